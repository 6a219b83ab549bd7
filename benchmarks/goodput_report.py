"""Goodput that was measured, as tables and as a page: `python -m benchmarks.goodput_report FILE.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_command, goodput_plot
from benchmarks.cells import TextTable
from benchmarks.figure_page import figure_lines, report_command, show_figures
from benchmarks.goodput_summary import Goodput, as_goodput
from benchmarks.spread import Spread

PAGE, PLOT = "goodput.md", "goodput.png"

HOW_TO_READ = """\
useful time: the number of updates that could be restored in the end, times the duration of an undisturbed update,
divided by the total time of the subject's processes. in one attempt: the same for each attempt, by the updates that it
added. lost: updates that were done and were missing in the end; most of them were repeated. late: processes that were
asked to leave and had not left at the end of the grace period. start: until the model was built. restore: from then
until the start of the loop, with the data in its place; only if there was something to restore. resume: from the start
of the process until its first update was complete. called: in calls of the library, including its waits. slower: the
additional time of updates compared with undisturbed ones, during saves and at the start of a process, where they are
loaded from the compilation cache."""


def tables(results: Mapping[str, Any]) -> list[TextTable]:
    """All figures as text."""
    goodput = {name: as_goodput(stored) for name, stored in results["goodput"].items()}
    return [_shares(goodput, results), _where(goodput), _times(goodput), _intervals(results)]


def _shares(goodput: Mapping[str, Goodput], results: Mapping[str, Any]) -> TextTable:
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{one.share:.1%}",
            f"{one.shares.median:.0%}\n{one.shares.minimum:.0%} .. {one.shares.maximum:.0%}",
            f"{one.useful:,}",
            f"{one.done - one.useful:,}",
            _numbers(one.lost_by_kill),
            _numbers(one.lost_by_request),
            f"{one.kills} + {one.requests}",
            str(one.late),
        )
        for name, one in goodput.items()
    ]
    headings = (
        "subject, useful time, in one attempt, useful updates, lost, by a kill, by a request, kills + requests, late"
    )
    update_ms = results["update_s"]["median"] * 1e3
    title = f"{results['seconds']:g} s of each, schedule {results['seed']}, an undisturbed update {update_ms:.0f} ms"
    return TextTable(title, tuple(headings.split(", ")), rows)


def _where(goodput: Mapping[str, Goodput]) -> TextTable:
    rows = []
    for name, one in goodput.items():
        parts = (one.where.useful, *goodput_plot.without_use(one.where).values())
        rows.append((name, *(f"{part / one.wall_s:.1%}" for part in parts)))
    labels = ("subject", "useful", *goodput_plot.LABELS)
    return TextTable("where the time went", labels, rows)


def _times(goodput: Mapping[str, Goodput]) -> TextTable:
    rows: list[tuple[str, ...]] = [
        (name, _seconds(one.start_s), _seconds(one.restore_s), _seconds(one.resume_s)) for name, one in goodput.items()
    ]
    return TextTable("seconds to resume", ("subject", "start", "restore", "resume"), rows)


def _intervals(results: Mapping[str, Any]) -> TextTable:
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{cost['cost_s'] * 1e3:.0f} ms",
            f"{cost['called_s'] * 1e3:.0f} ms",
            f"{results['intervals'][name]['steps']} updates, {results['intervals'][name]['seconds']:.1f} s",
        )
        for name, cost in results["costs"].items()
    ]
    headings = ("subject", "a save costs the loop", "of which the call", "interval of Young and Daly")
    return TextTable("measured before, without kills", headings, rows)


def _seconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f}\n{spread.minimum:.2f} .. {spread.maximum:.2f}"


def _numbers(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:g}\n{spread.minimum:g} .. {spread.maximum:g}"


def checks(results: Mapping[str, Any]) -> list[str]:
    """Whether all attempts have computed the same, and who was given up."""
    compared, conflicts = results["compared"], results["conflicts"]
    lines = [f"losses of the same update in several attempts or subjects: {compared:,} compared bit by bit, "]
    lines[0] += "all equal" if not conflicts else f"{len(conflicts)} DIFFER, such as {conflicts[0]}"
    return lines + [f"failed: {name}: {reason.splitlines()[0]}" for name, reason in results["failed"].items()]


def show(console: Console, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Everything, in a terminal."""
    show_figures(console, machine, tables(results), HOW_TO_READ, checks(results))


def write(folder: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The page and its plot."""
    folder.mkdir(parents=True, exist_ok=True)
    goodput = {name: as_goodput(stored) for name, stored in results["goodput"].items()}
    goodput_plot.write(folder / PLOT, goodput)
    lines = ["# Trainings that are killed", "", "Written by `benchmarks.goodput_report`;"]
    lines += ['[benchmarks.md](../explanation/benchmarks.md) describes the method, under "Goodput".', ""]
    lines += [f"- {line}" for line in cost_command.machine_lines(dict(machine))]
    lines += [f"- {line}" for line in checks(results)]
    lines += ["", f"![where the time went]({PLOT})"]
    lines += figure_lines(tables(results), HOW_TO_READ)
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


main = report_command("goodput_report", __doc__, f"{PAGE} and {PLOT}", show, write)

if __name__ == "__main__":
    main()
