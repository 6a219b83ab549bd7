"""Simulated trainings with random failures: self-tuning policies come close to the best fixed interval."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import jaxckpt_train as jct
from benchmarks.goodput_model import SaveFuture, SimulatedRun, Training, failure_times
from jaxckpt_train.policies.context import SavePolicy
from tests.support.tiers import nightly_after

NEVER = 1e12


def outcomes(training: Training, policy: SavePolicy, mtbf_s: float, steps: int) -> list[SaveFuture]:
    return [SimulatedRun(training, policy, failure_times(mtbf_s, seed)).run(steps) for seed in (1, 2)]


def share(found: Sequence[SaveFuture]) -> float:
    return sum(each.useful_s for each in found) / sum(each.wall_s for each in found)


def test_run_without_saves_and_failures_is_all_useful() -> None:
    found = SimulatedRun(Training(), jct.SpecificStepsPolicy([]), failure_times(NEVER, 1)).run(100)
    assert (found.share, found.saves) == (1.0, 0)


def test_losses_to_failures_and_saves_add_up() -> None:
    """A save of 1 s every 10 updates of 1 s, and a failure after 95.5 s, when 80 updates are saved."""
    training = Training(blocked_s=1.0, save_s=0.5, slower=1.0, restart_s=30.0)
    found = SimulatedRun(training, jct.FixedIntervalPolicy(10), iter([95.5, NEVER])).run(100)
    assert (found.useful_s, found.saves) == (100.0, 9)
    assert found.wall_s == pytest.approx(95.5 + 30 + 20 + 2)


@pytest.mark.parametrize("mtbf_s", nightly_after(2, [200.0, 2000.0, 600.0, 6000.0, 20000.0]))
def test_young_daly_is_near_best_fixed_interval(mtbf_s: float) -> None:
    training, steps = Training(step_s=2.0, blocked_s=1.0, save_s=6.0, slower=1.2), int(min(6000, max(2000, 3 * mtbf_s)))
    best = max(
        share(outcomes(training, jct.FixedIntervalPolicy(interval), mtbf_s, steps))
        for interval in (7, 14, 28, 56, 112, 224)
    )
    given = share(outcomes(training, jct.YoungDalyPolicy(mtbf_s), mtbf_s, steps))
    counted = share(outcomes(training, jct.YoungDalyPolicy(), mtbf_s, steps))
    assert given > 0.97 * best
    assert counted > 0.97 * best


def test_run_without_failures_saves_less_often() -> None:
    """The share follows the square root of cost by time: 2.4 % of one hour and 0.7 % of ten, at two seconds a save."""
    training, policy = Training(step_s=2.0, blocked_s=1.0, save_s=6.0, slower=1.2), jct.YoungDalyPolicy()
    hour, ten = (SimulatedRun(training, policy, failure_times(NEVER, 1)).run(steps) for steps in (1800, 18000))
    for found in (hour, ten):
        assert found.slowed_s / found.useful_s < 1.1 * (training.cost_s / found.useful_s) ** 0.5
    assert ten.slowed_s < 5 * hour.slowed_s


@pytest.mark.parametrize(
    "training",
    [
        Training(),
        Training(step_s=0.1, blocked_s=0.002, save_s=0.5, slower=1.1),
        Training(step_s=0.1, blocked_s=0.05, save_s=40.0, slower=1.15),
        Training(step_s=5.0, blocked_s=6.0, save_s=2.0, slower=2.0),
    ],
    ids=["usual", "fast disk", "slow disk", "blocking"],
)
def test_a_budget_is_kept(training: Training) -> None:
    found = SimulatedRun(training, jct.OverheadBudgetPolicy(0.035), failure_times(NEVER, 1)).run(8000)
    assert 0 < found.slowed_s / found.useful_s <= 0.035
    assert found.saves >= 3


def test_budget_is_used_up_without_other_bounds() -> None:
    found = SimulatedRun(Training(), jct.OverheadBudgetPolicy(0.035), failure_times(NEVER, 1)).run(8000)
    assert found.slowed_s / found.useful_s > 0.025
