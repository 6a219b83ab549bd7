"""Takes the host of a virtual machine out of the figures: has free memory really be there before the clock starts."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import huge_memory

MIB = 1 << 20
MARGIN_BYTES = 256 * MIB
PIECE_BYTES = 64 * MIB
HELD_S = 3.0
MEMORY_INFO = Path("/proc/meminfo")


def make_present(nbytes: int, *, is_quick: bool = False) -> None:
    """Touch memory for twice this many bytes, and free it again; from 64 MiB on after `HELD_S`, unless it `is_quick`.

    A kernel that reports free pages gives them back to its host after two seconds. Who touches them next waits for the
    host, from 0.6 to over 3 s for 1 GiB instead of 0.1 s, whatever it is measured for. Twice: for what is made, and
    for the page cache.

    Held, because the kernel reports in passes, two seconds after something was freed, and a pass takes along whatever
    is free by then: that of the caches that were just dropped would take this memory. That is waited for by
    the clock, since kernels in general do not tell when a pass is over.
    """
    wanted = min(2 * nbytes + MARGIN_BYTES, _available_bytes() * 3 // 4)
    pieces = [huge_memory.touched(PIECE_BYTES) for _ in range(wanted // PIECE_BYTES)]
    if nbytes >= PIECE_BYTES and not is_quick:  # what is small is over before it matters
        time.sleep(HELD_S)
    del pieces


def _available_bytes() -> int:
    for line in MEMORY_INFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{MEMORY_INFO}: expected a line MemAvailable")
