"""Shows figures that were measured, in a terminal and as a page, and the command that does so with a recorded run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_command, table
from benchmarks.cells import TextTable
from benchmarks.markdown import table_lines

Results = Mapping[str, Any]
Show = Callable[[Console, Mapping[str, Any], Results], None]
Write = Callable[[Path, Mapping[str, Any], Results], None]


def show_figures(
    console: Console, machine: Mapping[str, Any], tables: Sequence[TextTable], how_to_read: str, remarks: Sequence[str]
) -> None:
    """The machine, the tables, how to read them, and what else there is to say."""
    cost_command.show_machine(console, dict(machine))
    for text in tables:
        table.show_text(console, text)
    console.print(how_to_read, soft_wrap=True)
    for line in remarks:
        console.print(line, markup=False)


def figure_lines(tables: Sequence[TextTable], how_to_read: str) -> list[str]:
    """How to read the tables, and the tables, in Markdown."""
    lines = ["", "```", how_to_read, "```", ""]
    for text in tables:
        lines += [f"**{text.title}**", "", *table_lines(text), ""]
    return lines


def report_command(name: str, about: str | None, files: str, show: Show, write: Write) -> Callable[..., None]:
    """The command line that shows a recorded run, and writes its page if asked.

    Args:
        name: of the module.
        about: what it does.
        files: what is written, for the help.
        show: shows the run in a terminal.
        write: writes its page into a folder.
    """

    def main(arguments: Sequence[str] | None = None) -> None:
        """Show a recorded run, and write its page if asked."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
        parser.add_argument("record", type=Path, help="a file that --json wrote")
        parser.add_argument("--page", type=Path, help=f"folder for {files}")
        options = parser.parse_args(arguments)
        record = json.loads(options.record.read_text(encoding="utf-8"))
        show(cost_command.stdout_console(), record["machine"], record["results"])
        if options.page:
            write(options.page, record["machine"], record["results"])

    return main
