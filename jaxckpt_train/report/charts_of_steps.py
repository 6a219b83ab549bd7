"""Charts of steps: what became of each, the room they took, their metrics, and how far leaves moved between them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

from bokeh.models import FactorRange, Range1d

from jaxckpt_train.report.changes import PairChange
from jaxckpt_train.report.chart_frame import (
    BLUE,
    GREEN,
    GREY,
    MOMENT,
    OCHRE,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    finite,
    frame,
    legend,
    milliseconds,
    plain_numbers,
    source,
    tell,
    time_frame,
)
from jaxckpt_train.report.metric_series import MetricValue
from jaxckpt_train.report.quantities import bytes_text, scaled_bytes
from jaxckpt_train.report.step_lives import DiskUse, StepLife

STATE_COLOURS = {
    "kept": GREEN, "pinned": BLUE, "temporary": TEAL, "left behind": OCHRE, "damaged": RED, "not committed": ORANGE,
    "deleted": GREY, "gone": PURPLE,
}  # fmt: skip
LEAST_CHANGE = 1e-12
ASIDE = (0.0, 0.06, -0.06, 0.12, -0.12, 0.18, -0.18)  # so that dots of one pair do not cover each other


def retention(steps: Sequence[StepLife], now: datetime.datetime, span: Range1d) -> Any:
    """A line for each step, from when it was saved until it was deleted; those that are there go on until now."""
    chart = time_frame(300, "step", span)
    chart.yaxis.formatter = plain_numbers()
    items = []
    width = max(2.0, min(7.0, 160 / max(1, len(steps))))
    for state, colour in STATE_COLOURS.items():
        some = [step for step in steps if step.state == state]
        if some:
            lines = _lines(chart, some, now, colour, width)
            items.append((state, lines))
    aside = [step for step in steps if step.set_aside is not None]
    if aside:
        data = source(
            {
                "time": [milliseconds(step.set_aside or now) for step in aside],
                "step": [step.step for step in aside],
                "problem": [step.problem for step in aside],
            }
        )
        dots = chart.scatter(x="time", y="step", source=data, marker="x", size=10, line_width=2.5, color=RED)
        tell(chart, [("set aside", f"@time{MOMENT}"), ("step", "@step{0}"), ("", "@problem")], [dots])
        items.append(("set aside", [dots]))
    legend(chart, items)
    return chart


def _lines(chart: Any, steps: Sequence[StepLife], now: datetime.datetime, colour: str, width: float) -> list[Any]:
    ends = [step.deleted or (now if step.is_there else step.saved) or now for step in steps]
    data = source(
        {
            "saved": [milliseconds(step.saved or end) for step, end in zip(steps, ends, strict=True)],
            "until": [milliseconds(end) for end in ends],
            "step": [step.step for step in steps],
            "name": [step.name for step in steps],
            "state": [step.state for step in steps],
            "size": [bytes_text(step.bytes) for step in steps],
            "problem": [step.problem for step in steps],
        }
    )
    style = {"source": data, "color": colour}
    lines = chart.segment(x0="saved", x1="until", y0="step", y1="step", line_width=width, **style)
    dots = chart.scatter(x="saved", y="step", size=min(7.0, width + 2), **style)
    rows = [("step", "@name"), ("state", "@state"), ("saved", f"@saved{MOMENT}"), ("until", f"@until{MOMENT}")]
    tell(chart, [*rows, ("size", "@size"), ("problem", "@problem")], [dots, lines])
    return [lines, dots]


def disk_use(uses: Sequence[DiskUse], now: datetime.datetime, span: Range1d) -> Any:
    """The room that steps took over time."""
    size, unit = scaled_bytes(max(use.bytes for use in uses))
    scale = size / max(1, max(use.bytes for use in uses))
    last = _until(uses[-1], now)
    data = source(
        {
            "time": [milliseconds(use.time) for use in (*uses, last)],
            "size": [use.bytes * scale for use in (*uses, last)],
            "told": [bytes_text(use.bytes) for use in (*uses, last)],
            "steps": [str(use.steps) for use in (*uses, last)],
        }
    )
    chart = time_frame(180, unit, span)
    line = chart.step(x="time", y="size", source=data, mode="after", line_color=BLUE, line_width=2)
    chart.varea_step(x="time", y1=0, y2="size", source=data, step_mode="after", fill_color=BLUE, fill_alpha=0.12)
    tell(chart, [("from", f"@time{MOMENT}"), ("steps", "@steps"), ("size", "@told")], [line], mode="vline")
    chart.y_range = Range1d(start=0, end=size * 1.1 or 1)
    return chart


def _until(use: DiskUse, time: datetime.datetime) -> DiskUse:
    """It is the same still."""
    return DiskUse(max(time, use.time), use.steps, use.bytes)


def metric(values: Sequence[MetricValue]) -> Any:
    """A metric by step; what is not finite is a gap."""
    chart = frame(200, "")
    data = source({"step": [each.step for each in values], "value": [finite(each.value) for each in values]})
    chart.line(x="step", y="value", source=data, line_color=BLUE, line_width=1.5, line_alpha=0.7)
    dots = chart.scatter(x="step", y="value", source=data, size=6, color=BLUE)
    tell(chart, [("step", "@step{0}"), ("value", "@value{0.000000}")], [dots])
    chart.xaxis.axis_label, chart.xaxis.formatter = "step", plain_numbers()
    return chart


def changes(pairs: Sequence[PairChange], most: int) -> Any:
    """A dot for each leaf that changed, by pair of steps, on a scale of factors; and the change of all values together.

    Args:
        pairs: those that were compared.
        most: how many leaves of each: those that changed most.
    """
    names = [pair_name(pair) for pair in pairs]
    chart = frame(300, "relative change", x_range=FactorRange(factors=names), y_axis_type="log")
    chart.xgrid.visible = False
    rows: list[tuple[str, str, float, float]] = []
    for name, pair in zip(names, pairs, strict=True):
        told = [(leaf.name, leaf.relative) for leaf in pair.leaves if leaf.relative is not None]
        known = sorted((each for each in told if math.isfinite(each[1])), key=lambda each: -each[1])[:most]
        rows += [(name, leaf, max(LEAST_CHANGE, value), ASIDE[number % len(ASIDE)])
                 for number, (leaf, value) in enumerate(known)]  # fmt: skip
    data = source(
        {
            "place": [(pair, beside) for pair, _, _, beside in rows],
            "leaf": [leaf for _, leaf, _, _ in rows],
            "relative": [value for _, _, value, _ in rows],
        }
    )
    dots = chart.scatter(x="place", y="relative", source=data, size=6, color=BLUE, alpha=0.7)
    tell(chart, [("leaf", "@leaf"), ("relative change", "@relative{0.00e+0}")], [dots])
    whole = [(name, pair.relative) for name, pair in zip(names, pairs, strict=True) if pair.relative]
    items = [("a leaf", [dots])]
    if whole:
        data = source({"pair": [name for name, _ in whole], "relative": [finite(value) for _, value in whole]})
        bars = chart.scatter(x="pair", y="relative", source=data, marker="dash", size=44, line_width=3, color=ORANGE)
        tell(chart, [("all values", "@pair"), ("relative change", "@relative{0.00e+0}")], [bars])
        items.append(("all values together", [bars]))
    legend(chart, items)
    return chart


def pair_name(pair: PairChange) -> str:
    """Such as "100 to 200"."""
    return f"{pair.before} to {pair.after}"
