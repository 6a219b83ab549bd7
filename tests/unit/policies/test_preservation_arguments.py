"""Preservation policies: which arguments they refuse, and which answers of a policy are refused."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, steps_to_delete
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
from jaxckpt_train.policies.save import FixedIntervalPolicy

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, NOW)


def deleted(checkpoints: list[CheckpointInfo], policy: Any) -> list[int]:
    """What `steps_to_delete` says, in order."""
    return sorted(steps_to_delete(checkpoints, policy, context=DecisionContext(NOW)))


class Answer:
    """A policy that a user could write: it gives one fixed answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def should_preserve(self, checkpoints: Any, *, context: Any) -> Any:
        return self.answer


@pytest.mark.parametrize("build", [LatestN, EveryNSteps, EveryNStepsClosest, lambda n: BestN("loss", n, "min")])
@pytest.mark.parametrize("number", [0, -1, True, 2.0, "2", math.nan])
def test_counts_and_intervals_must_be_positive_integers(build: Any, number: Any) -> None:
    with pytest.raises(SettingsError, match=r"\w+\.\w+: expected a whole number"):
        build(number)


@pytest.mark.parametrize("seconds", [0, -1, True, math.nan, math.inf, "60", None, timedelta(0), 10**400])
def test_seconds_must_be_finite_and_above_zero(seconds: Any) -> None:
    with pytest.raises(SettingsError, match=r"LatestDuration\.duration"):
        LatestDuration(seconds)
    if seconds != 10**400:
        with pytest.raises(SettingsError, match=r"EveryNSeconds\.interval_secs"):
            EveryNSeconds(seconds)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: EveryNSteps(5, exact_interval=1), r"EveryNSteps\.exact_interval: .*found 1"),  # type: ignore[arg-type]
        (lambda: EveryNSteps(5, max_to_keep=0), r"EveryNSteps\.max_to_keep: .*found 0"),
        (lambda: EveryNStepsClosest(5, max_to_keep=0), r"EveryNStepsClosest\.max_to_keep: .*found 0"),
        (lambda: BestN("", 1, "min"), r"BestN\.metric"),
        (lambda: BestN("loss", 1, "low"), r"BestN\.mode: .*found 'low'"),  # type: ignore[arg-type]
        (lambda: BestN("loss", 1, "min", 1), r"BestN\.keep_checkpoints_without_metrics"),  # type: ignore[arg-type]
        (
            lambda: CustomSteps([1, True]),
            r"CustomSteps\.steps: .*found True",
        ),
        (lambda: CustomSteps("12"), r"CustomSteps\.steps: expected a collection"),  # type: ignore[arg-type]
        (lambda: AnyPreservationPolicy([]), r"AnyPreservationPolicy\.policies"),
        (lambda: AnyPreservationPolicy([LatestN(1), 3]), r"policies\[1\]: .*should_preserve"),  # type: ignore[list-item]
        (lambda: AnyPreservationPolicy([LatestN]), r"policies\[0\]: .*LatestN"),  # type: ignore[list-item]
        (
            lambda: AnyPreservationPolicy([FixedIntervalPolicy(5)]),  # type: ignore[list-item]
            r"policies\[0\]: .*FixedIntervalPolicy",
        ),
    ],
)
def test_a_wrong_argument_is_named(build: Any, match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        build()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ([True], r"Answer\(\)\.should_preserve: expected one bool for each of 2 .*found \[True\]"),
        ([True] * 3, "found .True, True, True"),
        (None, "found None"),
        ([True, 1], "found .True, 1"),
        ([None, True], "found .None, True"),
        ("ab", "found 'ab'"),
    ],
)
def test_answers_must_be_one_bool_per_checkpoint(answer: Any, match: str) -> None:
    for policy in (Answer(answer), AnyPreservationPolicy([PreserveAll(), Answer(answer)])):
        with pytest.raises(SettingsError, match=match):
            deleted([info(1), info(2)], policy)


def test_an_answer_of_numpy_bools_is_taken() -> None:
    assert deleted([info(1), info(2), info(3)], Answer(np.array([False, True, False]))) == [1]


def test_policies_are_values() -> None:
    one = AnyPreservationPolicy([LatestN(2), CustomSteps([3, 1])])
    other = AnyPreservationPolicy((LatestN(np.int64(2)), CustomSteps({1, 3})))  # type: ignore[arg-type]
    assert one == other
    assert len({one, other}) == 1
    assert repr(one) == "AnyPreservationPolicy(policies=(LatestN(n=2), CustomSteps(steps=[1, 3])))"
    with pytest.raises(AttributeError):
        one.policies = ()  # type: ignore[misc]


def test_missing_metric_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    infos = [CheckpointInfo(step, NOW, metrics={"accuracy": 1.0}) for step in range(1000)]
    for count in range(1, 120):
        assert all(BestN("acuracy", 1, "max").should_preserve(infos[:count], context=DecisionContext(NOW)))
        BestN("accuracy", 1, "max").should_preserve(infos[:count], context=DecisionContext(NOW))
    expected = [f"none of {count} checkpoints has the metric 'acuracy'" for count in (10, 100)]
    assert [part in message for part, message in zip(expected, caplog.messages, strict=True)] == [True, True]
    assert all(message.endswith(": accuracy") for message in caplog.messages)
