"""The one save of a run that is under way: waited for, given up; what it fails with is raised once."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Literal

from jaxckpt_train.checkpoint_metadata import CheckpointMetadata
from jaxckpt_train.errors import CheckpointTimeoutError, SettingsError
from jaxckpt_train.pending import LAST_PATIENCE_S, PendingSave
from jaxckpt_train.steps.policy_arguments import positive_seconds
from jaxckpt_train.steps.policy_context import CheckpointInfo

_log = logging.getLogger("jaxckpt_train")

ENDS_WITHIN_S = 60.0  # in a job, of process 0: by then all have heard how a save has ended
Busy = Literal["wait", "skip"]
Stalled = Literal["skip", "raise"]


class InFlight:
    """At most one save, and what the next one does about it. `StepManager` documents the arguments.

    Attributes:
        pending: the save, until its outcome was seen.
        info: what policies may know of it.
        given_up: one that nobody waits for any more.
        is_asked_to_leave: whether a save is not to wait for its turn any more, since it has to end in time.
        is_time_up: whether what is not done by now is given up, since the job was asked to leave.

    Raises:
        SettingsError: an argument is wrong.
    """

    def __init__(self, if_busy: Busy, stall_timeout_s: float, if_stalled: Stalled) -> None:
        if if_busy not in ("wait", "skip"):
            raise SettingsError(f'StepManager.if_busy: expected "wait" or "skip", found {if_busy!r}')
        if if_stalled not in ("skip", "raise"):
            raise SettingsError(f'StepManager.if_stalled: expected "skip" or "raise", found {if_stalled!r}')
        self._if_busy, self._if_stalled = if_busy, if_stalled
        self._stall_timeout_s = positive_seconds("StepManager.stall_timeout_s", stall_timeout_s)
        self.is_asked_to_leave: Callable[[], bool] = lambda: False
        self.is_time_up: Callable[[], bool] = lambda: False
        self.pending: PendingSave[CheckpointMetadata] | None = None
        self.info: CheckpointInfo | None = None
        self.given_up: PendingSave[CheckpointMetadata] | None = None
        self._skipped_for: tuple[PendingSave[CheckpointMetadata] | None, float] = (None, 0.0)
        self._told_of: PendingSave[CheckpointMetadata] | None = None
        self._without_state: PendingSave[CheckpointMetadata] | None = None
        self._kept: list[BaseException] | None = None
        self._begun_at = 0.0

    def begun(self, pending: PendingSave[CheckpointMetadata] | None) -> None:
        """Take note of a save that is about to begin; None: it did not."""
        self.pending, self._begun_at = pending, time.monotonic()

    def running_for_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begun_at

    def is_running(self) -> bool:
        """Whether it has neither committed nor failed."""
        return self.pending is not None and not self.pending.done()

    def running_info(self) -> tuple[CheckpointInfo, ...]:
        """What policies may know of it, if it is running."""
        return (self.info,) if self.info is not None and self.is_running() else ()

    def check(self) -> None:
        """Raise the error of a save that failed, once."""
        pending = self.pending
        if pending is not None and pending.done():
            self._tell(self.settle())

    def is_over(self) -> bool:
        """Whether there is one, which has ended, and whose outcome was not told yet."""
        return self.pending is not None and self.pending.done()

    def tell_outcome(self, *, is_told: bool = False) -> None:
        """In a job where it has ended, or is about to in this process, too: raise the error that it failed with.

        `is_told`: that is raised already, or another one.
        """
        try:
            error = self.settle(ENDS_WITHIN_S)
        except CheckpointTimeoutError as late:
            error, self.pending = late, None
        if not is_told:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        if error is not None and self._kept is None:
            raise error
        if error is not None and self._kept is not None:
            self._kept.append(error)

    @contextlib.contextmanager
    def telling_later(self) -> Iterator[None]:
        """Within: the error of a save that failed is raised at the end, when the next one may have begun."""
        if self._kept is not None:
            yield
            return
        kept = self._kept = list[BaseException]()
        try:
            yield
        except BaseException:
            for error in kept:
                _log.error("the save before failed", exc_info=error)  # that one, and not this
            raise
        finally:
            self._kept = None
        if kept:
            raise kept[0]

    def settle(
        self,
        timeout_s: float | None = None,
        patience_s: float = LAST_PATIENCE_S,
        until: Callable[[], bool] = lambda: False,
    ) -> BaseException | None:
        """Wait for it; the error, if it failed.

        Raises:
            CheckpointTimeoutError: not in time, it has not got any further for `patience_s` seconds, or `until` became
                true; it goes on.
        """
        pending = self.pending
        if pending is None:
            return None
        error = pending.outcome(timeout_s, patience_s, until)
        if self.pending is pending:  # else another thread has begun the next one meanwhile
            self.pending = None
            self._skipped_for = (None, 0.0)
        if pending is self._without_state:  # that it failed was told when it was skipped
            self._without_state = None
            return None
        return error

    def wait_for_turn(self, step: int, force: bool, timeout_s: float | None) -> str | None:
        """Wait until there is none, before the save of `step`; or say why that is skipped.

        Raises:
            CheckpointTimeoutError: not in time, or it has not got any further for too long.
            Exception: the original error of the save, if it failed.
        """
        pending = self.pending
        if pending is None or pending.done():
            self.check()  # it may have failed since the last look
            return None
        if self._if_busy == "skip" and not force:
            self._look_at(pending)
            if pending.movement.waited_s >= self._stall_timeout_s:
                return self._skipped(step, force, pending.no_further())
            why = f"skipped: {pending.subject} is still under way, and if_busy is 'skip'"
            _log.info("step %d: %s", step, why)
            return why
        _log.info("step %d waits: %s is still under way", step, pending.subject)
        try:
            error = self.settle(timeout_s, self.patience_s(force), self.is_asked_to_leave)
        except CheckpointTimeoutError as stalled:
            if self.is_asked_to_leave():
                return f"skipped: {stalled}"
            return self._skipped(step, force, stalled)
        self._tell(error)
        return None

    def _look_at(self, pending: PendingSave[CheckpointMetadata]) -> None:
        """Who skips does not wait, but is awake: the time counts since it last skipped for this save, or that moved.

        Half of what is allowed at most: after a stop of the whole job the save has until the next look to get further.
        """
        now, (seen, at) = time.monotonic(), self._skipped_for
        if seen is pending:
            pending.movement.waited(now - max(at, pending.movement.moved_at), at_most=self._stall_timeout_s / 2)
        self._skipped_for = (pending, now)

    def patience_s(self, force: bool) -> float:
        """Seconds without any progress after which a save is not waited for any more."""
        return LAST_PATIENCE_S if force else self._stall_timeout_s

    def not_taken(self, step: int, force: bool, timeout_s: float | None, stalled: CheckpointTimeoutError) -> str:
        """The save under way could not even take its state: why it is skipped.

        Raises:
            CheckpointTimeoutError: as given, if it is not to be skipped.
        """
        self._without_state = self.pending
        if timeout_s is None and self.is_asked_to_leave():  # else it is who leaves that set a time, and is told
            _log.warning("step %d is skipped: %s", step, stalled)
            return f"skipped: {stalled}"
        return self._skipped(step, force, stalled)

    def _skipped(self, step: int, force: bool, stalled: CheckpointTimeoutError) -> str:
        if force or self._if_stalled == "raise":
            raise stalled
        level = logging.INFO if self._told_of is self.pending else logging.WARNING  # once for each that is stalled
        _log.log(level, "step %d is skipped: %s", step, stalled)
        self._told_of = self.pending
        return f"skipped: {stalled}"

    def leave_to_parent(self) -> None:
        """Do not wait for a save of which this process, a fork, has a copy only."""
        if self.pending is not None and self.pending.is_of_parent():
            self.pending, self.given_up = None, self.pending

    def give_up(self, exit_code: int) -> None:
        """Do not wait for it any more, also at the end of the process, which has this exit code then."""
        if self.pending is not None:
            self.pending.give_up(exit_code)
            self.pending, self.given_up = None, self.pending
