"""Signals that request a shutdown: handlers that set a flag, and call what the user had installed before."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from jaxckpt_train.errors import SettingsError

IGNORED_S = 30.0
CHECK_S = 1.0  # how often a notice checks whether its handlers were replaced
_ACTION_BYTES = 512  # larger than `struct sigaction` on any system
_log = logging.getLogger("jaxckpt_train")
_notices: weakref.WeakSet[SignalNotice] = weakref.WeakSet()
_forking = threading.local()  # the signals that were blocked before


class SignalHandler:
    """Reports a signal to a notice, and calls the handler that the user had installed before.

    A handler can outlive its notice: another handler may be installed above it and call or restore it, or the notice
    was never stopped. It then behaves as if it were not installed, so that it does not swallow signals, such as a
    SIGTERM that has to end the process. It keeps only a weak reference to the notice, whose method `received` it calls.
    """

    def __init__(self, number: int, received: Callable[[int], object]) -> None:
        self._number = number
        self._received = weakref.WeakMethod(received)
        self._is_stopped, self._ignores_until = False, -math.inf
        self._before, self._action = signal.getsignal(number), _exchange_action(number)
        self._address = b""

    def install(self) -> None:
        """Install the handler. Only the main thread can do that."""
        signal.signal(self._number, self)
        self._address = self._installed_address()

    def replaced_by(self) -> str | None:
        """A description of what has replaced this handler, so that it may not be called; None: nothing has."""
        found: object = signal.getsignal(self._number)
        if found is not self and not isinstance(found, SignalHandler):  # a SignalHandler calls the one below it
            return repr(found)
        return None if self._installed_address() == self._address else "a handler written in C"

    def _installed_address(self) -> bytes:
        """The address of the C function that the system calls, the first member of `struct sigaction`."""
        return _exchange_action(self._number).raw[: ctypes.sizeof(ctypes.c_void_p)]

    def stop(self) -> None:
        """Report no more signals, and restore the previous handler unless another one is installed above."""
        self._is_stopped = True
        installed: object = signal.getsignal(self._number)
        if installed is self and threading.current_thread() is threading.main_thread():  # other threads cannot install
            self._lowest()._put_back()

    def hush(self) -> None:
        """Like `stop`, for a process that shuts down on request: launchers may send more signals.

        For half a minute, and while the interpreter ends, the signal is ignored, so that it does not change the exit
        code. A process that lives longer gets it again. A handler of the user is restored instead.
        """
        if self._lowest()._before not in (signal.SIG_DFL, signal.default_int_handler):
            self.stop()
            return
        self._is_stopped, self._ignores_until = True, time.monotonic() + IGNORED_S
        atexit.register(self._ignore)

    def _ignore(self) -> None:
        installed: object = signal.getsignal(self._number)
        if installed is self and time.monotonic() < self._ignores_until:
            signal.signal(self._number, signal.SIG_IGN)  # the interpreter would restore the default action

    def is_live(self) -> bool:
        """Whether the notice still exists and is not stopped."""
        return not self._is_stopped and self._received() is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python on the main thread, or by a handler installed above."""
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
        """The handler below which is what would be installed without this handler and the dead ones below it."""
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
            signal.raise_signal(self._number)  # the default action, which may end the process, or a C handler
        finally:
            _exchange_action(self._number, here)


def _exchange_action(number: int, new: ctypes.Array[ctypes.c_char] | None = None) -> ctypes.Array[ctypes.c_char]:
    """Return the action for a signal as the system knows it, and replace it by `new` if that is given.

    Python only knows handlers that were installed through it. It takes a handler written in C, such as that of
    `faulthandler.register`, for the default action, and would restore the default instead of it.
    """
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _sigaction()(number, new, action)
    return action


@functools.cache
def _sigaction() -> Any:
    """The function of the C library. Cached, because each lookup creates classes that only garbage collection frees."""
    return ctypes.CDLL(None).sigaction


def _hold_signals() -> None:
    """Block the watched signals during a fork: the child has no handler yet, and would lose them."""
    numbers = {number for notice in list(_notices) for number in notice.watched()}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _let_signals_come() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    """Restore the handlers in a forked child, such as a pool worker: it has no save, so signals end it as usual."""
    for notice in list(_notices):
        notice.restore()
    _let_signals_come()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_restore_in_child)


class SignalNotice:
    """Notices signals by handlers that set a flag, and call the handlers that the user had installed before.

    A second signal changes nothing, so it cannot kill the save that the first one has caused.
    """

    def __init__(self, names: Sequence[str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.received: str | None = None
        self.received_at: float | None = None
        self._monotonic = monotonic
        self._numbers = list(dict.fromkeys(map(_signal_number, names)))  # SIGIOT and SIGABRT have one number
        self._handlers: dict[int, SignalHandler] = {}
        self._next_check, self._replaced = -math.inf, set[int]()
        _notices.add(self)

    def install(self) -> None:
        """Install the handlers. Only the main thread can do that; on another thread, log a warning."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not watched: only the main thread can install handlers; use notice_file instead")
            return
        for number in self._numbers:
            self._handlers[number] = SignalHandler(number, self._receive)
            self._handlers[number].install()

    def _receive(self, number: int) -> None:
        if self.received_at is None:
            self.received_at = self._monotonic()
        self.received = self.received or signal.Signals(number).name

    def watched(self) -> list[int]:
        """The signals that have a handler now."""
        return list(self._handlers)

    def restore(self, *, leaving: bool = False) -> None:
        """Restore the previous handlers; a handler that has another one above it passes its signals on.

        If the process is `leaving` on request, more signals of any kind may follow: Slurm sends SIGUSR1, then SIGTERM.
        """
        for handler in self._handlers.values():
            if leaving:
                handler.hush()
            else:
                handler.stop()
        self._handlers.clear()

    def notice(self) -> str | None:
        """The received signal as text; None: no signal was received."""
        if self.received is None and self._monotonic() >= self._next_check:
            self._warn_if_replaced()
        return None if self.received is None else f"signal {self.received}"

    def _warn_if_replaced(self) -> None:
        """Warn once for each signal whose handler was replaced."""
        self._next_check = self._monotonic() + CHECK_S
        for number, handler in self._handlers.items():
            other = None if number in self._replaced else handler.replaced_by()
            if other is not None:
                self._replaced.add(number)
                _log.warning(
                    "%s: its handler was replaced by %s, so this signal does not request a shutdown any more, unless "
                    "the new handler calls the one that it replaced. Install your handler before the "
                    "CheckpointCallback is entered, which then calls it, or use notice_file",
                    signal.Signals(number).name,
                    other,
                )


def _signal_number(name: object) -> int:
    number = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if number is None:
        raise SettingsError(f'signals: expected names such as "SIGTERM", found {name!r}')
    return int(number)
