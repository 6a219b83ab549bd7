"""Ends a process that is ending anyway with an exit code, after all that others have registered with `atexit`."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


class _LastFlush:
    """In place of a standard stream. Python itself flushes it once all exit functions have run: that ends the process.

    An exit function cannot set the exit code, and to end the process in one would leave out those that come after it;
    to call these from here would call again what is running already, and native libraries wait for themselves then.
    """

    def __init__(self, stream: Any, code: int) -> None:
        self._stream, self._code = stream, code
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """As of the stream; by nobody's call but the interpreter's own, end the process."""
        try:
            sys._getframe(1)
        except ValueError:  # there is no Python code left that could have called
            for each in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # who reads it may be gone
                    _flush(each)
            os._exit(self._code)
        _flush(self)


def _flush(stream: Any) -> None:
    inner = stream._stream if isinstance(stream, _LastFlush) else stream
    if inner is not None and not getattr(inner, "closed", False):
        inner.flush()


def end_with(code: int) -> None:
    """Have this process, which runs its exit functions, end with this code, whatever threads it still has."""
    sys.stdout, sys.stderr = _LastFlush(sys.stdout, code), _LastFlush(sys.stderr, code)
