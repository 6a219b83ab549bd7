"""Policies that tune themselves: their intervals, bounds and reasons, and that the processes of a job agree."""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt_train as jct
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.policies.context import CheckpointInfo, Decision, DecisionContext, Failures, SaveCosts, decide
from jaxckpt_train.policies.save import AIM, ROOM, daly_interval_s

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
KNOWN = SaveCosts(step_s=1.0, cost_s=2.0, blocked_s=0.5, duration_s=3.0)


def asked(policy: Any, since_s: float, costs: SaveCosts = KNOWN, saved: bool = True, **more: Any) -> Decision:
    """The decision `since_s` seconds after the last save, or after the start if nothing was saved."""
    now = START + timedelta(seconds=1e6 + since_s)
    last = START + timedelta(seconds=1e6)
    previous = [CheckpointInfo(10, last)] if saved else []
    context = DecisionContext(now, run_started=START if saved else last, read_costs=lambda: costs, **more)
    return decide(policy, CheckpointInfo(20, now), previous, context)


def interval_of(policy: Any, costs: SaveCosts = KNOWN, **more: Any) -> float:
    """The interval after which the policy asks for a save, to a thousandth."""
    low, high = 0.0, 1e7
    if not asked(policy, high, costs, **more).save:
        return math.inf
    while high - low > 1e-3 * max(low, 1.0):
        middle = (low + high) / 2
        low, high = (low, middle) if asked(policy, middle, costs, **more).save else (middle, high)
    return high


@pytest.mark.parametrize("policy", [jct.OverheadBudgetPolicy(), jct.YoungDalyPolicy()])
def test_unmeasured_run_saves_at_longest_interval(policy: Any) -> None:
    assert interval_of(policy, SaveCosts()) == pytest.approx(3600, rel=2e-3)
    unbounded = type(policy)(max_interval_secs=None)
    assert not asked(unbounded, 1e7, SaveCosts()).save
    assert not decide(unbounded, CheckpointInfo(1, START), [], DecisionContext(START)).save
    assert "max_interval_secs=3600" in asked(policy, 4000, SaveCosts()).reason


@pytest.mark.parametrize("policy", [jct.OverheadBudgetPolicy(), jct.YoungDalyPolicy()])
def test_first_save_measures_the_cost(policy: Any) -> None:
    assert asked(policy, 0.0, SaveCosts(step_s=1.0)).reason.endswith("to measure its cost")
    assert not asked(policy, 1e6, SaveCosts(step_s=1.0, is_measuring=True)).save


@pytest.mark.parametrize("kind", [jct.OverheadBudgetPolicy, jct.YoungDalyPolicy])
def test_untimed_updates_defer_save_to_longest_interval(kind: Any) -> None:
    unseen = dataclasses.replace(KNOWN, is_unseen=True)
    assert interval_of(kind(max_interval_secs=None), unseen) == math.inf
    assert interval_of(kind(max_interval_secs=5000.0), unseen) == pytest.approx(5000, rel=0.01)


@pytest.mark.parametrize("policy", [jct.OverheadBudgetPolicy(), jct.YoungDalyPolicy()])
def test_running_save_prevents_another(policy: Any) -> None:
    assert asked(policy, 1e6).save
    assert not asked(policy, 1e6, is_saving_in_progress=True).save


@pytest.mark.parametrize("policy", [jct.OverheadBudgetPolicy(), jct.YoungDalyPolicy()])
def test_interval_counts_from_latest_start(policy: Any) -> None:
    waited = START + timedelta(hours=9)
    context = DecisionContext(waited, run_started=waited, read_costs=lambda: KNOWN)
    assert not decide(policy, CheckpointInfo(20, waited), [CheckpointInfo(10, START)], context).save


@pytest.mark.parametrize("policy", [jct.OverheadBudgetPolicy(), jct.YoungDalyPolicy(600.0)])
def test_recalled_measurements_suffice(policy: Any) -> None:
    recalled = SaveCosts(cost_s=2.0)
    assert interval_of(policy, recalled) == pytest.approx(interval_of(policy, SaveCosts(step_s=1.0, cost_s=2.0)))


@given(st.floats(0.01, 10), st.floats(0.01, 0.5))
def test_budget_sets_the_interval(cost_s: float, fraction: float) -> None:
    policy = jct.OverheadBudgetPolicy(fraction, min_interval_secs=1e-3, max_interval_secs=None)
    costs = SaveCosts(step_s=0.1, cost_s=cost_s, spent_s=AIM * fraction * 1000, trained_s=1000)
    interval_s = interval_of(policy, costs)
    assert cost_s / (interval_s - cost_s) == pytest.approx(AIM * fraction, rel=1e-2)


def test_exceeded_budget_delays_next_save() -> None:
    policy = jct.OverheadBudgetPolicy(0.1, max_interval_secs=None)
    even = interval_of(policy, SaveCosts(step_s=1.0, cost_s=1.0, spent_s=9.0, trained_s=100.0))
    more = interval_of(policy, SaveCosts(step_s=1.0, cost_s=1.0, spent_s=18.0, trained_s=100.0))
    less = interval_of(policy, SaveCosts(step_s=1.0, cost_s=1.0, spent_s=0.0, trained_s=100.0))
    assert more - even == pytest.approx(9.0 / (AIM * 0.1), rel=1e-2)
    assert less == pytest.approx(0.5 / (AIM * 0.1) + 1.0, rel=1e-2)  # at most twice as often


@pytest.mark.parametrize("cost_s", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("mtbf_s", [300.0, 3600.0, 86400.0])
def test_interval_of_young_and_daly_loses_least(cost_s: float, mtbf_s: float) -> None:
    """By the exact expectation for random failures (Daly 2006, equation 20), without the time to restart."""

    def lost(interval_s: float) -> float:
        return mtbf_s * (math.exp((interval_s + cost_s) / mtbf_s) - 1) / interval_s

    found = daly_interval_s(cost_s, mtbf_s)
    assert lost(found) < min(lost(found * 1.1), lost(found / 1.1))
    policy = jct.YoungDalyPolicy(mtbf_s, min_interval_secs=1e-3, max_interval_secs=None)
    costs = SaveCosts(step_s=0.1, cost_s=cost_s)
    assert interval_of(policy, costs) == pytest.approx(found + cost_s, rel=2e-3)


def test_very_expensive_save_still_has_interval() -> None:
    assert daly_interval_s(100.0, 10.0) == 10.0


def test_without_a_given_rate_failures_are_counted() -> None:
    policy = jct.YoungDalyPolicy(max_interval_secs=None)
    few = interval_of(policy, read_failures=lambda: Failures(0, 1e6))
    many = interval_of(policy, read_failures=lambda: Failures(1000, 1e6))
    assert many == pytest.approx(daly_interval_s(2.0, 1e3) + 2.0, rel=1e-2)
    assert few > 30 * many
    assert interval_of(jct.YoungDalyPolicy(1e3), read_failures=lambda: Failures(5, 10.0)) == pytest.approx(
        many, rel=1e-2
    )


@pytest.mark.parametrize("lived_s", [600.0, 6e4, 6e6])
def test_unfailed_run_expects_twice_its_age(lived_s: float) -> None:
    assert Failures(0, lived_s).mtbf_s == pytest.approx(2 * lived_s, rel=0.11)
    assert Failures(20, lived_s).mtbf_s == pytest.approx(lived_s / 20, rel=0.11)  # and observed failures soon dominate


@pytest.mark.parametrize("kind", [jct.OverheadBudgetPolicy, jct.YoungDalyPolicy])
def test_bounds_are_kept_and_reported(kind: Any) -> None:
    often, seldom = SaveCosts(step_s=1.0, cost_s=1e-6), SaveCosts(step_s=1.0, cost_s=1e6)
    assert interval_of(kind(min_interval_secs=7.0), often) == pytest.approx(7.0, rel=1e-2)
    assert "min_interval_secs=7 is more" in asked(kind(min_interval_secs=7.0), 8.0, often).reason
    assert interval_of(kind(max_interval_secs=90.0), seldom) == pytest.approx(90.0, rel=1e-2)
    assert "max_interval_secs=90 is less" in asked(kind(max_interval_secs=90.0), 91.0, seldom).reason


@pytest.mark.parametrize("kind", [jct.OverheadBudgetPolicy, jct.YoungDalyPolicy])
def test_interval_exceeds_duration_of_saves(kind: Any) -> None:
    slow = SaveCosts(step_s=1.0, cost_s=1e-6, duration_s=900.0, usual_s=100.0)  # one save took longer than the others
    assert interval_of(kind(), slow) == pytest.approx(ROOM * 100.0, rel=1e-2)
    assert "but a save lasts 100 s" in asked(kind(), 1000.0, slow).reason


@pytest.mark.parametrize("kind", [jct.OverheadBudgetPolicy, jct.YoungDalyPolicy])
@pytest.mark.parametrize("cost_s", [1e-6, 1.0, 1e6])
def test_longest_interval_bounds_slow_saves(kind: Any, cost_s: float) -> None:
    slow, policy = SaveCosts(step_s=1.0, cost_s=cost_s, usual_s=100.0), kind(max_interval_secs=60.0)
    assert interval_of(policy, slow) <= 60.1
    assert "lasts 100 s, but max_interval_secs=60" in asked(policy, 61.0, slow).reason


def test_reasons_state_what_was_measured() -> None:
    spent = SaveCosts(step_s=1.0, cost_s=2.0, blocked_s=0.5, spent_s=3.0, trained_s=100.0)
    assert re.fullmatch(
        r"OverheadBudgetPolicy\(max_fraction=0.035\): a save costs 2 s \(and blocks the loop for 0.5 s of it\), "
        r"all so far 3.00% of the training: every [\d.]+ s",
        asked(jct.OverheadBudgetPolicy(), 1000.0, spent).reason,
    )
    found = asked(jct.YoungDalyPolicy(), 3000.0, read_failures=lambda: Failures(3, 7200.0)).reason
    assert found.startswith(
        "YoungDalyPolicy: a save costs 2 s, and a failure is expected every 2074 s (3 in 2.0 h so far)"
    )
    inside = jct.AnySavePolicy([jct.FixedIntervalPolicy(10_000), jct.YoungDalyPolicy(1e3)])
    assert asked(inside, 3000.0).reason.startswith(
        "YoungDalyPolicy: a save costs 2 s, and a failure is expected every 1000 s"
    )


@pytest.mark.parametrize("kind", [jct.OverheadBudgetPolicy, jct.YoungDalyPolicy])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"min_interval_secs": 0}, "min_interval_secs: .*found 0"),
        ({"max_interval_secs": math.inf}, "max_interval_secs: .*found inf"),
        ({"min_interval_secs": 5, "max_interval_secs": 4}, r"max_interval_secs: .*\(5\), found 4"),
    ],
)
def test_invalid_bounds_are_refused(kind: Any, arguments: Any, match: str) -> None:
    with pytest.raises(SettingsError, match=f"{kind.__name__}.{match}"):
        kind(**arguments)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 3.5, True, "0.1", math.nan, None])
def test_a_budget_is_a_fraction(fraction: Any) -> None:
    with pytest.raises(SettingsError, match="max_fraction"):
        jct.OverheadBudgetPolicy(fraction)


@pytest.mark.parametrize("mtbf", [0, -1.0, "1h", True, math.inf])
def test_time_between_failures_is_number_of_seconds(mtbf: Any) -> None:
    with pytest.raises(SettingsError, match=r"YoungDalyPolicy\.mtbf_secs"):
        jct.YoungDalyPolicy(mtbf)


def test_young_daly_policy_is_built_from_yaml() -> None:
    node = {"_target_": "jaxckpt_train.YoungDalyPolicy", "mtbf_secs": 7200, "max_interval_secs": 1800}
    assert callback_arguments({"save_policy": node})["save_policy"] == jct.YoungDalyPolicy(7200, max_interval_secs=1800)
