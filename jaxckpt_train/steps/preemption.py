"""Preemption: signals, a notice file, a wall-clock limit and other sources, noticed between steps."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from jaxckpt_train.checkpoint import PathLike
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.jobs.coordinator import BARRIER_TIMEOUT_S, Coordinator
from jaxckpt_train.multihost import PreemptionService
from jaxckpt_train.notices.source import NoticeSource
from jaxckpt_train.notices.watched_sources import WatchedSources
from jaxckpt_train.pending import call_within
from jaxckpt_train.steps.job_preemption import Agreement, Alone, ByExchange, ByService
from jaxckpt_train.steps.signal_handlers import SignalHandler
from jaxckpt_train.steps.telling import tell_sources
from jaxckpt_train.store.local import file_exists

FILE_POLL_S = LOOK_S = 1.0
_log = logging.getLogger("jaxckpt_train")


_notices: weakref.WeakSet[SignalNotice] = weakref.WeakSet()
_forking = threading.local()  # the signals that were blocked before


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
            tell_sources(self._sources, step, math.inf if ends_at is None else ends_at - self._monotonic())

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
