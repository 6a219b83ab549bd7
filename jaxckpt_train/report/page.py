"""The HTML page of a report: a single file that loads nothing and runs only its own scripts.

`page_of` builds the page, and `write_page` writes it atomically. All text is escaped, except text of type `Html`, which
only this module creates. So no text from a file can change the page.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxckpt_train.errors import CheckpointExistsError, StorageError
from jaxckpt_train.inspection.units import (
    bytes_text,
    clipped,
    counted,
    number_text,
    percent_text,
    rate_text,
    seconds_text,
    time_text,
)
from jaxckpt_train.report.changes import FILE, LeafSize
from jaxckpt_train.report.charts import MOST_METRICS, Drawing, draw, library, metric_place, pair_name, shown_pairs
from jaxckpt_train.report.gather import Gathered
from jaxckpt_train.report.series import MOST_BYTES, Limits
from jaxckpt_train.report.tables import (
    Table,
    changes_table,
    largest_table,
    marks_table,
    metric_table,
    processes_table,
    restores_table,
    saves_table,
    spent_table,
    steps_table,
    use_table,
)
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
    scripts = [library(), own_file("explorer.js"), own_file("page.js")] if drawing.places else [
        own_file("explorer.js"), own_file("page.js")
    ]  # fmt: skip
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{_short(gathered.run)}: report"),
        element("style", Html(own_file("page.css"))),
    )
    data = {"document": drawing.document, "places": drawing.places, "tree": explorer_data(gathered, limits)}
    body = element(
        "body",
        element("a", "Skip to the report", href="#report", class_="skip"),
        _header(gathered),
        element("main", _content(gathered, drawing, limits), id="report"),
        element("footer", element("p", "Made by jaxckpt_train. This page loads nothing from elsewhere.")),
        element("script", _json(data), type="application/json", id="report-data"),
        [element("script", Html(script)) for script in scripts],
    )
    return MARK + element("html", head, body, lang="en") + "\n"


def _short(run: str) -> str:
    return "/".join(run.split("/")[-2:])


def _header(gathered: Gathered) -> Html:
    links = [element("a", title, href=f"#{name}") for name, title in NAMES]
    made = f"made at {time_text(gathered.made)} UTC"
    return element(
        "header",
        element(
            "div",
            element("h1", "Report of ", element("span", _short(gathered.run))),
            element("button", "Dark", id="theme", type="button", aria_pressed="false", class_="needs-script"),
            class_="title",
        ),
        element("p", element("code", gathered.run), " \u00b7 ", made, class_="quiet"),
        element("nav", links, aria_label="Sections"),
    )


def _content(gathered: Gathered, drawing: Drawing, limits: Limits) -> Html:
    before = (timeline, throughput, goodput, steps, metrics)
    return joined(
        summary(gathered),
        element("noscript", element("p", "Without JavaScript there are no charts; their data is in the tables.")),
        [make(gathered, drawing) for make in before],
        explorer(gathered, limits),
        changes(gathered, drawing),
    )


def _json(value: Any) -> Html:
    """Return JSON for a script element, in which no text can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _policy(scripts: list[str]) -> str:
    """Return a content security policy that forbids loading and allows only these scripts."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def check_place(backend: Backend, path: str) -> bool:
    """Return whether a path is an earlier report, which may be replaced; False: the path does not exist.

    Raises:
        CheckpointExistsError: the path is another file.
        StorageError: the directory does not exist or cannot be read.
    """
    folder, name = os.path.split(path)
    try:
        names = {entry.name for entry in backend.list(folder)}
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        problem = "expected the directory of the page, found none: create it, or choose another file"
        raise StorageError(error.errno, problem, folder) from error
    if name not in names:
        return False
    if read_head(backend, folder, name, len(MARK)) != MARK.encode():
        raise CheckpointExistsError(
            f"{path}: expected a new file or an earlier report, found another file: choose another file with -o"
        )
    return True


def write_page(backend: Backend, path: str, page: str) -> None:
    """Write a page atomically, and replace an earlier report.

    Raises:
        CheckpointExistsError: the path is another file.
        StorageError: the file system refused the write.
    """
    data = page.encode()
    if not check_place(backend, path) and backend.write_new(path, data):
        return
    check_place(backend, path)  # another process may have created it meanwhile
    temporary = f"{os.path.dirname(path)}/{TEMPORARY_PREFIXES[0]}{secrets.token_hex(8)}"
    try:
        backend.write_new(temporary, data)
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

    A `_` at the end of a name is removed, and other `_` become `-`. The value True gives an attribute without a value.
    None and False omit the attribute.
    """
    texts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        plain = name.rstrip("_").replace("_", "-")
        texts.append(f" {plain}" if value is True else f' {plain}="{escaped(str(value))}"')
    begin = f"<{tag}{''.join(texts)}>"
    return Html(begin if tag in _VOID else f"{begin}{joined(*children)}</{tag}>")


def own_file(name: str) -> str:
    """Return the text of a style sheet or script next to this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def table_html(table: Table, caption: str) -> Html:
    """Return a table that scrolls if it is wider than the page."""
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
    """Return a chart with its description and its data as collapsed tables, or only the tables if there is no chart.

    Args:
        drawing: the charts.
        place: the ID of the place of the chart.
        title: the title of the chart.
        about: a description of the chart.
        tables: the data by name.
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
    """Return a section with its heading."""
    return element("section", element("h2", title, id=name), *children, aria_labelledby=name)


def facts(rows: Sequence[tuple[str, str, str]]) -> Html:
    """Return tiles with a name, a value and a remark each."""
    tiles = [
        element("div", element("dt", name), element("dd", value), element("dd", remark, class_="quiet"))
        for name, value, remark in rows
    ]
    return element("dl", tiles, class_="facts")


def note(text: str) -> Html:
    """Return a remark, in which text in backquotes becomes code."""
    pieces = text.split("`")
    return element("p", [element("code", piece) if number % 2 else piece for number, piece in enumerate(pieces)],
                   class_="quiet")  # fmt: skip


def problems(title: str, texts: Sequence[str]) -> Html:
    """Return a highlighted list of problems."""
    lines = [element("li", clipped(text, 600)) for text in texts[:MOST_PROBLEMS]]
    if len(texts) > MOST_PROBLEMS:
        lines.append(element("li", f"and {len(texts) - MOST_PROBLEMS:,} more"))
    return element("div", element("strong", title), element("ul", lines), class_="problems", role="note")


def explorer_data(gathered: Gathered, limits: Limits) -> dict[str, Any]:
    """Return the leaves with their forms, sizes and last relative changes, as data for the script of the tree."""
    if gathered.tree is None:
        return {"leaves": [], "forms": []}
    pairs = [pair for pair in gathered.changes.pairs if not pair.problem]
    last = pairs[-1] if pairs and pairs[-1].after == gathered.tree.step else None
    moved = {leaf.name: leaf.relative for leaf in last.leaves} if last is not None else {}
    forms: dict[str, int] = {}
    leaves = []
    for leaf in _chosen(gathered.tree.leaves, limits):
        is_compared = last is not None and leaf.form != FILE
        change = moved.get(leaf.name, 0.0) if is_compared else None
        leaves.append([leaf.name, forms.setdefault(leaf.form, len(forms)), leaf.bytes, _change(change)])
    return {"leaves": leaves, "forms": list(forms), "pair": None if last is None else [last.before, last.after]}


def _change(change: float | None) -> float | str | None:
    """Return a change for JSON, rounded to the digits that are shown."""
    if change is None or math.isfinite(change):
        return None if change is None else float(f"{change:.3g}")
    return str(change)


def _chosen(leaves: Sequence[LeafSize], limits: Limits) -> list[LeafSize]:
    """Return the largest leaves that a page has room for, in the order of the tree."""
    room, chosen = limits.leaf_characters, set[int]()
    for number in sorted(range(len(leaves)), key=lambda number: -leaves[number].bytes)[: limits.leaves]:
        room -= len(json.dumps(leaves[number].name))
        if room < 0:
            break
        chosen.add(number)
    return [leaf for number, leaf in enumerate(leaves) if number in chosen]


def explorer(gathered: Gathered, limits: Limits) -> Html:
    """Return the section of the tree of the newest valid step."""
    tree = gathered.tree
    if tree is None:
        return section("tree", "Tree", note("There is no valid step."))
    total = sum(leaf.bytes for leaf in tree.leaves)
    shown = _chosen(tree.leaves, limits)
    left_out = None
    if len(shown) < len(tree.leaves):
        rest = bytes_text(total - sum(leaf.bytes for leaf in shown))
        left_out = note(f"The {len(tree.leaves) - len(shown):,} smallest leaves, {rest}, are left out.")
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
    return section(
        "tree",
        "Tree",
        element("p", f"Step {tree.step}: {counted(len(tree.leaves), 'leaf', 'leaves')}, {bytes_text(total)}."),
        note("In a pattern, * matches anything within a key and ** anything. Other text matches a part of a path."),
        left_out,
        element("div", search, class_="needs-script"),
        element("p", "", id="leaf-count", class_="quiet", aria_live="polite"),
        element("div", "", id="leaves"),
        element(
            "details",
            element("summary", "Data: the largest leaves"),
            table_html(largest_table(tree), "Leaves"),
        ),
    )


Section = Callable[[Gathered, Drawing], Html]


def summary(gathered: Gathered) -> Html:
    """Return the summary: key figures and problems."""
    there = [step for step in gathered.steps if step.is_there]
    newest = max((step.step for step in there if step.is_current and not step.problem), default=None)
    totals, counts = gathered.totals, gathered.counts
    rows = [
        ("Newest valid step", "none" if newest is None else f"{newest:,}", counted(len(there), "step") + " on disk"),
        ("Disk use", bytes_text(sum(step.bytes or 0 for step in there)), "data of all steps"),
        ("Useful time", percent_text(totals.share) if gathered.processes else "unknown", _of_time(gathered)),
        ("Processes", f"{len(gathered.processes):,}", "one is running" if gathered.is_live else "none is running"),
        ("Saves", f"{counts.saves - counts.failed_saves:,}", f"{counts.failed_saves:,} failed"),
        ("Blocked by saves", seconds_text(counts.blocked_s), _per_save(gathered)),
    ]
    wrong = [f"Step {step.step}, {step.name}: {step.problem}" for step in gathered.damaged]
    failed = [save for save in gathered.saves if not save.ok]
    wrong += [f"Step {save.step} was not saved at {time_text(save.ended)}: {save.error}" for save in failed[-10:]]
    return joined(
        facts(rows),
        problems("Problems", wrong) if wrong else None,
        problems("Could not be read", gathered.warnings) if gathered.warnings else None,
    )


def _of_time(gathered: Gathered) -> str:
    return f"of {seconds_text(gathered.totals.wall_s)}" if gathered.processes else "no process in the history"


def _per_save(gathered: Gathered) -> str:
    counts = gathered.counts
    return f"{seconds_text(counts.blocked_s / counts.saves)} each" if counts.saves else "no save"


def timeline(gathered: Gathered, drawing: Drawing) -> Html:
    """Return the section of the timeline."""
    if not (gathered.saves or gathered.restores or gathered.processes or gathered.marks):
        return section("timeline", "Timeline", note("The history has no events yet."))
    tables: list[tuple[str, Table]] = [
        ("processes", processes_table(gathered.processes, gathered.totals)),
        ("saves", saves_table(gathered.saves, gathered.counts.saves)),
        ("restores", restores_table(gathered.restores, gathered.counts.restores)),
        ("other events", marks_table(gathered.marks, gathered.counts.marks)),
    ]
    events = ", ".join(f"{count:,} {clipped(kind, 40)}" for kind, count in list(gathered.events.items())[:20])
    return section(
        "timeline",
        "Timeline",
        note(f"Times are in UTC. The history has these events: {events}."),
        chart_html(
            drawing, "timeline", "The run.", "Processes by how they ended, saves, restores, other events.", tables
        ),
        chart_html(
            drawing,
            "save-times",
            "Time of each save.",
            "Blocked: the loop waited for the save. In the background: the loop continued.",
            [("saves", tables[1][1])],
        ),
    )


def throughput(gathered: Gathered, drawing: Drawing) -> Html:
    """Return the section of the throughput."""
    if "throughput" not in drawing.places:
        return section("throughput-of-saves", "Throughput", note("No save or restore has recorded its rate."))
    disk, counts = gathered.disk, gathered.counts
    saves, restores = saves_table(gathered.saves, counts.saves), restores_table(gathered.restores, counts.restores)
    limit = "With --measure-disk, the chart has a line for the rate of the disk."
    if disk is not None:
        limit = (
            f"The rate of the disk was {rate_text(disk.bytes_per_s)} when this report was made: the fastest of "
            f"{disk.tries} synced writes of {bytes_text(disk.bytes)} by one process."
        )
    return section(
        "throughput-of-saves",
        "Throughput",
        note(limit),
        chart_html(
            drawing,
            "throughput",
            "Bytes per second.",
            "For a save, the time runs from its first write to its commit; for a restore, it is the whole time.",
            [("saves", saves), ("restores", restores)],
        ),
    )


def goodput(gathered: Gathered, drawing: Drawing) -> Html:
    """Return the section of the goodput."""
    if not gathered.processes:
        return section("goodput", "Goodput", note("The history has no process."))
    totals = gathered.totals
    words = (
        f"{percent_text(totals.share)} of {seconds_text(totals.wall_s)} were spent on useful updates: "
        f"{counted(totals.useful_steps, 'update')}. Lost and repeated, or to be repeated: "
        f"{counted(totals.redone_steps, 'update')}."
    )
    return section(
        "goodput",
        "Goodput",
        element("p", words),
        chart_html(
            drawing,
            "time-spent",
            "Where the time went.",
            "The run, and each process as shares of its own time.",
            [("where the time of the run went", spent_table(totals))],
        ),
        table_html(processes_table(gathered.processes, totals), "Processes"),
    )


def steps(gathered: Gathered, drawing: Drawing) -> Html:
    """Return the section of the steps."""
    if not gathered.steps:
        return section("steps", "Steps", note("No step has been saved yet."))
    by_state = ", ".join(f"{count:,} {state}" for state, count in gathered.counts.states.items())
    return section(
        "steps",
        "Steps",
        element("p", f"{counted(gathered.counts.steps, 'step')}: {by_state}."),
        chart_html(
            drawing,
            "retention",
            "Retention.",
            "A line for each step from its save to its deletion, coloured by its present state.",
            [("steps", steps_table(gathered.steps, gathered.counts.steps))],
        ),
        chart_html(
            drawing,
            "disk-use",
            "Disk use.",
            "The data of all steps.",
            [("disk use", use_table(gathered))],
        ),
    )


def metrics(gathered: Gathered, drawing: Drawing) -> Html:
    """Return the section of the metrics by step."""
    if not gathered.metrics:
        return section("metrics", "Metrics", note("No known step has metrics."))
    charts = []
    for number, (name, values) in enumerate(gathered.metrics.items()):
        there = gathered.counts.values[name]
        table = metric_table(values, there)
        known = f"{counted(there, 'step')}, last value {number_text(values[-1].value)}."
        if number < MOST_METRICS:
            charts.append(chart_html(drawing, metric_place(number), clipped(name, 60), known, [("values", table)]))
    left_out = len(gathered.metrics) - MOST_METRICS
    more = note(f"{counted(left_out, 'more metric')} left out; `--json` has them.") if left_out > 0 else None
    about = note(
        "These are the metrics of the steps of the current branch. Metrics of deleted steps come from the history."
    )
    return section("metrics", "Metrics", about, element("div", charts, class_="pairs"), more)


def changes(gathered: Gathered, drawing: Drawing) -> Html:
    """Return the section of the changes between steps."""
    pairs = gathered.changes.pairs
    left_out = note(gathered.changes.left_out) if gathered.changes.left_out else None
    if not pairs:
        none = None if left_out else note("There are no two steps to compare.")
        return section("step-to-step", "Changes", none, left_out)
    more, failed = "", [f"{pair_name(pair)}: {pair.problem}" for pair in pairs if pair.problem]
    good = shown_pairs(gathered)
    if len(good) + len(failed) < len(pairs):
        more = f"The last {len(good):,} of {len(pairs) - len(failed):,} compared pairs; `--json` has all."
    lines = [
        f"{pair_name(pair)}: {counted(len(pair.leaves), 'leaf', 'leaves')} changed, {pair.equal:,} did not"
        for pair in good
    ]
    table = changes_table(good, [pair_name(pair) for pair in good])
    return section(
        "step-to-step",
        "Changes",
        note("The relative change of a leaf is the norm of the difference divided by the norm of its earlier value."),
        element("ul", [element("li", line) for line in lines]) if lines else None,
        problems("Could not be compared", failed) if failed else None,
        chart_html(
            drawing,
            "changes",
            "Change of each leaf.",
            "From each kept step to the next.",
            [("changes of leaves", table)],
        ),
        note(more) if more else None,
        left_out,
    )
