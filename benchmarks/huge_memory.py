"""Memory on huge pages, and the plain bytes of a workload in it."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence

import numpy as np

from benchmarks.random_bytes import each_leaf
from benchmarks.workloads import Workload

ALIGNMENT_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


def aligned(nbytes: int) -> int:
    """The next size that `O_DIRECT` takes."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def fresh(nbytes: int, *, huge: bool = True) -> np.ndarray:
    """Page-aligned memory that is only promised: its first touch makes it, in huge pages or surely in small ones."""
    memory = mmap.mmap(-1, -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    except OSError as refused:
        if refused.errno != errno.EINVAL:  # EINVAL: a kernel without transparent huge pages
            raise
    return np.frombuffer(memory, np.uint8)[:nbytes]


def touched(nbytes: int) -> np.ndarray:
    """Page-aligned memory that is really there."""
    memory = fresh(nbytes)
    memory[:] = 0
    return memory


def gather(workload: Workload, seed: Sequence[int], target: str | None = None) -> np.ndarray:
    """The concatenated bytes of the leaves, padded for `O_DIRECT`."""
    leaves = workload.leaves if target is None else workload.wanted(target)
    buffer = touched(aligned(sum(leaf.nbytes for leaf in leaves)))
    end = 0
    for leaf, content in each_leaf(workload, seed, target):
        buffer[end : end + leaf.nbytes] = content
        end += leaf.nbytes
    return buffer
