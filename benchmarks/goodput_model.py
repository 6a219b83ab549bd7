"""Simulates a training that saves by a policy and fails at random: which part of its time goes into useful updates.

The policies and the clock that measures the loop are the real ones; only time is simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, Failures, SavePolicy, decide
from jaxckpt_train.policies.cost_model import LoopTimer

START = datetime(2026, 3, 1, tzinfo=UTC)


@dataclasses.dataclass(frozen=True)
class Training:
    """A training, in seconds.

    Attributes:
        step_s: for one update.
        blocked_s: that a save holds up the loop.
        save_s: that it takes until it is committed, from when the loop goes on.
        slower: by which factor updates take longer meanwhile.
        restart_s: from a failure until the loop has its state again.
    """

    step_s: float = 1.0
    blocked_s: float = 1.0
    save_s: float = 5.0
    slower: float = 1.2
    restart_s: float = 30.0

    @property
    def cost_s(self) -> float:
        """What one save costs the loop."""
        return self.blocked_s + self.save_s * (1 - 1 / self.slower)


@dataclasses.dataclass(frozen=True)
class SaveFuture:
    """What came of a simulated run.

    Attributes:
        useful_s: seconds that its updates take by themselves.
        wall_s: seconds that it took in all.
        slowed_s: seconds that saves have cost.
        saves: how many were committed.
        reasons: of the saves, in order.
    """

    useful_s: float
    wall_s: float
    slowed_s: float
    saves: int
    reasons: tuple[str, ...]

    @property
    def share(self) -> float:
        """The useful part of its time."""
        return self.useful_s / self.wall_s


def failure_times(mtbf_s: float, seed: int) -> Iterator[float]:
    """Times between failures, exponentially distributed."""
    draw = random.Random(seed)
    while True:
        yield draw.expovariate(1 / mtbf_s)


class SimulatedRun:
    """One run, over all its processes.

    Args:
        training: what it does.
        policy: when it saves.
        failures: seconds from one failure to the next.
    """

    def __init__(self, training: Training, policy: SavePolicy, failures: Iterator[float]) -> None:
        self.training, self.policy, self._failures = training, policy, failures
        self.now = 0.0
        self._fails_at = next(failures)
        self._failed = Failures()
        self._lived_s = 0.0
        self._committed: list[CheckpointInfo] = []
        self._cost_s: float | None = None
        self._slowed_s = 0.0
        self._reasons: list[str] = []

    def run(self, steps: int) -> SaveFuture:
        """Train until this many updates are complete."""
        reached = self._live(steps)
        while reached < steps:
            self.now += self.training.restart_s
            reached = self._live(steps)
        saves = len(self._committed)
        return SaveFuture(steps * self.training.step_s, self.now, self._slowed_s, saves, tuple(self._reasons))

    def _live(self, steps: int) -> int:
        """One process: until it fails, or is done. Returns the step that the next one goes on from."""
        began, clock = self.now, LoopTimer(lambda: self.now)
        clock.recall(self._cost_s, None)
        step = self._committed[-1].step if self._committed else 0
        saving: CheckpointInfo | None = None
        ends_at = 0.0
        while step < steps:
            is_slow = saving is not None and self.now < ends_at
            took_s = self.training.step_s * (self.training.slower if is_slow else 1.0)
            self._slowed_s += took_s - self.training.step_s
            self.now += took_s
            if saving is not None and self.now >= ends_at:
                self._committed.append(saving)
                clock.committed(ends_at - _seconds(saving))
                saving = None
            if self.now >= self._fails_at:
                self._fail(began, clock)
                return self._committed[-1].step if self._committed else 0
            step += 1
            clock.entered(step, saving is not None)
            reason = self._asked(step, saving, began, clock)
            if reason and saving is None:
                self._reasons.append(reason)
                saving = CheckpointInfo(step, _time(self.now))
                self.now += self.training.blocked_s
                self._slowed_s += self.training.blocked_s
                ends_at = self.now + self.training.save_s
                clock.save_began(step)
            clock.left(step, saving is not None)
        return step

    def _asked(self, step: int, saving: CheckpointInfo | None, began: float, clock: LoopTimer) -> str:
        lived_s = self._lived_s + self.now - began
        context = DecisionContext(
            _time(self.now),
            is_saving_in_progress=saving is not None,
            run_started=_time(began),
            read_costs=clock.costs,
            read_failures=functools.partial(Failures, self._failed.count, lived_s),
        )
        previous = self._committed[-1:] if saving is None else [saving]
        decision = decide(self.policy, CheckpointInfo(step, _time(self.now)), previous, context)
        return decision.reason if decision.save else ""

    def _fail(self, began: float, clock: LoopTimer) -> None:
        self.now = self._fails_at
        self._fails_at += self.training.restart_s + next(self._failures)
        self._lived_s += self.now - began
        self._failed = Failures(self._failed.count + 1, self._lived_s)
        self._cost_s = clock.costs().cost_s or self._cost_s


def _time(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def _seconds(info: CheckpointInfo) -> float:
    return (info.time - START).total_seconds()
