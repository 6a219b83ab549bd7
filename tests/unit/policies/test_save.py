"""Save policies: when each asks for a save, how policies compose, and the reason of each decision."""

from __future__ import annotations

import dataclasses
import math
import warnings
from datetime import UTC, datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.policies.context import NOT_DUE, CheckpointInfo, Decision, DecisionContext, decide
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.policies.save import (
    AllSavePolicy,
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    EverySecondsPolicy,
    FixedIntervalPolicy,
    ImprovementPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SpecificStepsPolicy,
)

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """The time `seconds` after the start of the run."""
    return START + timedelta(seconds=seconds)


def info(step: int, seconds: float = 0, **metrics: float) -> CheckpointInfo:
    """A checkpoint, or the step being decided, `seconds` after the start."""
    return CheckpointInfo(step, at(seconds), metrics or None)


def asks(policy: Any, step: CheckpointInfo, previous: list[CheckpointInfo] | None = None, **context: Any) -> bool:
    """The policy's answer, through `decide`; the run started at `START` by default."""
    context = {"run_started": START, **context}
    return decide(policy, step, previous or [], DecisionContext(step.time, **context)).save


def forbidden() -> dict[str, float]:
    """Metrics that must not be read: reading could wait for the device."""
    raise AssertionError("metrics were read")


class Always:
    """A policy that a user could write; it counts how often it is asked."""

    def __init__(self, answer: Any = True) -> None:
        self.answer = answer
        self.asked = 0

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> Any:
        self.asked += 1
        return self.answer


# Each policy ------------------------------------------------------------------------------------------------------


def test_fixed_interval_saves_the_multiples_step_zero_included() -> None:
    policy = FixedIntervalPolicy(5)
    assert [step for step in range(12) if asks(policy, info(step))] == [0, 5, 10]


def test_specific_steps_saves_exactly_the_named_steps() -> None:
    for steps in ([3, 7], {7, 3}, (7, 3, 3), np.array([3, 7]), range(3, 8, 4), (step for step in [3, 7])):
        policy = SpecificStepsPolicy(steps)  # type: ignore[arg-type]
        assert [step for step in range(12) if asks(policy, info(step))] == [3, 7]


def test_specific_steps_compares_and_reads_without_order() -> None:
    assert SpecificStepsPolicy([7, 3]) == SpecificStepsPolicy({3, 7})
    assert repr(SpecificStepsPolicy([7, 3])) == "SpecificStepsPolicy(steps=[3, 7])"
    assert SpecificStepsPolicy(range(0, 10**12, 10)).should_save(info(10**9), [], context=DecisionContext(START))


def test_initial_save_needs_an_empty_run() -> None:
    assert asks(InitialSavePolicy(), info(17))
    assert not asks(InitialSavePolicy(), info(17), [info(1)])


def test_preemption_policy_asks_when_the_process_must_leave() -> None:
    assert asks(PreemptionCheckpointingPolicy(), info(17), reached_preemption=True)
    assert not asks(PreemptionCheckpointingPolicy(), info(17))


def test_every_seconds_counts_from_start_or_save() -> None:
    policy = EverySecondsPolicy(60)
    assert not asks(policy, info(1, 59.9))
    assert asks(policy, info(1, 60))
    assert not asks(policy, info(9, 119.9), [info(5, 60)])
    assert asks(policy, info(9, 120), [info(1, 0), info(5, 60)])


def test_every_seconds_does_not_save_right_after_resume() -> None:
    policy = EverySecondsPolicy(60)
    days_ago = [info(100, -300_000)]
    assert not asks(policy, info(101, 1), days_ago)
    assert asks(policy, info(140, 60), days_ago)


def test_every_seconds_saves_at_once_without_reference() -> None:
    assert asks(EverySecondsPolicy(60), info(1), run_started=None)
    assert not asks(EverySecondsPolicy(60), info(2, 1), [info(1)], run_started=None)


def test_every_seconds_survives_clock_that_is_set_back() -> None:
    policy = EverySecondsPolicy(60)
    previous = [info(5, 60)]
    saved = []
    for second in range(-7200, -6900):
        if asks(policy, info(10, second), previous):
            previous.append(info(10, second))
            saved.append(second)
    assert saved == [-7200, -7140, -7080, -7020, -6960]


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=60), st.floats(1, 300))
def test_every_seconds_saves_exactly_when_due(gaps: list[float], seconds: float) -> None:
    policy, now, last, previous = EverySecondsPolicy(seconds), 0.0, at(0), list[CheckpointInfo]()
    for step, gap in enumerate(gaps):
        now += gap
        due = (at(now) - last).total_seconds() >= seconds
        assert asks(policy, info(step, now), previous) == due
        if due:
            last = at(now)
            previous.append(info(step, now))


def test_continuous_saves_whenever_no_save_is_in_progress() -> None:
    policy = ContinuousCheckpointingPolicy()
    assert asks(policy, info(1))
    assert asks(policy, info(2), [info(1)])
    assert not asks(policy, info(2), [info(1)], is_saving_in_progress=True)


def test_continuous_keeps_its_minimum_interval() -> None:
    policy = ContinuousCheckpointingPolicy(minimum_interval_secs=30)
    assert asks(policy, info(1))
    assert not asks(policy, info(2, 29), [info(1, 0)])
    assert asks(policy, info(2, 30), [info(1, 0)])
    assert not asks(policy, info(2, 30), [info(1, 0)], is_saving_in_progress=True)


def test_improvement_saves_strictly_better_metrics_only() -> None:
    policy = ImprovementPolicy("loss", "min")
    previous = [info(1, loss=0.5), info(2, loss=0.9), info(3), info(4, loss=math.nan)]
    for loss, expected in [(0.4, True), (0.5, False), (0.7, False), (math.nan, False), (-math.inf, True)]:
        assert asks(policy, info(5), previous, read_metrics=lambda loss=loss: {"loss": loss}) is expected
    assert asks(ImprovementPolicy("acc", "max"), info(5), [info(1, acc=0.5)], read_metrics=lambda: {"acc": 0.6})
    assert not asks(ImprovementPolicy("acc", "max"), info(5), [info(1, acc=0.5)], read_metrics=lambda: {"acc": 0.4})


def test_improvement_policy_reports_missing_metric(caplog: pytest.LogCaptureFixture) -> None:
    for step, previous in [*((step, []) for step in range(1, 1001)), (100, [info(50)])]:
        assert not asks(ImprovementPolicy("cost", "min"), info(step), previous, read_metrics=lambda: {"loss": 1.0})
    expected = [f"step {step} has no metric 'cost'" for step in (10, 100, 1000)]
    assert [part in message for part, message in zip(expected, caplog.messages, strict=True)] == [True] * 3
    assert all(message.endswith(": loss") for message in caplog.messages)


def test_improvement_saves_first_value() -> None:
    policy = ImprovementPolicy("loss", "min")
    assert asks(policy, info(1), read_metrics=lambda: {"loss": np.float32(3)})
    assert asks(policy, info(1, loss=3.0), [info(0)])
    assert not asks(policy, info(1))
    assert not asks(policy, info(1), read_metrics=lambda: None)
    assert not asks(policy, info(1), read_metrics=lambda: {"accuracy": 1.0})
    assert not asks(policy, info(1), read_metrics=lambda: {"loss": math.nan})


def test_improvement_refuses_a_metric_that_is_no_number() -> None:
    with pytest.raises(SettingsError, match=r"found '0\.5'"):
        asks(ImprovementPolicy("loss", "min"), info(1), read_metrics=lambda: {"loss": "0.5"})


def test_only_improvement_reads_metrics() -> None:
    policies: list[Any] = [
        FixedIntervalPolicy(5),
        EverySecondsPolicy(5),
        SpecificStepsPolicy([5]),
        InitialSavePolicy(),
        ContinuousCheckpointingPolicy(5),
        PreemptionCheckpointingPolicy(),
    ]
    for policy in [*policies, AnySavePolicy(policies), AllSavePolicy(policies)]:
        asks(policy, info(1, 1), [info(0)], read_metrics=forbidden)


# Composition and reasons ------------------------------------------------------------------------------------------


def test_any_policy_stops_at_first_save() -> None:
    first, second, third = Always(False), Always(True), Always(True)
    assert asks(AnySavePolicy([first, second, third]), info(1))
    assert (first.asked, second.asked, third.asked) == (1, 1, 0)


def test_all_policy_stops_at_first_refusal() -> None:
    cheap = FixedIntervalPolicy(10)
    policy = AllSavePolicy([cheap, ImprovementPolicy("loss", "min")])
    assert not asks(policy, info(9), read_metrics=forbidden)
    assert asks(policy, info(10), read_metrics=lambda: {"loss": 1.0})
    assert not asks(policy, info(10), [info(5, loss=0.5)], read_metrics=lambda: {"loss": 1.0})


INTERVALS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@settings(deadline=None)
@given(INTERVALS, st.integers(0, 200))
def test_any_is_the_union_and_all_the_intersection(intervals: list[int], step: int) -> None:
    children = [FixedIntervalPolicy(interval) for interval in intervals]
    each = [asks(child, info(step)) for child in children]
    assert asks(AnySavePolicy(children), info(step)) == any(each)
    assert asks(AllSavePolicy(children), info(step)) == all(each)
    assert asks(AnySavePolicy([AllSavePolicy(children), AllSavePolicy(children[:1])]), info(step)) == each[0]


def test_a_reason_names_the_policy_that_asked() -> None:
    context = DecisionContext(START)
    assert decide(FixedIntervalPolicy(500), info(500), [], context) == Decision(
        True, "FixedIntervalPolicy(interval=500)"
    )
    nested = AnySavePolicy(
        [
            PreemptionCheckpointingPolicy(),
            AllSavePolicy([FixedIntervalPolicy(500), AnySavePolicy([SpecificStepsPolicy([3]), InitialSavePolicy()])]),
        ]
    )
    assert decide(nested, info(500), [], context).reason == "FixedIntervalPolicy(interval=500) and InitialSavePolicy()"
    leaving = DecisionContext(START, reached_preemption=True)
    assert decide(nested, info(501), [], leaving).reason == "PreemptionCheckpointingPolicy()"
    assert decide(AnySavePolicy([Always()]), info(501), [], context).reason == "Always()"


def test_no_text_is_built_when_nothing_is_due() -> None:
    policy = AnySavePolicy([FixedIntervalPolicy(500), AllSavePolicy([FixedIntervalPolicy(400)])])
    assert decide(policy, info(7), [], DecisionContext(START)) is NOT_DUE
    assert not NOT_DUE.save
    assert "not due" in NOT_DUE.reason


def test_policies_must_answer_with_a_bool() -> None:
    assert asks(Always(np.True_), info(1))
    assert not asks(Always(np.False_), info(1))
    for answer in (None, 1, "yes"):
        for policy in (Always(answer), AnySavePolicy([Always(answer)]), AllSavePolicy([Always(answer)])):
            with pytest.raises(SettingsError, match=r"Always\(\)\.should_save"):
                asks(policy, info(1))


# Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, -1, True, 5.0, "5", None, math.nan])
def test_fixed_interval_refuses_invalid_intervals(interval: Any) -> None:
    with pytest.raises(SettingsError, match=r"FixedIntervalPolicy\.interval"):
        FixedIntervalPolicy(interval)


@pytest.mark.parametrize("seconds", [0, -1.0, True, math.nan, math.inf, -math.inf, "60", timedelta(seconds=60)])
def test_seconds_must_be_finite_and_above_zero(seconds: Any) -> None:
    with pytest.raises(SettingsError, match=r"EverySecondsPolicy\.seconds"):
        EverySecondsPolicy(seconds)
    with pytest.raises(SettingsError, match=r"ContinuousCheckpointingPolicy\.minimum_interval_secs"):
        ContinuousCheckpointingPolicy(seconds)


@pytest.mark.parametrize("steps", [5, None, "12", ["1"], [True], [1.0], [-1], range(-3, 3), range(3, -3, -1)])
def test_specific_steps_refuses_invalid_collections(steps: Any) -> None:
    with pytest.raises(SettingsError, match=r"SpecificStepsPolicy\.steps.*: expected"):
        SpecificStepsPolicy(steps)


def test_improvement_refuses_other_modes_and_names() -> None:
    with pytest.raises(SettingsError, match=r"ImprovementPolicy\.mode: .*found 'up'"):
        ImprovementPolicy("loss", "up")  # type: ignore[arg-type]
    for metric in ("", None, 3):
        with pytest.raises(SettingsError, match=r"ImprovementPolicy\.metric"):
            ImprovementPolicy(metric, "min")  # type: ignore[arg-type]


@pytest.mark.parametrize("composite", [AnySavePolicy, AllSavePolicy])
@pytest.mark.parametrize(
    ("policies", "match"),
    [
        ([], r"policies: .*found \[\]"),
        ([LatestN(2)], r"policies\[0\]: .*LatestN\(n=2\)"),
        ([InitialSavePolicy(), None], r"policies\[1\]: .*found None"),
        ([InitialSavePolicy], r"policies\[0\]: .*InitialSavePolicy"),
        (InitialSavePolicy(), r"policies: expected a list of policies"),
        ("all", r"policies: expected a list of policies"),
    ],
)
def test_composites_refuse_invalid_policies(composite: Any, policies: Any, match: str) -> None:
    with pytest.raises(SettingsError, match=rf"{composite.__name__}\.{match}"):
        composite(policies)


def test_policies_are_values() -> None:
    one = AnySavePolicy([FixedIntervalPolicy(5), InitialSavePolicy()])
    other = AnySavePolicy((FixedIntervalPolicy(np.int64(5)), InitialSavePolicy()))  # type: ignore[arg-type]
    assert one == other
    assert len({one, other}) == 1
    assert repr(other) == "AnySavePolicy(policies=(FixedIntervalPolicy(interval=5), InitialSavePolicy()))"
    with pytest.raises(AttributeError):
        one.policies = ()  # type: ignore[misc]


def test_times_need_zone_and_are_kept_in_utc() -> None:
    with pytest.raises(SettingsError, match=r"CheckpointInfo\.time"):
        CheckpointInfo(1, datetime(2026, 3, 1))
    with pytest.raises(SettingsError, match=r"DecisionContext\.now"):
        DecisionContext(1.5)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"DecisionContext\.run_started"):
        DecisionContext(START, run_started=datetime(2026, 3, 1))
    abroad = START.astimezone(timezone(timedelta(hours=9)))
    assert CheckpointInfo(1, abroad).time.tzinfo is UTC
    assert DecisionContext(abroad, run_started=abroad) == DecisionContext(START, run_started=START)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(SettingsError, match=r"CheckpointInfo\.step"):
        CheckpointInfo(step, START)
    assert type(CheckpointInfo(np.int32(7), START).step) is int  # type: ignore[arg-type]


# Orbax's own policies ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orbax() -> ModuleType:
    """Orbax's save policies, without the warnings that its import gives on some versions of Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip("orbax.checkpoint.checkpoint_managers")
    return module


def test_orbax_policies_work_unchanged(orbax: ModuleType) -> None:
    previous = [info(100, 0)]
    assert asks(orbax.FixedIntervalPolicy(100), info(200), previous)
    assert not asks(orbax.FixedIntervalPolicy(100), info(201), previous)
    assert asks(orbax.SpecificStepsPolicy([7]), info(7), previous)
    assert asks(orbax.InitialSavePolicy(), info(7))
    assert not asks(orbax.InitialSavePolicy(), info(7), previous)
    assert asks(orbax.PreemptionCheckpointingPolicy(), info(7), reached_preemption=True)
    continuous = orbax.ContinuousCheckpointingPolicy(minimum_interval_secs=30)
    assert asks(continuous, info(101, 30), previous)
    assert not asks(continuous, info(101, 29), previous)
    assert not asks(continuous, info(101, 30), previous, is_saving_in_progress=True)


def test_orbax_policies_and_ours_contain_each_other(orbax: ModuleType) -> None:
    theirs = orbax.AnySavePolicy([FixedIntervalPolicy(5), orbax.InitialSavePolicy()])
    ours = AnySavePolicy([orbax.FixedIntervalPolicy(5), AllSavePolicy([orbax.InitialSavePolicy()])])
    for step, previous in [(5, [info(1)]), (6, [info(1)]), (6, [])]:
        assert asks(theirs, info(step), previous) == asks(ours, info(step), previous)
    reason = decide(ours, info(6), [], DecisionContext(START)).reason
    assert reason == "InitialSavePolicy()"


@settings(deadline=None, max_examples=50)
@given(step=st.integers(0, 60), gap=st.floats(0, 100), interval=st.integers(1, 20), busy=st.booleans())
def test_policies_with_orbax_names_decide_like_orbax(
    orbax: ModuleType, step: int, gap: float, interval: int, busy: bool
) -> None:
    ours: list[Any] = [
        FixedIntervalPolicy(interval),
        SpecificStepsPolicy([interval, 3]),
        InitialSavePolicy(),
        PreemptionCheckpointingPolicy(),
        ContinuousCheckpointingPolicy(minimum_interval_secs=interval),
    ]
    for policy in ours:
        arguments = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
        theirs = getattr(orbax, type(policy).__name__)(**arguments)
        for previous in ([], [info(0, 0)]):
            expected = asks(theirs, info(step, gap), previous, is_saving_in_progress=busy)
            assert asks(policy, info(step, gap), previous, is_saving_in_progress=busy) == expected, policy


@dataclasses.dataclass(frozen=True)
class OwnPolicy(FixedIntervalPolicy):
    """A policy of a user, with a name that only type checkers know."""

    extra: NameForTypeCheckers | None = None  # type: ignore[name-defined]  # noqa: F821
    is_loud: bool = 1  # type: ignore[assignment]


def test_fields_of_a_subclass_are_not_checked() -> None:
    assert OwnPolicy(np.int64(5)).interval == 5
    with pytest.raises(SettingsError, match=r"OwnPolicy\.interval"):
        OwnPolicy(0)


def test_composites_take_any_iterable() -> None:
    policies = [InitialSavePolicy(), FixedIntervalPolicy(5)]
    assert AnySavePolicy(each for each in policies) == AnySavePolicy(policies)  # type: ignore[arg-type]
