"""Metrics by step, of the line that the run descends from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxckpt_train.looking.run_look import StepLook
from jaxckpt_train.report.step_lives import StepLife
from jaxckpt_train.report.timeline import Save


@dataclasses.dataclass(frozen=True)
class MetricValue:
    """What a metric was at a step; may be nan or infinite."""

    step: int
    value: float


def metric_series(
    saves: Sequence[Save], looks: Sequence[StepLook], lives: Sequence[StepLife]
) -> dict[str, list[MetricValue]]:
    """Of each metric its values by step, lowest first; of steps that were left behind there are none.

    What the history tells of steps that are deleted is part of it. What the steps themselves say goes before that: it
    may have been noted by a later evaluation.

    Args:
        saves: in order; of a step that was saved again the last save counts.
        looks: the steps that are there.
        lives: all steps.
    """
    by_step: dict[int, dict[str, float]] = {}
    for save in saves:
        if save.ok and save.step is not None:
            by_step[save.step] = dict(save.metrics)
    for look in looks:
        if look.entry is not None and look.is_current:
            by_step.setdefault(look.step, {}).update(look.entry.metrics or {})
    line = {life.step for life in lives if life.left is None and life.is_current}
    found: dict[str, list[MetricValue]] = {}
    for step in sorted(line & set(by_step)):
        for name, value in by_step[step].items():
            found.setdefault(name, []).append(MetricValue(step, value))
    return found
