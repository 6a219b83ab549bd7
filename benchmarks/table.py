"""Tables of a record in a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from benchmarks import cells
from benchmarks.record import Record, WorkloadRecord
from benchmarks.summary import summarise

WIDTH_WITHOUT_TERMINAL = 180


def stdout_console() -> Console:
    """A console that stays wide enough for the tables when stdout is a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def show(console: Console, record: Record) -> None:
    """The machine, then tables, absences and warnings of every workload."""
    for line in cells.machine_lines(record):
        console.print(line, soft_wrap=True, markup=False)
    for workload in record.workloads.values():
        show_workload(console, workload)
    console.print(cells.how_to_read(record), markup=False)


def show_workload(console: Console, workload: WorkloadRecord) -> None:
    """The tables of one workload, and what has to be known about them."""
    summary = summarise(workload.turns)
    for text in cells.tables(workload, summary):
        show_text(console, text)
    for line in cells.absent(workload):
        console.print(line, markup=False)
    for warning in summary.warnings:
        console.print(f"WARNING: {warning}", style="bold red", markup=False)
    for subject, reason in workload.failed.items():
        console.print(f"FAILED: {subject}: {reason}", style="bold red", markup=False)


def show_text(console: Console, text: cells.TextTable) -> None:
    """One table."""
    table = Table(title=text.title, title_justify="left", show_lines=True)
    for number, heading in enumerate(text.headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in text.rows:
        table.add_row(*row)
    console.print(table)
