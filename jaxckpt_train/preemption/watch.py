"""Watches for requests to shut down: signals, a notice file, a time limit, and other sources.

`PreemptionWatch` combines the notices of one run. In a multi-process job, a request may reach only some processes. They
agree on one step at which all of them shut down: `ByService` uses JAX's preemption service, `ByExchange` an own
exchange.
"""

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
from typing import Any, Protocol

import msgspec

from jaxckpt_train.checkpoint import PathLike
from jaxckpt_train.distributed.coordinator import BARRIER_TIMEOUT_S, Coordinator, PollSchedule
from jaxckpt_train.distributed.jax_service import PreemptionService
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.pending import call_within
from jaxckpt_train.preemption.sources import NoticeSource, WatchedSources, notify_sources
from jaxckpt_train.run.job import leave_channel
from jaxckpt_train.store.backends.local import file_exists

IGNORED_S = 30.0
_ACTION_BYTES = 512  # larger than `struct sigaction` on any system
NOTICED_WITHIN_S = 1.0
"""How often JAX's service looks for signals."""
FILE_POLL_S = POLL_S = 1.0
_log = logging.getLogger("jaxckpt_train")
_notices: weakref.WeakSet[SignalNotice] = weakref.WeakSet()
_forking = threading.local()  # the signals that were blocked before


class SignalHandler:
    """Reports a signal to a notice, and calls the handler that the user had installed before.

    A handler can outlive its notice: another handler may be installed above it and call or restore it, or the notice
    was never stopped. It then behaves as if it were not installed, so that it does not swallow signals, such as a
    SIGTERM that has to end the process.

    Args:
        number: the signal.
        received: a method of the notice, called with the number; only a weak reference to the notice is kept.
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


class Agreement(Protocol):
    """How the processes of a job agree to shut down, by calls that all of them make.

    Attributes:
        reason: why this process shuts down if it has noticed nothing itself.
    """

    reason: str

    def is_agreed(self, noticed: bool) -> bool:
        """Whether all processes shut down at this call; `noticed`: whether this process has noticed a request."""

    def noticed_before_s(self) -> float:
        """How many seconds before that the request may have come."""

    def leave(self) -> None:
        """Take no further part; processes that wait for this one are notified."""


class LocalAgreement:
    """The agreement of a single process."""

    reason = "itself"

    def is_agreed(self, noticed: bool) -> bool:
        """Whether a request was noticed."""
        return noticed

    def noticed_before_s(self) -> float:
        """Zero: the notices of this process have the time."""
        return 0.0

    def leave(self) -> None:
        """Do nothing."""


class ByService:
    """The agreement by JAX's preemption service.

    The service has its own SIGTERM handler in C++, which must not be replaced. To report a request that was noticed
    otherwise, this process sends SIGTERM to itself.
    """

    reason = "SIGTERM to a process of this job"

    def __init__(self, service: PreemptionService) -> None:
        self._service = service
        self._is_sent = False

    def is_agreed(self, noticed: bool) -> bool:
        """Whether the service has reached the step that it has chosen."""
        if noticed and not self._is_sent:
            self._is_sent = True
            signal.raise_signal(signal.SIGTERM)
        return self._service.is_reached()

    def noticed_before_s(self) -> float:
        """The time by the service, plus its polling interval."""
        return self._service.noticed_before_s() + NOTICED_WITHIN_S

    def leave(self) -> None:
        """Do nothing: the service detects a process that ends."""


class _Exchanged(msgspec.Struct, array_like=True):
    is_agreed: bool
    next: int


class ByExchange:
    """The agreement by an exchange about once a second, for jobs in which JAX's service is disabled.

    Args:
        coordinator: the processes.
        timeout_s: seconds without a sign of life after which a process is considered lost.
        monotonic: the time in seconds.
    """

    reason = "another process of this job"

    def __init__(self, coordinator: Coordinator, timeout_s: float, monotonic: Callable[[], float]) -> None:
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._poll_schedule = PollSchedule(coordinator.processes, monotonic)
        self._channel: Coordinator | None = None  # opened by the first call, which all processes make
        self._is_agreed = False

    def is_agreed(self, noticed: bool) -> bool:
        """Whether any process has noticed a request, as of the last exchange."""
        if not self._is_agreed and self._poll_schedule.is_due():
            self._channel = self._channel or self._coordinator.within("preemption", self._timeout_s)
            said = msgspec.msgpack.decode(
                self._channel.exchange(
                    "checking for a shutdown request",
                    lambda: b"!" if noticed else b"",
                    lambda values: msgspec.msgpack.encode(_Exchanged(any(values), self._poll_schedule.next())),
                ),
                type=_Exchanged,
            )
            self._poll_schedule.set_next(said.next)
            self._is_agreed = said.is_agreed
        return self._is_agreed

    def noticed_before_s(self) -> float:
        """Zero: the own notices have the time; a request to another process came a moment ago."""
        return 0.0

    def leave(self) -> None:
        """Leave the exchange."""
        channel, self._channel = self._channel, None
        if channel is not None:
            leave_channel(channel)


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
        self._next_look, self._replaced = -math.inf, set[int]()
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

        Args:
            leaving: whether the process shuts down on request. More signals of any kind may follow: Slurm sends
                SIGUSR1, then SIGTERM.
        """
        for handler in self._handlers.values():
            if leaving:
                handler.hush()
            else:
                handler.stop()
        self._handlers.clear()

    def notice(self) -> str | None:
        """The received signal as text; None: no signal was received."""
        if self.received is None and self._monotonic() >= self._next_look:
            self._warn_if_replaced()
        return None if self.received is None else f"signal {self.received}"

    def _warn_if_replaced(self) -> None:
        """Warn once for each signal whose handler was replaced."""
        self._next_look = self._monotonic() + POLL_S
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


class FileNotice:
    """A file that requests a shutdown by its existence; checked at most once a second.

    The disk may not answer: a helper thread checks, and the loop waits for it for a second. No other check starts
    before it has finished.
    """

    def __init__(self, path: PathLike, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic = path, monotonic
        self._next = -1.0
        self._found = self._is_looking = False
        self._looks, self._hint = 0, ""

    def notice(self) -> str | None:
        """The request as text, if the file exists."""
        now = self._monotonic()
        if not self._found and now >= self._next and not self._is_looking:
            self._next, self._is_looking = now + FILE_POLL_S, True
            call_within(self._look, FILE_POLL_S)
        return f"notice file {self._path}{self._hint}" if self._found else None

    def _look(self) -> None:
        try:
            found, self._looks = file_exists(self._path), self._looks + 1
            if found and self._looks == 1:  # without this hint, each start would end at once
                self._hint = ", which existed when this job started: remove it before the job is started again"
            self._found = found
        finally:
            self._is_looking = False


class TimeNotice:
    """A limit of the run's wall-clock time, reached early enough for the last save to end within it.

    Args:
        max_run_time_s: seconds from now.
        monotonic: the time in seconds.
        leave_early_s: returns how many seconds before the limit to shut down; called repeatedly, as it is measured.

    Attributes:
        end: the time at which the job has to shut down.
    """

    def __init__(
        self,
        max_run_time_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        leave_early_s: Callable[[], float] | None = None,
    ) -> None:
        self._monotonic, self._leave_early_s = monotonic, leave_early_s
        self._limit_s, self._began_at = max_run_time_s, monotonic()
        self._is_up = False
        self._look()

    def notice(self) -> str | None:
        """The request as text, if the time is up."""
        now = self._monotonic()
        if not self._is_up and now >= self._next:
            self._look()
        self._is_up = self._is_up or now >= self.end
        return f"the time limit of {self._limit_s:g} s" if self._is_up else None

    def _look(self) -> None:
        early_s = 0.0 if self._leave_early_s is None else self._leave_early_s()
        self.end = self._began_at + max(0.0, self._limit_s - early_s)
        self._next = min(self._monotonic() + POLL_S, self.end)


class PreemptionWatch:
    """All notices of one run. In a job, all processes act on a notice at the same step.

    Args:
        job: the processes.
        service: JAX's preemption service, which watches for SIGTERM; None: it is disabled.
        signals: the names of the signals to watch.
        notice_file: a file that requests a shutdown by its existence.
        max_run_time_s: a limit of the run's time.
        leave_early_s: returns how many seconds before the limit to shut down.
        sources: further sources of notices.
        timeout_s: seconds without a sign of life after which another process is considered lost.
        monotonic: the time in seconds.
    """

    def __init__(
        self,
        job: Coordinator,
        *,
        service: PreemptionService | None = None,
        signals: Sequence[str] = (),
        notice_file: PathLike | None = None,
        max_run_time_s: float | None = None,
        leave_early_s: Callable[[], float] | None = None,
        sources: Sequence[NoticeSource] = (),
        timeout_s: float = BARRIER_TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._is_first = job.process == 0
        self._agreement: Agreement = LocalAgreement()
        self._is_shared = job.processes > 1
        if self._is_shared and service is None:
            self._agreement = ByExchange(job, timeout_s, monotonic)
        elif self._is_shared and service is not None:
            self._agreement = ByService(service)
            signals = [name for name in signals if name != "SIGTERM"]
        self._signals = SignalNotice(signals, monotonic)
        self._notices: list[Callable[[], str | None]] = [self._signals.notice]
        if notice_file is not None:
            self._notices.append(FileNotice(notice_file, monotonic).notice)
        self._limit: TimeNotice | None = None
        if max_run_time_s is not None:
            self._limit = TimeNotice(max_run_time_s, monotonic, leave_early_s)
            self._notices.append(self._limit.notice)
        self._sources = WatchedSources(sources)
        if self._sources:
            self._notices.append(self._source_notice)
        self._left: tuple[int | None, float | None] | None = None
        self.reason: str | None = None
        self.noticed_at: float | None = None
        self._asked_at = 0.0

    def start(self) -> None:
        """Start watching."""
        self._sources.start()
        self._signals.install()

    def stop(self, *, leaving: bool = False) -> None:
        """Stop watching, and restore the signal handlers.

        Args:
            leaving: whether the process ends now. If a shutdown was requested, all watched signals are ignored.
        """
        self._notify_sources()
        self._agreement.leave()
        self._sources.stop()
        is_asked = self.noticed_at is not None or self._signals.received is not None
        self._signals.restore(leaving=leaving and is_asked)

    def leaves(self, step: int | None, left_s: float | None) -> None:
        """Record that the run has ended on request; the sources are notified when the watch stops.

        Args:
            step: the committed step; None: there is none.
            left_s: the seconds left for all sources; None: no limit.
        """
        self._left = step, None if left_s is None else self._monotonic() + left_s

    def _notify_sources(self) -> None:
        left, self._left = self._left, None  # notify only once
        if left is not None and self._sources and self._is_first:
            step, ends_at = left
            notify_sources(self._sources, step, math.inf if ends_at is None else ends_at - self._monotonic())

    def reached(self) -> bool:
        """Whether the job has to shut down; the same answer in all processes. Takes a microsecond."""
        if self.reason is None:
            for notice in self._notices:
                self.reason = notice()
                if self.reason is not None:
                    break
        agreed = self._agreement.is_agreed(self.reason is not None)
        if agreed and self.noticed_at is None:
            self.noticed_at = now = self._monotonic()
            received_at = math.inf if self._signals.received_at is None else self._signals.received_at
            before = now - self._agreement.noticed_before_s()
            self._asked_at = min(before, received_at, self._time_is_up_at(), self._sources.asked_at())
            self.reason = self.reason or self._agreement.reason
            _log.warning("shutdown requested: %s", self.reason)
        return agreed

    def _source_notice(self) -> str | None:
        found = self._sources.notice()
        return None if found is None else found.reason

    def is_asked(self) -> bool:
        """Whether a signal or a source's notice came, or the time is up. Accesses no file and no other process.

        In a multi-process job, only what all processes have agreed on counts: a process that acts alone would leave the
        others waiting.
        """
        if self._is_shared:
            return self.noticed_at is not None
        if self._signals.received is not None or self._monotonic() >= self._time_is_up_at():
            return True
        return self._sources.notice() is not None

    def reached_alone(self) -> bool:
        """Like `reached`, callable anywhere in the loop. Always False in a multi-process job, which has to agree."""
        return not self._is_shared and self.reached()

    def _time_is_up_at(self) -> float:
        return math.inf if self._limit is None else self._limit.end

    def left_of(self, grace_period_s: float) -> float | None:
        """The seconds left of the grace period, at least 0; None: it had ended before the loop noticed the request.

        If a source knows when the machine ends, that limits the time, unless this moment had already passed when the
        loop noticed the request.
        """
        if self.noticed_at is None:
            return grace_period_s
        leave_by, ends_at = self._sources.leave_by(), self._asked_at + grace_period_s
        if self.noticed_at >= leave_by:
            leave_by = math.inf
        if self.noticed_at >= ends_at:
            ends_at = math.inf
        ends_at = min(ends_at, leave_by)
        return None if ends_at == math.inf else max(0.0, ends_at - self._monotonic())


def _signal_number(name: object) -> int:
    number = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if number is None:
        raise SettingsError(f'signals: expected names such as "SIGTERM", found {name!r}')
    return int(number)
