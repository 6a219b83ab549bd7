"""Markdown of a record: the tables, the machine and the commands, as a page for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import cells
from benchmarks.cells import TextTable
from benchmarks.record import Record, WorkloadRecord
from benchmarks.summary import summarise

RESULTS, JOBS = ("results.md", "Results"), ("jobs.md", "Multi-process jobs")
"""Name and title of a page."""


def write(record: Record, folder: Path, plots: Sequence[Path] = (), page: tuple[str, str] = RESULTS) -> Path:
    """Write a page to `folder`, with the plots that lie in the same folder.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, title = page
    file = folder / name
    file.write_text("\n".join(_page(record, folder, plots, title)), encoding="utf-8")
    return file


def _page(record: Record, folder: Path, plots: Sequence[Path], title: str) -> list[str]:
    commands = list(dict.fromkeys(workload.command for workload in record.workloads.values()))
    lines = [
        f"# {title}",
        "",
        f"Written by `benchmarks.report`; {_explained(folder)} describes what is measured, and how.",
        "",
    ]
    lines += [f"- {line}" for line in cells.machine_lines(record)]
    lines += ["", "```", *commands, "```", "", "```", cells.how_to_read(record).rstrip(), "```", ""]
    for plot in plots:
        lines += [f"![{plot.stem}]({plot.name})", ""]
    for workload in record.workloads.values():
        lines += _section(workload)
    return lines


def _explained(folder: Path) -> str:
    """A link where it leads somewhere."""
    name = "explanation/benchmarks.md"
    return f"[benchmarks.md](../{name})" if (folder.parent / name).exists() else f"`docs/{name}`"


def _section(workload: WorkloadRecord) -> list[str]:
    summary = summarise(workload.turns)
    lines = [f"## {workload.name}", ""]
    for table in cells.tables(workload, summary):
        lines += [table.title, "", *table_lines(table), ""]
    notes = cells.absent(workload)
    notes += [f"warning: {warning}" for warning in summary.warnings]
    notes += [f"failed: {subject}: {reason.splitlines()[0]}" for subject, reason in workload.failed.items()]
    before = f"load average before: {workload.load_average:.2f}"
    notes.append(f"commit {workload.commit}; seed {workload.seed}; {before}")
    return [*lines, *(f"- {note}" for note in notes), ""]


def table_lines(table: TextTable) -> list[str]:
    """A table without its title."""
    bars = "|".join(["---", *["---:"] * (len(table.headings) - 1)])
    rows = ["| " + " | ".join(cell.replace("\n", "<br>") for cell in row) + " |" for row in table.rows]
    return [f"| {' | '.join(table.headings)} |", f"|{bars}|", *rows]
