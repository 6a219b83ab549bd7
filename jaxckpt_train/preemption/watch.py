"""Preemption: signals, a notice file, a wall-clock limit and other sources, noticed between steps.

How the processes of a job leave at one place, though a request to leave reaches only some of them at first.

The handler that a notice installs for a signal; once the notice is stopped or gone, it acts as what it replaced.
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
from jaxckpt_train.run.job import leave_order
from jaxckpt_train.store.backends.local import file_exists

IGNORED_S = 30.0
_ACTION_BYTES = 512  # more than any system's `struct sigaction` has
NOTICED_WITHIN_S = 1.0
"""The service looks for signals so often."""
FILE_POLL_S = LOOK_S = 1.0
_log = logging.getLogger("jaxckpt_train")
_notices: weakref.WeakSet[SignalNotice] = weakref.WeakSet()
_forking = threading.local()  # the signals that were blocked before


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


class Agreement(Protocol):
    """What the processes of a job agree on at the calls that all of them make.

    Attributes:
        reason: why they leave, where this process has noticed nothing.
    """

    reason: str

    def is_agreed(self, noticed: bool) -> bool:
        """Whether all leave at this call; `noticed`: this process has noticed a request."""

    def noticed_before_s(self) -> float:
        """How many seconds before that the request may have come."""

    def leave(self) -> None:
        """This process asks no more; whoever waits for it is told."""


class Alone:
    """There is no other process."""

    reason = "itself"

    def is_agreed(self, noticed: bool) -> bool:
        """Whether it was noticed."""
        return noticed

    def noticed_before_s(self) -> float:
        """Its own notices tell."""
        return 0.0

    def leave(self) -> None:
        """Nobody waits."""


class ByService:
    """By JAX's preemption service, which has a SIGTERM handler of its own, in C++, that no handler may replace.

    What is noticed otherwise is told to it by that signal, which this process sends to itself.
    """

    reason = "SIGTERM to a process of this job"

    def __init__(self, service: PreemptionService) -> None:
        self._service = service
        self._is_sent = False

    def is_agreed(self, noticed: bool) -> bool:
        """As the service says, from the call on at which it does."""
        if noticed and not self._is_sent:
            self._is_sent = True
            signal.raise_signal(signal.SIGTERM)
        return self._service.is_reached()

    def noticed_before_s(self) -> float:
        """As the service tells, which looks for signals now and then."""
        return self._service.noticed_before_s() + NOTICED_WITHIN_S

    def leave(self) -> None:
        """Nobody waits: the service finds out by itself."""


class _Said(msgspec.Struct, array_like=True):
    is_agreed: bool
    next: int


class ByExchange:
    """By an exchange about once a second, where JAX's service is switched off.

    Args:
        everyone: the processes.
        timeout_s: seconds without a sign of life after which a process is not waited for.
        monotonic: the time in seconds.
    """

    reason = "another process of this job, which was asked to"

    def __init__(self, everyone: Coordinator, timeout_s: float, monotonic: Callable[[], float]) -> None:
        self._everyone, self._timeout_s = everyone, timeout_s
        self._poll_schedule = PollSchedule(everyone.processes, monotonic)
        self._order: Coordinator | None = None  # begun by the first look, which all make
        self._is_agreed = False

    def is_agreed(self, noticed: bool) -> bool:
        """Whether one has noticed, as of the last tick."""
        if not self._is_agreed and self._poll_schedule.is_due():
            self._order = self._order or self._everyone.within("preemption", self._timeout_s)
            said = msgspec.msgpack.decode(
                self._order.exchange(
                    "looking whether to leave",
                    lambda: b"!" if noticed else b"",
                    lambda values: msgspec.msgpack.encode(_Said(any(values), self._poll_schedule.next())),
                ),
                type=_Said,
            )
            self._poll_schedule.set_next(said.next)
            self._is_agreed = said.is_agreed
        return self._is_agreed

    def noticed_before_s(self) -> float:
        """Its own notices tell; of others it is not known, and not long ago."""
        return 0.0

    def leave(self) -> None:
        """As the protocol says."""
        order, self._order = self._order, None
        if order is not None:
            leave_order(order)


def _hold_signals() -> None:
    """One that came to a child before it has its own handlers would be lost: it waits for them."""
    numbers = {number for notice in list(_notices) for number in notice.watched()}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _let_signals_come() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    """A forked child, such as a worker of a pool, has no save to wait for: a signal ends it as it would elsewhere."""
    for notice in list(_notices):
        notice.restore()
    _let_signals_come()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_restore_in_child)


class SignalNotice:
    """Handlers that set a flag, and call the handler that was there before if the user had set one.

    Python runs them between two byte codes of the main thread; all they do is safe there. A second signal changes
    nothing, so it cannot kill a save that the first one asked for.
    """

    def __init__(self, names: Sequence[str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.received: str | None = None
        self.received_at: float | None = None
        self._monotonic = monotonic
        self._numbers = list(dict.fromkeys(map(_signal_number, names)))  # SIGIOT is another name of SIGABRT
        self._handlers: dict[int, SignalHandler] = {}
        self._next_look, self._replaced = -math.inf, set[int]()
        _notices.add(self)

    def install(self) -> None:
        """Install the handlers; only the main thread can, elsewhere this warns and does nothing."""
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
        """The numbers of the signals for which it has handlers now."""
        return list(self._handlers)

    def restore(self, *, leaving: bool = False) -> None:
        """Put the handlers back that were there before; where others are above its own, those pass signals on.

        `leaving`: the process ends on request. More signals of any kind may come: Slurm sends SIGUSR1, then SIGTERM.
        """
        for handler in self._handlers.values():
            if leaving:
                handler.hush()
            else:
                handler.stop()
        self._handlers.clear()

    def notice(self) -> str | None:
        """The signal that came, as text."""
        if self.received is None and self._monotonic() >= self._next_look:
            self._warn_if_replaced()
        return None if self.received is None else f"signal {self.received}"

    def _warn_if_replaced(self) -> None:
        """Warn once for each signal for which somebody has installed another handler since."""
        self._next_look = self._monotonic() + LOOK_S
        for number, handler in self._handlers.items():
            other = None if number in self._replaced else handler.replaced_by()
            if other is not None:
                self._replaced.add(number)
                _log.warning(
                    "%s: its handler was replaced by %s, so this signal is not seen as a request to leave, unless that "
                    "handler calls the one that it replaced. Install your handler before the CheckpointCallback is "
                    "entered, which then calls it, or use notice_file",
                    signal.Signals(number).name,
                    other,
                )


class FileNotice:
    """A file whose appearance asks the job to leave; looked for at most once a second.

    Its disk may not answer: who looks is a thread of its own, which is waited for a second and not looked for again
    until it has found out.
    """

    def __init__(self, path: PathLike, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic = path, monotonic
        self._next = -1.0
        self._found = self._is_looking = False
        self._looks, self._hint = 0, ""

    def notice(self) -> str | None:
        """That the file is there, as text."""
        now = self._monotonic()
        if not self._found and now >= self._next and not self._is_looking:
            self._next, self._is_looking = now + FILE_POLL_S, True
            call_within(self._look, FILE_POLL_S)
        return f"notice file {self._path}{self._hint}" if self._found else None

    def _look(self) -> None:
        try:
            found, self._looks = file_exists(self._path), self._looks + 1
            if found and self._looks == 1:  # or each start would end at once, for ever
                self._hint = ", which was there when this job began: remove it before the job is started again"
            self._found = found
        finally:
            self._is_looking = False


class TimeNotice:
    """A limit of the run's wall-clock time; told so much before that the last save ends within it.

    Args:
        max_run_time_s: seconds from now.
        monotonic: the time in seconds.
        leave_early_s: how many seconds before the limit; asked now and then, as it may be measured.

    Attributes:
        end: the time at which it is told.
    """

    def __init__(
        self,
        max_run_time_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        leave_early_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._monotonic, self._leave_early_s = monotonic, leave_early_s
        self._limit_s, self._began_at = max_run_time_s, monotonic()
        self._is_up = False
        self._look()

    def notice(self) -> str | None:
        """That the time is up, as text."""
        now = self._monotonic()
        if not self._is_up and now >= self._next:
            self._look()
        self._is_up = self._is_up or now >= self.end
        return f"the time limit of {self._limit_s:g} s" if self._is_up else None

    def _look(self) -> None:
        self.end = self._began_at + max(0.0, self._limit_s - self._leave_early_s())
        self._next = min(self._monotonic() + LOOK_S, self.end)


class PreemptionWatch:
    """All notices of one run. What one process of a job notices, all of them act on at the same place.

    Args:
        job: the processes.
        service: of JAX, which agrees for them, and watches for SIGTERM; None: there is none.
        signals: names of the signals that are watched for.
        notice_file: a file whose appearance asks the job to leave.
        max_run_time_s: a limit of the run's time.
        leave_early_s: how many seconds before that.
        sources: further sources of notices.
        timeout_s: seconds without a sign of life after which another process of the job is not waited for.
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
        leave_early_s: Callable[[], float] = lambda: 0.0,
        sources: Sequence[NoticeSource] = (),
        timeout_s: float = BARRIER_TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._is_first = job.process == 0
        self._agreement: Agreement = Alone()
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
        """Begin to watch."""
        self._sources.start()
        self._signals.install()

    def stop(self, *, leaving: bool = False) -> None:
        """End that, and put the signal handlers back.

        `leaving`: the process ends now. If it was asked to, all signals that were watched are ignored meanwhile.
        """
        self._tell_sources()
        self._agreement.leave()
        self._sources.stop()
        is_asked = self.noticed_at is not None or self._signals.received is not None
        self._signals.restore(leaving=leaving and is_asked)

    def leaves(self, step: int | None, left_s: float | None) -> None:
        """The run is over: the sources are told so when the watch is stopped.

        Args:
            step: that is committed; None: there is none.
            left_s: seconds left for all; None: no limit.
        """
        self._left = step, None if left_s is None else self._monotonic() + left_s

    def _tell_sources(self) -> None:
        left, self._left = self._left, None  # once
        if left is not None and self._sources and self._is_first:
            step, ends_at = left
            notify_sources(self._sources, step, math.inf if ends_at is None else ends_at - self._monotonic())

    def reached(self) -> bool:
        """Whether the job was asked to leave; the same answer on all processes. Costs a microsecond."""
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
            _log.warning("asked to leave: %s", self.reason)
        return agreed

    def _source_notice(self) -> str | None:
        found = self._sources.notice()
        return None if found is None else found.reason

    def is_asked(self) -> bool:
        """Whether a signal or a source's notice came, or the time is up, here; looks at no file, asks no other process.

        In a job it is only known by what all have agreed on: what one does by itself would leave the others waiting.
        """
        if self._is_shared:
            return self.noticed_at is not None
        if self._signals.received is not None or self._monotonic() >= self._time_is_up_at():
            return True
        return self._sources.notice() is not None

    def reached_alone(self) -> bool:
        """As `reached`, at any place of the loop; False in a job, in which all have to ask at the same place."""
        return not self._is_shared and self.reached()

    def _time_is_up_at(self) -> float:
        return math.inf if self._limit is None else self._limit.end

    def left_of(self, grace_period_s: float) -> float | None:
        """Seconds left of the grace period, at least 0; None: it was over before the loop could notice.

        Where a source knows when the machine is gone, no more than until then. One that should have been gone when the
        loop noticed, and was not, is not believed.
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
