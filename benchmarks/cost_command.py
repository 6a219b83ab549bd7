"""The command line that the three benchmarks share: options, the working directory, the JSON file, the machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import Description, describe

JSON_VERSION = 1
DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "bench"
WIDTH_WITHOUT_TERMINAL = 150

progress = Console(stderr=True, highlight=False, soft_wrap=True)


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every one of these benchmarks has."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    made.add_argument("--quick", action="store_true", help="smaller and fewer: a look, not a result")
    made.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="a directory on the disk to measure")
    made.add_argument("--json", type=Path, help="write the machine, all samples and the summary to this file")
    made.add_argument(
        "--under",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="put before the command of every measuring process, such as 'taskset -c 0,1' or 'flock FILE'",
    )
    return made


def names(text: str) -> list[str]:
    """The type of an option that takes names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


@contextlib.contextmanager
def working_directory(parent: Path) -> Iterator[Path]:
    """A new directory below `parent`, removed afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="cost-", dir=parent))
    try:
        yield made
    finally:
        remove(made)


def remove(path: Path) -> None:
    """Remove a directory with all it holds, if it is there."""
    shutil.rmtree(path, ignore_errors=True)


def stdout_console() -> Console:
    """A console that stays wide enough for the tables when stdout is a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def show_machine(console: Console, machine: Description) -> None:
    """The machine and the versions, in two lines."""
    for line in machine_lines(machine):
        console.print(line)


def machine_lines(machine: Description) -> list[str]:
    """The machine and the versions, in two lines."""
    gib = int(machine["memory_bytes"] or 0) / (1 << 30)
    shown = ("python", "jax", "numpy", "orbax-checkpoint")
    return [
        f"machine: {machine['cores']} cores ({machine['processor']}), {gib:.1f} GiB, {machine['kernel']}, "
        f"{machine['file_system']} on {machine['device']}",
        f"commit: {machine['commit']}; versions: " + ", ".join(f"{name} {machine[name]}" for name in shown),
    ]


def finish(options: argparse.Namespace, machine: Description, results: Any) -> None:
    """Write the JSON file if one was asked for."""
    if options.json is None:
        return
    asked = {name: value if not isinstance(value, Path) else str(value) for name, value in vars(options).items()}
    document = {"json_version": JSON_VERSION, "machine": machine, "options": asked, "results": results}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def machine_of(directory: Path) -> Description:
    """The machine and the versions that the figures are of."""
    return describe(directory)
