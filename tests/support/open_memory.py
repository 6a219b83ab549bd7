"""The open descriptors and shared mappings of this process, to show that shared memory leaves nothing open."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def left_open() -> tuple[int, int]:
    """Return the numbers of descriptors and of shared-memory mappings of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:jaxckpt" in line for line in maps)
