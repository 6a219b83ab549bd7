"""Reports from recorded runs: `python -m benchmarks.report RUN.json ... [--plots FOLDER]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import markdown, plots, table
from benchmarks.record import Record, merge


def main(arguments: Sequence[str] | None = None) -> None:
    """Show the tables of one or several recorded runs, and write plots and a page if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="files that --json wrote, of one machine")
    parser.add_argument("--plots", type=Path, help="folder for save.png, load.png and results.md, and jobs.md")
    options = parser.parse_args(arguments)
    record = merge([Record.read(file) for file in options.records])
    table.show(table.stdout_console(), record)
    if options.plots:
        write_page(record, options.plots)


def write_page(record: Record, folder: Path) -> None:
    """The plots and `results.md`, and what was measured of jobs as `jobs.md`, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs, others = record.of_jobs(True), record.of_jobs(False)
    if others.workloads:
        markdown.write(others, folder, plots.write(others, folder))
    if jobs.workloads:
        markdown.write(jobs, folder, page=markdown.JOBS)


if __name__ == "__main__":
    main()
