"""Overheads that were measured, as tables and a page: `python -m benchmarks.overhead_report FILE.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_command, overhead_plot
from benchmarks.cells import TextTable
from benchmarks.figure_page import figure_lines, report_command, show_figures
from benchmarks.overhead_summary import Overhead, as_overhead, intervals_of
from benchmarks.spread import Spread

PAGE, PLOT = "overhead-budget.md", "overhead-budget.png"

HOW_TO_READ = """\
slowed down: wall time per update in the blocks with saves, including the calls, relative to the mean of the blocks
without saves before and after, minus one. by the policy: its own measurement, on which it acts. noise: an update in a
block without saves relative to the previous such block. interval: from the start of a save to that of the next, in the
time of the loop with saves, which is stopped during the blocks without. lasted: the duration of a save until its
commit."""


def tables(results: Mapping[str, Any]) -> list[TextTable]:
    """All figures as text."""
    rows = [_row(name, disk, as_overhead(disk["overhead"])) for name, disk in results["disks"].items()]
    headings = "disk, slowed down, one block, by the policy, noise, saves, interval s, lasted s, update ms"
    found = [TextTable(f"a budget of {results['fraction']:.1%}", tuple(headings.split(", ")), rows)]
    if results["phases"]:
        found.append(_phases(results["phases"]))
    return found


def _row(name: str, disk: Mapping[str, Any], one: Overhead) -> tuple[str, ...]:
    rate = disk.get("bytes_per_s")
    return (
        name if rate is None else f"{name}, {rate / 2**20:g} MiB/s",
        f"{one.total:.2%}",
        _percent(one.measured),
        f"{one.policy:.2%}",
        _percent(one.noise),
        str(one.saves),
        _seconds(one.interval_s),
        _seconds(one.lasted_s),
        f"{one.update_s.median * 1e3:.0f}",
    )


def _phases(phases: Mapping[str, Any]) -> TextTable:
    """What the policy chose in each phase: of the saves that began in it, and the next one."""
    saves = phases["saves"]
    rows: list[tuple[str, ...]] = []
    for number, rate in enumerate(phases["rates"]):
        began, ended = phases["ends_s"][number], phases["ends_s"][number + 1]
        inside = [place for place, save in enumerate(saves) if began <= save["at_s"] < ended]
        intervals = intervals_of(saves[inside[0] : inside[-1] + 1]) if inside else []
        lasted = [saves[place]["lasted_s"] for place in inside if saves[place]["lasted_s"] is not None]
        rows.append(
            (
                "fast" if rate is None else f"{rate / 2**20:g} MiB/s",
                f"{ended - began:.0f}",
                str(len(inside)),
                _seconds(Spread.of(intervals) if intervals else None),
                _seconds(Spread.of(lasted) if lasted else None),
            )
        )
    costs = phases["costs"]
    title = f"a disk that changes; slowed down by {costs['spent_s'] / costs['trained_s']:.2%}, by the policy"
    return TextTable(title, ("disk", "seconds", "saves", "interval s", "lasted s"), rows)


def _percent(spread: Spread) -> str:
    return f"{spread.median:.2%}\n{spread.minimum:.2%} .. {spread.maximum:.2%}"


def _seconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.1f}\n{spread.minimum:.1f} .. {spread.maximum:.1f}"


def _remarks(results: Mapping[str, Any]) -> list[str]:
    return [f"left out: the slow disk: {results['left_out']}"] if "left_out" in results else []


def show(console: Console, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Everything, in a terminal."""
    show_figures(console, machine, tables(results), HOW_TO_READ, _remarks(results))


def write(folder: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The page and its plot."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# The real cost of an overhead budget", "", "Written by `benchmarks.overhead_report`;"]
    lines += ['[benchmarks.md](../explanation/benchmarks.md) describes the method, under "Overhead budget".', ""]
    lines += [f"- {line}" for line in cost_command.machine_lines(dict(machine))]
    lines += [f"- {line}" for line in _remarks(results)]
    if results["phases"]:
        overhead_plot.write(folder / PLOT, results["phases"], results["fraction"])
        lines += ["", f"![intervals on a disk that changes]({PLOT})"]
    lines += figure_lines(tables(results), HOW_TO_READ)
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


main = report_command("overhead_report", __doc__, f"{PAGE} and {PLOT}", show, write)

if __name__ == "__main__":
    main()
