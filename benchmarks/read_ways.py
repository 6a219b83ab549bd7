"""Ways to have a file in new memory, every byte verified: direct reads, the page cache, and mappings (ADR 10)."""

from __future__ import annotations

import argparse
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from benchmarks import host_memory, huge_memory, page_cache
from benchmarks.raw_disk import open_direct, warn_if_buffered
from benchmarks.spread import Spread

MIB = 1 << 20
PIECE_BYTES = 16 * MIB

Piece = tuple[int, np.ndarray]
Read = Callable[[Path, int], tuple[np.ndarray, list[str]]]
"""Reads this many bytes of a file; returns them, and the digest of each piece."""


def by_calls(threads: int, *, direct: bool, huge: bool) -> Read:
    """`preadv` into new memory by some threads, each of which digests what it has read."""

    def read(path: Path, total: int) -> tuple[np.ndarray, list[str]]:
        descriptor = open_direct(path, os.O_RDONLY)[0] if direct else os.open(path, os.O_RDONLY)
        memory = huge_memory.fresh(total, huge=huge)

        def one(piece: Piece) -> str:
            if (done := os.preadv(descriptor, [memoryview(piece[1])], piece[0])) != len(piece[1]):
                raise OSError(f"read {done} of {len(piece[1])} bytes at {piece[0]}")
            return _digest(piece)

        try:
            return memory, _digests(one, memory, threads)
        finally:
            os.close(descriptor)

    return read


def by_mapping(threads: int, *, populate: bool) -> Read:
    """A private mapping: read when it is digested, and writable, as JAX wants it; or populated, and read-only."""

    def read(path: Path, total: int) -> tuple[np.ndarray, list[str]]:
        descriptor = os.open(path, os.O_RDONLY)
        flags = mmap.MAP_PRIVATE | (mmap.MAP_POPULATE if populate else 0)
        try:
            mapped = mmap.mmap(descriptor, total, flags, mmap.PROT_READ | (0 if populate else mmap.PROT_WRITE))
        finally:
            os.close(descriptor)
        memory = np.frombuffer(mapped, np.uint8)
        return memory, _digests(_digest, memory, threads)

    return read


WAYS: dict[str, Read] = {
    "O_DIRECT, 4 threads, huge pages": by_calls(4, direct=True, huge=True),
    "O_DIRECT, 4 threads, pages of 4 KiB": by_calls(4, direct=True, huge=False),
    "O_DIRECT, 1 thread, huge pages": by_calls(1, direct=True, huge=True),
    "page cache, 2 threads, huge pages": by_calls(2, direct=False, huge=True),
    "page cache, 4 threads, huge pages": by_calls(4, direct=False, huge=True),
    "a mapping, digested by 4 threads": by_mapping(4, populate=False),
    "a read-only mapping, populated, then digested by 4 threads": by_mapping(4, populate=True),
}


def _digest(piece: Piece) -> str:
    return xxhash.xxh3_128_hexdigest(piece[1])


def _digests(digest: Callable[[Piece], str], memory: np.ndarray, threads: int) -> list[str]:
    with ThreadPoolExecutor(threads) as pool:
        return list(
            pool.map(digest, ((at, memory[at : at + PIECE_BYTES]) for at in range(0, len(memory), PIECE_BYTES)))
        )


def measure(folder: Path, total: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in turn, caches dropped before each; the first round is not counted."""
    path = folder / "read_ways"
    content = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    expected = _digests(_digest, content, 1)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    try:
        path.write_bytes(content.data)
        del content
        page_cache.sync_tree(folder)
        for number in range(rounds + 1):
            for name in list(WAYS)[:: 1 if number % 2 else -1]:
                page_cache.drop(folder)
                host_memory.make_present(total)
                started = time.perf_counter()
                memory, found = WAYS[name](path, total)
                took = time.perf_counter() - started
                if found != expected:
                    raise ValueError(f"{name}: other bytes than were written")
                del memory
                seconds[name] += [took] if number else []
    finally:
        path.unlink(missing_ok=True)
    return seconds


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("build/bench/reads"), help="a directory of its own")
    parser.add_argument("--mib", type=int, default=1024, help="size of the file, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    warn_if_buffered(options.dir)
    print(f"| way, {options.mib} MiB, every byte digested | seconds, median of {options.rounds} (range) |\n|---|---|")
    for name, seconds in measure(options.dir, options.mib * MIB, options.rounds).items():
        print(f"| {name} | {Spread.of(seconds)} |")


if __name__ == "__main__":
    main()
