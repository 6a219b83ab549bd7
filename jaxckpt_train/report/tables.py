"""The tables of a report, which hold the data of each chart as text. The charts show their cells in tooltips."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxckpt_train.inspection.units import (
    bytes_text,
    count_text,
    counted,
    number_text,
    percent_text,
    rate_text,
    seconds_text,
    time_text,
)
from jaxckpt_train.report.changes import PairChange, TreeSizes
from jaxckpt_train.report.gather import Process
from jaxckpt_train.report.series import DiskUse, Drain, Item, Mark, MetricValue, Restore, Save, StepLife
from jaxckpt_train.run.goodput import Goodput

MOST_ROWS = 150
Cells = dict[str, str]  # a row, by the headings of the columns; one that ends with "#" has numbers
PARTS = {  # of the time of a run
    "useful_s": "useful updates",
    "lost_s": "lost updates",
    "blocked_s": "blocked by saves",
    "to_resume_s": "until the state was restored",
    "other_s": "processes without updates",
    "between_s": "between processes",
}
MARKS = {"preempted": "preemption", "set_aside": "step set aside", "take_over": "lock taken over"}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text, which may have a row of totals and a sentence about rows that are left out."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    last: Sequence[str] = ()
    left_out: str = ""


def table_of(items: Sequence[Item], cells: Callable[[Item], Cells], there: int) -> Table:
    """Return a table of the last items, of which `there` exist and the data of the report has these."""
    rows = [cells(each) for each in items[-MOST_ROWS:]]
    has = "all" if len(items) == there else f"{len(items):,}"
    left_out = "" if len(rows) == there else f"The last {len(rows):,} of {there:,}; `--json` has {has} of them."
    return Table([*rows[0]] if rows else [], [[*row.values()] for row in rows], left_out=left_out)


def processes_table(processes: Sequence[Process], totals: Goodput) -> Table:
    """Return a table with a row for each process, and the totals."""
    last = ["", "total", "", "", "", *_amounts(totals, totals.share).values()]
    return dataclasses.replace(table_of(processes, process_cells, len(processes)), last=last)


def process_cells(each: Process) -> Cells:
    """Return a row of the table of processes."""
    return {
        "process#": str(each.number),
        "began (UTC)": time_text(each.began),
        "ended": each.how,
        "where": each.where,
        "steps#": "-" if each.first_step is None else f"{each.first_step}-{each.last_step}",
        **_amounts(each, each.useful_s / each.wall_s if each.wall_s else 0.0),
    }


def _amounts(of: Process | Goodput, share: float) -> Cells:
    return {
        "useful#": count_text(of.useful_steps),
        "redone#": count_text(of.redone_steps),
        "saves#": f"{of.saves:,}" + (f" and {of.failed_saves:,} failed" if of.failed_saves else ""),
        "blocked#": seconds_text(of.blocked_s),
        "resume#": seconds_text(of.to_resume_s),
        "wall#": seconds_text(of.wall_s),
        "useful time#": f"{seconds_text(of.useful_s)}, {percent_text(min(1.0, share))}",
    }


def spent_table(totals: Goodput) -> Table:
    """Return a table of where the time of the run went."""
    whole, seconds = totals.wall_s, [(name, getattr(totals, field)) for field, name in PARTS.items()]
    rows = [[name, seconds_text(each), percent_text(each / whole if whole else 0.0)] for name, each in seconds]
    return Table(["what", "time#", "share#"], rows, ["all", seconds_text(whole), ""])


def save_cells(save: Save) -> Cells:
    """Return a row of the table of saves."""
    return {
        "step#": count_text(save.step),
        "tier": save.tier,
        "ended (UTC)": time_text(save.ended),
        "blocked#": seconds_text(save.blocked_s),
        "background#": seconds_text(save.background_s),
        "size#": bytes_text(save.bytes),
        "written#": bytes_text(save.written_bytes),
        "rate#": rate_text(save.bytes_per_s),
        "reason": save.reason,
        "outcome": "committed" if save.ok else f"failed: {save.error}",
    }


def restore_cells(each: Restore) -> Cells:
    """Return a row of the table of restores."""
    return {
        "step#": count_text(each.step),
        "tier": each.tier,
        "newer than the run directory#": "" if each.ahead_steps is None else counted(each.ahead_steps, "step"),
        "ended (UTC)": time_text(each.ended),
        "took#": seconds_text(each.restore_s),
        "size#": bytes_text(each.bytes),
        "rate#": rate_text(each.bytes_per_s),
        "skipped damaged steps": ", ".join(each.skipped),
    }


def drain_cells(each: Drain) -> Cells:
    """Return a row of the table of copies to the run directory."""
    return {
        "step#": count_text(each.step),
        "ended (UTC)": time_text(each.ended),
        "took#": seconds_text(each.drain_s),
        "after its save#": seconds_text(each.lag_s),
        "behind the fast tier#": "" if each.lag_steps is None else counted(each.lag_steps, "step"),
        "size#": bytes_text(each.bytes),
    }


def mark_cells(mark: Mark) -> Cells:
    """Return a row of the table of other events."""
    what, step = MARKS[mark.kind], count_text(mark.step)
    return {"time (UTC)": time_text(mark.time), "what": what, "step#": step, "why": mark.text}


def step_cells(step: StepLife) -> Cells:
    """Return a row of the table of steps."""
    remarks = [
        "pinned" if step.pinned and step.state != "pinned" else "",
        "temporary" if step.temporary and step.state != "temporary" else "",
        f"left behind at {time_text(step.left)}" if step.left else "",
        f"set aside at {time_text(step.set_aside)}" if step.set_aside else "",
        step.problem,
    ]
    return {
        "step#": count_text(step.step),
        "directory": step.name,
        "state": step.state,
        "saved (UTC)": time_text(step.saved),
        "deleted (UTC)": time_text(step.deleted),
        "size#": bytes_text(step.bytes),
        "remarks": "; ".join(filter(None, remarks)),
    }


def use_cells(use: DiskUse) -> Cells:
    """Return a row of the table of the disk use."""
    return {"from (UTC)": time_text(use.time), "steps#": count_text(use.steps), "size#": bytes_text(use.bytes)}


def metric_cells(each: MetricValue) -> Cells:
    """Return a row of the table of a metric."""
    return {"step#": count_text(each.step), "value#": number_text(each.value)}


def largest_table(tree: TreeSizes, most: int = 50) -> Table:
    """Return a table of the largest leaves, for browsers without JavaScript."""
    largest = sorted(tree.leaves, key=lambda leaf: -leaf.bytes)[:most]
    left_out = "" if len(largest) == len(tree.leaves) else f"The {most} largest of {len(tree.leaves):,} leaves."
    rows = [[leaf.name, leaf.form, bytes_text(leaf.bytes)] for leaf in largest]
    return Table(["leaf", "form", "size#"], rows, left_out=left_out)


def changes_table(pairs: Sequence[PairChange], names: Sequence[str]) -> Table:
    """Return a table of relative changes with a column for each pair, sorted by the change in the last pair."""
    by_name = [{leaf.name: leaf for leaf in pair.leaves} for pair in pairs]
    order: dict[str, float] = {}
    for pair in by_name:  # the last pair counts
        for name, leaf in pair.items():
            order[name] = leaf.relative if leaf.relative is not None and not math.isnan(leaf.relative) else math.inf
    chosen = sorted(order, key=lambda name: -order[name])
    words = {"only_a": "removed", "only_b": "new", "form": "another form"}
    rows = []
    for name in chosen[:MOST_ROWS]:
        leaves = [pair.get(name) for pair in by_name]
        cells = [
            "equal" if leaf is None else words.get(leaf.kind) or number_text(leaf.relative) or "changed"
            for leaf in leaves
        ]
        rows.append([name, *cells])
    left_out = "" if len(rows) == len(chosen) else f"{len(rows):,} of {len(chosen):,} leaves; `--json` has all of them."
    whole = [number_text(pair.relative) if pair.relative is not None else "equal" for pair in pairs]
    return Table(["leaf", *(f"{name}#" for name in names)], rows, ["all values that changed", *whole], left_out)
