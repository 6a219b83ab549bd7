"""Copy an opened checkpoint of any format into a new one, array by array, with only a few chunks in memory.

`ReadAhead` reads boxes on helper threads before they are written, into memory that it reuses.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxckpt_train.errors import CheckpointTimeoutError, UnsupportedLeafError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, cut_box, full_box
from jaxckpt_train.store.buffers import fresh_area
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.files import read_recorded
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    WHOLE_CHUNKS,
    ArrayRecord,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
)
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import ReadProgress, read_box, read_boxes
from jaxckpt_train.store.segment import ALIGNMENT, DTYPES, ArraySource, ChunkSource, alignment_class
from jaxckpt_train.store.threads import POLL_S, StallDetector
from jaxckpt_train.store.timeouts import BackgroundCall, abandon_call, start_call
from jaxckpt_train.store.transaction import MOVE_IT_AWAY, Transaction, begin
from jaxckpt_train.store.writer import write_arrays

LEAST_BYTES = 1 << 20  # smaller boxes are not read ahead but in groups, when the first of a group is fetched
TOGETHER_BYTES, TOGETHER = 4 << 20, 1024  # the size of such a group, and its number of boxes
AT_ONCE = 2
CHUNK_BYTES = 256 << 20
"""A larger array is copied in chunks of at most this size, one in memory at a time."""
MAX_CHUNKS = 1 << 20


def copy_checkpoint(
    files: Opener,
    source: Committed,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    info: Mapping[str, Any],
    parts: Sequence[str] | None,
    decoding: int,
    progress: ReadProgress,
) -> Committed:
    """Write and commit a copy of an opened checkpoint in this library's format.

    `info` is recorded in the copy's manifest. The checkpointables `parts` are copied (None: all). `decoding` is the
    additional memory to read an array of the source, as a multiple of its size; see `Opened`.

    Raises CorruptCheckpointError: data of the source differs from what was saved; CheckpointExistsError: something has
    taken that path meanwhile; UnsupportedLeafError: an array is too large to be copied; MismatchError: a value of the
    source does not fit an operation; StorageError: a file system refused.
    """
    transaction = begin(backend, final, settings)
    try:
        segments: list[SegmentRecord] = []
        copier = _Copier(files, source, backend, transaction, settings, decoding, progress)
        wanted = [part for part in source.manifest.parts if parts is None or part.name in parts]
        records = [copier.copy_part(part, segments) for part in wanted]
        manifest = Manifest(
            FORMAT, FORMAT_VERSION, settings.digest, BLOCK_BYTES, tuple(segments), tuple(records), dict(info)
        )
        return transaction.commit(manifest, if_taken=MOVE_IT_AWAY)
    except BaseException as error:
        transaction.abort_after(error)
        raise


@dataclasses.dataclass(frozen=True)
class _Copier:
    files: Opener
    source: Committed
    backend: Backend
    transaction: Transaction
    settings: StoreSettings
    decoding: int
    progress: ReadProgress

    def copy_part(self, part: PartRecord, segments: list[SegmentRecord]) -> PartRecord:
        self.transaction.add_folders([part.name, *(os.path.dirname(record.file) for record in part.files)])
        budget = self.settings.read_budget_bytes
        with ReadAhead(budget, self.source.directory, decoding=self.decoding) as ahead:
            written = write_arrays(
                self.backend,
                self.transaction.directory,
                part.name,
                self._sources_of(part, ahead),
                self.settings,
                first_segment=len(segments),
                progress=self.progress,
                give_up=ahead.give_up,
            )
        segments.extend(written.segments)
        return PartRecord(part.name, part.kind, written.arrays, tuple(self._copy_files(part)), part.detail)

    def _sources_of(self, part: PartRecord, ahead: ReadAhead) -> list[ArraySource]:
        found = []
        for array in part.arrays:
            boxes = self._boxes_of(array)
            coming = ahead.of([LazyBox(self.files, self.source, array, box, self.settings) for box in boxes])
            chunks = [ChunkSource(*each) for each in zip(boxes, coming, strict=True)]
            found.append(ArraySource(array.name, array.shape, DTYPES[array.dtype], chunks, array.sharding))
        ahead.order(lambda box: alignment_class(box.nbytes))
        return found

    def _boxes_of(self, array: ArrayRecord) -> list[Box]:
        itemsize = DTYPES[array.dtype].itemsize
        if self.source.manifest.block_bytes >= WHOLE_CHUNKS:
            return [chunk.box for chunk in array.chunks]  # its chunks can only be read whole
        return chunk_boxes(array.shape, itemsize, f"{self.source.directory}: array {array.name!r}")

    def _copy_files(self, part: PartRecord) -> Iterator[FileRecord]:
        manifest = self.source.manifest
        for record in part.files:
            digest = manifest.digest if self.settings.verify_on_load and record.digests else None
            data = read_recorded(self.files, self.source.directory, record, digest, manifest.block_bytes)
            yield self.transaction.write_file(record.file, bytes(memoryview(data)))
            self.progress(record.bytes)


def chunk_boxes(shape: Sequence[int], itemsize: int, subject: str, most: int = CHUNK_BYTES) -> list[Box]:
    """Cut an array into boxes of at most `most` bytes along its first axes; empty for an array without elements."""
    total = math.prod(shape) * itemsize
    if not total:
        return []
    if total > most * MAX_CHUNKS:
        raise UnsupportedLeafError(f"{subject}: cannot copy {total:,} bytes, expected at most {most * MAX_CHUNKS:,}")
    return list(cut_box(full_box(shape), itemsize, most))


class LazyBox:
    """A box of a stored array that is read on demand."""

    def __init__(
        self, files: Opener, committed: Committed, array: ArrayRecord, box: Box, settings: StoreSettings
    ) -> None:
        self._files, self._committed, self._array, self._box, self._settings = files, committed, array, box, settings
        self.shape, self.dtype = box_shape(box), DTYPES[array.dtype]
        self.size = box_elements(box)
        self.nbytes = self.size * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """Read it into new memory."""
        data = np.empty(self.shape, self.dtype)
        self.read_into(data.reshape(-1).view(np.uint8))
        return data

    def read_with(self, others: Sequence[LazyBox]) -> list[np.ndarray]:
        """Read it together with others of the same checkpoint, which is much faster than one at a time."""
        wanted = [Wanted(each._array, [each._box]) for each in (self, *others)]
        return [arrays[0] for arrays in read_boxes(self._files, self._committed, wanted, self._settings)]

    def read_into(self, target: np.ndarray) -> None:
        """Read it into a flat uint8 array of its size."""
        read_box(self._files, self._committed, self._array, self._box, target, self._settings)


class ReadAhead:
    """Boxes of a checkpoint, read roughly in the order in which they will be fetched.

    Running reads and their results stay within the budget, except for a box that is fetched now, which never waits.
    Small boxes need up to `TOGETHER_BYTES` more, plus the memory of those that are still referenced. Use it as a
    context manager: it starts no read after the end of the block.

    `at_once` limits the boxes that are being read, or wait to be fetched. `decoding` is the additional memory while a
    box is read, as a multiple of its size; it counts towards the budget.
    """

    def __init__(self, budget_bytes: int, subject: str, at_once: int = AT_ONCE, decoding: int = 0) -> None:
        self._subject, self._at_once, self._decoding = subject, at_once, decoding
        self._waiting, self._begun, self._small = deque[BoxAhead](), list[_ReadGroup](), deque[BoxAhead]()
        self._wanted, self._is_abandoned = list[BackgroundCall[Any]](), False
        self._lock = threading.Lock()
        self._memory = _ReusedMemory(budget_bytes)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._waiting.clear()
            self._small.clear()
            left = self._wanted + [each.call for each in self._begun]
            self._begun, self._wanted = [], []
        for call in left:
            abandon_call(call)

    def give_up(self) -> None:
        """Make every `fetch` that is waiting fail, from any thread, because the storage may not respond."""
        self._is_abandoned = True

    def of(self, boxes: Sequence[LazyBox]) -> list[BoxAhead]:
        """Add boxes that will be fetched after the ones before."""
        found = [BoxAhead(self, box) for box in boxes]
        for each in found:
            (self._small if each.nbytes < LEAST_BYTES else self._waiting).append(each)
        return found

    def order(self, key: Callable[[BoxAhead], int]) -> None:
        """Sort the boxes by the order in which they will be fetched; call it before the first fetch."""
        self._waiting, self._small = deque(sorted(self._waiting, key=key)), deque(sorted(self._small, key=key))

    def fetch(self, box: BoxAhead) -> np.ndarray:
        """Wait until a box is read, and return it.

        Raises CheckpointTimeoutError: the storage does not respond, or `give_up` was called.
        """
        with self._lock:
            if box.group is None:
                self._start_now(box)
            self._begin_more()
            assert box.group is not None
            group, place = box.group
        stall = StallDetector(self._subject, 0)
        while not group.call.is_done.wait(POLL_S):
            if self._is_abandoned:
                raise CheckpointTimeoutError(f"{self._subject}: a read was abandoned before it ended")
            stall.waited(POLL_S, 0)
        with self._lock:
            if group in self._begun:
                self._begun.remove(group)
            self._begin_more()
        return group.take(place)

    def _start_now(self, box: BoxAhead) -> None:
        """Read a box now; a small one with those that follow it. The lock is held."""
        if box.nbytes >= LEAST_BYTES:
            self._waiting.remove(box)
            group = self._group_of_one(box)
        else:
            at = self._small.index(box)  # 0 if they are fetched in order
            most = min(TOGETHER, len(self._small) - at)
            self._small.rotate(-at)
            some, nbytes = list[BoxAhead](), 0
            while len(some) < most and nbytes < TOGETHER_BYTES:
                some.append(self._small.popleft())
                nbytes += some[-1].nbytes
            self._small.rotate(at)
            first, *others = [each.box for each in some]
            group = _ReadGroup(some, lambda: first.read_with(others))
        self._wanted = [each for each in self._wanted if not each.is_done.is_open()]
        self._wanted.append(start_call(group.call))

    def _begin_more(self) -> None:
        """Start as many reads as there is room for; the lock is held."""
        while self._waiting and len(self._begun) < self._at_once:
            if not self._memory.has_room(self._waiting[0].nbytes * (1 + self._decoding)):
                return
            group = self._group_of_one(self._waiting.popleft())
            self._begun.append(group)
            start_call(group.call)

    def _group_of_one(self, box: BoxAhead) -> _ReadGroup:
        """Reserve memory for a large box now; the lock is held."""
        extra = box.nbytes * self._decoding
        memory = self._memory.take(box.nbytes, extra)

        def read() -> Sequence[np.ndarray]:
            try:
                box.box.read_into(memory)
            finally:
                self._memory.extra_returned.append(extra)
            return [memory.view(box.dtype).reshape(box.shape)]

        return _ReadGroup([box], read)


class BoxAhead:
    """A box of a `ReadAhead`, with the attributes of an array that writers need."""

    def __init__(self, ahead: ReadAhead, box: LazyBox) -> None:
        self._ahead, self.box = ahead, box
        self.shape, self.dtype, self.size, self.nbytes = box.shape, box.dtype, box.size, box.nbytes
        self.group: tuple[_ReadGroup, int] | None = None

    def fetch(self) -> np.ndarray:
        """Wait until it is read."""
        return self._ahead.fetch(self)


class _ReadGroup:
    """Boxes that one call reads: a large one, or several small ones."""

    def __init__(self, boxes: Sequence[BoxAhead], read: Callable[[], Sequence[np.ndarray]]) -> None:
        self.call = BackgroundCall(read)
        self._lock = threading.Lock()
        self._found: list[np.ndarray | None] = []
        self._error: BaseException | None = None
        for place, box in enumerate(boxes):
            box.group = self, place

    def take(self, place: int) -> np.ndarray:
        """One of the boxes, once the call is done; the group keeps no reference to it."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._found:
                try:
                    self._found = [*self.call.take()]
                except BaseException as error:  # keep it for the other boxes, because `take` returns it only once
                    self._error = error
                    raise
            found, self._found[place] = self._found[place], None
        assert found is not None
        return found


class _ReusedMemory:
    """Reusable memory for boxes: the first touch of fresh memory takes longer than reading a box."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget, self._lent, self._extra = budget_bytes, 0, 0  # extra: what decoding uses
        self._returned, self._free = deque[mmap.mmap](), list[mmap.mmap]()
        self.extra_returned = deque[int]()  # other threads append what they used for decoding

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes are within the budget, or no memory is lent."""
        self._take_back()
        return self._lent == 0 or self._lent + self._extra + size <= self._budget

    def take(self, size: int, extra: int) -> np.ndarray:
        """A flat uint8 array at a page boundary, with arbitrary content; reused once nothing refers to it.

        `extra` is the memory that decoding will use meanwhile.
        """
        self._take_back()
        self._extra += extra
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fitting = [area for area in self._free if rounded <= len(area) <= 2 * rounded]
        if fitting:
            area = min(fitting, key=len)
            self._free.remove(area)
        else:
            self._trim(rounded)
            area = fresh_area(rounded)
        self._lent += len(area)
        array = np.frombuffer(area, np.uint8, size)
        weakref.finalize(array, self._returned.append, area).atexit = False
        return array

    def _take_back(self) -> None:
        while self.extra_returned:
            self._extra -= self.extra_returned.popleft()
        while self._returned:
            area = self._returned.popleft()
            self._lent -= len(area)
            self._free.append(area)
        self._trim(0)

    def _trim(self, more: int) -> None:
        """Free buffers that, together with `more` bytes, exceed the budget."""
        while self._free and self._lent + self._extra + sum(map(len, self._free)) + more > self._budget:
            self._free.pop(0)
