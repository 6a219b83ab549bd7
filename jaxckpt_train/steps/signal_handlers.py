"""The handler that a notice installs for a signal; once the notice is stopped or gone, it acts as what it replaced."""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

IGNORED_S = 30.0
_ACTION_BYTES = 512  # more than any system's `struct sigaction` has


class SignalHandler:
    """Tells a notice of a signal, and calls the handler that was there before if the user had set one.

    It may outlast its notice: another handler may be above it by then, which calls it or will put it back, and nobody
    may have stopped the notice at all. It must not swallow signals then, such as a SIGTERM that is to end the process.

    Args:
        number: of the signal.
        received: a method of the notice, called with the number; it keeps no notice alive.
    """

    def __init__(self, number: int, received: Callable[[int], object]) -> None:
        self._number = number
        self._received = weakref.WeakMethod(received)
        self._is_stopped, self._ignores_until = False, -math.inf
        self._before, self._action = signal.getsignal(number), _exchange_action(number)
        self._address = b""

    def install(self) -> None:
        """Install it; only the main thread can."""
        signal.signal(self._number, self)
        self._address = self._installed_address()

    def replaced_by(self) -> str | None:
        """What was installed in its place since, as text; None: nothing that keeps this one from being called."""
        found: object = signal.getsignal(self._number)
        if found is not self and not isinstance(found, SignalHandler):  # those call the one below
            return repr(found)
        return None if self._installed_address() == self._address else "a handler written in C"

    def _installed_address(self) -> bytes:
        """Of the C function that the system calls: the first member of `struct sigaction`. One for all of Python's."""
        return _exchange_action(self._number).raw[: ctypes.sizeof(ctypes.c_void_p)]

    def stop(self) -> None:
        """Tell of nothing any more, and put back what was there before unless another handler is above."""
        self._is_stopped = True
        installed: object = signal.getsignal(self._number)
        if installed is self and threading.current_thread() is threading.main_thread():  # others can install nothing
            self._lowest()._put_back()

    def hush(self) -> None:
        """As `stop`, for a process that ends on request, with an exit code of its own: launchers send more signals.

        For half a minute, and while the interpreter ends, the signal is ignored; a process that lives on gets it then.
        A handler of the user's own knows better what to do: it is put back.
        """
        if self._lowest()._before not in (signal.SIG_DFL, signal.default_int_handler):
            self.stop()
            return
        self._is_stopped, self._ignores_until = True, time.monotonic() + IGNORED_S
        atexit.register(self._ignore)

    def _ignore(self) -> None:
        installed: object = signal.getsignal(self._number)
        if installed is self and time.monotonic() < self._ignores_until:
            signal.signal(self._number, signal.SIG_IGN)  # the interpreter puts the default in place of its handlers

    def is_live(self) -> bool:
        """Whether somebody still wants to be told."""
        return not self._is_stopped and self._received() is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python, between two byte codes of the main thread, or by a handler that is above."""
        lowest = self._lowest()
        if time.monotonic() < self._ignores_until:
            return
        received = None if self._is_stopped else self._received()
        if received is None:
            lowest._act_as_before(frame)
            return
        received(number)
        before = lowest._before
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _lowest(self) -> SignalHandler:
        """The one below which is what would be there had this one never come, nor the dead ones below it."""
        lowest = self
        while isinstance(lowest._before, SignalHandler) and not lowest._before.is_live():
            lowest = lowest._before
        return lowest

    def _put_back(self) -> None:
        signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)
        if not callable(self._before):
            _exchange_action(self._number, self._action)

    def _act_as_before(self, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(self._number, frame)
            return
        here = _exchange_action(self._number, self._action)
        try:
            signal.raise_signal(self._number)  # the default, which may end the process, or a handler written in C
        finally:
            _exchange_action(self._number, here)


def _exchange_action(number: int, new: ctypes.Array[ctypes.c_char] | None = None) -> ctypes.Array[ctypes.c_char]:
    """What the process does on a signal, as the system knows it, and set it to `new` if that is given.

    Python knows only of handlers that were set through it: one that is written in C, such as that of
    `faulthandler.register`, it takes for the default, and would put the default in its place.
    """
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _sigaction()(number, new, action)
    return action


@functools.cache
def _sigaction() -> Any:
    """The C library's function; found once, as ctypes makes classes for each look, which only the collector frees."""
    return ctypes.CDLL(None).sigaction
