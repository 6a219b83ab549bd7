"""The charts of a report, drawn with Bokeh as one document for the browser."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import BasicTickFormatter, ColumnDataSource, FactorRange, HoverTool, Range1d
from bokeh.plotting import figure
from bokeh.resources import Resources

from jaxckpt_train.inspection.units import number_text, percent_text, scaled_bytes, seconds_text
from jaxckpt_train.report import tables
from jaxckpt_train.report.changes import PairChange
from jaxckpt_train.report.gather import Gathered, Process
from jaxckpt_train.report.series import DiskUse, Drain, Limits, Mark, MetricValue, Restore, Save, StepLife, thinned
from jaxckpt_train.run.goodput import KILLED, RUNNING, Goodput
from jaxckpt_train.run.history import CLOSED, FINISHED, LATE, PREEMPTED

# These colours are distinguishable with colour blindness, on light and dark pages. The browser sets the colours of text
# and lines, because it knows the theme.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY, TEAL, OCHRE = (
    "#3f7fbf", "#dd8432", "#2e9b6f", "#cf4a5a", "#8b6fc4", "#8b919b", "#2b9da6", "#b7952a"
)  # fmt: skip
TOOLS = "xpan,box_zoom,xwheel_zoom,reset,save"
MAX_CHARACTERS = 100
HOW_COLOURS = {FINISHED: GREEN, PREEMPTED: BLUE, CLOSED: TEAL, RUNNING: PURPLE, LATE: OCHRE, KILLED: RED}
ERROR = "an error"
LANES = ("events", "restores", "drains", "saves", "processes")  # from the bottom up
LEAST_S = 1e-5  # shorter times are drawn as this on a logarithmic scale
LEAST_MIB = 1e-3
MIB = 1 << 20
MARKS = {"preempted": ("inverted_triangle", ORANGE), "set_aside": ("square_x", RED), "take_over": ("diamond", PURPLE)}
STATE_COLOURS = {
    "kept": GREEN, "pinned": BLUE, "temporary": TEAL, "left behind": OCHRE, "damaged": RED, "not committed": ORANGE,
    "deleted": GREY, "gone": PURPLE,
}  # fmt: skip
LEAST_CHANGE = 1e-12
OFFSETS = (0.0, 0.06, -0.06, 0.12, -0.12, 0.18, -0.18)  # so that dots of one pair do not cover each other
PART_COLOURS = (GREEN, RED, ORANGE, BLUE, PURPLE, GREY)
MOST_BARS = 40
MOST_METRICS = 24
MOST_PAIRS = 40


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The Bokeh document as JSON data.

    By the ID of its place in the page: the ID of each chart, and a sentence about items that are not drawn.
    """

    document: dict[str, Any]
    places: dict[str, str]
    left_out: dict[str, str]


def library() -> str:
    """Return the JavaScript of Bokeh."""
    return Resources(mode="inline", components=["bokeh"], minified=True).js_raw[0]


def draw(gathered: Gathered, limits: Limits) -> Drawing:
    """Draw all charts that have data, within the limits."""
    left_out: dict[str, str] = {}
    charts = {**_over_time(gathered, limits, left_out), **_of_steps(gathered, limits, left_out)}
    document = Document()
    for name, chart in charts.items():
        chart.name = name
        document.add_root(chart)
    places = {name: chart.id for name, chart in charts.items()}
    return Drawing(dict(document.to_json(deferred=False)), places, left_out)


def _over_time(gathered: Gathered, limits: Limits, left_out: dict[str, str]) -> dict[str, Any]:
    processes = thinned(gathered.processes, limits.processes, lambda process: process.wall_s)
    saves = thinned(gathered.saves, limits.saves, lambda save: save.save_s + (0 if save.ok else 1e9))
    restores = thinned(gathered.restores, limits.saves, lambda each: each.restore_s or 0.0)
    drains = thinned(gathered.drains, limits.saves, lambda each: each.lag_s or 0.0)
    marks = thinned(gathered.marks, limits.saves, lambda mark: mark.kind != "take_over")
    steps = thinned(gathered.steps, limits.steps, lambda step: step.is_there)
    uses = thinned(gathered.disk_use, limits.points, lambda use: use.bytes)
    bars: list[Process | Save | Restore | Drain] = [*processes, *saves, *restores, *drains]
    times = [time for each in bars for time in (each.began, each.ended)]
    times += [mark.time for mark in marks]
    times += [time for step in steps for time in (step.saved, step.deleted) if time is not None]
    span, now = _time_span(times), max(times, default=gathered.made)
    charts, counts = dict[str, Any](), gathered.counts
    if bars or marks:
        charts["timeline"] = _timeline(processes, saves, restores, drains, marks, span)
    if saves:
        charts["save-times"] = _save_times(saves, span)
    if drains:
        charts["drain-lag"] = _drain_lag(drains, span)
    rated: list[Save | Restore] = [*saves, *restores]
    if any(each.bytes_per_s is not None for each in rated):
        charts["throughput"] = _throughput(saves, restores, span)
    if steps:
        charts["retention"] = _retention(steps, now, span)
    if uses:
        charts["disk-use"] = _disk_use(uses, now, span)
    for place in ("timeline", "save-times", "throughput"):
        _note_left_out(left_out, place, len(saves), counts.saves, "saves", "of neighbours the longest")
    _note_left_out(left_out, "drain-lag", len(drains), counts.drains, "copies", "of neighbours the latest")
    _note_left_out(left_out, "retention", len(steps), counts.steps, "steps", "of neighbours one that still exists")
    _note_left_out(left_out, "disk-use", len(uses), counts.changes, "changes", "of neighbours the largest")
    return charts


def _of_steps(gathered: Gathered, limits: Limits, left_out: dict[str, str]) -> dict[str, Any]:
    charts: dict[str, Any] = {}
    if gathered.processes:
        last = gathered.processes[-MOST_BARS:]
        charts["time-spent"] = _time_spent(last, gathered.totals)
        _note_left_out(left_out, "time-spent", len(last), len(gathered.processes), "processes", "the last ones")
    for number, (name, values) in enumerate(list(gathered.metrics.items())[:MOST_METRICS]):
        some, place = thinned(values, limits.points, lambda each: abs(each.value)), f"metric-{number}"
        charts[place] = _metric(some)
        there = gathered.counts.values[name]
        _note_left_out(left_out, place, len(some), there, "values", "of neighbours the largest")
    pairs = shown_pairs(gathered)
    if any(leaf.relative is not None for pair in pairs for leaf in pair.leaves):
        most, room = max(len(pair.leaves) for pair in pairs), max(1, limits.changed_leaves // len(pairs))
        charts["changes"] = _changes(pairs, room)
        _note_left_out(left_out, "changes", min(most, room), most, "leaves of a pair", "those that changed most")
    return charts


def shown_pairs(gathered: Gathered) -> list[PairChange]:
    """Return the last compared pairs of steps, as many as a page has room for."""
    return [pair for pair in gathered.changes.pairs if not pair.problem][-MOST_PAIRS:]


def pair_name(pair: PairChange) -> str:
    """Return the name of a pair, such as "100 to 200"."""
    return f"{pair.before} to {pair.after}"


def _note_left_out(left_out: dict[str, str], place: str, drawn: int, there: int, what: str, which: str) -> None:
    if drawn < there:
        left_out[place] = f"{drawn:,} of {there:,} {what} are drawn: {which}."


def _frame(height: int, y_label: str, **options: Any) -> Any:
    """Return an empty chart as wide as the page, with options of `bokeh.plotting.figure`."""
    made = figure(height=height, sizing_mode="stretch_width", tools=TOOLS, toolbar_location="right", **options)
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.toolbar.active_drag = None  # a finger on a chart scrolls the page
    made.toolbar.active_scroll = None
    made.background_fill_color = made.border_fill_color = made.outline_line_color = None
    made.yaxis.axis_label = y_label
    made.min_border_left, made.min_border_right = 76, 24  # so that the time axes of all charts are aligned
    for axis in (*made.xaxis, *made.yaxis):
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = axis.minor_tick_line_color = None
        axis.major_tick_line_color = None
    return made


def _time_frame(height: int, y_label: str, span: Range1d, **options: Any) -> Any:  # of one span, they pan together
    return _frame(height, y_label, x_axis_type="datetime", x_range=span, **options)


def _time_span(times: Iterable[datetime.datetime]) -> Range1d:
    """Return a span that contains all times, with a margin, to share between charts."""
    found = sorted(map(_milliseconds, times)) or [0.0]
    room = max(1.0, (found[-1] - found[0]) * 0.02)
    return Range1d(start=found[0] - room, end=found[-1] + room)


def _milliseconds(time: datetime.datetime) -> float:
    """Return a time in the unit of Bokeh: milliseconds since 1970 in UTC."""
    return time.timestamp() * 1000


def _source(columns: Mapping[str, Any], rows: Sequence[tables.Cells] = ()) -> ColumnDataSource:
    """Return columns of equal length, and the columns of a table, as a data source."""
    cells = {name.removesuffix("#"): [row[name] for row in rows] for name in rows[0]} if rows else {}
    return ColumnDataSource({name: _column(values) for name, values in {**columns, **cells}.items()})


def _column(values: Sequence[Any]) -> Any:
    if values and all(isinstance(value, int | float) for value in values):
        return np.asarray(values, np.float64)  # takes less space in the page
    return [
        value[:MAX_CHARACTERS].encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for value in values
    ]


def _add_tooltip(chart: Any, names: Iterable[str], renderers: Sequence[Any], **options: Any) -> None:
    """Add a tooltip with the columns of these names, of which a "#" at the end is removed."""
    rows = [(name, f"@{{{name}}}") for name in (name.removesuffix("#") for name in names)]
    chart.add_tools(HoverTool(tooltips=rows, renderers=list(renderers), **options))


def _legend(chart: Any, items: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """Store names and renderers in the tags of a chart, for a legend of the page that wraps and works with keys."""
    chart.tags = []
    for name, renderers in items:
        first, last = renderers[0].glyph, renderers[-1].glyph
        shape = str(getattr(last, "marker", "square"))  # bars are squares
        colour = str(getattr(first, "fill_color", None) or first.line_color)
        chart.tags.append({"name": name, "colour": colour, "mark": shape, "ids": [each.id for each in renderers]})


def _timeline(
    processes: Sequence[Process],
    saves: Sequence[Save],
    restores: Sequence[Restore],
    drains: Sequence[Drain],
    marks: Sequence[Mark],
    span: Range1d,
) -> Any:
    lanes = [lane for lane in LANES if drains or lane != "drains"]
    chart = _time_frame(230, "", span, y_range=FactorRange(factors=lanes))
    chart.ygrid.visible = False
    items: list[tuple[str, list[Any]]] = []
    for how, colour in [*HOW_COLOURS.items(), (ERROR, GREY)]:
        ended = [each for each in processes if (each.how if each.how in HOW_COLOURS else ERROR) == how]
        if ended:
            rows = [tables.process_cells(each) for each in ended]
            style = {"source": _source(_bar_columns(ended, "processes"), rows), "color": colour}
            bars = chart.hbar(y="lane", left="from", right="until", height=0.55, line_width=1.5, alpha=0.85, **style)
            _add_tooltip(chart, rows[0], [bars])
            items.append((how, [bars]))
    items += _save_bars(chart, saves)
    if drains:
        rows = [tables.drain_cells(each) for each in drains]
        style = {"y": "lane", "source": _source(_bar_columns(drains, "drains"), rows), "color": BLUE}
        bars = chart.hbar(left="from", right="until", height=0.4, line_width=1.5, **style)
        _add_tooltip(chart, rows[0], [bars])
        items.append(("copy to the run directory", [bars]))
    for tier, name, colour in (("slow", "restore", GREEN), ("fast", "restore from the fast tier", TEAL)):
        read = [each for each in restores if each.tier == tier]
        if read:
            rows = [tables.restore_cells(each) for each in read]
            style = {"y": "lane", "source": _source(_bar_columns(read, "restores"), rows), "color": colour}
            bars = chart.hbar(left="from", right="until", height=0.4, line_width=1.5, **style)
            dots = chart.scatter(x="until", marker="triangle", size=9, **style)
            _add_tooltip(chart, rows[0], [bars, dots])
            items.append((name, [bars, dots]))
    for kind, (marker, colour) in MARKS.items():
        some = [mark for mark in marks if mark.kind == kind]
        if some:
            rows = [tables.mark_cells(mark) for mark in some]
            data = _source({"at": [_milliseconds(mark.time) for mark in some], "lane": ["events"] * len(some)}, rows)
            style = {"source": data, "marker": marker, "color": colour}
            dots = chart.scatter(x="at", y="lane", size=11, fill_alpha=0.6, line_width=1.5, **style)
            _add_tooltip(chart, rows[0], [dots])
            items.append((tables.MARKS[kind], [dots]))
    _legend(chart, items)
    return chart


def _bar_columns(bars: Sequence[Process | Save | Restore | Drain], lane: str) -> dict[str, list[Any]]:
    return {
        "from": [_milliseconds(each.began) for each in bars],
        "until": [_milliseconds(each.ended) for each in bars],
        "lane": [lane] * len(bars),
    }


def _save_bars(chart: Any, saves: Sequence[Save]) -> list[tuple[str, list[Any]]]:
    items = []
    failed = [save for save in saves if not save.ok]
    for tier, name, colour in (("slow", "save", ORANGE), ("fast", "save to the fast tier", OCHRE)):
        good = [save for save in saves if save.ok and save.tier == tier]
        if not good:
            continue
        rows = [tables.save_cells(save) for save in good]
        held_until = [_milliseconds(save.began) + save.blocked_s * 1000 for save in good]
        style = {"y": "lane", "source": _source({**_bar_columns(good, "saves"), "held": held_until}, rows)}
        behind = chart.hbar(left="held", right="until", height=0.4, color=GREY, line_width=1, alpha=0.9, **style)
        held = chart.hbar(left="from", right="held", height=0.55, color=colour, line_width=1.5, **style)
        _add_tooltip(chart, rows[0], [behind, held])
        items += [(f"{name}, blocked", [held]), (f"{name}, in the background", [behind])]
    if failed:
        rows = [tables.save_cells(save) for save in failed]
        data = _source(_bar_columns(failed, "saves"), rows)
        dots = chart.scatter(x="until", y="lane", source=data, marker="x", size=11, line_width=2.5, color=RED)
        _add_tooltip(chart, rows[0], [dots])
        items.append(("failed save", [dots]))
    return items


def _save_times(saves: Sequence[Save], span: Range1d) -> Any:
    chart = _time_frame(240, "seconds", span, y_axis_type="log")
    rows = [tables.save_cells(save) for save in saves]
    columns = {
        "until": [_milliseconds(save.ended) for save in saves],
        "blocked_s": [max(LEAST_S, save.blocked_s) for save in saves],
        "background_s": [max(LEAST_S, save.background_s) for save in saves],
    }
    style = {"x": "until", "source": _source(columns, rows)}
    behind = chart.scatter(y="background_s", marker="square", size=6, color=GREY, alpha=0.8, **style)
    held = chart.scatter(y="blocked_s", marker="circle", size=7, color=ORANGE, alpha=0.9, **style)
    _add_tooltip(chart, rows[0], [behind, held])
    _legend(chart, [("blocked", [held]), ("in the background", [behind])])
    return chart


def _drain_lag(drains: Sequence[Drain], span: Range1d) -> Any:
    chart = _time_frame(240, "seconds", span, y_axis_type="log")
    rows = [tables.drain_cells(each) for each in drains]
    columns = {
        "until": [_milliseconds(each.ended) for each in drains],
        "took_s": [max(LEAST_S, each.drain_s or 0.0) for each in drains],
        "lag_s": [max(LEAST_S, each.lag_s or 0.0) for each in drains],
    }
    style = {"x": "until", "source": _source(columns, rows)}
    took = chart.scatter(y="took_s", marker="square", size=6, color=GREY, alpha=0.8, **style)
    lag = chart.scatter(y="lag_s", marker="circle", size=7, color=BLUE, alpha=0.9, **style)
    _add_tooltip(chart, rows[0], [took, lag])
    _legend(chart, [("since the save", [lag]), ("the copy alone", [took])])
    return chart


def _throughput(saves: Sequence[Save], restores: Sequence[Restore], span: Range1d) -> Any:
    chart = _time_frame(240, "MiB/s", span, y_axis_type="log")
    items = []
    saved = [each for each in saves if each.bytes_per_s is not None]
    read = [each for each in restores if each.bytes_per_s is not None]
    if saved:
        rows = [tables.save_cells(each) for each in saved]
        dots = chart.scatter(x="until", y="mib", source=_rates(saved, rows), marker="circle", size=7, color=BLUE)
        _add_tooltip(chart, rows[0], [dots])
        items.append(("save", [dots]))
    if read:
        rows = [tables.restore_cells(each) for each in read]
        dots = chart.scatter(x="until", y="mib", source=_rates(read, rows), marker="triangle", size=9, color=GREEN)
        _add_tooltip(chart, rows[0], [dots])
        items.append(("restore", [dots]))
    _legend(chart, items)
    return chart


def _rates(rated: Sequence[Save | Restore], rows: Sequence[tables.Cells]) -> ColumnDataSource:
    mib = [max(LEAST_MIB, (each.bytes_per_s or 0) / MIB) for each in rated]
    return _source({"until": [_milliseconds(each.ended) for each in rated], "mib": mib}, rows)


def _retention(steps: Sequence[StepLife], now: datetime.datetime, span: Range1d) -> Any:
    chart = _time_frame(300, "step", span)
    chart.yaxis.formatter = BasicTickFormatter(use_scientific=False)
    items = []
    width = max(2.0, min(7.0, 160 / max(1, len(steps))))
    for state, colour in STATE_COLOURS.items():
        some = [step for step in steps if step.state == state]
        if some:
            rows = [tables.step_cells(step) for step in some]
            ends = [step.deleted or (now if step.is_there else step.saved) or now for step in some]
            columns = {
                "from": [_milliseconds(step.saved or end) for step, end in zip(some, ends, strict=True)],
                "until": [_milliseconds(end) for end in ends],
                "number": [step.step for step in some],
            }
            style = {"source": _source(columns, rows), "color": colour}
            lines = chart.segment(x0="from", x1="until", y0="number", y1="number", line_width=width, **style)
            dots = chart.scatter(x="from", y="number", size=min(7.0, width + 2), **style)
            _add_tooltip(chart, rows[0], [dots, lines])
            items.append((state, [lines, dots]))
    aside = [(step, step.set_aside) for step in steps if step.set_aside is not None]
    if aside:
        rows = [tables.step_cells(step) for step, _ in aside]
        times, numbers = [_milliseconds(time) for _, time in aside], [step.step for step, _ in aside]
        data = _source({"at": times, "number": numbers}, rows)
        dots = chart.scatter(x="at", y="number", source=data, marker="x", size=10, line_width=2.5, color=RED)
        _add_tooltip(chart, rows[0], [dots])
        items.append(("set aside", [dots]))
    _legend(chart, items)
    return chart


def _disk_use(uses: Sequence[DiskUse], now: datetime.datetime, span: Range1d) -> Any:
    most = max(use.bytes for use in uses)
    size, unit = scaled_bytes(most)
    uses = [*uses, dataclasses.replace(uses[-1], time=max(now, uses[-1].time))]  # unchanged until now
    rows, scaled = [tables.use_cells(use) for use in uses], [use.bytes * size / max(1, most) for use in uses]
    data = _source({"at": [_milliseconds(use.time) for use in uses], "scaled": scaled}, rows)
    chart = _time_frame(180, unit, span)
    line = chart.step(x="at", y="scaled", source=data, mode="after", line_color=BLUE, line_width=2)
    chart.varea_step(x="at", y1=0, y2="scaled", source=data, step_mode="after", fill_color=BLUE, fill_alpha=0.12)
    _add_tooltip(chart, rows[0], [line], mode="vline")
    chart.y_range = Range1d(start=0, end=size * 1.1 or 1)
    return chart


def _metric(values: Sequence[MetricValue]) -> Any:
    chart = _frame(200, "")
    rows = [tables.metric_cells(each) for each in values]
    numbers = [each.value if math.isfinite(each.value) else math.nan for each in values]  # nan is a gap
    data = _source({"x": [each.step for each in values], "y": numbers}, rows)
    chart.line(x="x", y="y", source=data, line_color=BLUE, line_width=1.5, line_alpha=0.7)
    dots = chart.scatter(x="x", y="y", source=data, size=6, color=BLUE)
    _add_tooltip(chart, rows[0], [dots])
    chart.xaxis.axis_label, chart.xaxis.formatter = "step", BasicTickFormatter(use_scientific=False)
    return chart


def _changes(pairs: Sequence[PairChange], most: int) -> Any:
    names = [pair_name(pair) for pair in pairs]
    chart = _frame(300, "relative change", x_range=FactorRange(factors=names), y_axis_type="log")
    chart.xgrid.visible = False
    places, leaves, changes = list[tuple[str, float]](), list[str](), list[float]()
    for name, pair in zip(names, pairs, strict=True):
        known = [(leaf.relative, leaf.name) for leaf in pair.leaves if leaf.relative is not None]
        largest = sorted((each for each in known if math.isfinite(each[0])), key=lambda each: -each[0])[:most]
        places += [(name, OFFSETS[number % len(OFFSETS)]) for number in range(len(largest))]
        leaves += [leaf for _, leaf in largest]
        changes += [max(LEAST_CHANGE, relative) for relative, _ in largest]
    columns = {"place": places, "leaf": leaves, "y": changes, "relative change": list(map(number_text, changes))}
    data = _source(columns)
    dots = chart.scatter(x="place", y="y", source=data, size=6, color=BLUE, alpha=0.7)
    _add_tooltip(chart, ["leaf", "relative change"], [dots])
    items = [("a leaf", [dots])]
    whole = [(name, pair.relative) for name, pair in zip(names, pairs, strict=True) if pair.relative]
    if whole:
        numbers = [relative if math.isfinite(relative) else math.nan for _, relative in whole]
        cells = {"all values": [name for name, _ in whole], "relative change": list(map(number_text, numbers))}
        data = _source({**cells, "y": numbers})
        bars = chart.scatter(x="all values", y="y", source=data, marker="dash", size=44, line_width=3, color=ORANGE)
        _add_tooltip(chart, ["all values", "relative change"], [bars])
        items.append(("all values together", [bars]))
    _legend(chart, items)
    return chart


def _time_spent(processes: Sequence[Process], totals: Goodput) -> Any:
    rows: list[tuple[str, Process | Goodput]] = [("the run", totals)]
    rows += [(f"process {each.number}", each) for each in processes]
    names = [name for name, _ in rows]
    chart = _frame(90 + 24 * len(rows), "", y_range=FactorRange(factors=names[::-1]), x_range=(0, 100))
    chart.xaxis.axis_label = "per cent of the time"
    chart.ygrid.visible = False
    starts = [0.0] * len(rows)
    items = []
    for (field, part), colour in zip(tables.PARTS.items(), PART_COLOURS, strict=True):
        seconds = [getattr(row, field, 0.0) for _, row in rows]
        if not any(seconds):
            continue
        shares = [each / row.wall_s if row.wall_s else 0.0 for each, (_, row) in zip(seconds, rows, strict=True)]
        ends = [start + 100 * share for start, share in zip(starts, shares, strict=True)]
        texts = {"part": [part] * len(rows), "took": list(map(seconds_text, seconds))}
        columns = {"row": names, "left": starts, "right": ends, **texts, "share": list(map(percent_text, shares))}
        bars = chart.hbar(
            y="row", left="left", right="right", height=0.62, source=_source(columns), color=colour, line_width=0
        )
        _add_tooltip(chart, ["row", "part", "took", "share"], [bars])
        items.append((part, [bars]))
        starts = ends
    _legend(chart, items)
    return chart
