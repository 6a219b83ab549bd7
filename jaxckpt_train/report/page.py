"""The HTML page of a report: a single file that loads nothing and runs only its own scripts.

All text is escaped, except text of type `Html`, which only this module creates: no text from a file changes the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxckpt_train.errors import CheckpointExistsError
from jaxckpt_train.inspection.units import (
    bytes_text,
    clipped,
    counted,
    number_text,
    percent_text,
    seconds_text,
    time_text,
)
from jaxckpt_train.report import tables
from jaxckpt_train.report.changes import FILE, LeafSize
from jaxckpt_train.report.charts import MOST_METRICS, Drawing, draw, library, pair_name, shown_pairs
from jaxckpt_train.report.gather import Gathered
from jaxckpt_train.report.series import MOST_BYTES, Limits
from jaxckpt_train.report.tables import Table
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Backend
from jaxckpt_train.store.files import read_head

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufdd0-\ufdef\ufffe\uffff]")
_VOID = {"meta", "input", "br"}
MOST_PROBLEMS = 25
NAMES = (
    ("timeline", "Timeline"),
    ("throughput-of-saves", "Throughput"),
    ("goodput", "Goodput"),
    ("steps", "Steps"),
    ("metrics", "Metrics"),
    ("tree", "Tree"),
    ("step-to-step", "Changes"),
)
CHARTS = {  # the title and the description, by the place in the page
    "timeline": ("The run.", "Processes by how they ended, saves, restores, other events."),
    "save-times": (
        "Time of each save.",
        "Blocked: the loop waited for the save. In the background: the loop continued.",
    ),
    "throughput": (
        "Bytes per second.",
        "For a save, the time runs from its first write to its commit; for a restore, it is the whole time.",
    ),
    "time-spent": ("Where the time went.", "The run, and each process as shares of its own time."),
    "retention": ("Retention.", "A line for each step from its save to its deletion, coloured by its present state."),
    "disk-use": ("Disk use.", "The data of all steps."),
    "changes": ("Change of each leaf.", "From each kept step to the next."),
}
MARK = "<!doctype html>\n<!-- a report by jaxckpt_train -->\n"
"""The start of each page. A file without it is never replaced."""


def page_of(gathered: Gathered, most_bytes: int = MOST_BYTES) -> str:
    """Return the page, leaving out as many items as needed to keep it below `most_bytes`."""
    limits = Limits()
    while len((page := _page(gathered, limits)).encode()) > most_bytes and limits.leaves > 1:
        limits = limits.halved()
    return page


def _page(gathered: Gathered, limits: Limits) -> str:
    drawing = draw(gathered, limits)
    scripts = [*([library()] if drawing.places else []), _own_file("explorer.js"), _own_file("page.js")]
    name, made = "/".join(gathered.run.split("/")[-2:]), f"made at {time_text(gathered.made)} UTC"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{name}: report"),
        element("style", Html(_own_file("page.css"))),
    )
    header = element(
        "header",
        element(
            "div",
            element("h1", "Report of ", element("span", name)),
            element("button", "Dark", id="theme", type="button", aria_pressed="false", class_="needs-script"),
            class_="title",
        ),
        element("p", element("code", gathered.run), " \u00b7 ", made, class_="quiet"),
        element("nav", [element("a", title, href=f"#{name}") for name, title in NAMES], aria_label="Sections"),
    )
    content = [
        _summary(gathered),
        element("noscript", element("p", "Without JavaScript there are no charts; their data is in the tables.")),
        [make(gathered, drawing) for make in (_timeline, _throughput, _goodput, _steps, _metrics)],
        _explorer(gathered, limits),
        _changes(gathered, drawing),
    ]
    data = {"document": drawing.document, "places": drawing.places, "tree": _explorer_data(gathered, limits)}
    body = element(
        "body",
        element("a", "Skip to the report", href="#report", class_="skip"),
        header,
        element("main", content, id="report"),
        element("footer", element("p", "Made by jaxckpt_train. This page loads nothing from elsewhere.")),
        element("script", _json(data), type="application/json", id="report-data"),
        [element("script", Html(script)) for script in scripts],
    )
    return MARK + element("html", head, body, lang="en") + "\n"


def _json(value: Any) -> Html:
    """Return JSON for a script element, in which no text can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _policy(scripts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def check_place(backend: Backend, path: str) -> bool:
    """Return whether a path is an earlier report, which may be replaced; False: the path does not exist."""
    folder, name = os.path.split(path)
    if name not in {entry.name for entry in backend.list(folder)}:
        return False
    if read_head(backend, folder, name, len(MARK)) != MARK.encode():
        raise CheckpointExistsError(
            f"{path}: expected a new file or an earlier report, found another file: choose another file with -o"
        )
    return True


def write_page(backend: Backend, path: str, page: str) -> None:
    """Write a page atomically, and replace an earlier report."""
    if not check_place(backend, path):
        if not backend.write_new(path, page.encode()):
            raise CheckpointExistsError(f"{path}: another process has just created this file")
        return
    temporary = f"{os.path.dirname(path)}/{TEMPORARY_PREFIXES[0]}{secrets.token_hex(8)}"
    try:
        backend.write_new(temporary, page.encode())
        backend.exchange(temporary, path, sync=False)
    finally:
        backend.remove(temporary)


class Html(str):
    """Text that is HTML already and is not escaped again."""


def escaped(value: object) -> Html:
    """Return a text as HTML. HTML is not changed, and characters that a page must not contain are replaced."""
    if isinstance(value, Html):
        return value
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return Html(html.escape(_UNFIT.sub("\ufffd", text), quote=True))


def joined(*children: object) -> Html:
    """Return the concatenated HTML of the children. None is skipped, and lists are flattened."""
    found = []
    for child in children:
        if isinstance(child, list | tuple):
            found.append(joined(*child))
        elif child is not None:
            found.append(escaped(child))
    return Html("".join(found))


def element(tag: str, *children: object, **attributes: Any) -> Html:
    """Return an element.

    In names of attributes, a `_` at the end is removed, and others become `-`. The value True gives an attribute
    without a value. None and False omit the attribute.
    """
    texts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        plain = name.rstrip("_").replace("_", "-")
        texts.append(f" {plain}" if value is True else f' {plain}="{escaped(str(value))}"')
    begin = f"<{tag}{''.join(texts)}>"
    return Html(begin if tag in _VOID else f"{begin}{joined(*children)}</{tag}>")


def _own_file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _table(table: Table, caption: str) -> Html:
    kinds = ["right" if name.endswith("#") else "time" if name.endswith("(UTC)") else None for name in table.headings]
    head = [
        element("th", name.removesuffix("#"), scope="col", class_=kind)
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
    left_out = _note(table.left_out) if table.left_out else None
    return joined(left_out, element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption))


def _chart(drawing: Drawing, place: str, data: dict[str, Table], words: tuple[str, str] | None = None) -> Html:
    """Return the chart of a place, if there is one, and its data as collapsed tables."""
    title, about = words or CHARTS[place]
    opened = [
        element("details", element("summary", f"Data: {name}"), _table(table, name))
        for name, table in data.items()
        if table.rows
    ]
    found = element("div", opened, class_="data")
    if place not in drawing.places:
        return found
    label = f"{title} {about} The data is in the tables below it."
    return element(
        "figure",
        element("figcaption", element("strong", title), " ", about),
        element("div", id=f"chart-{place}", class_="chart", role="img", aria_label=label),
        _note(drawing.left_out[place]) if place in drawing.left_out else None,
        found,
    )


def _section(name: str, *children: object) -> Html:
    return element("section", element("h2", dict(NAMES)[name], id=name), *children, aria_labelledby=name)


def _note(text: str) -> Html:
    pieces = text.split("`")
    return element("p", [element("code", piece) if number % 2 else piece for number, piece in enumerate(pieces)],
                   class_="quiet")  # fmt: skip


def _problems(title: str, texts: Sequence[str]) -> Html:
    lines = [element("li", clipped(text, 600)) for text in texts[:MOST_PROBLEMS]]
    if len(texts) > MOST_PROBLEMS:
        lines.append(element("li", f"and {len(texts) - MOST_PROBLEMS:,} more"))
    return element("div", element("strong", title), element("ul", lines), class_="problems", role="note")


def _explorer_data(gathered: Gathered, limits: Limits) -> dict[str, Any]:
    """Return the leaves with their forms, sizes and last relative changes for the script of the tree."""
    if gathered.tree is None:
        return {"leaves": [], "forms": []}
    pairs = [pair for pair in gathered.changes.pairs if not pair.problem]
    last = pairs[-1] if pairs and pairs[-1].after == gathered.tree.step else None
    moved = {leaf.name: leaf.relative for leaf in last.leaves} if last is not None else {}
    forms: dict[str, int] = {}
    leaves: list[list[Any]] = []
    for leaf in _chosen(gathered.tree.leaves, limits):
        change: float | str | None = None
        if last is not None and leaf.form != FILE:
            change = moved.get(leaf.name, 0.0)
        if isinstance(change, float):  # JSON has no infinity, and the page shows three digits
            change = float(f"{change:.3g}") if math.isfinite(change) else str(change)
        leaves.append([leaf.name, forms.setdefault(leaf.form, len(forms)), leaf.bytes, change])
    return {"leaves": leaves, "forms": list(forms), "pair": None if last is None else [last.before, last.after]}


def _chosen(leaves: Sequence[LeafSize], limits: Limits) -> list[LeafSize]:
    """Return the largest leaves that a page has room for, in the order of the tree."""
    largest = sorted(range(len(leaves)), key=lambda number: -leaves[number].bytes)[: limits.leaves]
    return [leaves[number] for number in sorted(largest)]


def _explorer(gathered: Gathered, limits: Limits) -> Html:
    tree = gathered.tree
    if tree is None:
        return _section("tree", _note("There is no valid step."))
    total = sum(leaf.bytes for leaf in tree.leaves)
    shown = _chosen(tree.leaves, limits)
    left_out = None
    if len(shown) < len(tree.leaves):
        rest = bytes_text(total - sum(leaf.bytes for leaf in shown))
        left_out = _note(f"The {len(tree.leaves) - len(shown):,} smallest leaves, {rest}, are left out.")
    search = element(
        "div",
        element("label", "Search", for_="leaf-pattern"),
        element(
            "input", id="leaf-pattern", type="search", placeholder="kernel, state/params/*/bias or **/mu",
            autocomplete="off", spellcheck="false",
        ),
        element("button", "Sort by size", id="leaf-order", type="button", aria_pressed="false"),
        element("button", "Close all", id="leaf-close", type="button"),
        class_="bar",
    )  # fmt: skip
    return _section(
        "tree",
        element("p", f"Step {tree.step}: {counted(len(tree.leaves), 'leaf', 'leaves')}, {bytes_text(total)}."),
        _note("In a pattern, * matches anything within a key and ** anything. Other text matches a part of a path."),
        left_out,
        element("div", search, class_="needs-script"),
        element("p", "", id="leaf-count", class_="quiet", aria_live="polite"),
        element("div", "", id="leaves"),
        element(
            "details", element("summary", "Data: the largest leaves"), _table(tables.largest_table(tree), "Leaves")
        ),
    )


def _summary(gathered: Gathered) -> Html:
    there = [step for step in gathered.steps if step.is_there]
    newest = max((step.step for step in there if step.is_current and not step.problem), default=None)
    totals, counts = gathered.totals, gathered.counts
    of_time, useful = "no process in the history", "unknown"
    if gathered.processes:
        of_time, useful = f"of {seconds_text(totals.wall_s)}", percent_text(totals.share)
    per_save = f"{seconds_text(counts.blocked_s / counts.saves)} each" if counts.saves else "no save"
    rows = [
        ("Newest valid step", "none" if newest is None else f"{newest:,}", counted(len(there), "step") + " on disk"),
        ("Disk use", bytes_text(sum(step.bytes or 0 for step in there)), "data of all steps"),
        ("Useful time", useful, of_time),
        ("Processes", f"{len(gathered.processes):,}", "one is running" if gathered.is_live else "none is running"),
        ("Saves", f"{counts.saves - counts.failed_saves:,}", f"{counts.failed_saves:,} failed"),
        ("Blocked by saves", seconds_text(counts.blocked_s), per_save),
    ]
    tiles = [
        element("div", element("dt", name), element("dd", value), element("dd", remark, class_="quiet"))
        for name, value, remark in rows
    ]
    wrong = [f"Step {step.step}, {step.name}: {step.problem}" for step in gathered.damaged]
    failed = [save for save in gathered.saves if not save.ok]
    wrong += [f"Step {save.step} was not saved at {time_text(save.ended)}: {save.error}" for save in failed[-10:]]
    return joined(
        element("dl", tiles, class_="facts"),
        _problems("Problems", wrong) if wrong else None,
        _problems("Could not be read", gathered.warnings) if gathered.warnings else None,
    )


def _timeline(gathered: Gathered, drawing: Drawing) -> Html:
    if not (gathered.saves or gathered.restores or gathered.processes or gathered.marks):
        return _section("timeline", _note("The history has no events yet."))
    counts = gathered.counts
    saves = tables.table_of(gathered.saves, tables.save_cells, counts.saves)
    data = {
        "processes": tables.processes_table(gathered.processes, gathered.totals),
        "saves": saves,
        "restores": tables.table_of(gathered.restores, tables.restore_cells, counts.restores),
        "other events": tables.table_of(gathered.marks, tables.mark_cells, counts.marks),
    }
    events = ", ".join(f"{count:,} {clipped(kind, 40)}" for kind, count in list(gathered.events.items())[:20])
    return _section(
        "timeline",
        _note(f"Times are in UTC. The history has these events: {events}."),
        _chart(drawing, "timeline", data),
        _chart(drawing, "save-times", {"saves": saves}),
    )


def _throughput(gathered: Gathered, drawing: Drawing) -> Html:
    if "throughput" not in drawing.places:
        return _section("throughput-of-saves", _note("No save or restore has recorded its rate."))
    counts = gathered.counts
    data = {
        "saves": tables.table_of(gathered.saves, tables.save_cells, counts.saves),
        "restores": tables.table_of(gathered.restores, tables.restore_cells, counts.restores),
    }
    return _section("throughput-of-saves", _chart(drawing, "throughput", data))


def _goodput(gathered: Gathered, drawing: Drawing) -> Html:
    if not gathered.processes:
        return _section("goodput", _note("The history has no process."))
    totals = gathered.totals
    words = (
        f"{percent_text(totals.share)} of {seconds_text(totals.wall_s)} were spent on useful updates: "
        f"{counted(totals.useful_steps, 'update')}. Lost and repeated, or to be repeated: "
        f"{counted(totals.redone_steps, 'update')}."
    )
    return _section(
        "goodput",
        element("p", words),
        _chart(drawing, "time-spent", {"where the time of the run went": tables.spent_table(totals)}),
        _table(tables.processes_table(gathered.processes, totals), "Processes"),
    )


def _steps(gathered: Gathered, drawing: Drawing) -> Html:
    if not gathered.steps:
        return _section("steps", _note("No step has been saved yet."))
    counts = gathered.counts
    by_state = ", ".join(f"{count:,} {state}" for state, count in counts.states.items())
    present_last = sorted(gathered.steps, key=lambda step: step.is_there)
    uses = tables.table_of(gathered.disk_use, tables.use_cells, counts.changes)
    return _section(
        "steps",
        element("p", f"{counted(counts.steps, 'step')}: {by_state}."),
        _chart(drawing, "retention", {"steps": tables.table_of(present_last, tables.step_cells, counts.steps)}),
        _chart(drawing, "disk-use", {"disk use": uses}),
    )


def _metrics(gathered: Gathered, drawing: Drawing) -> Html:
    if not gathered.metrics:
        return _section("metrics", _note("No known step has metrics."))
    charts = []
    for number, (name, values) in enumerate([*gathered.metrics.items()][:MOST_METRICS]):
        there = gathered.counts.values[name]
        words = clipped(name, 60), f"{counted(there, 'step')}, last value {number_text(values[-1].value)}."
        charts.append(
            _chart(drawing, f"metric-{number}", {"values": tables.table_of(values, tables.metric_cells, there)}, words)
        )
    left_out = len(gathered.metrics) - MOST_METRICS
    more = _note(f"{counted(left_out, 'more metric')} left out; `--json` has them.") if left_out > 0 else None
    about = _note(
        "These are the metrics of the steps of the current branch. Metrics of deleted steps come from the history."
    )
    return _section("metrics", about, element("div", charts, class_="pairs"), more)


def _changes(gathered: Gathered, drawing: Drawing) -> Html:
    pairs = gathered.changes.pairs
    left_out = _note(gathered.changes.left_out) if gathered.changes.left_out else None
    if not pairs:
        return _section("step-to-step", left_out or _note("There are no two steps to compare."))
    more, failed = "", [f"{pair_name(pair)}: {pair.problem}" for pair in pairs if pair.problem]
    good = shown_pairs(gathered)
    if len(good) + len(failed) < len(pairs):
        more = f"The last {len(good):,} of {len(pairs) - len(failed):,} compared pairs; `--json` has all."
    lines = [
        f"{pair_name(pair)}: {counted(len(pair.leaves), 'leaf', 'leaves')} changed, {pair.equal:,} did not"
        for pair in good
    ]
    table = tables.changes_table(good, [pair_name(pair) for pair in good])
    return _section(
        "step-to-step",
        _note("The relative change of a leaf is the norm of the difference divided by the norm of its earlier value."),
        element("ul", [element("li", line) for line in lines]) if lines else None,
        _problems("Could not be compared", failed) if failed else None,
        _chart(drawing, "changes", {"changes of leaves": table}),
        _note(more) if more else None,
        left_out,
    )
