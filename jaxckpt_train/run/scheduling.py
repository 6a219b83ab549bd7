"""SaveScheduler: which steps of a run are saved, as all processes of a job decide it."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from jaxckpt_train.distributed.coordinator import PollSchedule
from jaxckpt_train.pending import SaveSlot
from jaxckpt_train.policies.context import (
    NOT_DUE,
    CheckpointInfo,
    Decision,
    DecisionContext,
    Failures,
    SaveCosts,
    SavePolicy,
    decide,
)
from jaxckpt_train.policies.cost_model import LoopTimer
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.goodput import RunStatistics
from jaxckpt_train.run.history import Clock, plain_metrics
from jaxckpt_train.run.job import JobSync, decided_locally, depends_on_step, may_save


class _Answer(msgspec.Struct, array_like=True):
    decision: Decision
    has_steps: bool
    is_over: bool  # whether the previous save has ended
    next: int  # the number of calls until the next poll


class _Asked:
    """A policy, the steps that it is asked after, and what the processes of a job remember of its answers."""

    def __init__(
        self, policy: SavePolicy, infos: Callable[[], tuple[CheckpointInfo, ...]], processes: int, name: str
    ) -> None:
        self.policy, self.infos, self.name = policy, infos, name
        self.poll_schedule, self.has_steps = PollSchedule(processes), False
        # In a multi-process job, a decision to save whose save has not started yet.
        self.last: tuple[int, Decision] | None = None


class SaveScheduler:
    """Decides which steps of a run to save, and measures the loop. Without a policy, every step is saved.

    All processes of a job ask about the same steps in the same order, and take the same decisions. A policy that
    depends only on the step is evaluated by each process on its own. One that depends on time is evaluated by the
    primary, about once a second, and every other policy, such as a user's, by the primary at every step.

    `fast_policy` decides which other steps are saved to the fast tier.

    Attributes:
        renews_copies: whether the next step is saved at least to the fast tier, because hosts may have been lost.
    """

    def __init__(
        self,
        policy: SavePolicy | None,
        run: RunDirectory,
        save_slot: SaveSlot,
        job_sync: JobSync,
        clock: Clock,
        fast_policy: SavePolicy | None = None,
    ) -> None:
        self._run, self._save_slot, self._clock, self._job_sync = run, save_slot, clock, job_sync
        self._policy = self._fast_policy = None
        if policy is not None:
            self._policy = _Asked(policy, run.chosen_infos, job_sync.processes, "whether to save")
        if fast_policy is not None:
            self._fast_policy = _Asked(fast_policy, run.fast_infos, job_sync.processes, "whether to save fast")
        self._started = clock()
        self.clock, self._recalled = LoopTimer(), RunStatistics()
        job_sync.decides = decided_locally(policy)
        if fast_policy is not None:
            job_sync.decides += f"; to the fast tier: {decided_locally(fast_policy)}"
        self.reached_preemption = self.renews_copies = False

    def decide(self, step: int, metrics: Mapping[str, Any] | None = None) -> Decision:
        """Return whether to save a step, and why; see `StepManager.decide`."""
        if self._policy is None:
            return Decision(True, "no save policy: every call saves")
        with self.call(step):
            decision = self._decide(self._policy, step, metrics)
            if not decision.save and self._fast_policy is not None:
                fast = self._decide(self._fast_policy, step, metrics)
                if self.renews_copies:
                    return Decision(True, "the first update after a restore: renews copies on other hosts", fast=True)
                if fast.save:
                    return Decision(True, fast.reason, fast=True)
            return decision

    @contextlib.contextmanager
    def call(self, step: int) -> Iterator[None]:
        """Record that the loop has called with this step, and that it continues after the `with` block."""
        self._run.log.completed = step
        self.clock.entered(step, self._save_slot.is_running())
        try:
            yield
        finally:
            self.clock.left(step, self._save_slot.is_running())

    def _decide(self, asked: _Asked, step: int, metrics: Mapping[str, Any] | None) -> Decision:
        now, policy = self._clock(), asked.policy
        context = DecisionContext(
            now,
            is_saving_in_progress=self._save_slot.is_running(),
            reached_preemption=self.reached_preemption,
            read_metrics=None if metrics is None else functools.partial(plain_metrics, metrics),
            run_started=self._started,
            read_costs=self.costs,
            read_failures=functools.partial(self._failures, now),
        )
        info = CheckpointInfo(step, now)

        if self._job_sync.is_single_process:
            return decide(policy, info, self._previous(asked), context)
        if depends_on_step(policy):
            return decide(policy, info, (), context)
        # A loop that called `should_save` and now saves gets the same answer without another agreement.
        if asked.last is not None and asked.last[0] == step:
            return asked.last[1]
        found, is_polled = NOT_DUE, asked.poll_schedule.is_due()
        if may_save(policy, info, context, is_polled=is_polled, has_steps=asked.has_steps):
            found = self._ask_primary(asked, info, context, is_polled=is_polled)
        asked.last = (step, found) if found.save else None
        return found

    def _previous(self, asked: _Asked) -> tuple[CheckpointInfo, ...]:
        return (*asked.infos(), *self._save_slot.running_info())

    def _ask_primary(
        self, asked: _Asked, info: CheckpointInfo, context: DecisionContext, *, is_polled: bool
    ) -> Decision:
        """Let the primary decide for all processes, which then report the outcome of the previous save alike."""

        def say() -> bytes:
            previous = self._previous(asked)
            decision, has_steps = decide(asked.policy, info, previous, context), bool(previous)
            following = asked.poll_schedule.next() if is_polled else 0
            is_over = self._save_slot.has_unreported_outcome()
            return msgspec.msgpack.encode(_Answer(decision, has_steps, is_over, following))

        sent = self._job_sync.job.broadcast(f"deciding {asked.name} step {info.step}", say)
        answer = msgspec.msgpack.decode(sent, type=_Answer)
        asked.has_steps = asked.has_steps or answer.has_steps or answer.decision.save
        if is_polled:
            asked.poll_schedule.set_next(answer.next)
        if answer.is_over:
            self._save_slot.report_outcome()
        return answer.decision

    def save_started(self) -> None:
        """Forget the last decisions, since a save has started."""
        self.renews_copies = False
        for asked in (self._policy, self._fast_policy):
            if asked is not None:
                asked.last = None

    def costs(self) -> SaveCosts:
        """Return what saves have cost in this process or in earlier ones of the run. May read the history."""
        return self._costs_after(self._run.past)

    def known_costs(self) -> SaveCosts:
        """As `costs`, as far as the history has been read."""
        return self._costs_after(self._run.known_past)

    def _costs_after(self, past: RunStatistics) -> SaveCosts:
        if past is not self._recalled and past != RunStatistics():
            self._recalled = past
            self.clock.recall(past.cost_s, past.duration_s)
        return self.clock.costs()

    def _failures(self, now: datetime.datetime) -> Failures:
        before = self._run.past.failures
        return Failures(before.count, before.observed_s + max(0.0, (now - self._started).total_seconds()))
