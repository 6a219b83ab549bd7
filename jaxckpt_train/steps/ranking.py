"""Ranks checkpoints by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.steps.policy_context import CheckpointInfo
from jaxckpt_train.value_checks import Mode


def _number(value: Any) -> float:
    """`value` as a float; text is refused even where it reads as a number."""
    if isinstance(value, (str, bytes)):
        raise TypeError("text is no number")
    return float(value)


def metric_value(metrics: Mapping[str, Any] | None, metric: str) -> float | None:
    """The value of one metric as a float.

    Args:
        metrics: the metrics of one step, or None.
        metric: the name to look up.

    Returns:
        None where there are no metrics, or no such one, or it is None. NaN is returned as NaN.

    Raises:
        SettingsError: the value is no number.
    """
    value = None if metrics is None else metrics.get(metric)
    if value is None:
        return None
    try:
        return _number(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(f'metric "{metric}": expected a number, found {value!r}') from error


def is_better(value: float, than: float, mode: Mode) -> bool:
    """Whether `value` is strictly better. NaN is better than nothing, and nothing is better than NaN."""
    return value < than if mode == "min" else value > than


def rank_checkpoints(checkpoints: Sequence[CheckpointInfo], metric: str, mode: Mode) -> list[CheckpointInfo]:
    """The checkpoints that have the metric, best first; of equal ones the higher step first.

    Args:
        checkpoints: in any order.
        metric: the name of the metric.
        mode: "min": lower is better; "max": higher is better.

    Returns:
        Those with a value other than NaN; possibly none.

    Raises:
        SettingsError: a value of the metric is no number.
    """
    ranked: list[tuple[float, int, CheckpointInfo]] = []
    for info in checkpoints:
        value = metric_value(info.metrics, metric)
        if value is not None and not math.isnan(value):
            ranked.append((value if mode == "min" else -value, -info.step, info))
    ranked.sort(key=lambda entry: entry[:2])
    return [info for _, _, info in ranked]
