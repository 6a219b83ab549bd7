"""What OverheadBudgetPolicy really costs a training, on fast and slow disks: `python -m benchmarks.overhead_budget`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cost_command, overhead_report
from benchmarks.cost_process import run_fresh
from benchmarks.lm_training import FULL, QUICK
from benchmarks.overhead_summary import overhead_of
from benchmarks.overhead_training import FRACTION, Block
from benchmarks.write_limit import CannotLimitError, WriteLimit, write_limit

PAIRS, QUICK_PAIRS = 6, 2
BLOCK_S, QUICK_BLOCK_S = 30.0, 1.0
PHASE_S, QUICK_PHASE_S = 150.0, 2.0
SLOW_MIB_S = 20.0
PROBE_S = 2.0  # of the disk, at the rate that it is to have
MOST_OFF = 0.3
TIMEOUT_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print the tables, and write the figures as JSON and as a page if asked."""
    options = _parse(arguments)
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        results: dict[str, Any] = {"fraction": FRACTION, "size": _size(options), "disks": {}, "phases": None}
        try:
            with write_limit(directory) as limit:
                _measure(options, directory, limit, results)
        except CannotLimitError as error:
            results["left_out"] = str(error)
            cost_command.progress.print(f"no slow disk: {error}", markup=False)
            results["disks"]["fast"] = _pairs(options, directory, [])
    cost_command.finish(options, machine, results)
    overhead_report.show(cost_command.stdout_console(), machine, results)
    if options.page:
        overhead_report.write(options.page, machine, results)


def _measure(options: argparse.Namespace, directory: Path, limit: WriteLimit, results: dict[str, Any]) -> None:
    slow = round(options.slow_mib_s * 2**20)
    _check(limit, directory, slow)
    for name, rate in (("fast", None), ("slow", slow)):
        limit.set(rate)
        results["disks"][name] = {**_pairs(options, directory, limit.command()), "bytes_per_s": rate}
    phases = [(options.phase_s, rate) for rate in (None, slow, None)]
    arguments = {"limit": dataclasses.asdict(limit), "phases": phases}
    results["phases"] = _run(options, directory, "phases_in_child", arguments, limit.command())


def _check(limit: WriteLimit, directory: Path, rate: int) -> None:
    """The kernel must really limit.

    Raises:
        CannotLimitError: it does not.
    """
    limit.set(rate)
    probe = {"directory": str(directory), "nbytes": round(rate * PROBE_S)}
    found = run_fresh("benchmarks.write_limit:measured_bytes_per_s", probe, under=limit.command())
    _say(f"a limit of {rate / 2**20:.1f} MiB/s: {found / 2**20:.1f} MiB/s were written")
    if not 1 - MOST_OFF < found / rate < 1 + MOST_OFF:
        raise CannotLimitError(f"a limit of {rate:,} bytes/s let {found:,.0f} bytes/s be written")


def _pairs(options: argparse.Namespace, directory: Path, under: Sequence[str]) -> dict[str, Any]:
    arguments = {"block_s": options.block_s, "pairs": options.pairs}
    answer = _run(options, directory, "pairs_in_child", arguments, under)
    bare, saving = ([Block(**block) for block in answer[kind]] for kind in ("bare", "saving"))
    found = overhead_of(bare, saving, answer)
    _say(f"slowed down by {found.total:.2%}, blocks {found.measured.minimum:.2%} .. {found.measured.maximum:.2%}")
    return {**answer, "overhead": dataclasses.asdict(found)}


def _run(
    options: argparse.Namespace, directory: Path, function: str, arguments: dict[str, Any], under: Sequence[str]
) -> Any:
    given = {"size": _size(options), "directory": str(directory), **arguments}
    answer = run_fresh(
        f"benchmarks.overhead_training:{function}", given, under=[*options.under, *under], timeout_s=TIMEOUT_S
    )
    cost_command.remove(directory / "run")
    return answer


def _size(options: argparse.Namespace) -> dict[str, Any]:
    return dict(QUICK if options.quick else FULL)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cost_command.parser("overhead_budget", __doc__ or "")
    parser.add_argument("--pairs", type=int, help=f"of blocks with and without saves; default {PAIRS}")
    parser.add_argument("--block-s", type=float, help=f"seconds of each block, at least; default {BLOCK_S:g}")
    parser.add_argument("--phase-s", type=float, help=f"seconds before the disk changes; default {PHASE_S:g}")
    parser.add_argument("--slow-mib-s", type=float, default=SLOW_MIB_S, help="MiB a second of the slow disk")
    parser.add_argument("--page", type=Path, help="folder for overhead-budget.md and its plot")
    options = parser.parse_args(arguments)
    options.pairs = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    options.block_s = options.block_s or (QUICK_BLOCK_S if options.quick else BLOCK_S)
    options.phase_s = options.phase_s or (QUICK_PHASE_S if options.quick else PHASE_S)
    return options


def _say(text: str) -> None:
    cost_command.progress.print(text, markup=False)


if __name__ == "__main__":
    main()
