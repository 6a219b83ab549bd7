"""The cost of copies and parity on the fast tier, and restores from it: `python -m benchmarks.fast_tier`."""

from __future__ import annotations

import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import cost_command, fast_tier_turns
from benchmarks.cells import TextTable
from benchmarks.figure_page import figure_lines, report_command, show_figures
from benchmarks.spread import Spread
from jaxckpt_train.tiers import parity
from tests.support.jobs.job import running

PAGE = "fast-tier.md"
MIB = 1 << 20
HOSTS = 4
FULL_MIB, QUICK_MIB = 512, 32
ROUNDS, QUICK_ROUNDS, SAVES = 5, 1, 3
SLOW_MIB_PER_S = 20
KINDS = ("none", "partner", "xor", "p+q")
MOST_ADDED, MOST_BLOCKED_S, LEAST_XOR, LEAST_Q, LEAST_FASTER = 1.0, 0.005, 2.0, 1.0, 5.0
STAGING_BYTES = 96 * MIB

HOW_TO_READ = f"""\
{HOSTS} processes on this machine stand for hosts: each has a directory of its own, and they talk over loopback. They
share its processors, its disk and its memory, so a copy costs more here than where each host has its own.
  save      from the call until the step is protected and published on all hosts; {SAVES} saves after a warm-up
  blocked   how long the call takes
  added     the seconds of a save beyond those without redundancy, divided by these, in the same round
  restore   of the newest step, after one host was erased; and from a run directory that delivers
            {SLOW_MIB_PER_S} MiB/s to all processes together. All bytes are compared
  XOR, Q    of one core, in windows of 1 MiB"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the kinds of redundancy in turn, print the tables, and write the figures as JSON and as a page if asked."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = cost_command.parser("fast_tier", __doc__ or "")
    parser.add_argument("--mib", type=int, help=f"size of the state; default {FULL_MIB}")
    parser.add_argument("--page", type=Path, help=f"folder for {PAGE}")
    options = parser.parse_args(arguments)
    mib, rounds = (QUICK_MIB, QUICK_ROUNDS) if options.quick else (FULL_MIB, ROUNDS)
    mib = options.mib or mib
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        results = {"command": shlex.join(["python", "-m", "benchmarks.fast_tier", *given]), "mib": mib}
        results |= {"parity": _parity_speed(), "saves": _saves(directory, mib, rounds)}
        results["restores"] = _restores(directory, mib, rounds)
    cost_command.finish(options, machine, results)
    show(cost_command.stdout_console(), machine, results)
    if options.page:
        write(options.page, machine, results)


def _parity_speed() -> dict[str, list[float]]:
    """Bytes per second of XOR and of Q, in several rounds."""
    data = np.random.default_rng(1).integers(0, 256, 64 * MIB, np.uint8)
    total, scratch, found = np.zeros(parity.WINDOW_BYTES, np.uint8), np.empty(8192, np.uint64), dict[str, list[float]]()
    for which in ("xor", "q") * ROUNDS:
        start = time.perf_counter()
        for at in range(0, len(data), parity.WINDOW_BYTES):
            if which == "q":
                parity.double(total.view(np.uint64), scratch)
            parity.add(total, data[at : at + parity.WINDOW_BYTES])
        found.setdefault(which, []).append(len(data) / (time.perf_counter() - start))
    return found


def _saves(directory: Path, mib: int, rounds: int) -> dict[str, list[list[dict[str, float]]]]:
    found: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in KINDS}
    with running(HOSTS) as job:
        for number in range(rounds):
            for kind in [*KINDS[number % len(KINDS) :], *KINDS[: number % len(KINDS)]]:
                run = directory / "run"
                saves = job.call(fast_tier_turns.save, str(run), kind, mib, SAVES, timeout_s=600.0)
                found[kind].append(saves[0])
                cost_command.remove(run)
                shown = ", ".join(f"{each['save_s']:.2f} s" for each in saves[0])
                cost_command.progress.print(f"round {number}: {kind}: {shown}", markup=False)
    return found


def _restores(directory: Path, mib: int, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"fast": [], "slow": []}
    run, fast = directory / "run", directory / "run" / "fast"
    with running(HOSTS) as job:
        job.call(fast_tier_turns.keep, str(run), mib, timeout_s=600.0)
        for _ in range(rounds):
            for which in found:
                kept = fast.with_name("kept")
                shutil.move(fast, kept)
                if which == "fast":
                    shutil.copytree(kept, fast)
                    shutil.rmtree(fast / "host1")
                times = job.call(fast_tier_turns.restore, str(run), mib, SLOW_MIB_PER_S, timeout_s=600.0)
                cost_command.remove(fast)
                shutil.move(kept, fast)
                found[which].append(max(times))
                cost_command.progress.print(f"restore, {which}: {found[which][-1]:.2f} s")
    return found


def tables(results: Mapping[str, Any]) -> list[TextTable]:
    """The goals, the saves and the restores."""
    saves, restores = results["saves"], results["restores"]
    added = {kind: _added(saves, kind) for kind in KINDS[1:]}
    blocked_s = _blocked_s(saves, "partner") - _blocked_s(saves, "none")
    most_ms, is_short = f"at most {MOST_BLOCKED_S * 1000:g}", blocked_s <= MOST_BLOCKED_S
    xor, q = (statistics.median(results["parity"][which]) / 1e9 for which in ("xor", "q"))
    faster = statistics.median(a / b for a, b in zip(restores["slow"], restores["fast"], strict=True))
    memory = max(each.get("memory_bytes", 0.0) for each in _all(saves["p+q"])) / MIB
    goals = [
        _goal("partner: added to a save", added["partner"], f"at most {MOST_ADDED}", added["partner"] <= MOST_ADDED),
        _goal("partner: added to the time blocked, ms", blocked_s * 1000, most_ms, is_short),
        _goal("XOR, GB/s", xor, f"at least {LEAST_XOR}", xor >= LEAST_XOR),
        _goal("Q, GB/s", q, f"at least {LEAST_Q}", q >= LEAST_Q),
        _goal("restore, times as fast as the slow one", faster, f"at least {LEAST_FASTER}", faster >= LEAST_FASTER),
    ]
    rows = []
    for kind in KINDS:
        times = [each["save_s"] for each in _all(saves[kind])]
        share = "" if kind == "none" else f"{added[kind]:.2f}"
        rows.append((kind, str(Spread.of(times)), share, f"{_blocked_s(saves, kind) * 1000:.1f}"))
    read = [(f"from {name}", str(Spread.of(restores[which]))) for which, name in (("fast", "hosts"), ("slow", "disk"))]
    title = f"{results['mib']:,} MiB on {HOSTS} hosts"
    remarks = f"restore of {results['mib']:,} MiB; memory of a save with P and Q: {memory:.0f} MiB in process 0"
    return [
        TextTable("goals", ("", "found", "goal", ""), goals),
        TextTable(title, ("redundancy", "save, s", "added", "blocked, ms"), rows),
        TextTable(remarks, ("", "seconds"), read),
    ]


def _all(rounds: Sequence[Sequence[Mapping[str, float]]]) -> list[Mapping[str, float]]:
    return [each for saves in rounds for each in saves]


def _blocked_s(saves: Mapping[str, Any], kind: str) -> float:
    return statistics.median(each["blocked_s"] for each in _all(saves[kind]))


def _added(saves: Mapping[str, Any], kind: str) -> float:
    """The median over the rounds of what a kind adds to a save, as a share of one without redundancy."""
    shares = []
    for with_it, without in zip(saves[kind], saves["none"], strict=True):
        one, other = (statistics.median(each["save_s"] for each in some) for some in (with_it, without))
        shares.append(one / other - 1)
    return statistics.median(shares)


def _goal(name: str, found: float, goal: str, is_met: bool) -> tuple[str, ...]:
    return name, f"{found:.2f}", goal, "met" if is_met else "MISSED"


def show(console: Console, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Everything, in a terminal."""
    show_figures(console, machine, tables(results), HOW_TO_READ, [])


def write(folder: Path, machine: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# The fast tier", "", "Written by `python -m benchmarks.fast_tier`.", ""]
    lines += [f"- {line}" for line in cost_command.machine_lines(dict(machine))]
    lines += ["", "```", results["command"], "```", *figure_lines(tables(results), HOW_TO_READ)]
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


report = report_command("fast_tier", __doc__, PAGE, show, write)

if __name__ == "__main__":
    main()
