"""Charts over time: the timeline of a run, how long its saves took, and how fast they and the restores were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bokeh.models import FactorRange, Range1d

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
    legend,
    milliseconds,
    source,
    tell,
    time_frame,
)
from jaxckpt_train.report.disk_rate import DiskRate
from jaxckpt_train.report.processes import Process
from jaxckpt_train.report.quantities import bytes_text, rate_text, seconds_text
from jaxckpt_train.report.timeline import Mark, Restore, Save
from jaxckpt_train.steps.attempts import CLOSED, FINISHED, KILLED, LATE, PREEMPTED, RUNNING

HOW_COLOURS = {FINISHED: GREEN, PREEMPTED: BLUE, CLOSED: TEAL, RUNNING: PURPLE, LATE: OCHRE, KILLED: RED}
ERROR = "an error"
LANES = ("events", "restores", "saves", "processes")  # from the bottom up
LEAST_S = 1e-5  # what is shorter is drawn as long as this where the scale has no zero
LEAST_MIB = 1e-3
MIB = 1 << 20


def how_ended(process: Process) -> str:
    """How a process has ended, as the legend has it: errors are one kind."""
    return process.how if process.how in HOW_COLOURS else ERROR


def timeline(
    processes: Sequence[Process],
    saves: Sequence[Save],
    restores: Sequence[Restore],
    marks: Sequence[Mark],
    span: Range1d,
) -> Any:
    """Processes as bars by how they ended; saves and restores as bars in time; other events as marks."""
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
        rows = [("process", "@number"), ("ended", "@how"), ("where", "@where"), ("steps", "@steps"), ("lived", "@wall")]
        tell(chart, [*rows, ("began", f"@began{MOMENT}")], [bars])
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


SAVE_ROWS = [
    ("save of step", "@step"),
    ("blocked", "@blocked"),
    ("in the background", "@background"),
    ("size", "@size"),
    ("reason", "@reason"),
]


def _save_bars(chart: Any, saves: Sequence[Save]) -> list[tuple[str, list[Any]]]:
    items = []
    good, failed = [save for save in saves if save.ok], [save for save in saves if not save.ok]
    if good:
        data = source(_save_columns(good))
        behind = chart.hbar(
            y="lane", left="held", right="ended", height=0.4, source=data, color=GREY, line_width=1, alpha=0.9
        )
        held = chart.hbar(y="lane", left="began", right="held", height=0.55, source=data, color=ORANGE, line_width=1.5)
        tell(chart, SAVE_ROWS, [behind, held])
        items += [("save, blocked", [held]), ("save, in the background", [behind])]
    if failed:
        data = source(_save_columns(failed))
        dots = chart.scatter(x="ended", y="lane", source=data, marker="x", size=11, line_width=2.5, color=RED)
        tell(chart, [*SAVE_ROWS[:3], ("failed", "@error")], [dots])
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


RESTORE_ROWS = [("restore of step", "@step"), ("took", "@took"), ("size", "@size"), ("rate", "@rate")]
RESTORE_ROWS += [("damaged ones passed over", "@skipped")]


def _restore_bars(chart: Any, restores: Sequence[Restore]) -> list[tuple[str, list[Any]]]:
    if not restores:
        return []
    data = source(_restore_columns(restores))
    bars = chart.hbar(y="lane", left="began", right="ended", height=0.4, source=data, color=GREEN, line_width=1.5)
    dots = chart.scatter(x="ended", y="lane", source=data, marker="triangle", size=9, color=GREEN)
    tell(chart, RESTORE_ROWS, [bars, dots])
    return [("restore", [bars, dots])]


MARKS = {
    "preempted": ("preemption", "inverted_triangle", ORANGE),
    "set_aside": ("step set aside", "square_x", RED),
    "take_over": ("lock taken over", "diamond", PURPLE),
}


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
            tell(chart, [(name, f"@time{MOMENT}"), ("step", "@step"), ("", "@text")], [dots])
            items.append((name, [dots]))
    return items


def save_times(saves: Sequence[Save], span: Range1d) -> Any:
    """Blocked and background seconds of each save, on a scale of factors."""
    chart = time_frame(240, "seconds", span, y_axis_type="log")
    columns = _save_columns(saves)
    columns["blocked_s"] = [max(LEAST_S, save.blocked_s) for save in saves]
    columns["background_s"] = [max(LEAST_S, save.background_s) for save in saves]
    data = source(columns)
    behind = chart.scatter(x="ended", y="background_s", source=data, marker="square", size=6, color=GREY, alpha=0.8)
    held = chart.scatter(x="ended", y="blocked_s", source=data, marker="circle", size=7, color=ORANGE, alpha=0.9)
    tell(chart, SAVE_ROWS, [behind, held])
    legend(chart, [("blocked", [held]), ("in the background", [behind])])
    return chart


def throughput(saves: Sequence[Save], restores: Sequence[Restore], disk: DiskRate | None, span: Range1d) -> Any:
    """Bytes a second of saves and restores, on a scale of factors, and what the disk takes."""
    chart = time_frame(240, "MiB/s", span, y_axis_type="log")
    items = []
    told = [save for save in saves if save.bytes_per_s is not None]
    if told:
        data = source({**_save_columns(told), "mib": [max(LEAST_MIB, (save.bytes_per_s or 0) / MIB) for save in told]})
        dots = chart.scatter(x="ended", y="mib", source=data, marker="circle", size=7, color=BLUE, alpha=0.85)
        tell(chart, [*SAVE_ROWS, ("rate", "@mib{0,0.0} MiB/s")], [dots])
        items.append(("save", [dots]))
    read = [each for each in restores if each.bytes_per_s is not None]
    if read:
        data = source(
            {**_restore_columns(read), "mib": [max(LEAST_MIB, (each.bytes_per_s or 0) / MIB) for each in read]}
        )
        dots = chart.scatter(x="ended", y="mib", source=data, marker="triangle", size=9, color=GREEN, alpha=0.9)
        tell(chart, RESTORE_ROWS, [dots])
        items.append(("restore", [dots]))
    if disk is not None:
        taken = source({"x": [span.start, span.end], "y": [disk.bytes_per_s / MIB] * 2})
        line = chart.line(x="x", y="y", source=taken, line_color=RED, line_dash="dashed", line_width=1.5)
        items.append(("what the disk took when this was made", [line]))
    legend(chart, items)
    return chart
