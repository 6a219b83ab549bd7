"""What the policies that tune themselves do in simulated trainings, for the plots of docs/reference/policies.md."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import jaxckpt_train as jct
from benchmarks.goodput_model import START, SimulatedRun, Training, failure_times
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, SavePolicy, decide

BUDGET = 0.035
USUAL = Training(step_s=1.0, blocked_s=0.5, save_s=5.0, slower=1.2)
SLOW = Training(step_s=1.0, blocked_s=2.5, save_s=25.0, slower=1.2)
SLOWER_AFTER_S, BUDGET_STEPS = 3600.0, 7200
MTBF_S, FAILING_STEPS, SEEDS = 600.0, 3000, range(1, 5)
INTERVALS_S = (7, 14, 28, 56, 112, 224)
NEVER_S = 1e12
Line = list[tuple[float, float]]


@dataclasses.dataclass
class Asked:
    """A policy that takes note of the saves that another one asks for.

    Attributes:
        policy: the other one.
        at_s: when they were.
        began_s: when the process of each had begun.
        spent: what saves have cost until then, as a part of the training.
    """

    policy: SavePolicy
    at_s: list[float] = dataclasses.field(default_factory=list)
    began_s: list[float] = dataclasses.field(default_factory=list)
    spent: list[float] = dataclasses.field(default_factory=list)

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """As the other one."""
        due = decide(self.policy, step, previous_steps, context).save
        if due and context.read_costs is not None:
            costs = context.read_costs()
            began = step.time if context.run_started is None else context.run_started
            self.at_s.append((step.time - START).total_seconds())
            self.began_s.append((began - START).total_seconds())
            self.spent.append(costs.spent_s / max(costs.trained_s, 1.0))
        return due

    def intervals(self) -> Line:
        """Seconds between each save and the one before it in the same process, over the time."""
        pairs = itertools.pairwise(zip(self.at_s, self.began_s, strict=True))
        return [(later, later - earlier) for (earlier, began), (later, same) in pairs if began == same]


class SlowerLater:
    """A training whose disk gets slower; a stand-in for a `Training`."""

    run: SimulatedRun | None = None

    def __getattr__(self, name: str) -> Any:
        is_late = self.run is not None and self.run.now >= SLOWER_AFTER_S
        return getattr(SLOW if is_late else USUAL, name)


def budget_lines() -> dict[str, Line]:
    """Of a training whose disk gets five times slower: the share that saves have cost, and the intervals."""
    training, asked = SlowerLater(), Asked(jct.OverheadBudgetPolicy(BUDGET))
    training.run = SimulatedRun(training, asked, failure_times(NEVER_S, 1))  # type: ignore[arg-type]
    training.run.run(BUDGET_STEPS)
    return {"share": list(zip(asked.at_s, asked.spent, strict=True)), "interval": asked.intervals()}


def share_of(policy: SavePolicy) -> float:
    """The useful part of the time of trainings that fail every ten minutes."""
    found = [SimulatedRun(USUAL, policy, failure_times(MTBF_S, seed)).run(FAILING_STEPS) for seed in SEEDS]
    return sum(each.useful_s for each in found) / sum(each.wall_s for each in found)


def goodput_lines() -> dict[str, Line]:
    """The useful part of the time over fixed intervals, and over those that Young and Daly choose."""
    fixed = [(float(each), share_of(jct.FixedIntervalPolicy(each))) for each in INTERVALS_S]
    chosen = {"given": jct.YoungDalyPolicy(MTBF_S), "estimated": jct.YoungDalyPolicy()}
    lines = {"fixed": fixed}
    for name, policy in chosen.items():
        lines[name] = [(statistics.median(each for _, each in intervals_of(policy)), share_of(policy))]
    return lines


def intervals_of(policy: SavePolicy) -> Line:
    """The intervals between saves of one training that fails every ten minutes."""
    asked = Asked(policy)
    SimulatedRun(USUAL, asked, failure_times(MTBF_S, 1)).run(2 * FAILING_STEPS)
    return asked.intervals()


def learning_lines() -> dict[str, Line]:
    """The intervals of two trainings that fail every ten minutes, of which one knows that."""
    learning = {"given": jct.YoungDalyPolicy(MTBF_S), "estimated": jct.YoungDalyPolicy()}
    return {name: intervals_of(policy) for name, policy in learning.items()}
