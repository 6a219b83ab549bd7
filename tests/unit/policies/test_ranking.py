"""Ranking by a metric: order, ties, and values that are not numbers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.policies.context import CheckpointInfo, is_better, metric_value, rank_checkpoints

VALUES = st.one_of(st.none(), st.just(math.nan), st.integers(-3, 3).map(float), st.floats())


def info(step: int, **metrics: Any) -> CheckpointInfo:
    return CheckpointInfo(step, datetime(2026, 3, 1, tzinfo=UTC), metrics or None)


def test_a_metric_is_looked_up_as_a_float() -> None:
    assert metric_value({"loss": np.float16(0.5)}, "loss") == 0.5
    assert metric_value({"loss": 2}, "loss") == 2.0
    assert metric_value({"loss": None}, "loss") is None
    assert metric_value({}, "loss") is None
    assert metric_value(None, "loss") is None


def test_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises(SettingsError, match="found 'low'"):
        rank_checkpoints([info(1, loss="low")], "loss", "min")


def test_nan_is_neither_better_nor_worse() -> None:
    assert is_better(1, 2, "min")
    assert is_better(2, 1, "max")
    for mode in ("min", "max"):
        assert not is_better(1, 1, mode)
        assert not is_better(math.nan, 1, mode)
        assert not is_better(1, math.nan, mode)


def test_higher_step_of_equal_values_comes_first() -> None:
    infos = [info(1, loss=1.0), info(3, loss=0.5), info(2, loss=0.5), info(4)]
    assert [one.step for one in rank_checkpoints(infos, "loss", "min")] == [3, 2, 1]
    assert [one.step for one in rank_checkpoints(infos, "loss", "max")] == [1, 3, 2]


@settings(deadline=None)
@given(st.lists(VALUES, max_size=12), st.sampled_from(["min", "max"]))
def test_a_ranking_is_in_order_and_without_nan(values: list[float | None], mode: Any) -> None:
    run = [info(step) if value is None else info(step, loss=value) for step, value in enumerate(values)]
    ranked = [(one.metrics or {})["loss"] for one in rank_checkpoints(run, "loss", mode)]
    assert ranked == sorted((v for v in values if v is not None and not math.isnan(v)), reverse=mode == "max")
