"""The cost of inspecting and converting checkpoints, compared with Orbax and the disk: `python -m benchmarks.tools`."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cost_command, page_cache, tools_report
from benchmarks.cost_process import run_fresh

ROUNDS, QUICK_ROUNDS = 5, 1
STARTS, QUICK_STARTS = 9, 2
HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304"  # as cli.md advises


@dataclasses.dataclass(frozen=True)
class Size:
    """How much there is.

    Attributes:
        arrays, array_bytes: of what Orbax has saved.
        pair_arrays: of each of two steps, of the same size.
        steps: of a run.
        leaves: of a checkpoint.
    """

    arrays: int
    array_bytes: int
    pair_arrays: int
    steps: int
    leaves: int


FULL = Size(32, 64 << 20, 16, 1000, 10_000)
SMALL = {"arrays": 1, "array_bytes": 1 << 20}  # the first of each kind, in which modules are imported
QUICK = Size(4, 8 << 20, 4, 50, 500)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print the tables, and write the figures as JSON and as a page if asked."""
    options = _parse(arguments)
    size = QUICK if options.quick else FULL
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        results: dict[str, Any] = {"size": dataclasses.asdict(size), "imports": {}, "diff": {}, "commands": {}}
        for interface in ("v0", "v1"):
            results["imports"][interface] = _imports(options, directory, size, interface)
        results["diff"] = _diff(options, directory, size)
        results["commands"] = _commands(options, directory, size)
    cost_command.finish(options, machine, results)
    tools_report.show(cost_command.stdout_console(), machine, results)
    if options.page:
        tools_report.write(options.page, machine, results)


def _imports(options: argparse.Namespace, directory: Path, size: Size, interface: str) -> dict[str, Any]:
    """Loads and imports of one checkpoint of Orbax, in turn."""
    source, small, out = (str(directory / name) for name in (f"orbax-{interface}", "small", "imported"))
    arrays = {"arrays": size.arrays, "array_bytes": size.array_bytes}
    _turn("make_orbax", options, path=source, interface=interface, **arrays)
    _turn("make_orbax", options, path=small, interface=interface, **SMALL)
    import_, warm = ["import", source, f"{out}/a"], ["import", small, f"{out}/small"]
    both = {"path": source, "warm": small, "nbytes": size.arrays * size.array_bytes}
    tuned = argparse.Namespace(under=[*options.under, "env", HUGE_PAGES])
    turns: dict[str, Callable[[], dict[str, Any]]] = {
        "load by Orbax": lambda: _turn("load_by_orbax", options, interface=interface, **both),
        "load by ours": lambda: _turn("load_by_us", options, **both, **arrays),
        "import": lambda: _turn("command", options, arguments=import_, warm=warm, nbytes=both["nbytes"]),
        "import, huge pages": lambda: _turn("command", tuned, arguments=import_, warm=warm, nbytes=both["nbytes"]),
    }
    found = _in_turn(options, turns, Path(source), lambda: cost_command.remove(Path(out)))
    for each in (source, small):
        cost_command.remove(Path(each))
    return found


def _diff(options: argparse.Namespace, directory: Path, size: Size) -> dict[str, Any]:
    """Two steps compared, and read."""
    folder, small = (str(directory / name) for name in ("pair", "small"))
    _turn("make_pair", options, folder=folder, arrays=size.pair_arrays, array_bytes=size.array_bytes)
    _turn("make_pair", options, folder=small, **SMALL)
    both, warm = ["diff", f"{folder}/a", f"{folder}/b"], ["diff", f"{small}/a", f"{small}/b"]
    nbytes = 2 * size.pair_arrays * size.array_bytes
    turns: dict[str, Callable[[], dict[str, Any]]] = {
        "read both, raw": lambda: _turn("read_both", options, folder=folder, nbytes=nbytes),
        "read both, verified": lambda: _turn("read_both_verified", options, folder=folder, warm=small, nbytes=nbytes),
        "load both": lambda: _turn("load_both", options, folder=folder, warm=small, nbytes=nbytes),
        "diff": lambda: _turn("command", options, arguments=both, warm=warm, nbytes=nbytes),
    }
    found = _in_turn(options, turns, Path(folder), lambda: None)
    for each in (folder, small):
        cost_command.remove(Path(each))
    return found


def _in_turn(
    options: argparse.Namespace, turns: Mapping[str, Callable[[], Any]], source: Path, after: Callable[[], None]
) -> dict[str, Any]:
    """Each of them once a round, with nothing of the source in the page cache."""
    found: dict[str, Any] = {name: [] for name in turns}
    for number in range(options.rounds):
        for name, turn in turns.items():
            page_cache.drop(source)
            found[name].append(turn())
            after()
        figures = ", ".join(f"{name} {samples[-1]['seconds']:.2f} s" for name, samples in found.items())
        _say(f"{source.name}, round {number + 1}: {figures}")
    return found


def _commands(options: argparse.Namespace, directory: Path, size: Size) -> dict[str, list[float]]:
    """Whole commands, from the shell to their end."""
    few, run, leaves = directory / "few", directory / "run", directory / "leaves"
    _turn("make_run", options, run=str(few), steps=3)
    _turn("make_run", options, run=str(run), steps=size.steps)
    _turn("make_leaves", options, path=str(leaves), leaves=size.leaves)
    asked = {
        "--help": ["--help"],
        "ls, 3 steps": ["ls", str(few)],
        f"ls, {size.steps:,} steps": ["ls", str(run)],
        f"show, {size.leaves:,} leaves": ["show", str(leaves)],
    }
    found: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(QUICK_STARTS if options.quick else STARTS):
        for name, words in asked.items():
            found[name].append(_whole_command_s([*options.under, sys.executable, "-m", "jaxckpt_train.cli", *words]))
    return found


def _whole_command_s(words: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _turn(name: str, options: argparse.Namespace, **arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = run_fresh(f"benchmarks.tools_turns:{name}", arguments, under=options.under)
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cost_command.parser("tools", __doc__ or "")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    parser.add_argument("--page", type=Path, help=f"folder for {tools_report.PAGE}")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def _say(text: str) -> None:
    cost_command.progress.print(text, markup=False)


if __name__ == "__main__":
    main()
