"""The parts that sections of a page are made of: tables, charts with their data, and facts in a row."""

from __future__ import annotations

from collections.abc import Sequence

from jaxckpt_train.report.drawing import Drawing
from jaxckpt_train.report.markup import Html, element, joined
from jaxckpt_train.report.quantities import clipped
from jaxckpt_train.report.tables import Table

MOST_PROBLEMS = 25


def table_html(table: Table, caption: str) -> Html:
    """A table that is scrolled by itself where it is wider than the page."""
    kinds = [_kind(heading) for heading in table.headings]
    head = [
        element("th", name.removesuffix("#") if kind == "right" else name, scope="col", class_=kind)
        for name, kind in zip(table.headings, kinds, strict=True)
    ]

    def row(texts: Sequence[str]) -> Html:
        cells = [element("td", clipped(text), class_=kind) for text, kind in zip(texts, kinds, strict=True)]
        return element("tr", cells)

    whole = element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", element("tr", head)),
        element("tbody", [row(texts) for texts in table.rows]),
        element("tfoot", row(table.last)) if table.last else None,
    )
    left_out = note(table.left_out) if table.left_out else None
    return joined(left_out, element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption))


def _kind(heading: str) -> str | None:
    if heading.endswith("#") and len(heading) > 1:
        return "right"
    return "time" if heading.endswith("(UTC)") else None


def chart_html(drawing: Drawing, place: str, title: str, about: str, tables: Sequence[tuple[str, Table]]) -> Html:
    """A chart with what it shows in words, and its data as tables to open; without the chart where there is none.

    Args:
        drawing: the charts.
        place: the id of its place.
        title: of the chart.
        about: what it shows.
        tables: its data, each with a name.
    """
    opened = [
        element("details", element("summary", f"Data: {name}"), table_html(table, name))
        for name, table in tables
        if table.rows
    ]
    data = element("div", opened, class_="data")
    if place not in drawing.places:
        return data
    label = f"{title} {about} The data is in the tables below it."
    return element(
        "figure",
        element("figcaption", element("strong", title), " ", about),
        element("div", id=f"chart-{place}", class_="chart", role="img", aria_label=label),
        note(drawing.left_out[place]) if place in drawing.left_out else None,
        data,
    )


def section(name: str, title: str, *children: object) -> Html:
    """A section with its heading."""
    return element("section", element("h2", title, id=name), *children, aria_labelledby=name)


def facts(rows: Sequence[tuple[str, str, str]]) -> Html:
    """Facts in a row: what, how much, and a remark."""
    tiles = [
        element("div", element("dt", name), element("dd", value), element("dd", remark, class_="quiet"))
        for name, value, remark in rows
    ]
    return element("dl", tiles, class_="facts")


def note(text: str) -> Html:
    """A quiet remark of ours; what stands in backquotes is a command."""
    pieces = text.split("`")
    return element("p", [element("code", piece) if number % 2 else piece for number, piece in enumerate(pieces)],
                   class_="quiet")  # fmt: skip


def problems(title: str, texts: Sequence[str]) -> Html:
    """What is wrong, where everybody sees it."""
    lines = [element("li", clipped(text, 600)) for text in texts[:MOST_PROBLEMS]]
    if len(texts) > MOST_PROBLEMS:
        lines.append(element("li", f"and {len(texts) - MOST_PROBLEMS:,} more"))
    return element("div", element("strong", title), element("ul", lines), class_="problems", role="note")
