"""Graceful shutdown: finish the last save in the time left, record the outcome, and end the process."""

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
# The part of the grace period that is reserved to end a process that has used JAX.
ENDING_SHARE, MOST_ENDING_S = 0.4, 2.0
NOTHING_NEW = SaveResult(False, "nothing new to save")


class GracefulShutdown:
    """Shuts one run down on request.

    Args:
        watch: watches for requests.
        grace_period_s: the seconds from the request until something else ends the process; None: unknown.
        exit_code: the exit code of the process after a shutdown on request.
        raises: returns whether to raise `Preempted` instead of SystemExit.

    Attributes:
        is_late: whether a save was given up.
        loses: whether a save was given up, or not started, because the time was too short.
        preempted: the error that describes the shutdown, after it was decided.
        ends_process: whether the run ends by SystemExit.
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
        self._plans: dict[str, None] = {}  # ordered
        self.ends_process = False

    def is_time_up(self) -> bool:
        """For waits in the loop: whether a shutdown was requested in the meantime and its time is up."""
        if self._ends_at is None:
            if not (self._watch.is_asked() and self._watch.reached()):
                return False
            left_s = self.left_s()
            self._ends_at = math.inf if left_s is None else time.monotonic() + left_s
        return time.monotonic() >= self._ends_at

    def finish(
        self,
        manager: StepManager,
        save: Callable[[float | None], SaveResult] | None = None,
        unsaved: int | None = None,
    ) -> SaveResult:
        """Finish the running save, then make the last one, if it is needed and can be committed in time.

        A save that is not committed shortly before the end of the grace period is given up. If the grace period is
        unknown, or had ended before the loop noticed the request, there is no time limit.

        Args:
            manager: the manager of the run.
            save: starts the last save, within the given number of seconds. None: only the running save is finished.
            unsaved: the last completed update, if no save of it is committed or running.

        Raises:
            Exception: the original error of the last save if it failed; that of the running one if `save` starts none.
        """
        plan = self._choose(manager, unsaved)
        try:
            before = manager.settle(self.left_s())
            if before is not None:
                _log.error("the previous save failed", exc_info=before)
            if unsaved is not None and plan.waits and manager.agreed(plan.saves or before is not None):
                plan = self._choose(manager, unsaved)  # the duration and the outcome of the running save are known now
            if save is None:
                result = NOTHING_NEW
            elif plan.saves or unsaved is None:
                result = save(self.left_s())
            else:
                result = SaveResult(False, plan.why)
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
        _log.warning("shutting down: %s", plan.why)
        return plan

    def _give_up(self, manager: StepManager, error: CheckpointTimeoutError) -> None:
        self.is_late = self.loses = True
        manager.give_up(self._exit_code or 1)
        _log.error("shutdown requested by %s; a save was given up: %s", self._watch.reason, error)

    def wait(self, manager: StepManager) -> None:
        """Wait for the running save. If a requested shutdown leaves no time for it, give it up and end the run.

        Raises:
            SystemExit, Preempted: it was given up.
            CheckpointTimeoutError: it makes no progress.
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
        """Close the manager: wait for the running save and the deletions; a shutdown requested meanwhile limits this.

        Raises:
            CheckpointTimeoutError: the save makes no progress.
            Exception: the original error of a save that failed.
        """
        failure = None
        manager.leave_to_parent()
        try:
            if not self.is_late:
                failure = self._last_failure(manager)
            if failure is not None:
                manager.ends_as(type(failure).__name__)
        finally:  # whatever ended the wait, release the directory
            manager.close(self.left_s(), self.is_time_up, waits=False)
        if failure is not None:
            raise failure

    def _last_failure(self, manager: StepManager) -> BaseException | None:
        until = self._watch.is_asked if self._grace_period_s is not None else None
        try:
            return manager.settle(until=until)
        except CheckpointTimeoutError:
            if self._grace_period_s is None or not self._watch.reached():
                raise
        self.finish(manager)
        return None

    def interruptible(self, progress: ReadProgress | None) -> ReadProgress | None:
        """Wrap the `progress` of a load within `leaving_a_load`, so that a requested shutdown ends the load."""
        if self._grace_period_s is None:
            return progress

        def advance(done: int) -> None:
            if self._watch.is_asked():
                raise CheckpointTimeoutError("a shutdown was requested during the load")
            if progress is not None and done:
                progress(done)

        return advance

    @contextlib.contextmanager
    def leaving_a_load(self, manager: StepManager) -> Iterator[None]:
        """Within the context, a requested shutdown ends a load and the run at once: there is nothing to save yet.

        Raises:
            SystemExit, Preempted: the load was ended by a request.
        """
        try:
            yield
        except CheckpointTimeoutError:
            if self._grace_period_s is None or not (self._watch.is_asked() and self._watch.reached()):
                raise
            raise self._left(manager) from None

    def _left(self, manager: StepManager) -> BaseException:
        """Shut down at once; return the error to raise."""
        self.decide(manager)
        self.close(manager)
        error = self.error()
        self._watch.stop(leaving=self.ends_process)
        return error

    def left_s(self) -> float | None:
        """The seconds left for everything except the end of the process itself; None: no limit."""
        if self._watch.noticed_at is None:
            return None
        grace_period_s = math.inf if self._grace_period_s is None else self._grace_period_s
        left_s = self._watch.left_of(grace_period_s)  # a source may know when the machine ends
        if left_s is None:
            return None
        if self._ends_at is not None:  # keep the limit that an earlier wait has set
            return max(0.0, self._ends_at - time.monotonic())
        ending_s = min(MOST_ENDING_S, ENDING_SHARE * grace_period_s)
        return max(left_s - ending_s, left_s / 2)  # even a save that starts late may be short enough

    def decide(self, manager: StepManager) -> None:
        """Record that the run ends here, with the committed step."""
        step, reason = manager.latest, self._watch.reason
        saved = "no step is saved" if step is None else f"step {step} is saved"
        code = self._exit_code or int(self.loses)  # a lost save is not a success
        manager.ends_as(LATE if self.loses else PREEMPTED)
        self.preempted = Preempted(f"shutdown requested by {reason}; {saved}", step, code)
        _log.warning("%s", self.preempted)
        self._watch.leaves(step, self.left_s())
        if not self.is_late:  # after a save was given up, the disk may not answer now either
            left_s = self.left_s()
            note = functools.partial(manager.note_preemption, step, str(reason), "; ".join(self._plans) or None)
            call_within(note, NOTE_S if left_s is None else min(left_s, NOTE_S))

    def error(self) -> BaseException:
        """The error that ends the process, or `Preempted`, which the caller is expected to catch."""
        assert self.preempted is not None
        self.ends_process = not self._raises()
        return SystemExit(self.preempted.exit_code) if self.ends_process else self.preempted
