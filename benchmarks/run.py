"""The command line of the benchmarks: `python -m benchmarks.run`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import resource
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import jax
from rich.console import Console

from benchmarks import raw_disk, table
from benchmarks.machine import Description, describe
from benchmarks.rounds import WARM_UP_ROUND, Turn, run_rounds
from benchmarks.sample import Sample
from benchmarks.subject import Subject
from benchmarks.subject_ours import Ours
from benchmarks.subjects_orbax import OrbaxV0, OrbaxV1
from benchmarks.summary import Summary, summarise
from benchmarks.workloads import Workload, workloads

Results = dict[str, tuple[Workload, list[Turn], Summary]]

JSON_VERSION = 1
ROUNDS, QUICK_ROUNDS, FEWEST_ROUNDS = 5, 3, 5
DISK_FACTOR = 4
DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "bench"
SUBJECTS: dict[str, Callable[[], Subject | None]] = {
    raw_disk.NAME: lambda: None,
    OrbaxV0.name: OrbaxV0,
    OrbaxV1.name: OrbaxV1,
    Ours.name: Ours,
}

progress = Console(stderr=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print tables to stdout, and write all samples as JSON if asked."""
    options = _parse(arguments)
    jax.config.update("jax_platforms", "cpu")
    chosen = [workloads(options.quick)[name] for name in options.only]
    results: Results = {}
    with _directory(options.dir, chosen) as directory, _subjects(options.subjects) as subjects:
        machine = describe(directory)
        for workload in chosen:
            turns = run_rounds(
                workload,
                subjects,
                directory,
                counted_rounds=options.rounds,
                seed=options.seed,
                report=_report,
            )
            results[workload.name] = workload, turns, summarise(turns)
    _show(machine, results, options.rounds)
    if options.json:
        _write_json(options, machine, results)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    names = list(workloads(quick=False))
    parser.add_argument("--quick", action="store_true", help="smaller and fewer rounds: a look, not a result")
    parser.add_argument("--only", type=_names(names), default=names, help=f"workloads, of {','.join(names)}")
    parser.add_argument(
        "--subjects", type=_names(SUBJECTS), default=list(SUBJECTS), help=f"subjects, of {','.join(SUBJECTS)}"
    )
    parser.add_argument("--rounds", type=int, help=f"counted rounds, at least {FEWEST_ROUNDS} unless --quick")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="a directory on the disk to measure")
    parser.add_argument("--json", type=Path, help="write the machine, all samples and the summary to this file")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the random bytes; else a new one")
    options = parser.parse_args(arguments)
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


@contextlib.contextmanager
def _subjects(names: Sequence[str]) -> Iterator[list[Subject | None]]:
    with contextlib.ExitStack() as stack:
        made: list[Subject | None] = []
        for name in names:
            subject = _make_subject(name)
            made.append(subject)
            if subject:
                stack.callback(subject.close)
        yield made


def _make_subject(name: str) -> Subject | None:
    try:
        return SUBJECTS[name]()
    except (ImportError, AttributeError) as missing:
        advice = "install it (Orbax: the bench extra) or leave it out of --subjects"
        raise SystemExit(f"subject {name} is not there ({missing}); {advice}") from missing


def _report(workload: str, number: int, subject: str, sample: Sample) -> None:
    kind = "warm-up" if number == WARM_UP_ROUND else f"round {number}"
    progress.print(f"{workload} {kind} {subject}: save {sample.durable_s:.3f} s, load {sample.load_s:.3f} s")


def _show(machine: Description, results: Results, counted_rounds: int) -> None:
    console = table.stdout_console()
    table.show_machine(console, machine)
    for workload, _, summary in results.values():
        table.show(console, workload, summary, counted_rounds)
    console.print(table.HOW_TO_READ, markup=False)
    if any(summary.ratios for _, _, summary in results.values()):
        console.print(table.HOW_TO_READ_RATIOS, markup=False)


def _write_json(options: argparse.Namespace, machine: Description, results: Results) -> None:
    record = {
        "version": JSON_VERSION,
        "machine": machine,
        "options": {"quick": options.quick, "rounds": options.rounds, "seed": options.seed},
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "workloads": {name: _record(*result) for name, result in results.items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _record(workload: Workload, turns: Sequence[Turn], summary: Summary) -> dict[str, object]:
    return {
        "leaves": workload.leaves,
        "shape": workload.shape,
        "bytes": workload.nbytes,
        "turns": [dataclasses.asdict(turn) for turn in turns],
        **dataclasses.asdict(summary),
    }


if __name__ == "__main__":
    main()
