"""The command line of the benchmarks: `python -m benchmarks.run`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import table
from benchmarks.machine import commit, describe
from benchmarks.record import Record, WorkloadRecord
from benchmarks.registry import ENTRIES, Entry, chosen_by_default, why_not
from benchmarks.report import write_page
from benchmarks.rounds import Plan, run_rounds
from benchmarks.workloads import Workload, workloads

ROUNDS, QUICK_ROUNDS, FEWEST_ROUNDS = 5, 2, 5
DISK_FACTOR = 4
DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "bench"
NOT_ASKED_FOR = "not selected"
QUICK_WORKLOADS = ("dense", "small", "sharded", "partial")

progress = Console(stderr=True, highlight=False)


@dataclasses.dataclass(frozen=True)
class Command:
    """What a command line can measure.

    Attributes:
        module: that is run.
        about: what it does.
        workloads: all of them, for a quick run or not.
        quick_workloads: those of a quick run that names none.
        subjects: all of them.
    """

    module: str
    about: str
    workloads: Callable[[bool], Mapping[str, Workload]]
    quick_workloads: Sequence[str]
    subjects: Mapping[str, Entry]


ALONE = Command("benchmarks.run", __doc__ or "", workloads, QUICK_WORKLOADS, ENTRIES)


def main(arguments: Sequence[str] | None = None, command: Command = ALONE) -> None:
    """Run what the arguments ask for, print tables to stdout, and write the samples and a page if asked.

    Raises:
        SystemExit: with status 1 if a subject failed; what the others gave is shown and written all the same.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parse(given, command)
    chosen = [command.workloads(options.quick)[name] for name in options.only]
    said = f"python -m {command.module} {shlex.join(given)}".rstrip()
    record = Record({}, {})
    with _directory(options.dir, chosen) as directory:
        record.machine.update(describe(directory))
        for workload in chosen:
            record.workloads[workload.name] = _measure(workload, options, directory, said, command.subjects)
            if options.json:
                record.write(options.json)
    table.show(table.stdout_console(), record)
    if options.plots:
        write_page(record, options.plots)
    if any(workload.failed for workload in record.workloads.values()):
        raise SystemExit(1)


def _measure(
    workload: Workload, options: argparse.Namespace, directory: Path, said: str, known: Collection[str]
) -> WorkloadRecord:
    left_out = _left_out(options.subjects, workload.name, known)
    for name, reason in left_out.items():
        _report(f"{workload.name}: left out {name}: {reason}")
    load_average = os.getloadavg()[0]
    plan = Plan(counted_rounds=options.rounds, seed=options.seed, fresh_loads=options.fresh_loads, report=_report)
    subjects = [name for name in options.subjects if name not in left_out]
    outcome = run_rounds(workload, subjects, directory, plan)
    return WorkloadRecord(
        name=workload.name,
        nbytes=workload.nbytes,
        leaves=len(workload.leaves),
        targets=workload.targets,
        counted_rounds=options.rounds,
        seed=options.seed,
        quick=options.quick,
        fresh_loads=options.fresh_loads,
        command=said,
        load_average=load_average,
        commit=commit(),
        versions=outcome.versions,
        left_out=left_out,
        failed=outcome.failed,
        turns=outcome.turns,
        processes=workload.processes,
    )


def _left_out(chosen: Sequence[str], workload: str, known: Collection[str] = ENTRIES) -> dict[str, str]:
    """Every subject that has no turn, and why; one that could have had it, but was not asked for, too."""
    found: dict[str, str] = {}
    for name in dict.fromkeys((*known, *chosen)):
        reason = why_not(name, workload) or ("" if name in chosen else NOT_ASKED_FOR)
        if reason:
            found[name] = reason
    return found


def _parse(arguments: Sequence[str], command: Command) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {command.module}", description=command.about)
    names, subjects = list(command.workloads(False)), list(command.subjects)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer of all: a look, not a result")
    parser.add_argument("--only", type=_names(names), help=f"workloads, of {','.join(names)}")
    parser.add_argument("--subjects", type=_names(subjects), help=f"subjects, of {','.join(subjects)}")
    parser.add_argument("--rounds", type=int, help=f"counted rounds, at least {FEWEST_ROUNDS} unless --quick")
    parser.add_argument("--fresh-loads", action="store_true", help="each load in a process of its own")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="a directory on the disk to measure")
    parser.add_argument("--json", type=Path, help="write the machine and all samples to this file")
    parser.add_argument(
        "--plots", "--page", dest="plots", type=Path, help="write a page, and plots if it has any, to this folder"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the random bytes; else a new one")
    options = parser.parse_args(arguments)
    options.only = options.only or (list(command.quick_workloads) if options.quick else names)
    options.subjects = options.subjects or chosen_by_default(options.quick, command.subjects)
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.rounds < (1 if options.quick else FEWEST_ROUNDS):
        parser.error(f"--rounds {options.rounds}: expected at least {FEWEST_ROUNDS}, or 1 with --quick")
    return options


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
        return list(dict.fromkeys(text.split(",")))

    return parse


@contextlib.contextmanager
def _directory(parent: Path, chosen: Sequence[Workload]) -> Iterator[Path]:
    """A new directory below `parent`, deleted at the end; refuses where the disk is too full."""
    parent.mkdir(parents=True, exist_ok=True)
    needed = DISK_FACTOR * max(workload.nbytes for workload in chosen)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise SystemExit(f"{parent}: {free:,} bytes free, the benchmarks need {needed:,}; choose another with --dir")
    with tempfile.TemporaryDirectory(prefix="run-", dir=parent.resolve()) as directory:
        yield Path(directory)


def _report(line: str) -> None:
    progress.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
