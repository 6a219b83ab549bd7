"""Host memory for I/O: aligned arrays, and the read budget of loads."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.threads import Mailbox

_log = logging.getLogger("jaxckpt_train")
HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = max(ALIGNMENT, mmap.PAGESIZE)  # the unit that can be returned to the kernel; 64 KiB on some machines
# A reading thread waits STALL_S for memory before it collects garbage. It lifts the limit after STALLS such waits, or
# after STALLS * PATIENCE of them while another thread is working, which may return memory.
STALL_S, STALLS, PATIENCE = 0.05, 100, 120


def aligned_buffer(size: int) -> np.ndarray:
    """A flat uint8 array of `size` bytes at a page boundary, in huge pages if the kernel offers them.

    It is fresh anonymous memory, which reads as zero and whose pages are not touched yet. It lives as long as any view.
    """
    return np.frombuffer(fresh_area(max(size, ALIGNMENT)), np.uint8, size)


def empty_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised, 64-byte aligned, writable, row-major array."""
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if size >= ALIGNMENT:
        return aligned_buffer(size).view(dtype).reshape(shape)
    room = np.empty(size + VIEW_ALIGNMENT, np.uint8)
    skip = -room.ctypes.data % VIEW_ALIGNMENT
    return room[skip : skip + size].view(dtype).reshape(shape)


class Arena:
    """One area of fresh memory for the arrays of one load, so that all of it can use huge pages.

    A separately allocated array has its ends, and often all of it, in small pages, whose first touch is several times
    slower. The pages of an array return to the system when nothing refers to that array.
    """

    def __init__(self, size: int) -> None:
        self._area = fresh_area(size) if size else None
        self._size, self._next = size, 0
        self._lock = threading.Lock()

    @staticmethod
    def room_for(size: int) -> int:
        """How much of an arena an array of `size` bytes takes: whole pages, because only these can be returned."""
        return -(-size // PAGE_BYTES) * PAGE_BYTES

    def take(self, size: int) -> np.ndarray:
        """A flat uint8 array at a page boundary; a separate allocation if the area is used up."""
        pages = self.room_for(size)
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
    """Anonymous private memory. (Python's default is shared memory, which gets no huge pages.)

    Raises MemoryError: the system refuses it.
    """
    try:
        area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refused {size} bytes of memory: {error.strerror}") from error
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
    return area


class BufferPool:
    """Reusable buffers, as many as are used at a time. The last one used is lent first, because it may still be cached.

    Fresh memory would cost more at its first touch than copying the data that is read into a buffer.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    @contextlib.contextmanager
    def borrow(self, size: int) -> Iterator[np.ndarray]:
        """Borrow `size` bytes at a page boundary, with arbitrary content. No view of them may remain afterwards."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = aligned_buffer(size)
        if buffer.nbytes < size:
            buffer = aligned_buffer(size)
        yield buffer[:size]
        self._free.append(buffer)


class ReadBudget:
    """A limit on the bytes in use. A single request larger than the limit waits until nothing else is in use.

    Only `take` waits, and only worker threads call it; memory is returned wherever it is freed. Libraries such as JAX
    release what they have put on a device in later calls or when Python collects garbage, so a waiting thread collects
    garbage. If no memory is returned even so, and no thread is working that may return some, then some code keeps
    arrays that should be temporary, and the limit is lifted instead of waiting for ever. (While a thread is working,
    that happens after ten minutes.)
    """

    def __init__(self, total: int) -> None:
        self._total, self._used, self._lock = total, 0, threading.Lock()
        self._returned = Mailbox[int]()
        self._is_lifted = False
        self._working: set[int] = set()  # thread identifiers

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Mark this thread as working inside the block: it may return memory when it is done."""
        me = threading.get_ident()
        self._working.add(me)
        try:
            yield
        finally:
            self._working.discard(me)

    def take(self, size: int) -> None:
        """Wait until `size` bytes may be used; call it on reading threads only."""
        with self._lock:
            stalls = 0.0
            while not self._is_lifted and (not self._returned.empty() or 0 < self._used > self._total - size):
                try:
                    self._used -= self._returned.get(STALL_S)
                    stalls = 0.0
                except queue.Empty:
                    gc.collect(0)
                    stalls += 1 / PATIENCE if self._working else 1
                    if stalls >= STALLS:
                        _log.warning(
                            "%d bytes of host memory are not released; the load continues without a memory limit",
                            self._used,
                        )
                        self._is_lifted = True
            self._used += size

    def give(self, size: int) -> None:
        """Return `size` bytes; a finalizer may call it at any time on any thread."""
        self._returned.put(size)

    def charge(self, array: np.ndarray) -> None:
        """Count an existing array until nothing refers to it."""
        owner = owner_of(array)
        self.give(-owner.nbytes)
        weakref.finalize(owner, self.give, owner.nbytes).atexit = False

    def lift(self) -> None:
        """Remove the limit, because the memory that threads wait for will not be returned."""
        self._is_lifted = True
        self.give(0)


def owner_of(array: np.ndarray) -> np.ndarray:
    """The array that owns the memory of this view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
