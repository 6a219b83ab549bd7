"""Staging: a fixed budget of aligned host buffers between a snapshot and the disk, reused from save to save."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from collections.abc import Iterator

import numpy as np

from jaxckpt_train.store.segment import ALIGNMENT

HUGE_PAGE_BYTES = 2 << 20


def aligned_buffer(size: int) -> np.ndarray:
    """A flat uint8 array of `size` bytes at a page boundary, in huge pages where the kernel gives them.

    Fresh anonymous memory: its pages are not touched yet and read as zero. It lives as long as any view of it.
    """
    area = mmap.mmap(-1, max(size, ALIGNMENT), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8, size)


class StagingPool:
    """`count` buffers of `buffer_bytes` each, handed out one at a time; made when first needed, then kept."""

    def __init__(self, buffer_bytes: int, count: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._free: queue.LifoQueue[np.ndarray | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[np.ndarray]:
        """Borrow a buffer; waits until one is free. Its content is whatever the last user left."""
        held = self._free.get()
        try:
            if held is None:
                held = aligned_buffer(self.buffer_bytes)
            yield held
        finally:
            self._free.put(held)


_pools: dict[tuple[int, int], StagingPool] = {}
_pools_lock = threading.Lock()


def _forget_pools() -> None:
    """A forked child makes its own buffers: some of the parent's may be lent to threads that the child lacks."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget_pools)


def shared_pool(budget_bytes: int, threads: int) -> StagingPool:
    """The pool of this process for a budget and a number of writing threads, the same one at every call."""
    buffer_bytes = max(ALIGNMENT, budget_bytes // threads // ALIGNMENT * ALIGNMENT)
    with _pools_lock:
        return _pools.setdefault((buffer_bytes, threads), StagingPool(buffer_bytes, threads))
