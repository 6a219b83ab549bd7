"""Staging: a fixed budget of aligned host buffers between a snapshot and the disk, reused from save to save."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from jaxckpt_train.store.segment import ALIGNMENT

HUGE_PAGE_BYTES = 2 << 20


def aligned_buffer(size: int) -> np.ndarray:
    """A flat uint8 array of `size` bytes at a page boundary, in huge pages where the kernel gives them.

    Fresh anonymous memory: its pages are not touched yet and read as zero. It lives as long as any view of it.
    """
    return np.frombuffer(fresh_area(max(size, ALIGNMENT)), np.uint8, size)


class Arena:
    """One area of fresh memory for the arrays of one load, so that all of it can lie in huge pages.

    An array of its own size has its ends, and often all of it, in small pages, whose first touch costs several times as
    much. The pages of each array go back to the system when nothing refers to that array any more.
    """

    def __init__(self, size: int) -> None:
        self._area = fresh_area(size) if size else None
        self._size, self._next = size, 0
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """A flat uint8 array at a page boundary; from elsewhere if the area is used up."""
        pages = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            start = self._next
            if self._area is None or start + pages > self._size:
                return aligned_buffer(size)
            self._next += pages
        array = np.frombuffer(self._area, np.uint8, size, start)
        weakref.finalize(array, _give_back, self._area, start, pages).atexit = False
        return array


def _give_back(area: mmap.mmap, start: int, size: int) -> None:
    if hasattr(mmap, "MADV_DONTNEED"):
        area.madvise(mmap.MADV_DONTNEED, start, size)


def fresh_area(size: int) -> mmap.mmap:
    """Anonymous private memory (Python's default is shared, which gets no huge pages)."""
    area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
    return area


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


def shared_pool(budget_bytes: int, count: int) -> StagingPool:
    """The pool of this process for a budget and a number of buffers, the same one at every call."""
    buffer_bytes = max(ALIGNMENT, budget_bytes // count // ALIGNMENT * ALIGNMENT)
    with _pools_lock:
        return _pools.setdefault((buffer_bytes, count), StagingPool(buffer_bytes, count))
