"""Asks the save policy of a run about a step, in a job as all its processes do."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxckpt_train.steps.history import plain_metrics
from jaxckpt_train.steps.in_flight import InFlight
from jaxckpt_train.steps.job_decisions import JobDecisions, decided_alone
from jaxckpt_train.steps.leaving_plan import Situation
from jaxckpt_train.steps.past import Past
from jaxckpt_train.steps.policy_context import CheckpointInfo, Decision, DecisionContext, SavePolicy, decide
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.steps.save_costs import Failures, SaveCosts
from jaxckpt_train.steps.step_clock import StepClock
from jaxckpt_train.steps.step_save import Clock
from jaxckpt_train.steps.together import Together

NO_POLICY = Decision(True, "no save policy: every call saves")


class Decider:
    """What the policy of one run decides.

    Args:
        policy: None: every step is saved.
        run: the directory.
        in_flight: the save under way.
        together: the processes of the job.
        clock: the time, with a time zone.

    Attributes:
        clock: measures the loop.
        reached_preemption: whether the job was asked to leave; the same in all processes.
    """

    def __init__(
        self, policy: SavePolicy | None, run: RunDirectory, in_flight: InFlight, together: Together, clock: Clock
    ) -> None:
        self._policy, self._run, self._in_flight, self._clock = policy, run, in_flight, clock
        self._job = None if policy is None or together.is_alone else JobDecisions(together, policy)
        self._started = clock()
        self.clock, self._recalled = StepClock(), Past()
        together.decides(decided_alone(policy))
        self.reached_preemption = False
        self._asked: tuple[int, Decision] | None = None  # in a job, what was decided and not begun yet

    def decide(self, step: int, metrics: Mapping[str, Any] | None = None) -> Decision:
        """Whether to save a step, and why; `StepManager.decide` says more."""
        policy = self._policy
        if policy is None:  # who saves tells of the step
            return NO_POLICY
        with self.call(step):
            return self._decide(policy, step, metrics)

    @contextlib.contextmanager
    def call(self, step: int) -> Iterator[None]:
        """Within: the loop has called with so many updates complete; after it the loop goes on."""
        self._run.log.completed = step
        self.clock.entered(step, self._in_flight.is_running())
        try:
            yield
        finally:
            self.clock.left(step, self._in_flight.is_running())

    def _decide(self, policy: SavePolicy, step: int, metrics: Mapping[str, Any] | None) -> Decision:
        now = self._clock()
        context = DecisionContext(
            now,
            is_saving_in_progress=self._in_flight.is_running(),
            reached_preemption=self.reached_preemption,
            read_metrics=None if metrics is None else functools.partial(plain_metrics, metrics),
            run_started=self._started,
            read_costs=self.costs,
            read_failures=functools.partial(self._failures, now),
        )
        info = CheckpointInfo(step, now)
        if self._job is None:
            return decide(policy, info, self._previous(), context)

        def ask() -> tuple[Decision, bool]:
            previous = self._previous()
            return decide(policy, info, previous, context), bool(previous)

        if self._asked is None or self._asked[0] != step:  # else who has asked `should_save` saves now
            found = self._job.decide(info, context, ask, self._in_flight.is_over, self._in_flight.tell_outcome)
            self._asked = (step, found) if found.save else None
            return found
        return self._asked[1]

    def begun(self) -> None:
        """A save has begun: what was decided before it is done."""
        self._asked = None

    def costs(self) -> SaveCosts:
        """What saves were seen to cost, by this process or those before it."""
        past = self._run.past
        if past is not self._recalled:
            self._recalled = past
            self.clock.recall(past.cost_s, past.duration_s)
        return self.clock.costs()

    def situation(self, left_s: float | None, unsaved: int) -> Situation:
        """What is known when the job has been asked to leave, with this update complete and not saved."""
        self._run.log.completed = unsaved  # it may be told of nowhere else
        running, committed, costs = self._in_flight.running_info(), self._run.infos(), self.costs()
        return Situation(
            left_s,
            unsaved,
            running[0].step if running else None,
            self._in_flight.running_for_s() if running else 0.0,
            committed[-1].step if committed else None,
            costs.duration_s,
            costs.step_s,
        )

    def _failures(self, now: datetime.datetime) -> Failures:
        before = self._run.past.failures
        return Failures(before.count, before.observed_s + max(0.0, (now - self._started).total_seconds()))

    def _previous(self) -> tuple[CheckpointInfo, ...]:
        return (*self._run.infos(), *self._in_flight.running_info())
