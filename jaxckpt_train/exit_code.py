"""End a process that is already ending with another exit code, after all exit functions have run.

An exit function cannot set the exit code. Ending the process inside one would skip the functions after it, and calling
those from there would call functions that are already running, in which some native libraries deadlock. So `end_with`
replaces the standard streams: Python flushes them after all exit functions, and that flush ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

INTERRUPTED = 128 + signal.SIGINT  # the convention of shells
_LAST_WORD = f"{__name__}.last_word"  # the name of a module
_LAST_OF_ALL = -(1 << 30)  # a lower priority than any finalizer of `multiprocessing` has
_code: int | None = None
_child: int | None = None  # the child process in which `call_at_end_of_child` has registered its function
_is_ended_by_os: bool = False  # whether that process ends by `os._exit`, without Python's own shutdown


def end_with(code: int | None) -> None:
    """Make this process, which runs its exit functions, end with this code, regardless of its remaining threads.

    None restores its own exit code, for a failure that has been reported to the user in another way since.
    """
    global _code
    _code = code
    if code is None:
        sys.modules.pop(_LAST_WORD, None)
        sys.stdout, sys.stderr = _plain(sys.stdout), _plain(sys.stderr)
        return
    # Python frees modules first. No other object refers to this one, which would delay or prevent that.
    holder = types.ModuleType(_LAST_WORD)
    vars(holder)["last_word"] = _LastWord(code)
    sys.modules[_LAST_WORD] = holder
    sys.stdout, sys.stderr = _ending(sys.stdout, code), _ending(sys.stderr, code)


def code_of(stop: BaseException) -> int:
    """Return the exit code of a process that an exception of a signal handler ends early; it is never 0."""
    if isinstance(stop, KeyboardInterrupt):
        return INTERRUPTED
    code = stop.code if isinstance(stop, SystemExit) else None
    return (code & 0xFF if isinstance(code, int) else 0) or 1


def call_at_end_of_child(call: Callable[[], None]) -> None:
    """Make a child of `multiprocessing` call a function at its end, and end with the exit code that it asks for.

    Children started by fork and by forkserver do not run the functions that were registered with `atexit` before they
    were started, and before Python 3.13 they run none at all; they then skip Python's own shutdown. In other processes,
    this function does nothing.
    """
    global _child, _is_ended_by_os
    if _child == os.getpid() or not _is_child():
        return
    from multiprocessing import util

    util.Finalize(None, _end_child, (call,), exitpriority=_LAST_OF_ALL)  # harmless in a child started by spawn
    _is_ended_by_os = _how_child_was_made() in ("fork", "forkserver")
    _child = os.getpid()


def is_child_over() -> bool:
    """Return whether this is a child of `multiprocessing` whose shutdown has started, so that no call can be added."""
    util = sys.modules.get("multiprocessing.util")
    return util is not None and _is_child() and bool(util.is_exiting())


class _LastFlush:
    """A replacement for a standard stream that ends the process when Python flushes it after all exit functions.

    At that time nothing has been freed. Freeing objects may need a disk that does not answer.
    """

    def __init__(self, stream: Any, code: int) -> None:
        self._stream, self._code = stream, code
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream, or end the process once all exit functions have run."""
        if sys.is_finalizing() or _is_last_flush_of_child():
            _end_now(self._code)
        _flush(self)


class _LastWord:
    """Ends the process when it is freed with the modules, in case exit functions have restored the streams."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __del__(self) -> None:
        if sys.is_finalizing():
            _end_now(self._code)


def _flush(stream: Any) -> None:
    inner = _plain(stream)
    if inner is not None and not getattr(inner, "closed", False):
        inner.flush()


def _end_now(code: int) -> None:
    try:
        for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(OSError, ValueError):  # raised if the reader is gone
                _flush(each)
    finally:  # a user's stream may raise any error
        os._exit(code)


def _plain(stream: Any) -> Any:
    return stream._stream if isinstance(stream, _LastFlush) else stream


def _ending(stream: Any, code: int) -> Any:
    if stream is None:  # the process has no such stream
        return None
    return _LastFlush(_plain(stream), code)


def _is_child() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _how_child_was_made() -> str | None:
    """Return the start method of this child. The start method for its own children may have been changed since."""
    from multiprocessing import current_process, get_start_method

    return getattr(current_process(), "_start_method", None) or get_start_method(allow_none=True)


def _is_last_flush_of_child() -> bool:
    """Return whether a child flushes the streams as its last action, after its threads have ended.

    Children do this before Python 3.13.
    """
    is_main_over = threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive()
    return sys.version_info < (3, 13) and is_main_over and is_child_over() and _is_ended_by_os


def _end_child(call: Callable[[], None]) -> None:
    call()
    if _code is None:
        return
    if sys.version_info >= (3, 13):  # everything else is done, and the exit code is known
        _end_now(_code)
    if isinstance(sys.exception(), SystemExit | None):
        raise SystemExit(_code)
    end_with(1)  # the child reports its own error and ends with this code


def _forget_code() -> None:
    """Let a forked child end with its own code."""
    if _code is not None:
        end_with(None)


os.register_at_fork(after_in_child=_forget_code)
