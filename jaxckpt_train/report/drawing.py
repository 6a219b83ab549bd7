"""Draws the charts of a report: one document for the browser, and which of its charts belongs where in the page."""

from __future__ import annotations

import dataclasses
from typing import Any

from bokeh.document import Document
from bokeh.resources import Resources

from jaxckpt_train.report import charts_of_goodput, charts_of_steps, charts_of_time
from jaxckpt_train.report.changes import PairChange
from jaxckpt_train.report.chart_frame import time_span
from jaxckpt_train.report.gathering import Gathered
from jaxckpt_train.report.limits import Limits
from jaxckpt_train.report.processes import Process
from jaxckpt_train.report.thinning import thinned
from jaxckpt_train.report.timeline import Restore, Save

MOST_BARS = 40
MOST_METRICS = 24
MOST_PAIRS = 40


@dataclasses.dataclass(frozen=True)
class Drawing:
    """What the browser needs to draw the charts.

    Attributes:
        document: as Bokeh takes it.
        places: the id of each chart in the document, by the id of its place in the page.
        left_out: by the same id, a sentence about what is not drawn, where it is not all.
    """

    document: dict[str, Any]
    places: dict[str, str]
    left_out: dict[str, str]


def metric_place(number: int) -> str:
    """The id of the place of the chart of a metric."""
    return f"metric-{number}"


def library() -> str:
    """The JavaScript that draws, all of it."""
    return Resources(mode="inline", components=["bokeh"], minified=True).js_raw[0]


def draw(gathered: Gathered, limits: Limits) -> Drawing:
    """Draw all charts for which there is something to draw, and no more than the limits allow."""
    left_out: dict[str, str] = {}
    charts = {**_over_time(gathered, limits, left_out), **_of_steps(gathered, limits, left_out)}
    for name, chart in charts.items():
        chart.name = name
    document = Document()
    for chart in charts.values():
        document.add_root(chart)
    places = {name: chart.id for name, chart in charts.items()}
    return Drawing(dict(document.to_json(deferred=False)), places, left_out)


def _over_time(gathered: Gathered, limits: Limits, left_out: dict[str, str]) -> dict[str, Any]:
    processes = thinned(gathered.processes, limits.processes, lambda process: process.wall_s)
    saves = thinned(gathered.saves, limits.saves, lambda save: save.save_s + (0 if save.ok else 1e9))
    restores = thinned(gathered.restores, limits.saves, lambda each: each.restore_s or 0.0)
    marks = thinned(gathered.marks, limits.saves, lambda mark: mark.kind != "take_over")
    steps = thinned(gathered.steps, limits.steps, lambda step: step.is_there)
    uses = thinned(gathered.disk_use, limits.points, lambda use: use.bytes)
    bars: list[Process | Save | Restore] = [*processes, *saves, *restores]
    times = [time for each in bars for time in (each.began, each.ended)]
    times += [mark.time for mark in marks]
    times += [time for step in steps for time in (step.saved, step.deleted) if time is not None]
    span, now = time_span(times), max(times, default=gathered.made)
    charts, counts = dict[str, Any](), gathered.counts
    if processes or saves or restores or marks:
        charts["timeline"] = charts_of_time.timeline(processes, saves, restores, marks, span)
    if saves:
        charts["save-times"] = charts_of_time.save_times(saves, span)
    rated: list[Save | Restore] = [*saves, *restores]
    if any(each.bytes_per_s is not None for each in rated):
        charts["throughput"] = charts_of_time.throughput(saves, restores, gathered.disk, span)
    if steps:
        charts["retention"] = charts_of_steps.retention(steps, now, span)
    if uses:
        charts["disk-use"] = charts_of_steps.disk_use(uses, now, span)
    for place in ("timeline", "save-times", "throughput"):
        _tell(left_out, place, len(saves), counts.saves, "saves", "of neighbours the longest")
    _tell(left_out, "retention", len(steps), counts.steps, "steps", "of neighbours one that is still there")
    _tell(left_out, "disk-use", len(uses), counts.changes, "changes", "of neighbours the largest")
    return charts


def _of_steps(gathered: Gathered, limits: Limits, left_out: dict[str, str]) -> dict[str, Any]:
    charts: dict[str, Any] = {}
    if gathered.processes:
        last = gathered.processes[-MOST_BARS:]
        charts["time-spent"] = charts_of_goodput.time_spent(last, gathered.totals)
        _tell(left_out, "time-spent", len(last), len(gathered.processes), "processes", "the last ones")
    for number, (name, values) in enumerate(list(gathered.metrics.items())[:MOST_METRICS]):
        some = thinned(values, limits.points, lambda each: abs(each.value))
        charts[metric_place(number)] = charts_of_steps.metric(some)
        there = gathered.counts.values[name]
        _tell(left_out, metric_place(number), len(some), there, "values", "of neighbours the largest")
    pairs = shown_pairs(gathered)
    if any(leaf.relative is not None for pair in pairs for leaf in pair.leaves):
        most, room = max(len(pair.leaves) for pair in pairs), max(1, limits.changed_leaves // len(pairs))
        charts["changes"] = charts_of_steps.changes(pairs, room)
        _tell(left_out, "changes", min(most, room), most, "leaves of a pair", "those that changed most")
    return charts


def shown_pairs(gathered: Gathered) -> list[PairChange]:
    """The last pairs of steps that were compared, as many as a page has room for."""
    return [pair for pair in gathered.changes.pairs if not pair.problem][-MOST_PAIRS:]


def _tell(left_out: dict[str, str], place: str, drawn: int, there: int, what: str, which: str) -> None:
    if drawn < there:
        left_out[place] = f"{drawn:,} of {there:,} {what} are drawn: {which}."
