"""What each write mode costs, on each file system that there is: `python -m benchmarks.write_modes`.

`durability="full"` syncs files and directories before a save is acknowledged, `"file"` only the files, `"none"`
nothing. They take turns, so that all see the same disk; "raw" is a plain write and sync of one file of as many bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxckpt_train as jct
from tests.nightly.faults.loop_disk import loop_disk, why_not

MODES = ("full", "file", "none")
STATES: dict[str, Callable[[], Any]] = {
    "one array of 128 MiB": lambda: {"w": np.random.default_rng(0).standard_normal(1 << 24)},
    "1,000 arrays of 4 KiB": lambda: {f"x{n}": np.random.default_rng(n).standard_normal(512) for n in range(1000)},
}


@contextlib.contextmanager
def tmpfs(folder: Path) -> Iterator[Path]:
    """A file system in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def xfs(folder: Path) -> Iterator[Path]:
    """An xfs in a file."""
    folder.mkdir()
    with loop_disk(folder, "xfs") as disk:
        disk.make_new()
        yield disk.path


def places(work: Path) -> Iterator[tuple[str, Path]]:
    """The available file systems, in turn."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", work], check=True, stdout=subprocess.PIPE, text=True).stdout
    yield f"the disk here ({kind.strip()})", work
    if os.geteuid() != 0:
        print("tmpfs, xfs: SKIP: need root, to mount")
        return
    with tmpfs(work / "memory") as folder:
        yield "tmpfs", folder
    reason = why_not("xfs")
    if reason is not None:
        print(f"xfs: SKIP: {reason}")
        return
    with xfs(work / "xfs") as folder:
        yield "xfs (in a file, on a loop device)", folder


def measure(folder: Path, state: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of each save, by mode; the first round, which warms up, is left out."""
    seconds: dict[str, list[float]] = {mode: [] for mode in (*MODES, "raw")}
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for number in range(rounds + 1):
        for mode in MODES:
            took_s = timed(lambda mode=mode: jct.save(folder / "c", state, settings=jct.StoreSettings(durability=mode)))  # type: ignore[misc]
            shutil.rmtree(folder / "c")
            if number:
                seconds[mode].append(took_s)
        took_s = timed(lambda: raw(folder / "raw", nbytes))
        (folder / "raw").unlink()
        if number:
            seconds["raw"].append(took_s)
    return seconds


def timed(call: Callable[[], object]) -> float:
    """Seconds that it takes."""
    os.sync()  # what the one before has left unwritten is not this one's
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def raw(path: Path, nbytes: int) -> None:
    """One file, written and synced."""
    data = memoryview(bytearray(min(nbytes, 64 << 20)))
    with path.open("wb", buffering=0) as file:
        left = nbytes
        while left:
            left -= file.write(data[: min(left, len(data))])
        os.fsync(file.fileno())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("build/write_modes.json"))
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        for place, folder in places(Path(name)):
            for what, make in STATES.items():
                seconds = measure(folder, make(), chosen.rounds)
                rows.append({"place": place, "state": what, "seconds": seconds})
                shown = ", ".join(
                    f"{mode} {1e3 * statistics.median(each):.1f} ms ({1e3 * min(each):.1f} .. {1e3 * max(each):.1f})"
                    for mode, each in seconds.items()
                )
                print(f"{place}: {what}: {shown}", flush=True)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
