"""Leaving on request: the wait for the last save, what is told, and how the process ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxckpt_train.errors import CheckpointTimeoutError, Preempted
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.preemption import PreemptionWatch

_log = logging.getLogger("jaxckpt_train")


class Departure:
    """How one run leaves.

    Args:
        watch: for requests to leave.
        grace_period_s: seconds from the request until something else may end the process.
        exit_code: of a process that left on request.
        raises: whether `Preempted` is raised instead of SystemExit.
    """

    def __init__(
        self,
        watch: PreemptionWatch,
        grace_period_s: float,
        exit_code: int,
        raises: Callable[[], bool],
    ) -> None:
        self._watch = watch
        self._grace_period_s, self._exit_code, self._raises = grace_period_s, exit_code, raises
        self.preempted: Preempted | None = None

    def settle(self, manager: StepManager) -> BaseException | None:
        """Wait for the save under way; past the grace period too: whatever ends the process does so anyway."""
        try:
            return manager.settle(self._watch.left_of(self._grace_period_s))
        except CheckpointTimeoutError as error:
            _log.error("the grace period of %g s is over, still waiting: %s", self._grace_period_s, error)
            return manager.settle()

    def decide(self, manager: StepManager) -> None:
        """From now on the run is over; says so, with the step that is committed."""
        step, reason = manager.latest, self._watch.reason
        saved = "no step is saved" if step is None else f"step {step} is saved"
        self.preempted = Preempted(f"asked to leave by {reason}; {saved}", step, self._exit_code)
        _log.warning("%s", self.preempted)
        manager.note_preemption(step, str(reason))

    def error(self) -> BaseException:
        """What ends the process."""
        assert self.preempted is not None
        return self.preempted if self._raises() else SystemExit(self._exit_code)
