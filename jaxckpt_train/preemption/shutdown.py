"""Graceful shutdown: whether the job is asked to leave, until when, and how it leaves.

The path of a request: a notice (signal, file, time limit, source); `must_leave`, in which all processes agree on one
step, and from which on there is a deadline; `finish`, which completes the last save; `decide`, which records the
outcome; and `close`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from jaxckpt_train.checkpoint import PathLike
from jaxckpt_train.distributed.coordinator import Coordinator, PollSchedule
from jaxckpt_train.distributed.jax_service import PreemptionService
from jaxckpt_train.errors import CheckpointTimeoutError, Preempted
from jaxckpt_train.manager import StepManager
from jaxckpt_train.pending import call_within
from jaxckpt_train.preemption.sources import (
    FileNotice,
    Notice,
    NoticeSource,
    SignalNotice,
    TimeNotice,
    WatchedSources,
)
from jaxckpt_train.run.history import LATE, NOTE_S, PREEMPTED
from jaxckpt_train.run.job import leave_channel
from jaxckpt_train.run.saving import SaveResult
from jaxckpt_train.store.threads import interruptible

SERVICE_POLL_S = 1.0  # how often JAX's service looks for signals
# The part of the grace period that is reserved to end a process that has used JAX.
ENDING_SHARE, MOST_ENDING_S = 0.4, 2.0
NOTHING_NEW = SaveResult(False, "nothing new to save")
_log = logging.getLogger("jaxckpt_train")


class ByService:
    """Agrees on the step of a shutdown by JAX's preemption service.

    The service has its own SIGTERM handler in C++, which must not be replaced. To report a request that was noticed
    otherwise, this process sends SIGTERM to itself.
    """

    reason = "SIGTERM to a process of this job"

    def __init__(self, service: PreemptionService) -> None:
        self._service = service
        self._is_sent = False

    def is_agreed(self, is_noticed: bool) -> bool:
        """Whether all processes shut down at this call. All of them make the call."""
        if is_noticed and not self._is_sent:
            self._is_sent = True
            signal.raise_signal(signal.SIGTERM)
        return self._service.is_reached()

    def noticed_before_s(self) -> float:
        """How many seconds before that the request may have come."""
        return self._service.noticed_before_s() + SERVICE_POLL_S

    def leave(self) -> None:
        """Do nothing: the service detects a process that ends."""


class _Exchanged(msgspec.Struct, array_like=True):
    is_agreed: bool
    next: int


class ByExchange:
    """Agrees on the step of a shutdown by an exchange about once a second, if JAX's service is disabled."""

    reason = "another process of this job"

    def __init__(self, coordinator: Coordinator, timeout_s: float, monotonic: Callable[[], float]) -> None:
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._poll_schedule = PollSchedule(coordinator.processes, monotonic)
        self._channel: Coordinator | None = None  # opened by the first call, which all processes make
        self._is_agreed = False

    def is_agreed(self, is_noticed: bool) -> bool:
        """Whether any process has noticed a request, as of the last exchange. All of them make the call."""
        if not self._is_agreed and self._poll_schedule.is_due():
            self._channel = self._channel or self._coordinator.within("preemption", self._timeout_s)
            sent = self._channel.exchange(
                "checking for a shutdown request",
                lambda: b"!" if is_noticed else b"",
                lambda values: msgspec.msgpack.encode(_Exchanged(any(values), self._poll_schedule.next())),
            )
            said = msgspec.msgpack.decode(sent, type=_Exchanged)
            self._poll_schedule.set_next(said.next)
            self._is_agreed = said.is_agreed
        return self._is_agreed

    def noticed_before_s(self) -> float:
        """Zero: the own notices have the time; a request to another process came a moment ago."""
        return 0.0

    def leave(self) -> None:
        """Take no further part; processes that wait for this one are notified."""
        channel, self._channel = self._channel, None
        if channel is not None:
            leave_channel(channel)


class Outcome(enum.IntEnum):
    """How far a shutdown has come, and what it has cost. It only grows."""

    RUNNING = 0  # the last save was not started, whether or not a shutdown was requested
    LEAVING = 1  # the last save was started, if there is one, and nothing is lost so far
    LOST = 2  # updates are lost: there was no time to save them, or their values have changed
    GIVEN_UP = 3  # updates are lost, and a save was given up: the disk may not answer


class GracefulShutdown:
    """Knows whether the job is asked to leave, until when, and how it leaves. All processes leave at the same step.

    The arguments are options of `CheckpointCallback`, except for these:

    Args:
        manager: the manager of the run.
        job: the processes.
        service: JAX's preemption service, which watches for SIGTERM in a multi-process job. None: it is disabled.
        raises: whether to raise `Preempted` instead of SystemExit.
        monotonic: the time in seconds.

    Attributes:
        reason: why this process leaves. None: no request was noticed.
        noticed_at: when the processes agreed to leave. None: they have not.
        outcome: how far the shutdown has come.
        plan: what was decided about the last save.
        preempted: the error that describes the shutdown, after it was decided.
        ends_process: whether the run ends by SystemExit.
    """

    def __init__(
        self,
        manager: StepManager,
        job: Coordinator,
        *,
        service: PreemptionService | None = None,
        signals: Sequence[str] = (),
        notice_file: PathLike | None = None,
        max_run_time_s: float | None = None,
        sources: Sequence[NoticeSource] = (),
        grace_period_s: float | None = None,
        exit_code: int = 75,
        raises: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._monotonic, self._is_primary = manager, monotonic, job.process == 0
        self._grace_period_s, self._exit_code, self._raises = grace_period_s, exit_code, raises
        self._agreement: ByService | ByExchange | None = None  # None: this is the only process
        if job.processes > 1 and service is None:
            self._agreement = ByExchange(job, manager.settings.barrier_timeout_s, monotonic)
        elif job.processes > 1 and service is not None:
            self._agreement = ByService(service)
            signals = [name for name in signals if name != "SIGTERM"]
        self._signals, self._sources = SignalNotice(signals, monotonic), WatchedSources(sources)
        self._file = None if notice_file is None else FileNotice(notice_file, monotonic)
        self._limit: TimeNotice | None = None
        if max_run_time_s is not None:
            limit_s, early_s = max_run_time_s, grace_period_s
            leave_early_s = (lambda: manager.leave_early_s(limit_s)) if early_s is None else lambda: early_s
            self._limit = TimeNotice(limit_s, monotonic, leave_early_s)
        self.reason: str | None = None
        self.noticed_at: float | None = None
        self._asked_at = 0.0
        self.plan = NOTHING_NEW.reason
        self._is_notified = self.ends_process = False
        self.outcome = Outcome.RUNNING
        self.preempted: Preempted | None = None

    # Whether the job is asked to leave --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start watching for requests."""
        self._sources.start()
        self._signals.install()

    def must_leave(self) -> bool:
        """Whether the job has to shut down; the same answer in all processes. Takes a few microseconds."""
        if self.reason is None:
            self.reason = next((found.reason for found in self._requests()), None)
        is_noticed, agreement = self.reason is not None, self._agreement
        agreed = is_noticed if agreement is None else agreement.is_agreed(is_noticed)
        if agreed and self.noticed_at is None:
            self.noticed_at = now = self._monotonic()
            before_s = 0.0 if agreement is None else agreement.noticed_before_s()
            known = [found.asked_at for found in self._requests() if found.asked_at is not None]
            self._asked_at = min([now - before_s, *known])
            if self.reason is None and agreement is not None:
                self.reason = agreement.reason
            _log.warning("shutdown requested: %s", self.reason)
        return agreed

    def _requests(self) -> Iterator[Notice]:
        """The requests that this process has noticed."""
        for each in (self._signals, self._file, self._limit):
            found = None if each is None else each.notice()
            if found is not None:
                yield found
        yield from self._sources.notices()

    def is_asked(self) -> bool:
        """For waits: like `must_leave`, but in a multi-process job only what all processes have agreed on counts."""
        return self.must_leave() if self._agreement is None else self.noticed_at is not None

    # Until when -------------------------------------------------------------------------------------------------------

    def _ends_at(self) -> float:
        """When everything except the end of the process itself has to be done; infinity: no limit.

        This is fixed when the processes have agreed to leave, unless a source reports an earlier end later. A limit
        that had already passed by then does not count.
        """
        if self.noticed_at is None:
            return math.inf
        grace_s = math.inf if self._grace_period_s is None else self._grace_period_s
        limits = [self._asked_at + grace_s]
        limits += [found.leave_by for found in self._sources.notices() if found.leave_by is not None]
        end = min((at for at in limits if at > self.noticed_at), default=math.inf)
        # A request that was noticed late leaves half of the rest for a save, which may be short enough.
        return end - min(MOST_ENDING_S, ENDING_SHARE * grace_s, (end - self.noticed_at) / 2)

    def left_s(self) -> float | None:
        """The seconds left for everything except the end of the process itself; None: no limit."""
        return None if math.isinf(self._ends_at()) else self._rest_s()

    def _rest_s(self) -> float:
        return max(0.0, self._ends_at() - self._monotonic())

    def is_time_up(self) -> bool:
        """For waits in the loop: whether a shutdown was requested, maybe in the meantime, and its time is up."""
        return self.is_asked() and self._monotonic() >= self._ends_at()

    # How it leaves ----------------------------------------------------------------------------------------------------

    def finish(self, save: Callable[[], SaveResult] | None = None) -> SaveResult:
        """Finish the running save, then make the last one, if it is needed and can be committed in time.

        A save that is not committed at the deadline is given up. So is one that cannot end because the disk does not
        answer or another process is lost.

        Args:
            save: starts the last save, if there is an unsaved update and `has_time_to_save`. It is called after the end
                of the running save, which may have failed. None: only the running save is finished.

        Raises:
            Exception: the original error of the last save if it failed; that of the running one if there was no other.
        """
        self.reach(Outcome.LEAVING)
        self._manager.leaves(self.left_s())
        try:
            before = self._manager.settle(self.left_s(), waits_for_copies=False)
            if before is not None:
                _log.error("the previous save failed", exc_info=before)
            result = NOTHING_NEW if save is None else save()
            failure = self._manager.settle(self.left_s()) or (None if result.saved else before)
            if failure is not None:
                raise failure
        except CheckpointTimeoutError as error:
            self._give_up(error)
            return SaveResult(False, f"given up: {error}")
        return result

    def has_time_to_save(self, step: int) -> bool:
        """Return whether the last completed update, which is not saved, is to be saved now; otherwise it is lost."""
        plan = self._manager.plan_to_leave(step, self.left_s())
        self.plan = plan.why
        _log.warning("shutting down: %s", plan.why)
        if not plan.saves:
            self.reach(Outcome.LOST)
        return plan.saves

    def reach(self, outcome: Outcome) -> None:
        """Record an outcome, unless it was worse already."""
        self.outcome = max(self.outcome, outcome)

    def _give_up(self, error: CheckpointTimeoutError) -> None:
        self.reach(Outcome.GIVEN_UP)
        self._manager.give_up(self._code())
        _log.error("shutdown requested by %s; a save was given up: %s", self.reason, error)

    def _code(self) -> int:
        """The exit code; a process that has lost updates never ends with 0."""
        return self._exit_code or int(self.outcome >= Outcome.LOST)

    def decide(self) -> None:
        """Record that the run ends here, with the committed step."""
        manager, step = self._manager, self._manager.latest
        saved = "no step is saved" if step is None else f"step {step} is saved"
        manager.ends_as(LATE if self.outcome >= Outcome.LOST else PREEMPTED)
        self.preempted = Preempted(f"shutdown requested by {self.reason}; {saved}", step, self._code())
        _log.warning("%s", self.preempted)
        if self.outcome < Outcome.GIVEN_UP:
            note = functools.partial(manager.note_preemption, step, str(self.reason), self.plan)
            call_within(note, min(self._rest_s(), NOTE_S))

    def error(self) -> BaseException:
        """The error that ends the process, or `Preempted`, which the caller is expected to catch."""
        assert self.preempted is not None
        self.ends_process |= not self._raises
        return self.preempted if self._raises else SystemExit(self.preempted.exit_code)

    def wait(self) -> None:
        """Wait for the running save, and raise its error. If a shutdown leaves no time for it, give it up and end."""
        try:
            failure = self._manager.settle(until=self.is_time_up)
        except CheckpointTimeoutError as error:
            if not self.is_time_up():
                raise
            self._give_up(error)
            raise self._left() from None
        if failure is not None:
            raise failure

    def _check_load(self) -> None:
        if self._grace_period_s is not None and self.is_asked():
            raise CheckpointTimeoutError("a shutdown was requested during the load")

    @contextlib.contextmanager
    def leaving_a_load(self) -> Iterator[None]:
        """Within the context, a requested shutdown ends a load and the run at once: there is nothing to save yet."""
        try:
            with interruptible(self._check_load):
                yield
        except CheckpointTimeoutError:
            if self._grace_period_s is None or not self.is_asked():
                raise
            raise self._left() from None

    def _left(self) -> BaseException:
        """Shut down at once; return the error to raise."""
        self.decide()
        error = self.error()
        self.close()
        return error

    def close(self) -> None:
        """Wait for the running save and the deletions, close the manager and stop watching.

        A shutdown that is requested meanwhile limits the waits. The original error of a save that failed is raised.
        """
        manager = self._manager
        manager.leave_to_parent()
        with contextlib.ExitStack() as at_end:  # whatever ends the wait
            at_end.callback(self.stop)  # comes last: until here, a signal must not kill the process
            at_end.callback(lambda: manager.close(self.left_s(), self.is_time_up, waits=False))
            failure = None if self.outcome is Outcome.GIVEN_UP else self._last_failure()
            if failure is not None:
                manager.ends_as(type(failure).__name__)
        if failure is not None:
            raise failure

    def _last_failure(self) -> BaseException | None:
        try:
            return self._manager.settle(until=None if self._grace_period_s is None else self.is_asked)
        except CheckpointTimeoutError:
            if self._grace_period_s is None or not self.must_leave():
                raise
        self.finish()
        if self.outcome >= Outcome.LOST:
            self.decide()
        return None

    def stop(self) -> None:
        """Notify the sources that the job has left, stop watching, and restore the signal handlers.

        If the process ends now on request, all watched signals are ignored instead.
        """
        if self.preempted is not None and not self._is_notified and self._is_primary:
            self._is_notified = True
            self._sources.notify(self.preempted.step, self._rest_s())
        if self._agreement is not None:
            self._agreement.leave()
        self._sources.stop()
        is_asked = self.noticed_at is not None or self._signals.received is not None
        self._signals.restore(leaving=self.ends_process and is_asked)
