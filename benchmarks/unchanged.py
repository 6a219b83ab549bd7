"""Saves of a state of which little changes, by ours, Orbax and PyTorch DCP: `python -m benchmarks.unchanged`."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import cost_command
from benchmarks.cells import TextTable
from benchmarks.cost_process import run_fresh
from benchmarks.figure_page import figure_lines, report_command, show_figures
from benchmarks.machine import version
from benchmarks.registry import TORCH_PYTHON
from benchmarks.spread import Spread

PAGE = "unchanged.md"
MIB = 1 << 20
FULL_MIB, QUICK_MIB = 1024, 64
ROUNDS, QUICK_ROUNDS = 5, 1
SAVES = 5
OURS, FROZEN, ORBAX, DCP = "ours", "ours, frozen=", "Orbax", "PyTorch DCP"
MOST_MIB, MOST_OF_FULL, LEAST_BYTES, LEAST_TIME = 12, 0.1, 20, 10

HOW_TO_READ = f"""\
A training with adapters: base weights that stay as they are, and adapters and their moments of Adam, which change. For
ours the state is a Flax NNX model and its optimiser, which a jitted function updates and returns; the others save
arrays of the same sizes. Each process saves {SAVES} times to an empty directory, and keeps all steps. Saves are synced.
  save        medians of the rounds, from the call until the save is durable
  written     bytes of files that were not there before the save; a second name of a file counts nothing
  with frozen the patterns of the base weights are known; without, ours finds out"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the subjects in turn, print the tables, and write the figures as JSON and as a page if asked."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = cost_command.parser("unchanged", __doc__ or "")
    parser.add_argument("--mib", type=int, help=f"size of the base weights; default {FULL_MIB}")
    parser.add_argument("--page", type=Path, help=f"folder for {PAGE}")
    options = parser.parse_args(arguments)
    options.mib = options.mib or (QUICK_MIB if options.quick else FULL_MIB)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        results = {"command": shlex.join(["python", "-m", "benchmarks.unchanged", *given]), "mib": options.mib}
        results |= {"flax": version("flax"), "subjects": _measure(options, rounds, directory)}
    cost_command.finish(options, machine, results)
    show(cost_command.stdout_console(), machine, results)
    if options.page:
        write(options.page, machine, results)


def _measure(options: argparse.Namespace, rounds: int, directory: Path) -> dict[str, list[list[dict[str, float]]]]:
    subjects: dict[str, tuple[str, dict[str, Any]]] = {
        OURS: ("benchmarks.unchanged_turns:save_by_us", {"frozen": None}),
        FROZEN: ("benchmarks.unchanged_turns:save_by_us", {"frozen": "**/base"}),
        ORBAX: ("benchmarks.unchanged_turns:save_by_orbax", {}),
    }
    if TORCH_PYTHON.exists():
        subjects[DCP] = ("benchmarks.unchanged_torch:save_by_dcp", {})
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in subjects}
    for number in range(rounds):
        for name in list(subjects)[number % len(subjects) :] + list(subjects)[: number % len(subjects)]:
            function, more = subjects[name]
            run = directory / "run"
            python = TORCH_PYTHON if name == DCP else sys.executable
            arguments = {"directory": str(run), "mib": options.mib, "saves": SAVES, **more}
            saves = run_fresh(function, arguments, under=options.under, python=python)
            cost_command.remove(run)
            found[name].append(saves)
            shown = ", ".join(f"{each['seconds']:.2f} s {each['written'] / MIB:.0f} MiB" for each in saves)
            cost_command.progress.print(f"round {number}: {name}: {shown}", markup=False)
    return found


def tables(results: Mapping[str, Any]) -> list[TextTable]:
    """The goals, and each save of each subject."""
    return [_goals(results["subjects"]), _saves(results)]


def _goals(subjects: Mapping[str, Any]) -> TextTable:
    rows = []
    for name, first in ((OURS, 2), (FROZEN, 1)):
        later = [each for saves in subjects[name] for each in saves[first:]]
        written = max(each["written"] for each in later) / MIB
        which = f"{name}, from save {first + 1} on"
        rows.append(_goal(f"{which}: most MiB written", written, f"at most {MOST_MIB}", written <= MOST_MIB))
        share = statistics.median(
            statistics.median(each["seconds"] for each in saves[first:]) / saves[0]["seconds"]
            for saves in subjects[name]
        )
        rows.append(
            _goal(f"{which}: of the time of the first", share, f"at most {MOST_OF_FULL}", share <= MOST_OF_FULL)
        )
    for peer in (ORBAX, DCP):
        if peer in subjects:
            for what, least in (("written", LEAST_BYTES), ("seconds", LEAST_TIME)):
                ratio = _last(subjects[peer], what) / _last(subjects[OURS], what)
                rows.append(_goal(f"{peer}: {what}, divided by ours", ratio, f"at least {least}", ratio >= least))
    return TextTable("goals, about the third save and later ones", ("", "found", "goal", ""), rows)


def _last(rounds: Sequence[Sequence[Mapping[str, float]]], what: str) -> float:
    return statistics.median(each[what] for saves in rounds for each in saves[2:])


def _goal(name: str, found: float, goal: str, is_met: bool) -> tuple[str, ...]:
    return name, f"{found:.2f}", goal, "met" if is_met else "MISSED"


def _saves(results: Mapping[str, Any]) -> TextTable:
    rows = []
    for name, rounds in results["subjects"].items():
        for number in range(SAVES):
            some = [saves[number] for saves in rounds]
            written = statistics.median(each["written"] for each in some) / MIB
            rows.append((name, str(number + 1), str(Spread.of([each["seconds"] for each in some])), f"{written:,.1f}"))
    title = f"{results['mib']:,} MiB of base weights"
    return TextTable(title, ("", "save", "seconds", "MiB written"), rows)


def about_lines(machine: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """The machine, and the versions."""
    return [*cost_command.machine_lines(dict(machine)), f"flax {results['flax']}"]


def show(console: Console, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Everything, in a terminal."""
    show_figures(console, machine, tables(results), HOW_TO_READ, about_lines(machine, results)[2:])


def write(folder: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Unchanged leaves", "", "Written by `python -m benchmarks.unchanged`.", ""]
    lines += [f"- {line}" for line in about_lines(machine, results)]
    lines += ["", "```", results["command"], "```", *figure_lines(tables(results), HOW_TO_READ)]
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


report = report_command("unchanged", __doc__, PAGE, show, write)

if __name__ == "__main__":
    main()
