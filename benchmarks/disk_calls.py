"""Raw calls to the disk compared: pwrite and preadv on threads, and io_uring, by size and number; preallocation."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import huge_memory, page_cache
from benchmarks.io_uring import Ring
from benchmarks.raw_disk import open_direct, warn_if_buffered
from benchmarks.spread import Spread

MIB = 1 << 20
BUFFERS_BYTES = 128 * MIB
THREADS, THREAD_SIZES = (1, 2, 3), (4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
DEPTHS, RING_SIZES = (2, 4, 8), (1 * MIB, 4 * MIB, 16 * MIB)


@dataclass(frozen=True)
class Way:
    """One way to move a file: which calls, how many under way at a time, and of what size."""

    calls: str
    under_way: int
    size: int

    @property
    def name(self) -> str:
        """As the table names it."""
        return f"{self.calls} {self.under_way} x {self.size // MIB} MiB"


def ways(ring: bool) -> list[Way]:
    """All that are compared."""
    found = [
        Way("threads", *both) for both in itertools.product(THREADS, THREAD_SIZES) if both[0] * both[1] <= BUFFERS_BYTES
    ]
    found += [Way("preallocated", number, 32 * MIB) for number in (1, 2)]
    if ring:
        found += [Way("io_uring", *both) for both in itertools.product(DEPTHS, RING_SIZES)]
    return found


def move(way: Way, path: Path, total: int, buffers: np.ndarray, *, write: bool) -> float:
    """Write or read the whole file; returns the seconds, with `fdatasync` after a write."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL if write else os.O_RDONLY
    page_cache.settle()
    started = time.perf_counter()
    descriptor, _ = open_direct(path, flags)
    try:
        pieces = [(at, buffers[at % BUFFERS_BYTES :][: way.size]) for at in range(0, total, way.size)]
        if write and way.calls == "preallocated":  # and then as "threads"
            os.posix_fallocate(descriptor, 0, total)
        (_move_by_ring if way.calls == "io_uring" else _move_by_threads)(way, descriptor, pieces, write)
        if write:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - started


def _move_by_threads(way: Way, descriptor: int, pieces: list[tuple[int, np.ndarray]], write: bool) -> None:
    def one(piece: tuple[int, np.ndarray]) -> None:
        at, data = piece
        view = memoryview(data)
        done = os.pwrite(descriptor, view, at) if write else os.preadv(descriptor, [view], at)
        if done != len(view):
            raise OSError(f"moved {done} of {len(view)} bytes at {at}")

    if way.under_way == 1:
        for piece in pieces:
            one(piece)
        return
    with ThreadPoolExecutor(way.under_way) as pool:
        for _ in pool.map(one, pieces):
            pass


def _move_by_ring(way: Way, descriptor: int, pieces: list[tuple[int, np.ndarray]], write: bool) -> None:
    waiting, under_way = iter(pieces), 0
    with Ring(way.under_way) as ring:
        while True:
            more = [(descriptor, at, data) for at, data in itertools.islice(waiting, way.under_way - under_way)]
            if more:
                ring.submit(more, write=write)
            under_way += len(more)
            if not under_way:
                return
            under_way -= ring.wait()


def measure(folder: Path, total: int, rounds: int) -> dict[Way, tuple[list[float], list[float]]]:
    """Seconds of all writes and all reads of each way, in turn; the first round is not counted."""
    try:
        with Ring(1):
            found = ways(ring=True)
    except OSError as refused:
        print(f"io_uring is left out: {refused}", file=sys.stderr)
        found = ways(ring=False)
    buffers = huge_memory.touched(BUFFERS_BYTES)
    buffers[:] = np.random.default_rng(0).integers(0, 256, BUFFERS_BYTES, np.uint8)
    times: dict[Way, tuple[list[float], list[float]]] = {way: ([], []) for way in found}
    for number in range(rounds + 1):
        turn = found[number % len(found) :] + found[: number % len(found)]
        for way in turn if number % 2 else turn[::-1]:
            path = folder / "disk_calls"
            kinds = (True,) if way.calls == "preallocated" else (True, False)  # its file is read as any other
            try:
                took = [move(way, path, total, buffers, write=write) for write in kinds]
            finally:
                path.unlink(missing_ok=True)
            if number:
                for seconds, second in zip(times[way], took, strict=False):
                    seconds.append(second)
    return times


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    warn_if_buffered(options.dir)
    total = options.mib * MIB
    times = measure(options.dir, total, options.rounds)
    print(f"| calls, {options.mib} MiB, GB/s, median of {options.rounds} (range) | write | read |\n|---|---|---|")
    for way, both in times.items():
        cells = [_cell([total / second / 1e9 for second in seconds]) for seconds in both]
        print(f"| {way.name} | {cells[0]} | {cells[1]} |")


def _cell(speeds: list[float]) -> str:
    return str(Spread.of(speeds)) if speeds else "-"


if __name__ == "__main__":
    main()
