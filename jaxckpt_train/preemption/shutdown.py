"""Leaving on request: the wait for the last save, what is told, and how the process ends."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator

from jaxckpt_train.errors import CheckpointTimeoutError, Preempted
from jaxckpt_train.manager import StepManager
from jaxckpt_train.pending import call_within
from jaxckpt_train.policies.cost_model import ShutdownPlan
from jaxckpt_train.preemption.watch import PreemptionWatch
from jaxckpt_train.run.history import LATE, NOTE_S, PREEMPTED
from jaxckpt_train.run.saving import SaveResult
from jaxckpt_train.store.reader import ReadProgress

_log = logging.getLogger("jaxckpt_train")
# Of the grace period: what it takes to end a process in which JAX has been at work.
ENDING_SHARE, MOST_ENDING_S = 0.4, 2.0
NOTHING_NEW = SaveResult(False, "nothing new to save")


class GracefulShutdown:
    """How one run leaves.

    Args:
        watch: for requests to leave.
        grace_period_s: seconds from the request until something else ends the process; None: not known.
        exit_code: of a process that left on request.
        raises: whether `Preempted` is raised instead of SystemExit.

    Attributes:
        is_late: whether a save was given up.
        loses: whether one was, or was not begun, for want of time.
        preempted: what says that it has left.
        ends_process: whether it leaves by SystemExit.
    """

    def __init__(
        self,
        watch: PreemptionWatch,
        grace_period_s: float | None,
        exit_code: int,
        raises: Callable[[], bool],
    ) -> None:
        self._watch = watch
        self._grace_period_s, self._exit_code, self._raises = grace_period_s, exit_code, raises
        self.preempted: Preempted | None = None
        self._ends_at: float | None = None
        self.is_late = self.loses = False
        self._plans: dict[str, None] = {}  # in their order
        self.ends_process = False

    def is_time_up(self) -> bool:
        """For who waits in the loop: whether the job was asked to leave meanwhile, and what is not done is given up."""
        if self._ends_at is None:
            if not (self._watch.is_asked() and self._watch.reached()):
                return False
            left_s = self.left_s()
            self._ends_at = math.inf if left_s is None else time.monotonic() + left_s
        return time.monotonic() >= self._ends_at

    def finish(
        self,
        manager: StepManager,
        save: Callable[[float | None], SaveResult] = lambda left_s: NOTHING_NEW,
        unsaved: int | None = None,
    ) -> SaveResult:
        """Finish the save under way, then the last one, if there is one and it can be committed in time.

        What is not committed shortly before the grace period is over is given up. If nobody said how long that is, or
        it was over before the loop could notice, all is waited for.

        Args:
            manager: of the run.
            save: begins the last one within so many seconds.
            unsaved: the last completed update, if no save of it is committed or under way.

        Raises:
            Exception: the original error of the last save, if it failed: of the one under way, if `save` begins none.
        """
        plan = self._choose(manager, unsaved)
        try:
            before = manager.settle(self.left_s())
            if before is not None:
                _log.error("the save before failed", exc_info=before)
            if unsaved is not None and plan.waits and manager.agreed(plan.saves or before is not None):
                plan = self._choose(manager, unsaved)  # more is known now: how long that took, and how it has ended
            result = save(self.left_s()) if plan.saves or unsaved is None else SaveResult(False, plan.why)
            failure = manager.settle(self.left_s()) or (None if result.saved else before)
        except CheckpointTimeoutError as error:
            self._give_up(manager, error)
            return SaveResult(False, f"given up: {error}")
        self.loses |= plan.loses
        if failure is not None:
            raise failure
        return result

    def _choose(self, manager: StepManager, unsaved: int | None) -> ShutdownPlan:
        plan = manager.plan_to_leave(self.left_s(), unsaved)
        self._plans[plan.why] = None
        _log.warning("leaving: %s", plan.why)
        return plan

    def _give_up(self, manager: StepManager, error: CheckpointTimeoutError) -> None:
        self.is_late = self.loses = True
        manager.give_up(self._exit_code or 1)
        _log.error("asked to leave by %s, and given up: %s", self._watch.reason, error)

    def wait(self, manager: StepManager) -> None:
        """Wait for the save under way; one that is not committed when the time is up is given up, and ends the run.

        Raises:
            SystemExit, Preempted: it was given up.
            CheckpointTimeoutError: it does not get any further.
            Exception: the original error of the save, if it failed.
        """
        try:
            failure = manager.settle(until=self.is_time_up)
        except CheckpointTimeoutError as error:
            if not self.is_time_up():
                raise
            self._give_up(manager, error)
            raise self._left(manager) from None
        if failure is not None:
            raise failure

    def close(self, manager: StepManager) -> None:
        """Close it: wait for the save and the deletions under way, and in time if the job is asked to leave only now.

        Raises:
            CheckpointTimeoutError: the save does not get any further.
            Exception: the original error of a save that failed.
        """
        failure = None
        manager.leave_to_parent()
        try:
            if not self.is_late:
                failure = self._last_failure(manager)
            if failure is not None:
                manager.ends_as(type(failure).__name__)
        finally:  # whatever ended the wait: who saves lets go then
            manager.close(self.left_s(), self.is_time_up, waits=False)
        if failure is not None:
            raise failure

    def _last_failure(self, manager: StepManager) -> BaseException | None:
        until = self._watch.is_asked if self._grace_period_s is not None else lambda: False
        try:
            return manager.settle(until=until)
        except CheckpointTimeoutError:
            if self._grace_period_s is None or not self._watch.reached():
                raise
        self.finish(manager)
        return None

    def interruptible(self, progress: ReadProgress | None) -> ReadProgress | None:
        """`progress` of a load within `leaving_a_load`, which it ends once the job is asked to leave."""
        if self._grace_period_s is None:
            return progress

        def advance(done: int) -> None:
            if self._watch.is_asked():
                raise CheckpointTimeoutError("asked to leave meanwhile")
            if progress is not None and done:
                progress(done)

        return advance

    @contextlib.contextmanager
    def leaving_a_load(self, manager: StepManager) -> Iterator[None]:
        """Within: a load that is ended by a request to leave ends the run, at once, as there is nothing to save yet.

        Raises:
            SystemExit, Preempted: it was ended so.
        """
        try:
            yield
        except CheckpointTimeoutError:
            if self._grace_period_s is None or not (self._watch.is_asked() and self._watch.reached()):
                raise
            raise self._left(manager) from None

    def _left(self, manager: StepManager) -> BaseException:
        """Leave at once; what says so."""
        self.decide(manager)
        self.close(manager)
        error = self.error()
        self._watch.stop(leaving=self.ends_process)
        return error

    def left_s(self) -> float | None:
        """Seconds in which all must be done, some of the grace period being left to end the process; None: no limit."""
        if self._watch.noticed_at is None:
            return None
        grace_period_s = math.inf if self._grace_period_s is None else self._grace_period_s
        left_s = self._watch.left_of(grace_period_s)  # a source may know when the machine is gone
        if left_s is None:
            return None
        if self._ends_at is not None:  # a wait has begun to keep to it
            return max(0.0, self._ends_at - time.monotonic())
        ending_s = min(MOST_ENDING_S, ENDING_SHARE * grace_period_s)
        return max(left_s - ending_s, left_s / 2)  # a last save that begins late may still be a short one

    def decide(self, manager: StepManager) -> None:
        """From now on the run is over; says so, with the step that is committed."""
        step, reason = manager.latest, self._watch.reason
        saved = "no step is saved" if step is None else f"step {step} is saved"
        code = self._exit_code or int(self.loses)  # what was given up, or not even begun, is no success
        manager.ends_as(LATE if self.loses else PREEMPTED)
        self.preempted = Preempted(f"asked to leave by {reason}; {saved}", step, code)
        _log.warning("%s", self.preempted)
        self._watch.leaves(step, self.left_s())
        if not self.is_late:  # else its disk may not answer; nor may it now
            left_s = self.left_s()
            note = functools.partial(manager.note_preemption, step, str(reason), "; ".join(self._plans) or None)
            call_within(note, NOTE_S if left_s is None else min(left_s, NOTE_S))

    def error(self) -> BaseException:
        """What ends the process, or `Preempted`, which somebody is to catch."""
        assert self.preempted is not None
        self.ends_process = not self._raises()
        return SystemExit(self.preempted.exit_code) if self.ends_process else self.preempted
