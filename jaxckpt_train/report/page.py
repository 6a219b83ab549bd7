"""The HTML page of a report: a single file that loads nothing and runs only its own scripts.

The template `page.html` lays out the page and escapes all texts, so that no text from a file changes it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import CheckpointExistsError
from jaxckpt_train.inspection.units import (
    bytes_text,
    clipped,
    count_text,
    counted,
    number_text,
    percent_text,
    seconds_text,
    time_text,
)
from jaxckpt_train.report import tables
from jaxckpt_train.report.changes import FILE, LeafSize
from jaxckpt_train.report.charts import MOST_METRICS, draw, library, pair_name, shown_pairs
from jaxckpt_train.report.gather import Gathered
from jaxckpt_train.report.series import MOST_BYTES, Limits
from jaxckpt_train.report.tables import Table, table_of
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Backend, objects_of
from jaxckpt_train.store.files import read_head, read_whole

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufdd0-\ufdef\ufffe\uffff]")
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
    "drain-lag": (
        "Copies to the run directory.",
        "How long after the call that saved a step its copy from the fast tier was in the run directory.",
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
    leaves = [] if gathered.tree is None else _largest(gathered.tree.leaves, limits.leaves)
    scripts = [*([library()] if drawing.places else []), _own_file("explorer.js"), _own_file("page.js")]
    metrics = _metrics(gathered)
    template = _environment().from_string(_own_file("page.html"))
    return MARK + template.render(
        title="/".join(gathered.run.split("/")[-2:]),
        gathered=gathered,
        drawing=drawing,
        names=dict(NAMES),
        most_problems=MOST_PROBLEMS,
        facts=_facts(gathered),
        wrong=_wrong(gathered),
        events=", ".join(f"{count:,} {clipped(kind, 40)}" for kind, count in list(gathered.events.items())[:20]),
        states=", ".join(f"{count:,} {state}" for state, count in gathered.counts.states.items()),
        charts=CHARTS | metrics,
        metrics=metrics,
        tables=_tables(gathered),
        leaves=leaves,
        pairs={pair_name(pair): pair for pair in shown_pairs(gathered)},
        failed=[f"{pair_name(pair)}: {pair.problem}" for pair in gathered.changes.pairs if pair.problem],
        data={"document": drawing.document, "places": drawing.places, "tree": _explorer_data(gathered, leaves)},
        policy=_policy(scripts),
        style=_own_file("page.css"),
        scripts=scripts,
    )


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_fit
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    texts = (bytes_text, clipped, count_text, counted, percent_text, seconds_text, time_text)
    environment.globals.update({function.__name__: function for function in texts})
    return environment


def _fit(value: object) -> object:
    """Replace the characters that a page must not contain. Markup of the template stays as it is."""
    if hasattr(value, "__html__"):
        return value
    return _UNFIT.sub("\ufffd", str(value).encode("utf-8", "backslashreplace").decode())


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
    if is_url(path):
        if backend.kind(path) != "file":
            return False
    elif name not in {entry.name for entry in backend.list(folder)}:
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
    if is_url(path):
        before = read_whole(backend, *os.path.split(path), limit=None).tobytes()
        if not objects_of(backend).replace(path, page.encode(), before):
            raise CheckpointExistsError(f"{path}: another process has just replaced it")
        return
    temporary = f"{os.path.dirname(path)}/{TEMPORARY_PREFIXES[0]}{secrets.token_hex(8)}"
    try:
        backend.write_new(temporary, page.encode())
        backend.exchange(temporary, path, sync=False)
    finally:
        backend.remove(temporary)


def _own_file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _facts(gathered: Gathered) -> list[tuple[str, str, str]]:
    """Return the names, values and remarks at the top of the page."""
    there = [step for step in gathered.steps if step.is_there]
    newest = "none" if gathered.tree is None else count_text(gathered.tree.step)
    totals, counts = gathered.totals, gathered.counts
    of_time, useful = "no process in the history", "unknown"
    if gathered.processes:
        of_time, useful = f"of {seconds_text(totals.wall_s)}", percent_text(totals.share)
    fast = [each.ahead_steps or 0 for each in gathered.restores if each.tier == "fast"]
    per_save = f"{seconds_text(counts.blocked_s / counts.saves)} each" if counts.saves else "no save"
    return [
        ("Newest valid step", newest, counted(len(there), "step") + " on disk"),
        ("Disk use", bytes_text(sum(step.bytes or 0 for step in there)), "data of all steps"),
        ("Useful time", useful, of_time),
        ("Processes", f"{len(gathered.processes):,}", "one is running" if gathered.is_live else "none is running"),
        ("Saves", f"{counts.saves - counts.failed_saves:,}", f"{counts.failed_saves:,} failed"),
        ("Blocked by saves", seconds_text(counts.blocked_s), per_save),
        *([("Saved by the fast tier", counted(sum(fast), "update"), counted(len(fast), "restore"))] if fast else []),
    ]


def _wrong(gathered: Gathered) -> list[str]:
    wrong = [f"Step {step.step}, {step.name}: {step.problem}" for step in gathered.damaged]
    failed = [save for save in gathered.saves if not save.ok]
    return wrong + [f"Step {save.step} was not saved at {time_text(save.ended)}: {save.error}" for save in failed[-10:]]


def _metrics(gathered: Gathered) -> dict[str, tuple[str, str]]:
    """Return the title and the description of the chart of each metric, by its place."""
    found = {}
    for number, (name, values) in enumerate([*gathered.metrics.items()][:MOST_METRICS]):
        about = f"{counted(gathered.counts.values[name], 'step')}, last value {number_text(values[-1].value)}."
        found[f"metric-{number}"] = clipped(name, 60), about
    return found


def _tables(gathered: Gathered) -> dict[str, dict[str, Table]]:
    """Return the tables below each chart and below the tree, by name."""
    counts, pairs = gathered.counts, shown_pairs(gathered)
    saves = table_of(gathered.saves, tables.save_cells, counts.saves)
    restores = table_of(gathered.restores, tables.restore_cells, counts.restores)
    present_last = sorted(gathered.steps, key=lambda step: step.is_there)
    found = {
        "timeline": {
            "processes": tables.processes_table(gathered.processes, gathered.totals),
            "saves": saves,
            "restores": restores,
            "other events": table_of(gathered.marks, tables.mark_cells, counts.marks),
        },
        "save-times": {"saves": saves},
        "drain-lag": {"copies to the run directory": table_of(gathered.drains, tables.drain_cells, counts.drains)},
        "throughput": {"saves": saves, "restores": restores},
        "time-spent": {"where the time of the run went": tables.spent_table(gathered.totals)},
        "retention": {"steps": table_of(present_last, tables.step_cells, counts.steps)},
        "disk-use": {"disk use": table_of(gathered.disk_use, tables.use_cells, counts.changes)},
        "changes": {"changes of leaves": tables.changes_table(pairs, [pair_name(pair) for pair in pairs])},
    }
    for number, (name, values) in enumerate([*gathered.metrics.items()][:MOST_METRICS]):
        found[f"metric-{number}"] = {"values": table_of(values, tables.metric_cells, counts.values[name])}
    if gathered.tree is not None:
        found["tree"] = {"leaves": tables.largest_table(gathered.tree)}
    return found


def _largest(leaves: Sequence[LeafSize], most: int) -> list[LeafSize]:
    """Return the largest leaves, in the order of the tree."""
    largest = sorted(range(len(leaves)), key=lambda number: -leaves[number].bytes)[:most]
    return [leaves[number] for number in sorted(largest)]


def _explorer_data(gathered: Gathered, shown: Sequence[LeafSize]) -> dict[str, Any]:
    """Return the leaves with their forms, sizes and last relative changes for the script of the tree."""
    if gathered.tree is None:
        return {"leaves": [], "forms": []}
    pairs = [pair for pair in gathered.changes.pairs if not pair.problem]
    last = pairs[-1] if pairs and pairs[-1].after == gathered.tree.step else None
    moved = {leaf.name: leaf.relative for leaf in last.leaves} if last is not None else {}
    forms: dict[str, int] = {}
    leaves: list[list[Any]] = []
    for leaf in shown:
        change: float | str | None = None
        if last is not None and leaf.form != FILE:
            change = moved.get(leaf.name, 0.0)
        if isinstance(change, float):  # JSON has no infinity, and the page shows three digits
            change = float(f"{change:.3g}") if math.isfinite(change) else str(change)
        leaves.append([leaf.name, forms.setdefault(leaf.form, len(forms)), leaf.bytes, change])
    return {"leaves": leaves, "forms": list(forms), "pair": None if last is None else [last.before, last.after]}
