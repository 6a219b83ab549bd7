"""The memory that saves and loads take beyond the arrays themselves: `python -m benchmarks.memory`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import cost_command
from benchmarks.cost_process import run_fresh
from benchmarks.memory_trees import Workload, workloads
from benchmarks.memory_verdict import ALLOWANCE_BYTES, MIB, Series, within
from benchmarks.step_time_subjects import LIBRARIES, NOTHING, OURS, OURS_STREAM
from jaxckpt_train import StoreSettings

PARTS = ("save", "load", "series")
REPEATS, SAVES, SERIES_BYTES = 3, 50, 64 * MIB
QUICK_REPEATS, QUICK_SAVES, QUICK_SERIES_BYTES = 1, 10, 4 * MIB
SMALL_BUDGET_BYTES = 64 * MIB
# How often `staging_bytes` may be used: by the staging buffers, and by what is on its way from the devices to them.
STAGED_TIMES = {OURS: 1, OURS_STREAM: 2}

Row = dict[str, Any]

HOW_TO_READ = """\
MiB. Every measurement is of a fresh process that has saved and loaded a few bytes before.
  extra    highest resident memory (VmHWM, reset before) less that before the call; of a load also less the result
  training one jitted step that donates the state runs during the save: what the save holds, the step has to copy
  private  the same without mapped files, sampled every 2 ms
  left     private memory after a load, garbage collected, beyond that before it and the loaded arrays
  limit    ours: staging_bytes (with snapshot="stream": twice) or read_budget_bytes, and 32 MiB
  slope    of resident memory against the number of the save, over the last four fifths, and its standard error;
           GROWS: by more than 16 KiB for each save, in both halves of these saves
  nothing  the control: the same steps of training, and no save"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print tables to stdout, and write all samples as JSON if asked."""
    options = _parse(arguments)
    console = cost_command.stdout_console()
    results: dict[str, list[Row]] = {}
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        if "save" in options.parts:
            results["save"] = _saves(options, directory)
        if "load" in options.parts:
            results["load"] = _loads(options, directory)
        if "series" in options.parts:
            results["series"] = _series(options, directory)
    cost_command.show_machine(console, machine)
    for part, rows in results.items():
        show(console, part, rows)
    console.print(HOW_TO_READ, markup=False)
    cost_command.finish(options, machine, results)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cost_command.parser("memory", __doc__ or "")
    parser.add_argument("--subjects", type=cost_command.names, default=LIBRARIES, help=f"of {','.join(LIBRARIES)}")
    parser.add_argument("--parts", type=cost_command.names, default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--repeats", type=int, help=f"processes per figure; default {REPEATS}, with --quick 1")
    parser.add_argument("--saves", type=int, help=f"of the series; default {SAVES}, with --quick {QUICK_SAVES}")
    options = parser.parse_args(arguments)
    for name, chosen, known in (("subjects", options.subjects, LIBRARIES), ("parts", options.parts, PARTS)):
        if not chosen or set(chosen) - set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, found {','.join(chosen) or 'none'}")
    options.repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    options.saves = options.saves or (QUICK_SAVES if options.quick else SAVES)
    return options


def _fresh(options: argparse.Namespace, function: str, devices: int = 1, **arguments: Any) -> Row:
    return run_fresh(f"benchmarks.memory_child:{function}", arguments, devices=devices, under=options.under)


def _saves(options: argparse.Namespace, directory: Path) -> list[Row]:
    rows = []
    for name, train in (("dense", False), ("dense", True), ("small", False)):
        workload = workloads(options.quick)[name]
        title = f"{name}, training" if train else name
        for subject in _and_stream(options.subjects) if not train else options.subjects:
            runs = [
                _fresh(
                    options,
                    "save",
                    subject=subject,
                    workload=dataclasses.asdict(workload),
                    path=str(directory / f"{name}-{subject}-{number}"),
                    train=train,
                )
                for number in range(options.repeats)
            ]
            limit = StoreSettings().staging_bytes * STAGED_TIMES.get(subject, 0) or None
            rows.append(_row(subject, title, limit, runs))
    return rows


def _and_stream(subjects: Sequence[str]) -> list[str]:
    """`ours` has a second way to save, which takes nothing of the state before it is written."""
    return [each for subject in subjects for each in ((OURS, OURS_STREAM) if subject == OURS else (subject,))]


def _loads(options: argparse.Namespace, directory: Path) -> list[Row]:
    rows = []
    for workload in workloads(options.quick).values():
        for subject in options.subjects:
            path = str(directory / f"load-{workload.name}-{subject}")
            rows += _loads_of(options, workload, subject, path)
            cost_command.remove(Path(path))
    return rows


def _loads_of(options: argparse.Namespace, workload: Workload, subject: str, path: str) -> list[Row]:
    """Loads in processes of their own of what another process saved; ours also with a small budget."""
    about: dict[str, Any] = {"subject": subject, "workload": dataclasses.asdict(workload), "path": path}
    saved = _fresh(options, "prepare", workload.devices, **about)
    rows = []
    for budget in (SMALL_BUDGET_BYTES, None) if subject == OURS else (None,):
        runs = [
            _fresh(options, "load", workload.devices, **about, **saved, budget=budget) for _ in range(options.repeats)
        ]
        limit = (budget or StoreSettings().read_budget_bytes) if subject == OURS else None
        rows.append(_row(subject, workload.name, limit, runs))
    return rows


def _row(subject: str, workload: str, budget: int | None, runs: list[Row]) -> Row:
    extra = max(run["extra_bytes"] for run in runs)
    met = None if budget is None else within(extra, budget)
    row = {"subject": subject, "workload": workload, "budget_bytes": budget, "extra_bytes": extra, "met": met}
    cost_command.progress.print(f"{workload} {subject}: {extra / MIB:.1f} MiB extra, budget {budget}, met: {met}")
    return {**row, "runs": runs}


def _series(options: argparse.Namespace, directory: Path) -> list[Row]:
    rows = []
    for subject in (NOTHING, *options.subjects):
        path = directory / f"series-{subject}"
        path.mkdir()
        size_bytes = QUICK_SERIES_BYTES if options.quick else SERIES_BYTES
        run = _fresh(options, "series", subject=subject, saves=options.saves, size_bytes=size_bytes, path=str(path))
        found = {name: Series.of(run[name]) for name in ("rss_bytes", "private_bytes")}
        row = {name: {**dataclasses.asdict(one), "leaks": one.leaks} for name, one in found.items()}
        rows.append({"subject": subject, "saves": options.saves, **row, "runs": [run]})
        cost_command.progress.print(f"series {subject}: {found['rss_bytes'].line.slope / 1024:.1f} KiB for each save")
    return rows


def show(console: Console, part: str, rows: list[Row]) -> None:
    """The table of one part."""
    if part == "series":
        console.print(_series_table(rows))
        return
    table = Table(title=f"{part}: memory beyond the arrays, MiB (highest of the runs)", title_justify="left")
    for heading in ("workload", "subject", "budget", "extra", "private", "left", "limit", ""):
        table.add_column(heading, justify="left" if heading in ("workload", "subject") else "right")
    for row in rows:
        budget = row["budget_bytes"]
        shown = [max(run[name] for run in row["runs"]) for name in ("extra_bytes", "extra_private_bytes")]
        left = max((run.get("left_bytes", 0) for run in row["runs"]), default=0) if part == "load" else None
        limit = None if budget is None else budget + ALLOWANCE_BYTES
        verdict = {None: "", True: "met", False: "MISSED"}[row["met"]]
        table.add_row(row["workload"], row["subject"], *map(_mib, (budget, *shown, left, limit)), verdict)
    console.print(table)


def _series_table(rows: list[Row]) -> Table:
    saves = rows[0]["saves"] if rows else 0
    table = Table(title=f"series: resident memory after each of {saves} saves", title_justify="left")
    for heading in ("subject", "first MiB", "last MiB", "slope KiB/save", "private KiB/save", ""):
        table.add_column(heading, justify="left" if heading == "subject" else "right")
    for row in rows:
        rss, private = row["rss_bytes"], row["private_bytes"]
        slopes = [
            f"{one['line']['slope'] / 1024:.1f} ± {one['line']['slope_error'] / 1024:.1f}" for one in (rss, private)
        ]
        verdict = "GROWS" if rss["leaks"] or private["leaks"] else "steady"
        table.add_row(row["subject"], _mib(rss["first_bytes"]), _mib(rss["last_bytes"]), *slopes, verdict)
    return table


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.1f}"


if __name__ == "__main__":
    main()
