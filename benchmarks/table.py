"""Tables of a summary, for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from benchmarks.machine import Description
from benchmarks.summary import MEASURES, RATIOS, Spread, Summary
from benchmarks.workloads import Workload

WIDTH_WITHOUT_TERMINAL = 160

HOW_TO_READ = """\
Median and, below it, min .. max of the counted rounds. CPU: processor time of this process until durable, or loaded.
  blocking       until the asynchronous save returned
  save, plain    until the subject said that the save is finished
  save, durable  until all its files and directories are synced. Ours and raw count as durable when finished. Orbax has
                 by then synced the array data, but neither its metadata files nor the final rename: an fsync of all
                 its files and directories and of the parent is added, mostly of what is clean already.
"""
HOW_TO_READ_RATIOS = """\
Ratios: their time / our time in the same round; above 1 ours is faster. "save, durable" compares like with like;
"save, theirs plain" divides their save without the added fsync by our durable one.
"""


def stdout_console() -> Console:
    """A console that stays wide enough for the tables when stdout is a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def show_machine(console: Console, machine: Description) -> None:
    """One line each for the machine, the file system and the versions."""
    gib = int(machine["memory_bytes"] or 0) / (1 << 30)
    console.print(f"machine: {machine['cores']} cores ({machine['processor']}), {gib:.1f} GiB, {machine['kernel']}")
    console.print(f"files: {machine['file_system']} on {machine['device']}, {machine['mount_options']}", soft_wrap=True)
    names = ("python", "jax", "numpy", "orbax-checkpoint")
    console.print("versions: " + ", ".join(f"{name} {machine[name]}" for name in names))


def show(console: Console, workload: Workload, summary: Summary, counted_rounds: int) -> None:
    """The seconds, the ratios if there are any, and the warnings of one workload."""
    size = f"{workload.leaves} arrays, {workload.nbytes / 1e6:,.1f} MB, {counted_rounds} rounds"
    console.print(_table(f"{workload.name}: seconds ({size})", MEASURES.values(), summary.seconds, _seconds))
    if summary.ratios:
        console.print(_table(f"{workload.name}: their time / our time", RATIOS, summary.ratios, _times))
    for warning in summary.warnings:
        console.print(f"WARNING: {warning}", style="bold red", markup=False)


def _table(
    title: str,
    headings: Iterable[str],
    rows: dict[str, dict[str, Spread | None]],
    cell: Callable[[Spread], str],
) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("subject")
    for heading in headings:
        table.add_column(heading, justify="right")
    for subject, spreads in rows.items():
        table.add_row(subject, *(cell(spread) if spread else "-" for spread in spreads.values()))
    return table


def _seconds(spread: Spread) -> str:
    return f"{spread.median:.4f}\n{spread.minimum:.4f} .. {spread.maximum:.4f}"


def _times(spread: Spread) -> str:
    return f"{spread.median:.3g}x\n{spread.minimum:.3g} .. {spread.maximum:.3g}"
