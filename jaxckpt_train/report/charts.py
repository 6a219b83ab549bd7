"""The charts of a report, drawn with Bokeh.

`draw` draws all charts as one document for the browser, with the place of each in the page. There are charts over time
(timeline, saves, throughput, steps, disk use), of metrics and changes by step, and of the goodput of each process.
"""

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

from jaxckpt_train.inspection.units import bytes_text, rate_text, scaled_bytes, seconds_text
from jaxckpt_train.report.changes import PairChange
from jaxckpt_train.report.events import DiskUse, StepLife
from jaxckpt_train.report.gather import Gathered, Process, Totals
from jaxckpt_train.report.series import DiskRate, Limits, Mark, MetricValue, Restore, Save, thinned
from jaxckpt_train.run.goodput import KILLED, RUNNING
from jaxckpt_train.run.history import CLOSED, FINISHED, LATE, PREEMPTED

# These colours are distinguishable with colour blindness, on light and dark pages. The browser sets the colours of text
# and lines, because it knows the theme.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY, TEAL, OCHRE = (
    "#3f7fbf", "#dd8432", "#2e9b6f", "#cf4a5a", "#8b6fc4", "#8b919b", "#2b9da6", "#b7952a"
)  # fmt: skip
TOOLS = "xpan,box_zoom,xwheel_zoom,reset,save"
MAX_CHARACTERS = 100
MOMENT = "{%F %T.%3N}"
HOW_COLOURS = {FINISHED: GREEN, PREEMPTED: BLUE, CLOSED: TEAL, RUNNING: PURPLE, LATE: OCHRE, KILLED: RED}
ERROR = "an error"
LANES = ("events", "restores", "saves", "processes")  # from the bottom up
LEAST_S = 1e-5  # shorter times are drawn as this on a logarithmic scale
LEAST_MIB = 1e-3
MIB = 1 << 20
SAVE_ROWS = [
    ("save of step", "@step"),
    ("blocked", "@blocked"),
    ("in the background", "@background"),
    ("size", "@size"),
    ("reason", "@reason"),
]
RESTORE_ROWS = [("restore of step", "@step"), ("took", "@took"), ("size", "@size"), ("rate", "@rate")]
RESTORE_ROWS += [("skipped damaged steps", "@skipped")]
MARKS = {
    "preempted": ("preemption", "inverted_triangle", ORANGE),
    "set_aside": ("step set aside", "square_x", RED),
    "take_over": ("lock taken over", "diamond", PURPLE),
}
STATE_COLOURS = {
    "kept": GREEN, "pinned": BLUE, "temporary": TEAL, "left behind": OCHRE, "damaged": RED, "not committed": ORANGE,
    "deleted": GREY, "gone": PURPLE,
}  # fmt: skip
LEAST_CHANGE = 1e-12
OFFSETS = (0.0, 0.06, -0.06, 0.12, -0.12, 0.18, -0.18)  # so that dots of one pair do not cover each other
PARTS = (
    ("useful_s", "useful updates", GREEN),
    ("lost_s", "lost updates", RED),
    ("blocked_s", "blocked by saves", ORANGE),
    ("to_resume_s", "until the state was restored", BLUE),
    ("other_s", "without updates", PURPLE),
    ("between_s", "between processes", GREY),
)
TOTAL = "the run"
MOST_BARS = 40
MOST_METRICS = 24
MOST_PAIRS = 40


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The data that the browser needs to draw the charts.

    Attributes:
        document: the Bokeh document as JSON data.
        places: the ID of each chart in the document, by the ID of its place in the page.
        left_out: a sentence about items that are not drawn, by the same ID.
    """

    document: dict[str, Any]
    places: dict[str, str]
    left_out: dict[str, str]


def metric_place(number: int) -> str:
    """Return the ID of the place for the chart of a metric."""
    return f"metric-{number}"


def library() -> str:
    """Return the JavaScript of Bokeh."""
    return Resources(mode="inline", components=["bokeh"], minified=True).js_raw[0]


def draw(gathered: Gathered, limits: Limits) -> Drawing:
    """Draw all charts that have data, within the limits."""
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
        charts["timeline"] = timeline(processes, saves, restores, marks, span)
    if saves:
        charts["save-times"] = save_times(saves, span)
    rated: list[Save | Restore] = [*saves, *restores]
    if any(each.bytes_per_s is not None for each in rated):
        charts["throughput"] = throughput(saves, restores, gathered.disk, span)
    if steps:
        charts["retention"] = retention(steps, now, span)
    if uses:
        charts["disk-use"] = disk_use(uses, now, span)
    for place in ("timeline", "save-times", "throughput"):
        _note_left_out(left_out, place, len(saves), counts.saves, "saves", "of neighbours the longest")
    _note_left_out(left_out, "retention", len(steps), counts.steps, "steps", "of neighbours one that still exists")
    _note_left_out(left_out, "disk-use", len(uses), counts.changes, "changes", "of neighbours the largest")
    return charts


def _of_steps(gathered: Gathered, limits: Limits, left_out: dict[str, str]) -> dict[str, Any]:
    charts: dict[str, Any] = {}
    if gathered.processes:
        last = gathered.processes[-MOST_BARS:]
        charts["time-spent"] = time_spent(last, gathered.totals)
        _note_left_out(left_out, "time-spent", len(last), len(gathered.processes), "processes", "the last ones")
    for number, (name, values) in enumerate(list(gathered.metrics.items())[:MOST_METRICS]):
        some = thinned(values, limits.points, lambda each: abs(each.value))
        charts[metric_place(number)] = metric(some)
        there = gathered.counts.values[name]
        _note_left_out(left_out, metric_place(number), len(some), there, "values", "of neighbours the largest")
    pairs = shown_pairs(gathered)
    if any(leaf.relative is not None for pair in pairs for leaf in pair.leaves):
        most, room = max(len(pair.leaves) for pair in pairs), max(1, limits.changed_leaves // len(pairs))
        charts["changes"] = changes(pairs, room)
        _note_left_out(left_out, "changes", min(most, room), most, "leaves of a pair", "those that changed most")
    return charts


def shown_pairs(gathered: Gathered) -> list[PairChange]:
    """Return the last compared pairs of steps, as many as a page has room for."""
    return [pair for pair in gathered.changes.pairs if not pair.problem][-MOST_PAIRS:]


def _note_left_out(left_out: dict[str, str], place: str, drawn: int, there: int, what: str, which: str) -> None:
    if drawn < there:
        left_out[place] = f"{drawn:,} of {there:,} {what} are drawn: {which}."


def frame(height: int, y_label: str, **options: Any) -> Any:
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


def time_frame(height: int, y_label: str, span: Range1d, **options: Any) -> Any:
    """Return an empty chart over time. Charts with the same span pan and zoom together."""
    return frame(height, y_label, x_axis_type="datetime", x_range=span, **options)


def time_span(times: Iterable[datetime.datetime]) -> Range1d:
    """Return a span that contains all times, with a margin, to share between charts."""
    found = sorted(map(milliseconds, times)) or [0.0]
    room = max(1.0, (found[-1] - found[0]) * 0.02)
    return Range1d(start=found[0] - room, end=found[-1] + room)


def milliseconds(time: datetime.datetime) -> float:
    """Return a time in the unit of Bokeh: milliseconds since 1970 in UTC."""
    return time.timestamp() * 1000


def source(columns: Mapping[str, Sequence[Any]]) -> ColumnDataSource:
    """Return columns of equal length as a data source, with numbers as arrays to save space in the page."""
    return ColumnDataSource({name: _column(values) for name, values in columns.items()})


def _column(values: Sequence[Any]) -> Any:
    if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return np.asarray(values, np.float64)
    texts = [value[:MAX_CHARACTERS] if isinstance(value, str) else value for value in values]
    return [_plain(text) for text in texts]


def _plain(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def add_tooltip(chart: Any, rows: Sequence[tuple[str, str]], renderers: Sequence[Any], **options: Any) -> None:
    """Add a tooltip with rows of a name and a column, written as `@name{format}`."""
    moments: Any = {f"@{name}": "datetime" for name in ("began", "ended", "time", "saved", "until")}
    chart.add_tools(HoverTool(tooltips=list(rows), renderers=list(renderers), formatters=moments, **options))


def legend(chart: Any, items: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """Store the legend in the tags of a chart. A click on a name hides and shows what it names.

    The page draws the legend instead of Bokeh, so that it wraps on narrow pages and works with the keyboard.

    Args:
        chart: the chart.
        items: the names with their renderers. The names come from this module, never from files.
    """
    chart.tags = [
        {
            "name": name,
            "colour": _colour_of(renderers[0]),
            "mark": _mark_of(renderers),
            "ids": [r.id for r in renderers],
        }
        for name, renderers in items
    ]


def _colour_of(renderer: Any) -> str:
    glyph = renderer.glyph
    return str(getattr(glyph, "fill_color", None) or glyph.line_color)


def _mark_of(renderers: Sequence[Any]) -> str:
    """Return the name of the shape of the last renderer for the page; bars are squares."""
    glyph = renderers[-1].glyph
    marker = getattr(glyph, "marker", None)
    return str(marker) if marker is not None else "dashed" if type(glyph).__name__ == "Line" else "square"


def plain_numbers() -> BasicTickFormatter:
    """Return a formatter for an axis of whole numbers, without powers of ten."""
    return BasicTickFormatter(use_scientific=False)


def finite(value: float | None) -> float:
    """Return a finite value, or NaN, which a chart does not draw."""
    return value if value is not None and math.isfinite(value) else math.nan


def how_ended(process: Process) -> str:
    """Return how a process ended, for the legend, where all errors are one kind."""
    return process.how if process.how in HOW_COLOURS else ERROR


def timeline(
    processes: Sequence[Process],
    saves: Sequence[Save],
    restores: Sequence[Restore],
    marks: Sequence[Mark],
    span: Range1d,
) -> Any:
    """Return a chart with bars for processes, by how they ended, bars for saves and restores, and marks for others."""
    chart = time_frame(230, "", span, y_range=FactorRange(factors=list(LANES)))
    chart.ygrid.visible = False
    items = [*_process_bars(chart, processes), *_save_bars(chart, saves), *_restore_bars(chart, restores)]
    items += _marks(chart, marks)
    legend(chart, items)
    return chart


def _process_bars(chart: Any, processes: Sequence[Process]) -> list[tuple[str, list[Any]]]:
    items = []
    for how, colour in [*HOW_COLOURS.items(), (ERROR, GREY)]:
        some = [each for each in processes if how_ended(each) == how]
        if not some:
            continue
        data = source(
            {
                "began": [milliseconds(each.began) for each in some],
                "ended": [milliseconds(each.ended) for each in some],
                "lane": ["processes"] * len(some),
                "number": [str(each.number) for each in some],
                "how": [each.how for each in some],
                "where": [each.where for each in some],
                "steps": [f"{each.first_step}-{each.last_step}" for each in some],
                "wall": [seconds_text(each.wall_s) for each in some],
            }
        )
        bars = chart.hbar(
            y="lane", left="began", right="ended", height=0.55, source=data, color=colour, line_width=1.5, alpha=0.85
        )
        rows = [
            ("process", "@number"),
            ("ended", "@how"),
            ("where", "@where"),
            ("steps", "@steps"),
            ("wall time", "@wall"),
        ]
        add_tooltip(chart, [*rows, ("began", f"@began{MOMENT}")], [bars])
        items.append((how, [bars]))
    return items


def _save_columns(saves: Sequence[Save]) -> dict[str, list[Any]]:
    return {
        "began": [milliseconds(save.began) for save in saves],
        "held": [milliseconds(save.began) + save.blocked_s * 1000 for save in saves],
        "ended": [milliseconds(save.ended) for save in saves],
        "lane": ["saves"] * len(saves),
        "step": [str(save.step) for save in saves],
        "blocked": [seconds_text(save.blocked_s) for save in saves],
        "background": [seconds_text(save.background_s) for save in saves],
        "size": [bytes_text(save.bytes) for save in saves],
        "reason": [save.reason for save in saves],
        "error": [save.error for save in saves],
    }


def _save_bars(chart: Any, saves: Sequence[Save]) -> list[tuple[str, list[Any]]]:
    items = []
    good, failed = [save for save in saves if save.ok], [save for save in saves if not save.ok]
    if good:
        data = source(_save_columns(good))
        behind = chart.hbar(
            y="lane", left="held", right="ended", height=0.4, source=data, color=GREY, line_width=1, alpha=0.9
        )
        held = chart.hbar(y="lane", left="began", right="held", height=0.55, source=data, color=ORANGE, line_width=1.5)
        add_tooltip(chart, SAVE_ROWS, [behind, held])
        items += [("save, blocked", [held]), ("save, in the background", [behind])]
    if failed:
        data = source(_save_columns(failed))
        dots = chart.scatter(x="ended", y="lane", source=data, marker="x", size=11, line_width=2.5, color=RED)
        add_tooltip(chart, [*SAVE_ROWS[:3], ("failed", "@error")], [dots])
        items.append(("failed save", [dots]))
    return items


def _restore_columns(restores: Sequence[Restore]) -> dict[str, list[Any]]:
    return {
        "began": [milliseconds(each.began) for each in restores],
        "ended": [milliseconds(each.ended) for each in restores],
        "lane": ["restores"] * len(restores),
        "step": [str(each.step) for each in restores],
        "took": [seconds_text(each.restore_s) for each in restores],
        "size": [bytes_text(each.bytes) for each in restores],
        "rate": [rate_text(each.bytes_per_s) for each in restores],
        "skipped": [", ".join(each.skipped) or "none" for each in restores],
    }


def _restore_bars(chart: Any, restores: Sequence[Restore]) -> list[tuple[str, list[Any]]]:
    if not restores:
        return []
    data = source(_restore_columns(restores))
    bars = chart.hbar(y="lane", left="began", right="ended", height=0.4, source=data, color=GREEN, line_width=1.5)
    dots = chart.scatter(x="ended", y="lane", source=data, marker="triangle", size=9, color=GREEN)
    add_tooltip(chart, RESTORE_ROWS, [bars, dots])
    return [("restore", [bars, dots])]


def _marks(chart: Any, marks: Sequence[Mark]) -> list[tuple[str, list[Any]]]:
    items = []
    for kind, (name, marker, colour) in MARKS.items():
        some = [mark for mark in marks if mark.kind == kind]
        if some:
            data = source(
                {
                    "time": [milliseconds(mark.time) for mark in some],
                    "lane": ["events"] * len(some),
                    "step": ["" if mark.step is None else str(mark.step) for mark in some],
                    "text": [mark.text for mark in some],
                }
            )
            dots = chart.scatter(
                x="time", y="lane", source=data, marker=marker, size=11, color=colour, fill_alpha=0.6, line_width=1.5
            )
            add_tooltip(chart, [(name, f"@time{MOMENT}"), ("step", "@step"), ("", "@text")], [dots])
            items.append((name, [dots]))
    return items


def save_times(saves: Sequence[Save], span: Range1d) -> Any:
    """Return a chart of the blocked and background seconds of each save, on a logarithmic scale."""
    chart = time_frame(240, "seconds", span, y_axis_type="log")
    columns = _save_columns(saves)
    columns["blocked_s"] = [max(LEAST_S, save.blocked_s) for save in saves]
    columns["background_s"] = [max(LEAST_S, save.background_s) for save in saves]
    data = source(columns)
    behind = chart.scatter(x="ended", y="background_s", source=data, marker="square", size=6, color=GREY, alpha=0.8)
    held = chart.scatter(x="ended", y="blocked_s", source=data, marker="circle", size=7, color=ORANGE, alpha=0.9)
    add_tooltip(chart, SAVE_ROWS, [behind, held])
    legend(chart, [("blocked", [held]), ("in the background", [behind])])
    return chart


def throughput(saves: Sequence[Save], restores: Sequence[Restore], disk: DiskRate | None, span: Range1d) -> Any:
    """Return a chart of the rates of saves and restores, and of the disk, on a logarithmic scale."""
    chart = time_frame(240, "MiB/s", span, y_axis_type="log")
    items = []
    rated = [save for save in saves if save.bytes_per_s is not None]
    if rated:
        mib = [max(LEAST_MIB, (save.bytes_per_s or 0) / MIB) for save in rated]
        data = source({**_save_columns(rated), "mib": mib})
        dots = chart.scatter(x="ended", y="mib", source=data, marker="circle", size=7, color=BLUE, alpha=0.85)
        add_tooltip(chart, [*SAVE_ROWS, ("rate", "@mib{0,0.0} MiB/s")], [dots])
        items.append(("save", [dots]))
    read = [each for each in restores if each.bytes_per_s is not None]
    if read:
        data = source(
            {**_restore_columns(read), "mib": [max(LEAST_MIB, (each.bytes_per_s or 0) / MIB) for each in read]}
        )
        dots = chart.scatter(x="ended", y="mib", source=data, marker="triangle", size=9, color=GREEN, alpha=0.9)
        add_tooltip(chart, RESTORE_ROWS, [dots])
        items.append(("restore", [dots]))
    if disk is not None:
        taken = source({"x": [span.start, span.end], "y": [disk.bytes_per_s / MIB] * 2})
        line = chart.line(x="x", y="y", source=taken, line_color=RED, line_dash="dashed", line_width=1.5)
        items.append(("rate of the disk when this report was made", [line]))
    legend(chart, items)
    return chart


def retention(steps: Sequence[StepLife], now: datetime.datetime, span: Range1d) -> Any:
    """Return a chart with a line for each step from its save to its deletion, or until now."""
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
        add_tooltip(chart, [("set aside", f"@time{MOMENT}"), ("step", "@step{0}"), ("", "@problem")], [dots])
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
    add_tooltip(chart, [*rows, ("size", "@size"), ("problem", "@problem")], [dots, lines])
    return [lines, dots]


def disk_use(uses: Sequence[DiskUse], now: datetime.datetime, span: Range1d) -> Any:
    """Return a chart of the disk use over time."""
    size, unit = scaled_bytes(max(use.bytes for use in uses))
    scale = size / max(1, max(use.bytes for use in uses))
    last = DiskUse(max(now, uses[-1].time), uses[-1].steps, uses[-1].bytes)  # unchanged until now
    data = source(
        {
            "time": [milliseconds(use.time) for use in (*uses, last)],
            "size": [use.bytes * scale for use in (*uses, last)],
            "size_text": [bytes_text(use.bytes) for use in (*uses, last)],
            "steps": [str(use.steps) for use in (*uses, last)],
        }
    )
    chart = time_frame(180, unit, span)
    line = chart.step(x="time", y="size", source=data, mode="after", line_color=BLUE, line_width=2)
    chart.varea_step(x="time", y1=0, y2="size", source=data, step_mode="after", fill_color=BLUE, fill_alpha=0.12)
    add_tooltip(chart, [("from", f"@time{MOMENT}"), ("steps", "@steps"), ("size", "@size_text")], [line], mode="vline")
    chart.y_range = Range1d(start=0, end=size * 1.1 or 1)
    return chart


def metric(values: Sequence[MetricValue]) -> Any:
    """Return a chart of a metric by step. Values that are not finite are gaps."""
    chart = frame(200, "")
    data = source({"step": [each.step for each in values], "value": [finite(each.value) for each in values]})
    chart.line(x="step", y="value", source=data, line_color=BLUE, line_width=1.5, line_alpha=0.7)
    dots = chart.scatter(x="step", y="value", source=data, size=6, color=BLUE)
    add_tooltip(chart, [("step", "@step{0}"), ("value", "@value{0.000000}")], [dots])
    chart.xaxis.axis_label, chart.xaxis.formatter = "step", plain_numbers()
    return chart


def changes(pairs: Sequence[PairChange], most: int) -> Any:
    """Return a chart of the relative changes of leaves and of all values together, by pair of steps.

    Args:
        pairs: the compared pairs.
        most: the number of leaves to draw for each pair: those that changed most.
    """
    names = [pair_name(pair) for pair in pairs]
    chart = frame(300, "relative change", x_range=FactorRange(factors=names), y_axis_type="log")
    chart.xgrid.visible = False
    rows: list[tuple[str, str, float, float]] = []
    for name, pair in zip(names, pairs, strict=True):
        measured = [(leaf.name, leaf.relative) for leaf in pair.leaves if leaf.relative is not None]
        known = sorted((each for each in measured if math.isfinite(each[1])), key=lambda each: -each[1])[:most]
        rows += [(name, leaf, max(LEAST_CHANGE, value), OFFSETS[number % len(OFFSETS)])
                 for number, (leaf, value) in enumerate(known)]  # fmt: skip
    data = source(
        {
            "place": [(pair, offset) for pair, _, _, offset in rows],
            "leaf": [leaf for _, leaf, _, _ in rows],
            "relative": [value for _, _, value, _ in rows],
        }
    )
    dots = chart.scatter(x="place", y="relative", source=data, size=6, color=BLUE, alpha=0.7)
    add_tooltip(chart, [("leaf", "@leaf"), ("relative change", "@relative{0.00e+0}")], [dots])
    whole = [(name, pair.relative) for name, pair in zip(names, pairs, strict=True) if pair.relative]
    items = [("a leaf", [dots])]
    if whole:
        data = source({"pair": [name for name, _ in whole], "relative": [finite(value) for _, value in whole]})
        bars = chart.scatter(x="pair", y="relative", source=data, marker="dash", size=44, line_width=3, color=ORANGE)
        add_tooltip(chart, [("all values", "@pair"), ("relative change", "@relative{0.00e+0}")], [bars])
        items.append(("all values together", [bars]))
    legend(chart, items)
    return chart


def pair_name(pair: PairChange) -> str:
    """Return the name of a pair, such as "100 to 200"."""
    return f"{pair.before} to {pair.after}"


def time_spent(processes: Sequence[Process], totals: Totals) -> Any:
    """Return a chart with a bar for the run and one for each process, divided by how its time was spent."""
    rows: list[tuple[str, Process | Totals]] = [(TOTAL, totals)]
    rows += [(f"process {each.number}", each) for each in processes]
    chart = frame(
        90 + 24 * len(rows),
        "",
        y_range=FactorRange(factors=[name for name, _ in reversed(rows)]),
        x_range=(0, 100),
    )
    chart.xaxis.axis_label = "per cent of the time"
    chart.ygrid.visible = False
    starts = [0.0] * len(rows)
    items = []
    for field, name, colour in PARTS:
        seconds = [getattr(row, field, 0.0) for _, row in rows]
        if not any(seconds):
            continue
        shares = [100 * each / row.wall_s if row.wall_s else 0.0 for each, (_, row) in zip(seconds, rows, strict=True)]
        ends = [start + share for start, share in zip(starts, shares, strict=True)]
        data = source(
            {
                "row": [name for name, _ in rows],
                "left": starts,
                "right": ends,
                "share": shares,
                "took": list(map(seconds_text, seconds)),
            }
        )
        bars = chart.hbar(y="row", left="left", right="right", height=0.62, source=data, color=colour, line_width=0)
        add_tooltip(chart, [("row", "@row"), ("part", name), ("took", "@took"), ("share", "@share{0.0} %")], [bars])
        items.append((name, [bars]))
        starts = ends
    legend(chart, items)
    return chart
