"""The memory that a load may use beyond its destination: a number of bytes that are taken, and come back when freed.

Warm memory: buffers that what is only copied from is read into, one after the other.

Staging: a fixed budget of aligned host buffers between a snapshot and the disk, reused from save to save.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.threads import Mailbox, PerProcess

TELL_S = 60.0
_log = logging.getLogger("jaxckpt_train")
HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = max(ALIGNMENT, mmap.PAGESIZE)  # what the kernel takes back at a time; 64 KiB on some machines
# So long a reading thread waits for memory before it helps along, and so many times before it goes on without; so many
# times more often while somebody is at work who may give some back.
STALL_S, STALLS, PATIENCE = 0.05, 100, 120


def aligned_buffer(size: int) -> np.ndarray:
    """A flat uint8 array of `size` bytes at a page boundary, in huge pages where the kernel gives them.

    Fresh anonymous memory: its pages are not touched yet and read as zero. It lives as long as any view of it.
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
    """One area of fresh memory for the arrays of one load, so that all of it can lie in huge pages.

    An array of its own size has its ends, and often all of it, in small pages, whose first touch costs several times as
    much. The pages of each array go back to the system when nothing refers to that array any more.
    """

    def __init__(self, size: int) -> None:
        self._area = fresh_area(size) if size else None
        self._size, self._next = size, 0
        self._lock = threading.Lock()

    @staticmethod
    def room_for(size: int) -> int:
        """How much of an arena an array of `size` bytes takes: whole pages, as they go back."""
        return -(-size // PAGE_BYTES) * PAGE_BYTES

    def take(self, size: int) -> np.ndarray:
        """A flat uint8 array at a page boundary; from elsewhere if the area is used up."""
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
    """Anonymous private memory (Python's default is shared, which gets no huge pages).

    Raises:
        MemoryError: the system does not give so much.
    """
    try:
        area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of memory were refused: {error.strerror}") from error
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
    return area


class StagingPool:
    """One area of `budget_bytes`, lent in pieces; made when it is first needed, then kept.

    Pieces of any size, so that saves that cut their windows differently share one budget. Who waits is served in turn.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._area: np.ndarray | None = None
        self._lent: list[tuple[int, int]] = []
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def buffer(self, size: int) -> Iterator[np.ndarray]:
        """Borrow `size` bytes at a page boundary; waits until they are free. Holds whatever the last user left.

        Raises:
            ValueError: more than there ever will be.
        """
        if size > self.budget_bytes:
            raise ValueError(f"a buffer of {size} bytes, of {self.budget_bytes} in all")
        piece = self._borrow(-(-size // ALIGNMENT) * ALIGNMENT)
        try:
            assert self._area is not None
            yield self._area[piece[0] : piece[0] + size]
        finally:
            with self._changed:
                self._lent.remove(piece)
                self._changed.notify_all()

    def touch(self) -> None:
        """Have all of the memory there: its first touch costs more than any later one. Waits until none is lent."""
        with self.buffer(self.budget_bytes) as whole:
            whole[:] = 0

    def _borrow(self, size: int) -> tuple[int, int]:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or (start := self._gap(size)) is None:
                    if not self._changed.wait(TELL_S):
                        _log.warning(
                            "%s waits for %d of %d bytes of staging memory, and nobody has given any back for %.0f s; "
                            "does the disk still answer?", threading.current_thread().name, size, self.budget_bytes,
                            TELL_S,
                        )  # fmt: skip
                if self._area is None:
                    self._area = _area_of(self.budget_bytes)
                self._lent.append((start, start + size))
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        return start, start + size

    def _gap(self, size: int) -> int | None:
        """The first place with so many free bytes: memory that was used before is there already."""
        start = 0
        for low, high in sorted(self._lent):
            if low - start >= size:
                return start
            start = high
        return start if self.budget_bytes - start >= size else None


def _area_of(size: int) -> np.ndarray:
    try:
        return aligned_buffer(size)
    except MemoryError as error:
        raise SettingsError(
            f"StoreSettings.staging_bytes: {size} bytes of memory were refused by the system; choose fewer"
        ) from error


_pools = PerProcess(StagingPool)


def shared_pool(budget_bytes: int) -> StagingPool:
    """The pool of this process for a budget, the same one at every call."""
    return _pools.get(max(budget_bytes // ALIGNMENT, 1) * ALIGNMENT)


class BufferPool:
    """As many buffers as are used at a time. The one that was used last is lent first: it may still be in a cache.

    Fresh memory in its place costs more than to copy what is read into it: its first touch, each time.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    @contextlib.contextmanager
    def lent(self, size: int) -> Iterator[np.ndarray]:
        """`size` bytes at a page boundary, which hold whatever their last user has left. No view of them may stay."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = aligned_buffer(size)
        if buffer.nbytes < size:
            buffer = aligned_buffer(size)
        yield buffer[:size]
        self._free.append(buffer)


class ReadBudget:
    """A number of bytes that may be in use at once; one request larger than all of it waits until it is alone.

    Only `take` waits, and only worker threads take: giving back happens wherever memory is freed. Libraries such as JAX
    let go of what they have put on a device in later calls to them, or when Python collects garbage; so who waits
    collects. If nothing comes back even so, and nobody is at work whose end could bring it, then somebody keeps what
    should only pass, and the budget is given up: better than to wait for ever. (Ten minutes where somebody is at work.)
    """

    def __init__(self, total: int) -> None:
        self._total, self._used, self._lock = total, 0, threading.Lock()
        self._returned = Mailbox[int]()
        self._is_lifted = False
        self._at_work: set[int] = set()  # threads

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, this thread reads, or does what it read for: memory may come back when it is done, however late."""
        me = threading.get_ident()
        self._at_work.add(me)
        try:
            yield
        finally:
            self._at_work.discard(me)

    def take(self, size: int) -> None:
        """Wait until so many bytes may be used; on a reading thread only."""
        with self._lock:
            stalls = 0.0
            while not self._is_lifted and (not self._returned.empty() or 0 < self._used > self._total - size):
                try:
                    self._used -= self._returned.get(STALL_S)
                    stalls = 0.0
                except queue.Empty:
                    gc.collect(0)
                    stalls += 1 / PATIENCE if self._at_work else 1
                    if stalls >= STALLS:
                        _log.warning("%d bytes do not leave host memory; the load goes on without a limit", self._used)
                        self._is_lifted = True
            self._used += size

    def give(self, size: int) -> None:
        """They are free again; may be called by a finalizer, at any time on any thread."""
        self._returned.put(size)

    def charge(self, array: np.ndarray) -> None:
        """Count memory that is there already, until nothing refers to it any more."""
        owner = owner_of(array)
        self.give(-owner.nbytes)
        weakref.finalize(owner, self.give, owner.nbytes).atexit = False

    def lift(self) -> None:
        """Let everyone through from now on: nobody will give back what others wait for."""
        self._is_lifted = True
        self.give(0)


def owner_of(array: np.ndarray) -> np.ndarray:
    """The array that all others of the same memory are views of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
