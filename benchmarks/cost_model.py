"""What a leaf, a shard and a byte cost in each phase of a save and a load: `python -m benchmarks.cost_model`."""

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
from benchmarks.cost_summary import LINEAR_EXPONENT, Cost, costs

MIB = 1 << 20
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Axis:
    """What is made larger, and how large."""

    function: str
    unit: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    devices: int = 1


AXES = {
    "leaves": Axis("leaves", "leaf", (10, 100, 1_000, 10_000, 100_000), (10, 100, 1_000, 10_000)),
    "shards": Axis("shards", "chunk", (8, 100, 1_000, 10_000), (8, 100, 1_000), devices=8),
    "bytes": Axis("one_array", "byte", (MIB, 16 * MIB, 256 * MIB, 1024 * MIB), (MIB, 4 * MIB, 16 * MIB)),
    "manifest": Axis("manifest", "chunk", (10_000, 100_000, 1_000_000), (1_000, 10_000)),
}

HOW_TO_READ = f"""\
fixed + each * size: the line that fits the medians best by relative error. growth: p of value ~ size**p between the
two largest sizes; 1 is linear, above {LINEAR_EXPONENT} is marked; "-": under 20 ms at the largest size, too short to
tell. The peak of a load holds the loaded arrays too.
"save: ..." and "load: ..." are our phases, timed by calling internals; the other rows are the public calls."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print tables to stdout, and write all samples as JSON if asked."""
    options = _parse(arguments)
    console = cost_command.stdout_console()
    results: dict[str, Any] = {}
    tables = []
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        for name in options.axes:
            answers = _answers(options, name, directory)
            found = costs(answers)
            tables.append((AXES[name], name, found))
            summary = {kind: {row: dataclasses.asdict(cost) for row, cost in of.items()} for kind, of in found.items()}
            results[name] = {"summary": summary, "answers": answers}
    cost_command.show_machine(console, machine)
    for axis, name, found in tables:
        show(console, axis, name, found)
    console.print(HOW_TO_READ, markup=False)
    cost_command.finish(options, machine, results)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = cost_command.parser("cost_model", __doc__ or "")
    parser.add_argument("--axes", type=cost_command.names, default=list(AXES), help=f"of {','.join(AXES)}")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"of every measurement; default {REPEATS}")
    parser.add_argument("--largest", type=int, help="leave out sizes above this one; of bytes, in MiB")
    options = parser.parse_args(arguments)
    if not options.axes or set(options.axes) - set(AXES):
        parser.error(f"--axes: expected some of {', '.join(AXES)}, found {','.join(options.axes) or 'none'}")
    for name in options.axes:
        if len(_sizes(options, name)) < 2:
            parser.error(f"--largest: leaves fewer than two sizes of {name}")
    return options


def _sizes(options: argparse.Namespace, name: str) -> list[int]:
    axis = AXES[name]
    sizes = axis.quick_sizes if options.quick else axis.sizes
    if options.largest is None:
        return list(sizes)
    return [size for size in sizes if size <= options.largest * (MIB if name == "bytes" else 1)]


def _answers(options: argparse.Namespace, name: str, directory: Path) -> dict[int, Any]:
    axis, answers = AXES[name], {}
    for size in _sizes(options, name):
        arguments = {"size": size, "path": str(directory / f"{name}-{size}"), "repeats": options.repeats}
        function = f"benchmarks.cost_child:{axis.function}"
        answers[size] = run_fresh(function, arguments, devices=axis.devices, under=options.under)
        cost_command.progress.print(f"{name}: {size} done")
    return answers


def show(console: Console, axis: Axis, name: str, found: dict[str, dict[str, Cost]]) -> None:
    """The tables of one axis: seconds, and bytes on disk and in memory."""
    for kind, rows in found.items():
        scale, unit = (1e6, "us") if kind == "seconds" else (1.0, "B")
        each_scale, each_unit = (1e9, "ns") if axis.unit == "byte" and kind == "seconds" else (scale, unit)
        sizes = next(iter(rows.values())).sizes if rows else []
        table = Table(title=f"{name}: {kind}", title_justify="left")
        headings = [f"fixed, {unit}", f"each {axis.unit}, {each_unit}", "growth", *(f"at {_short(n)}" for n in sizes)]
        table.add_column("phase")
        for heading in headings:
            table.add_column(heading, justify="right")
        for row, cost in rows.items():
            values = [_seconds(value) if kind == "seconds" else f"{value:,.0f}" for value in cost.values]
            line = (f"{cost.fixed * scale:,.0f}", f"{cost.each * each_scale:,.3g}")
            table.add_row(row, *line, _growth(cost), *values)
        console.print(table)


def _growth(cost: Cost) -> str:
    if cost.linear is None:
        return "-"
    return f"{cost.exponent:.2f}" if cost.linear else f"{cost.exponent:.2f} NOT LINEAR"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _short(size: int) -> str:
    return f"{size // MIB} Mi" if size % MIB == 0 else f"{size:,}"


if __name__ == "__main__":
    main()
