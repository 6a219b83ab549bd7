"""The sizes of the state with adapters, how long its saves take, and what they write. Needs no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import host_memory, page_cache

MIB = 1 << 20
BLOCKS, WIDTH, RANK = 16, 1024, 26
"""The adapters and their two moments have about 10 MiB."""


def base_rows(mib: int) -> int:
    """The rows of the base weights of a block, as float32."""
    return mib * MIB // BLOCKS // WIDTH // 4


def written_below(folder: Path) -> dict[tuple[int, int], int]:
    """The sizes of all files below a folder, by what they are and when they changed; a second name counts once."""
    stats = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    return {(each.st_ino, each.st_mtime_ns): each.st_size for each in stats}


def measured_saves(
    directory: str, mib: int, saves: int, update: Callable[[], Any], save: Callable[[int, Any], None]
) -> list[dict[str, float]]:
    """Seconds and written bytes of each of some saves of what `update` returns before it."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    found, before = [], written_below(folder)
    for step in range(1, saves + 1):
        state = update()
        host_memory.make_present(mib * MIB, is_quick=False)
        page_cache.settle()
        started = time.perf_counter()
        save(step, state)
        seconds = time.perf_counter() - started
        now = written_below(folder)
        written = sum(size for each, size in now.items() if each not in before)
        found.append({"seconds": seconds, "written": float(written)})
        before = now
    return found
