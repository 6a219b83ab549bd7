"""What all charts have in common: frame, colours, axes, names, and what is told at the pointer."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import BasicTickFormatter, ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure

# Told apart by all who see colours differently, on a light and on a dark page. Text and lines of a chart get theirs in
# the browser, which knows what the page looks like.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY, TEAL, OCHRE = (
    "#3f7fbf", "#dd8432", "#2e9b6f", "#cf4a5a", "#8b6fc4", "#8b919b", "#2b9da6", "#b7952a"
)  # fmt: skip
TOOLS = "xpan,box_zoom,xwheel_zoom,reset,save"
MOST_LETTERS = 100


def frame(height: int, y_label: str, **options: Any) -> Any:
    """An empty chart as wide as the page; options as `bokeh.plotting.figure` takes them."""
    made = figure(height=height, sizing_mode="stretch_width", tools=TOOLS, toolbar_location="right", **options)
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.toolbar.active_drag = None  # a finger on a chart scrolls the page
    made.toolbar.active_scroll = None
    made.background_fill_color = made.border_fill_color = made.outline_line_color = None
    made.yaxis.axis_label = y_label
    made.min_border_left, made.min_border_right = 76, 24  # so that charts over time lie below each other
    for axis in (*made.xaxis, *made.yaxis):
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = axis.minor_tick_line_color = None
        axis.major_tick_line_color = None
    return made


def time_frame(height: int, y_label: str, span: Range1d, **options: Any) -> Any:
    """A chart over time; those of one span are moved and zoomed together."""
    return frame(height, y_label, x_axis_type="datetime", x_range=span, **options)


def time_span(times: Iterable[datetime.datetime]) -> Range1d:
    """A span that has all these times in it, with some room; the same for any number of charts."""
    found = sorted(map(milliseconds, times)) or [0.0]
    room = max(1.0, (found[-1] - found[0]) * 0.02)
    return Range1d(start=found[0] - room, end=found[-1] + room)


def milliseconds(time: datetime.datetime) -> float:
    """A time as charts count it: since 1970, without a zone, in UTC."""
    return time.timestamp() * 1000


def source(columns: Mapping[str, Sequence[Any]]) -> ColumnDataSource:
    """Columns of one length; numbers as arrays, which take less room in the page."""
    return ColumnDataSource({name: _column(values) for name, values in columns.items()})


def _column(values: Sequence[Any]) -> Any:
    if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return np.asarray(values, np.float64)
    texts = [value[:MOST_LETTERS] if isinstance(value, str) else value for value in values]
    return [_plain(text) for text in texts]


def _plain(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def tell(chart: Any, rows: Sequence[tuple[str, str]], renderers: Sequence[Any], **more: Any) -> None:
    """Have the pointer tell of what is under it: names, and columns as `@name{format}`."""
    moments: Any = {f"@{name}": "datetime" for name in ("began", "ended", "time", "saved", "until")}
    chart.add_tools(HoverTool(tooltips=list(rows), renderers=list(renderers), formatters=moments, **more))


MOMENT = "{%F %T.%3N}"


def legend(chart: Any, items: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """What the page is to put above the chart: names with a mark each, that hide and show what they name.

    The page does it, and not the library: it wraps where the page is narrow, and can be used by keys.

    Args:
        chart: it.
        items: names, and what each names; the names are ours, never those of files.
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
    """The shape of the last one, as the page knows it; bars are squares."""
    glyph = renderers[-1].glyph
    marker = getattr(glyph, "marker", None)
    return str(marker) if marker is not None else "dashed" if type(glyph).__name__ == "Line" else "square"


def plain_numbers() -> BasicTickFormatter:
    """Whole numbers of an axis, without powers of ten."""
    return BasicTickFormatter(use_scientific=False)


def finite(value: float | None) -> float:
    """A value as a chart can place it; nan: it cannot."""
    return value if value is not None and math.isfinite(value) else math.nan
