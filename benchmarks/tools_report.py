"""The cost of inspecting and converting, as tables and a page: `python -m benchmarks.tools_report FILE.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_command
from benchmarks.cells import TextTable
from benchmarks.figure_page import figure_lines, report_command, show_figures
from benchmarks.spread import Spread

PAGE = "tools.md"
MIB = 1 << 20

HOW_TO_READ = """\
median, and smallest .. largest of the rounds; in a round each has its turn, in a process of its own, with nothing of
the source in the page cache. x: seconds relative to those of the first row in the same round. memory: the process's
peak minus its memory at the start, measured by the kernel; for a load including the loaded arrays. The start of Python
and the imports of libraries are left out, except for whole commands, which are timed from the shell to their end."""


def tables(results: Mapping[str, Any]) -> list[TextTable]:
    """All figures as text."""
    size = results["size"]
    saved = size["arrays"] * size["array_bytes"] / 2**30
    found = [
        _turns(f"{saved:.3g} GiB saved by Orbax {interface}", turns) for interface, turns in results["imports"].items()
    ]
    pair = size["pair_arrays"] * size["array_bytes"] / 2**30
    found.append(_turns(f"two steps of {pair:.3g} GiB, in which every value differs", results["diff"]))
    rows = [(name, _spread([1e3 * each for each in seconds])) for name, seconds in results["commands"].items()]
    found.append(TextTable("whole commands", ("jaxckpt", "ms"), rows))
    return found


def _turns(title: str, turns: Mapping[str, Sequence[Mapping[str, float]]]) -> TextTable:
    first = next(iter(turns.values()))
    rows = []
    for name, samples in turns.items():
        ratios = [one["seconds"] / base["seconds"] for one, base in zip(samples, first, strict=True)]
        memory = statistics.median(one["peak_bytes"] for one in samples) / MIB
        rows.append((name, _spread([one["seconds"] for one in samples]), _spread(ratios), f"{memory:,.0f}"))
    return TextTable(title, ("", "seconds", "x", "memory MiB"), rows)


def _spread(values: Sequence[float]) -> str:
    one = Spread.of(values)
    digits = 2 if one.median < 100 else 0
    return f"{one.median:.{digits}f}\n{one.minimum:.{digits}f} .. {one.maximum:.{digits}f}"


def show(console: Console, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Everything, in a terminal."""
    show_figures(console, machine, tables(results), HOW_TO_READ, [])


def write(folder: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# The cost of inspecting and converting", ""]
    lines += ["Written by `benchmarks.tools_report` from the measurements of `make bench-tools`.", ""]
    lines += [f"- {line}" for line in cost_command.machine_lines(dict(machine))]
    lines += figure_lines(tables(results), HOW_TO_READ)
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


main = report_command("tools_report", __doc__, PAGE, show, write)

if __name__ == "__main__":
    main()
