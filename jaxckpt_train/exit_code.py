"""Ends a process that is ending anyway with an exit code, after all that others have registered with `atexit`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

INTERRUPTED = 128 + signal.SIGINT  # as shells have it
_LAST_WORD = f"{__name__}.last_word"  # among the modules
_LAST_OF_ALL = -(1 << 30)  # less than any finalizer of `multiprocessing` has
_code: int | None = None
_child: int | None = None  # the process that is watched as a child
_is_ended_by_os: bool = False  # whether that one ends by `os._exit`, and not by Python's own end


class _LastFlush:
    """In place of a standard stream. Python itself flushes it once all exit functions have run: that ends the process.

    An exit function cannot set the exit code, and to end the process in one would leave out those that come after it;
    to call these from here would call again what is running already, and native libraries wait for themselves then.
    Nothing has been freed by then: what is freed may ask a disk that does not answer.
    """

    def __init__(self, stream: Any, code: int) -> None:
        self._stream, self._code = stream, code
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """As of the stream; once all exit functions have run, end the process."""
        if sys.is_finalizing() or _is_last_flush_of_child():
            _end_now(self._code)
        _flush(self)


class _LastWord:
    """Ends the process when it is freed as the modules are, if exit functions have put the streams back."""

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
            with contextlib.suppress(OSError, ValueError):  # who reads it may be gone
                _flush(each)
    finally:  # whatever somebody's stream raises
        os._exit(code)


def end_with(code: int | None) -> None:
    """Have this process, which runs its exit functions, end with this code, whatever threads it still has.

    None: with its own after all, as what another one was asked for is told otherwise.
    """
    global _code
    _code = code
    if code is None:
        sys.modules.pop(_LAST_WORD, None)
        sys.stdout, sys.stderr = _plain(sys.stdout), _plain(sys.stderr)
        return
    # A module of its own that nobody else has is the first thing that frees: what others hold is freed late or never.
    holder = types.ModuleType(_LAST_WORD)
    vars(holder)["last_word"] = _LastWord(code)
    sys.modules[_LAST_WORD] = holder
    sys.stdout, sys.stderr = _ending(sys.stdout, code), _ending(sys.stderr, code)


def code_of(stop: BaseException) -> int:
    """The exit code of a process that what a signal handler raised ends, and that leaves something undone: not 0."""
    if isinstance(stop, KeyboardInterrupt):
        return INTERRUPTED
    code = stop.code if isinstance(stop, SystemExit) else None
    return (code & 0xFF if isinstance(code, int) else 0) or 1


def _plain(stream: Any) -> Any:
    return stream._stream if isinstance(stream, _LastFlush) else stream


def _ending(stream: Any, code: int) -> Any:
    if stream is None:  # what is printed goes nowhere, and stays so
        return None
    return _LastFlush(_plain(stream), code)


def call_at_end_of_child(call: Callable[[], None]) -> None:
    """Have a child of `multiprocessing` call it at its end, and end with the code that it asks for.

    Children by fork and by forkserver do not run what was registered with `atexit` before they were made, and nothing
    of it before Python 3.13; then they end without Python's own end. In any other process this does nothing.
    """
    global _child, _is_ended_by_os
    if _child == os.getpid() or not _is_child():
        return
    from multiprocessing import util

    util.Finalize(None, _end_child, (call,), exitpriority=_LAST_OF_ALL)  # a child by spawn is not harmed by it
    _is_ended_by_os = _how_child_was_made() in ("fork", "forkserver")
    _child = os.getpid()


def is_child_over() -> bool:
    """Whether this is a child of `multiprocessing` whose end has begun: what it is to call then is settled."""
    util = sys.modules.get("multiprocessing.util")
    return util is not None and _is_child() and bool(util.is_exiting())


def _is_child() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _how_child_was_made() -> str | None:
    """The start method of this child. That of its own children may have been set to another one since."""
    from multiprocessing import current_process, get_start_method

    return getattr(current_process(), "_start_method", None) or get_start_method(allow_none=True)


def _is_last_flush_of_child() -> bool:
    """Before Python 3.13, such a child flushes the streams when its threads have ended, as its last act."""
    is_main_over = threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive()
    return sys.version_info < (3, 13) and is_main_over and is_child_over() and _is_ended_by_os


def _end_child(call: Callable[[], None]) -> None:
    call()
    if _code is None:
        return
    if sys.version_info >= (3, 13):  # all else has been done, and the code has been chosen
        _end_now(_code)
    if isinstance(sys.exception(), SystemExit | None):
        raise SystemExit(_code)
    end_with(1)  # the child's own error is told, and has this code


def _forget_code() -> None:
    """A forked child ends with its own code."""
    if _code is not None:
        end_with(None)


os.register_at_fork(after_in_child=_forget_code)
