"""Preservation policies: which steps each keeps, once and applied repeatedly; which steps are never deleted."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, rank_checkpoints, steps_to_delete
from jaxckpt_train.policies.preservation import (
    AnyPreservationPolicy,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreserveAll,
)

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """The time `seconds` after the start of the run."""
    return START + timedelta(seconds=seconds)


def info(step: int, seconds: float | None = None, **metrics: Any) -> CheckpointInfo:
    """A checkpoint committed `seconds` after the start; by default one second per step."""
    return CheckpointInfo(step, at(step if seconds is None else seconds), metrics or None)


def preserved(policy: Any, checkpoints: Iterable[CheckpointInfo], now: float = 0) -> list[int]:
    """The steps that the policy itself preserves."""
    infos = list(checkpoints)
    flags = policy.should_preserve(infos, context=DecisionContext(at(now)))
    return [one.step for one, keep in zip(infos, flags, strict=True) if keep]


def deleted(checkpoints: Iterable[CheckpointInfo], policy: Any, now: float = 0) -> list[int]:
    """What `steps_to_delete` says, in order."""
    return sorted(steps_to_delete(list(checkpoints), policy, context=DecisionContext(at(now))))


def survivors(arriving: Iterable[CheckpointInfo], policy: Any) -> list[CheckpointInfo]:
    """The steps that remain when retention runs after each commit, as in a run; checks the invariants each time."""
    alive: list[CheckpointInfo] = []
    for one in arriving:
        alive.append(one)
        context = DecisionContext(one.time)
        gone = steps_to_delete(alive, policy, context=context)
        assert_never_lost(alive, gone)
        alive = [other for other in alive if other.step not in gone]
        assert not steps_to_delete(alive, policy, context=context), (
            "applied again at once, a policy must delete nothing"
        )
    return alive


def assert_never_lost(checkpoints: Sequence[CheckpointInfo], gone: set[int]) -> None:
    """The invariants of retention: the newest, the last committed and pinned steps stay; no unknown step is deleted."""
    assert gone <= {one.step for one in checkpoints}
    if checkpoints:
        assert max(one.step for one in checkpoints) not in gone
        assert checkpoints[-1].step not in gone
    assert not gone & {one.step for one in checkpoints if one.pinned}


def steps(checkpoints: Iterable[CheckpointInfo]) -> list[int]:
    return [one.step for one in checkpoints]


# Each policy ------------------------------------------------------------------------------------------------------


def test_latest_n_keeps_last_n() -> None:
    infos = [info(step) for step in (1, 5, 9, 12)]
    assert preserved(LatestN(2), infos) == [9, 12]
    assert preserved(LatestN(9), infos) == [1, 5, 9, 12]
    assert preserved(LatestN(), infos) == [1, 5, 9, 12]
    assert preserved(PreserveAll(), infos) == [1, 5, 9, 12]


def test_every_n_steps_keeps_multiples() -> None:
    infos = [info(step) for step in (0, 5, 10, 13, 20, 31)]
    assert preserved(EveryNSteps(10), infos) == [0, 10, 20]
    assert preserved(EveryNSteps(10, max_to_keep=2), infos) == [10, 20]


def test_inexact_interval_starts_at_first_step() -> None:
    infos = [info(step) for step in (3, 12, 13, 22, 27)]
    assert preserved(EveryNSteps(10, exact_interval=False), infos) == [3, 13, 27]
    assert preserved(EveryNSteps(10, exact_interval=False, max_to_keep=1), infos) == [27]


def test_closest_step_to_each_multiple_is_kept() -> None:
    infos = [info(step) for step in (2, 9, 12, 18, 22, 44, 47)]
    assert preserved(EveryNStepsClosest(10), infos) == [2, 9, 22, 44, 47]
    assert preserved(EveryNStepsClosest(10), [info(step) for step in (8, 12, 21)]) == [12, 21]
    assert preserved(EveryNStepsClosest(10, max_to_keep=2), infos) == [44, 47]
    assert preserved(EveryNStepsClosest(10), []) == []


def test_every_n_seconds_starts_at_first_step() -> None:
    infos = [info(step, seconds) for step, seconds in enumerate((5, 50, 65, 110, 125, 300))]
    assert preserved(EveryNSeconds(60), infos) == [0, 2, 4, 5]


def test_every_n_seconds_survives_clock_set_back() -> None:
    infos = [info(step, seconds) for step, seconds in enumerate((7200, 7230, 3600, 3630, 3660))]
    assert preserved(EveryNSeconds(60), infos) == [0, 2, 4]


def test_latest_duration_keeps_recent_steps() -> None:
    infos = [info(step, seconds) for step, seconds in enumerate((0, 50, 40, 100))]
    assert preserved(LatestDuration(timedelta(seconds=50)), infos, now=100) == [1, 2, 3]
    assert preserved(LatestDuration(50), infos, now=101) == [3]
    assert preserved(LatestDuration(50), infos, now=1000) == []
    assert deleted(infos, LatestDuration(50), now=1000) == [0, 1, 2]
    assert LatestDuration(60) == LatestDuration(timedelta(minutes=1))


def test_custom_steps_keeps_the_named_steps() -> None:
    infos = [info(step) for step in (1, 5, 9, 12)]
    assert preserved(CustomSteps([5, 12, 99]), infos) == [5, 12]
    assert preserved(CustomSteps(range(0, 10**12, 3)), infos) == [9, 12]
    assert repr(CustomSteps({12, 5})) == "CustomSteps(steps=[5, 12])"


# Best -------------------------------------------------------------------------------------------------------------


def test_best_and_latest_steps_are_both_kept() -> None:
    policy = AnyPreservationPolicy([BestN("loss", 2, "min"), LatestN(2)])
    run = [info(step, loss=step / 100) for step in (100, 200, 300, 400, 500)]
    assert steps(survivors(run, policy)) == [100, 200, 400, 500]


def test_nan_is_never_best() -> None:
    infos = [info(1, loss=math.nan), info(2, loss=3.0), info(3, loss=math.nan), info(4, loss=math.inf)]
    assert preserved(BestN("loss", 9, "min"), infos) == [2, 4]
    assert preserved(BestN("loss", 1, "min"), infos) == [2]
    assert preserved(BestN("loss", 1, "max"), infos) == [4]
    assert preserved(BestN("loss", 1, "max"), [info(1, loss=math.nan)]) == []


def test_step_without_metric_waits_for_later_one() -> None:
    policy = BestN("loss", 1, "min")
    infos = [info(1), info(2, loss=1.0), info(3), info(4, accuracy=1.0)]
    assert preserved(policy, infos) == [2, 3, 4]
    assert preserved(policy, [*infos, info(5, loss=2.0)]) == [2]
    assert preserved(policy, [*infos, info(5, loss=math.nan)]) == [2]
    assert preserved(policy, [info(1), info(2)]) == [1, 2]


def test_steps_without_metric_are_kept_as_configured() -> None:
    infos = [info(1), info(2, loss=1.0), info(3, loss=2.0), info(4)]
    assert preserved(BestN("loss", 1, "min", keep_checkpoints_without_metrics=True), infos) == [1, 2, 4]
    assert preserved(BestN("loss", 1, "min", keep_checkpoints_without_metrics=False), infos) == [2]
    assert preserved(BestN("loss", None, "min", keep_checkpoints_without_metrics=False), infos) == [1, 2, 3, 4]


def test_a_metric_attached_by_a_later_evaluation_counts() -> None:
    policy = AnyPreservationPolicy([BestN("loss", 1, "min"), LatestN(1)])
    alive = survivors([info(step) for step in (100, 200, 300)], policy)
    assert steps(alive) == [100, 200, 300]
    evaluated = [dataclasses.replace(one, metrics={"loss": np.float32(one.step)}) for one in alive]
    assert deleted(evaluated, policy) == [200]


VALUES = st.one_of(st.none(), st.just(math.nan), st.integers(-3, 3).map(float), st.floats())


@settings(deadline=None)
@given(st.lists(VALUES, max_size=12), st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_repeated_best_n_keeps_overall_best(values: list[float | None], n: int, mode: Any) -> None:
    run = [info(step) if value is None else info(step, loss=value) for step, value in enumerate(values)]
    best = rank_checkpoints(run, "loss", mode)[:n]
    alive = steps(survivors(run, BestN("loss", n, mode)))
    assert {one.step for one in best} <= set(alive)
    if run and run[-1].metrics:
        assert len(alive) <= n + 1


# What is never deleted --------------------------------------------------------------------------------------------


def test_newest_and_pinned_steps_stay_under_every_policy() -> None:
    nothing = CustomSteps([])
    assert deleted([], nothing) == []
    assert deleted([info(7)], nothing) == []
    infos = [info(1), dataclasses.replace(info(2), pinned=True), info(3), info(4)]
    assert deleted(infos, nothing) == [1, 3]
    assert deleted(reversed(infos), nothing) == [3], "step 1 was committed last, after a roll-back"


def test_step_committed_last_stays_after_roll_back() -> None:
    infos = [info(300, 3), info(400, 4), info(500, 5), info(350, 9)]
    assert deleted(infos, LatestN(1)) == [300, 400]


DAY_S = 86_400.0


@pytest.mark.parametrize("wrong_s", [DAY_S, -DAY_S, 400 * DAY_S, -400 * DAY_S])
@pytest.mark.parametrize("policy", [LatestN(2), AnyPreservationPolicy([LatestN(1), LatestN(2)])], ids=["one", "any"])
def test_wrongly_timed_step_goes_in_order(policy: Any, wrong_s: float) -> None:
    run = [info(1), info(2), info(3, 3 + wrong_s), info(4), info(5), info(6)]
    assert [steps(survivors(run[:count], policy)) for count in (3, 4, 5, 6)] == [[2, 3], [3, 4], [4, 5], [5, 6]]


@pytest.mark.parametrize("wrong_s", [DAY_S, -DAY_S])
def test_wrongly_timed_temporary_step_goes_next(wrong_s: float) -> None:
    temporary = dataclasses.replace(info(2, 2 + wrong_s), temporary=True)
    assert steps(survivors([info(1), temporary], PreserveAll())) == [1, 2]
    assert steps(survivors([info(1), temporary, info(3)], PreserveAll())) == [1, 3]


@pytest.mark.parametrize(("times", "now", "kept"), [
    ([10, 20, 30, 40], 45, [3, 4]),
    ([10, 1000, 30, 40], 45, [2, 3, 4]),
    ([10, 20, 1000, 40], 45, [3, 4]),
    ([10, 20, 1000, 1000], 45, [3, 4]),
    ([10, 1000, 1000, 40], 65, [4]),
    ([10, 20, 30, 1000], 45, [3, 4]),
    ([10, 1000, 30, 40], 2000, [4]),
    ([1000, 1010, 1020, 1030], 45, [1, 2, 3, 4]),
])  # fmt: skip
def test_future_time_does_not_keep_step(times: list[float], now: float, kept: list[int]) -> None:
    run = [info(step, time) for step, time in enumerate(times, 1)]
    gone = deleted(run, LatestDuration(20), now)
    assert [one.step for one in run if one.step not in gone] == kept


def test_next_commit_deletes_temporary_steps() -> None:
    one, two, three = (dataclasses.replace(info(step), temporary=True) for step in (1, 2, 3))
    assert deleted([one], PreserveAll()) == []
    assert deleted([one, two], PreserveAll()) == [1]
    assert deleted([one, two, info(9)], PreserveAll()) == [1, 2]
    assert deleted([dataclasses.replace(one, pinned=True), two, three], PreserveAll()) == [2]


def test_temporary_steps_displace_no_permanent_one() -> None:
    permanent = [info(100), info(200)]
    temporary = [dataclasses.replace(info(step), temporary=True) for step in (210, 220, 230)]
    assert steps(survivors([*permanent, *temporary], LatestN(2))) == [100, 200, 230]


CHECKPOINTS = st.lists(
    st.builds(
        CheckpointInfo,
        step=st.integers(0, 60),
        time=st.floats(-50, 50).map(at),
        metrics=st.one_of(st.none(), VALUES.map(lambda value: {"loss": value})),
        pinned=st.booleans(),
        temporary=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda one: one.step,
)
SMALL = st.one_of(st.none(), st.integers(1, 4))
CHAINS = st.one_of(
    st.builds(EveryNSteps, st.integers(1, 20), st.booleans(), SMALL),
    st.builds(EveryNStepsClosest, st.integers(1, 20), SMALL),
    st.builds(EveryNSeconds, st.floats(0.1, 40)),
)
LEAVES = st.one_of(
    CHAINS,
    st.just(PreserveAll()),
    st.builds(LatestN, SMALL),
    st.builds(LatestDuration, st.floats(0.1, 40)),
    st.builds(BestN, st.just("loss"), SMALL, st.sampled_from(["min", "max"]), st.sampled_from([None, True, False])),
    st.builds(CustomSteps, st.frozensets(st.integers(0, 60))),
)
POLICIES = st.recursive(LEAVES, lambda inner: st.builds(AnyPreservationPolicy, st.lists(inner, min_size=1, max_size=3)))


@settings(deadline=None)
@given(CHECKPOINTS, POLICIES)
def test_no_policy_deletes_newest_or_pinned_steps(checkpoints: list[CheckpointInfo], policy: Any) -> None:
    context = DecisionContext(at(50))
    gone = steps_to_delete(checkpoints, policy, context=context)
    assert_never_lost(checkpoints, gone)


@settings(deadline=None)
@given(CHECKPOINTS, st.lists(LEAVES, min_size=1, max_size=4))
def test_any_is_the_union_of_its_policies(checkpoints: list[CheckpointInfo], policies: list[Any]) -> None:
    infos = sorted(checkpoints, key=lambda one: one.step)
    union = {step for policy in policies for step in preserved(policy, infos, now=50)}
    assert set(preserved(AnyPreservationPolicy(policies), infos, now=50)) == union


# Applied repeatedly -----------------------------------------------------------------------------------------------

GAPS = st.lists(st.tuples(st.integers(1, 15), st.floats(0.01, 90)), max_size=40)


def run_of(gaps: list[tuple[int, float]]) -> list[CheckpointInfo]:
    """Checkpoints in the order of their commit, from gaps in steps and in seconds."""
    step, seconds, run = 0, 0.0, []
    for more_steps, more_seconds in gaps:
        step, seconds = step + more_steps, seconds + more_seconds
        run.append(info(step, seconds))
    return run


@settings(deadline=None)
@given(GAPS, CHAINS)
def test_incremental_application_equals_final_one(gaps: list[tuple[int, float]], policy: Any) -> None:
    if isinstance(policy, EveryNStepsClosest):
        policy = dataclasses.replace(
            policy, max_to_keep=None
        )  # the bound counts the newest step, so the result depends on when it is applied
    run = run_of(gaps)
    assert steps(survivors(run, policy)) == sorted({*preserved(policy, run), *steps(run[-1:])})


@settings(deadline=None)
@given(GAPS, st.integers(1, 20))
def test_every_n_steps_keeps_all_multiples_for_ever(gaps: list[tuple[int, float]], interval: int) -> None:
    run = run_of(gaps)
    policy = AnyPreservationPolicy([EveryNSteps(interval), LatestN(2), EveryNSeconds(60)])
    alive = set(steps(survivors(run, policy)))
    assert {one.step for one in run if one.step % interval == 0} <= alive
    assert set(steps(run[-2:])) <= alive


@settings(deadline=None)
@given(GAPS, st.floats(1, 200))
def test_every_n_seconds_leaves_gaps_and_bounded_count(gaps: list[tuple[int, float]], interval: float) -> None:
    run = run_of(gaps)
    alive = survivors(run, EveryNSeconds(interval))
    times = [one.time for one in alive]
    apart = [(later - sooner).total_seconds() for sooner, later in itertools.pairwise(times[:-1])]
    assert all(gap >= interval for gap in apart)
    if run:
        assert len(alive) <= (run[-1].time - run[0].time).total_seconds() / interval + 2
        widest = max((seconds for _, seconds in gaps), default=0.0)
        assert all(gap <= interval + widest + 1e-3 for gap in apart), "no gap is larger than necessary"


@settings(deadline=None)
@given(GAPS, st.integers(1, 20), st.integers(1, 5))
def test_max_to_keep_bounds_closest_steps(gaps: list[tuple[int, float]], interval: int, most: int) -> None:
    assert len(survivors(run_of(gaps), EveryNStepsClosest(interval, max_to_keep=most))) <= most


def test_a_hundred_preemptions_leave_a_bounded_disk() -> None:
    """Temporary saves by time, a permanent one at each of 102 preemptions, and each 1000th step for ever."""
    run = [
        CheckpointInfo(step, at(step * 7), temporary=bool(step % 490 and step % 1000)) for step in range(10, 50_001, 10)
    ]
    alive = steps(survivors(run, AnyPreservationPolicy([EveryNSteps(1000), LatestN(3)])))
    assert alive == sorted({*range(1000, 50_001, 1000), 49_490, 49_980})


def test_duration_policy_bounds_disk_use() -> None:
    policy = AnyPreservationPolicy([EveryNSeconds(600), EveryNSteps(1000), LatestN(1)])
    run = [info(step, step * 7) for step in range(10, 5001, 10)]  # a save each 70 seconds, many by preemptions
    alive = survivors(run, policy)
    assert {1000, 2000, 3000, 4000, 5000} <= set(steps(alive))
    assert len(alive) <= 35_000 / 600 + 5 + 1


# Orbax's own policies ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orbax() -> ModuleType:
    """Orbax's policies, without the warnings that its import gives on some versions of Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("orbax.checkpoint")
        module: ModuleType = pytest.importorskip("orbax.checkpoint._src.checkpoint_managers.preservation_policy")
    return module


def test_orbax_policies_work_unchanged(orbax: ModuleType) -> None:
    run = [info(step, step * 10, loss=step) for step in range(1, 31)]
    best = orbax.BestN(get_metric_fn=lambda metrics: -metrics["loss"], n=2)
    theirs = orbax.AnyPreservationPolicy([orbax.LatestN(2), orbax.EveryNSteps(10), orbax.EveryNSeconds(100), best])
    ours = AnyPreservationPolicy([LatestN(2), EveryNSteps(10), EveryNSeconds(100), BestN("loss", 2, "min")])
    assert steps(survivors(run, theirs)) == steps(survivors(run, ours)) == [1, 2, 10, 11, 20, 21, 29, 30]
    assert steps(survivors(run, AnyPreservationPolicy([orbax.LatestN(1), CustomSteps([5])]))) == [5, 30]
    now = datetime.now(UTC)  # Orbax's policy reads the clock itself
    ages = [CheckpointInfo(step, now - timedelta(hours=30 - step)) for step in range(0, 31, 10)]
    lately = orbax.LatestDuration(timedelta(hours=15))
    assert steps_to_delete(ages, lately, context=DecisionContext(now)) == {0, 10}


@settings(deadline=None)
@given(gaps=GAPS, interval=st.integers(1, 20), most=SMALL, exact=st.booleans())
def test_policies_with_orbax_names_keep_what_orbax_keeps(
    orbax: ModuleType, gaps: list[tuple[int, float]], interval: int, most: int | None, exact: bool
) -> None:
    ours: list[Any] = [
        PreserveAll(),
        LatestN(most),
        EveryNSteps(interval, exact, most),
        EveryNStepsClosest(interval, most),
        EveryNSeconds(interval),
    ]
    for policy in ours:
        arguments = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
        theirs = getattr(orbax, type(policy).__name__)(**arguments)
        assert preserved(policy, run_of(gaps)) == preserved(theirs, run_of(gaps)), policy
