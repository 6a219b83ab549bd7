"""What a process has open: to see that memory that others look at leaves nothing behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def left_open() -> tuple[int, int]:
    """Descriptors, and mappings of shared memory, of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:jaxckpt" in line for line in maps)
