"""The chart of goodput: what the time of each process went into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bokeh.models import FactorRange

from jaxckpt_train.report.chart_frame import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, frame, legend, source, tell
from jaxckpt_train.report.processes import Process, Totals
from jaxckpt_train.report.quantities import seconds_text

PARTS = (
    ("useful_s", "useful updates", GREEN),
    ("lost_s", "updates that were lost", RED),
    ("blocked_s", "blocked by saves", ORANGE),
    ("to_resume_s", "until the loop had its state", BLUE),
    ("other_s", "without updates", PURPLE),
    ("between_s", "between processes", GREY),
)
TOTAL = "the run"


def time_spent(processes: Sequence[Process], totals: Totals) -> Any:
    """One bar for the run and one for each process, in shares of its own time."""
    rows: list[tuple[str, Process | Totals]] = [(TOTAL, totals)]
    rows += [(f"process {each.number}", each) for each in processes]
    chart = frame(
        90 + 24 * len(rows),
        "",
        y_range=FactorRange(factors=[name for name, _ in reversed(rows)]),
        x_range=(0, 100),
    )
    chart.xaxis.axis_label = "per cent of its time"
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
        tell(chart, [("of", "@row"), ("in", name), ("took", "@took"), ("share", "@share{0.0} %")], [bars])
        items.append((name, [bars]))
        starts = ends
    legend(chart, items)
    return chart
