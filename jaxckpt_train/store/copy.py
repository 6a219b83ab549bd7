"""Copies an opened checkpoint, of whatever origin, into a new one: array by array, with little of it in memory.

The chunks of an array in a copy that keeps them: those of the source, the largest ones cut between two blocks.

Reads boxes on other threads before their turn comes to be written elsewhere, into memory that is used again.

A box of a stored array that is read when its turn comes to be written elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxckpt_train.errors import CheckpointTimeoutError, UnsupportedLeafError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, cut_box, full_box
from jaxckpt_train.store.buffers import fresh_area
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.dtypes import DTYPES
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
from jaxckpt_train.store.segment import ALIGNMENT, ArraySource, ChunkSource, alignment_class
from jaxckpt_train.store.threads import LOOK_S
from jaxckpt_train.store.timeouts import Question, StallDetector, leave, put
from jaxckpt_train.store.transaction import Transaction
from jaxckpt_train.store.writer import write_arrays

LEAST_BYTES = 1 << 20  # a smaller box is read when its turn comes, with small ones that come after it
TOGETHER_BYTES, TOGETHER = 4 << 20, 1024  # of such boxes
AT_ONCE = 2
T = TypeVar("T")
CHUNK_BYTES = 256 << 20
"""A larger array is copied in chunks of at most so many bytes, each of which is in memory at a time."""
MOST_CHUNKS = 1 << 20


class LazyBox:
    """A box of an array of an opened checkpoint.

    Args:
        files: what the checkpoint is read from.
        committed: the opened checkpoint.
        array: which array of it.
        box: which part of that.
        settings: how it is verified.
    """

    def __init__(
        self, files: Opener, committed: Committed, array: ArrayRecord, box: Box, settings: StoreSettings
    ) -> None:
        self._files, self._committed, self._array, self._box, self._settings = files, committed, array, box, settings
        self.shape, self.dtype = box_shape(box), DTYPES[array.dtype]
        self.size = box_elements(box)
        self.nbytes = self.size * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """Read it, into memory of its own; raises as `read_box`."""
        data = np.empty(self.shape, self.dtype)
        self.read_into(data.reshape(-1).view(np.uint8))
        return data

    def read_with(self, others: Sequence[LazyBox]) -> list[np.ndarray]:
        """It and others of the same checkpoint, read together, which takes far less than one after the other.

        Raises:
            As `read_boxes`.
        """
        wanted = [Wanted(each._array, [each._box]) for each in (self, *others)]
        return [arrays[0] for arrays in read_boxes(self._files, self._committed, wanted, self._settings)]

    def read_into(self, target: np.ndarray) -> None:
        """Read it into flat bytes of its size; raises as `read_box`."""
        read_box(self._files, self._committed, self._array, self._box, target, self._settings)


class BoxAhead:
    """A box of a `ReadAhead`: an array to come, as writers take it."""

    def __init__(self, ahead: ReadAhead, box: LazyBox) -> None:
        self._ahead, self.box = ahead, box
        self.shape, self.dtype, self.size, self.nbytes = box.shape, box.dtype, box.size, box.nbytes
        self.question: Question[np.ndarray] | None = None
        self.group: tuple[_ReadGroup, int] | None = None

    def fetch(self) -> np.ndarray:
        """Wait until it is read; raises as `read_box`, and as `ReadAhead.fetch`."""
        return self._ahead.fetch(self)


class ReadAhead:
    """Boxes of a checkpoint, read about in the order in which they will be wanted.

    Reads that have begun and what they gave take the budget at most, but for one that is wanted at once: that waits for
    nobody. Small ones are beside that: some `TOGETHER_BYTES`, and the memory of those that are still held.
    Use it as a context manager: it reads nothing more at its end.

    Args:
        budget_bytes: how much memory is lent at a time.
        subject: what is read, for messages about a disk that does not answer.
        at_once: how many are being read, or wait to be fetched, at a time.
        decoding: how many times its own size a box takes beside that while it is read; this is of the budget, too.
    """

    def __init__(self, budget_bytes: int, subject: str, at_once: int = AT_ONCE, decoding: int = 0) -> None:
        self._subject, self._at_once, self._decoding = subject, at_once, decoding
        self._waiting, self._begun, self._small = deque[BoxAhead](), list[BoxAhead](), deque[BoxAhead]()
        self._wanted, self._is_given_up = list[Question[Any]](), False
        self._lock = threading.Lock()
        self._memory = _KeptMemory(budget_bytes)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._waiting.clear()
            self._small.clear()
            left = self._wanted + [each.question for each in self._begun if each.question is not None]
            self._begun, self._wanted = [], []
        for question in left:
            leave(question)

    def give_up(self) -> None:
        """Have whoever waits for a box wait no more, from any thread: perhaps its disk does not answer."""
        self._is_given_up = True

    def of(self, boxes: Sequence[LazyBox]) -> list[BoxAhead]:
        """More boxes, which will be wanted after those before."""
        found = [BoxAhead(self, box) for box in boxes]
        for each in found:
            (self._small if each.nbytes < LEAST_BYTES else self._waiting).append(each)
        return found

    def order(self, key: Callable[[BoxAhead], int]) -> None:
        """Tell that those with a smaller key will be wanted first; before any is."""
        self._waiting, self._small = deque(sorted(self._waiting, key=key)), deque(sorted(self._small, key=key))

    def fetch(self, box: BoxAhead) -> np.ndarray:
        """Wait until a box is read.

        Raises:
            CheckpointTimeoutError: its disk does not answer, or it was given up.
        """
        if box.nbytes < LEAST_BYTES:
            group, place = self._read_group_of(box)
            self._wait_for(group.question)
            return group.take(place)
        with self._lock:
            question = box.question
            if question is None:
                question = self._put(_question(self._read(box.box)))
                self._waiting.remove(box)
            self._begin_more()
        self._wait_for(question)
        with self._lock:
            if box.question is not None:
                self._begun.remove(box)
            self._begin_more()
        return question.take()

    def _put(self, question: Question[T]) -> Question[T]:
        """Ask what is wanted at once; the lock is held."""
        self._wanted = [each for each in self._wanted if not each.is_answered.is_open()]
        self._wanted.append(question)
        return put(question)

    def _wait_for(self, question: Question[Any]) -> None:
        patience = StallDetector(self._subject)
        while not question.is_answered.wait(LOOK_S):
            if self._is_given_up:
                raise CheckpointTimeoutError(f"{self._subject}: a read has not ended, and is not waited for any more")
            patience.waited(LOOK_S, 0)

    def _read_group_of(self, box: BoxAhead) -> tuple[_ReadGroup, int]:
        """What a small box is read with, and its place in that: those that will be wanted next."""
        with self._lock:
            if box.group is None:
                at = self._small.index(box)  # 0 where they are wanted in their order
                most = min(TOGETHER, len(self._small) - at)
                self._small.rotate(-at)
                some, nbytes = list[BoxAhead](), 0
                while len(some) < most and nbytes < TOGETHER_BYTES:
                    some.append(self._small.popleft())
                    nbytes += some[-1].nbytes
                self._small.rotate(at)
                group = _ReadGroup([each.box for each in some])
                self._put(group.question)
                for place, each in enumerate(some):
                    each.group = group, place
            self._begin_more()
            assert box.group is not None
            return box.group

    def _begin_more(self) -> None:
        """Begin what there is room for; the lock is held."""
        while self._waiting and len(self._begun) < self._at_once:
            if not self._memory.has_room(self._waiting[0].nbytes * (1 + self._decoding)):
                return
            box = self._waiting.popleft()
            box.question = _question(self._read(box.box))
            self._begun.append(box)
            put(box.question)

    def _read(self, box: LazyBox) -> Callable[[], np.ndarray]:
        """What reads a box; its memory is taken at once, and comes back when nothing refers to the array any more."""
        beside = box.nbytes * self._decoding
        self._memory.take_concurrently(beside)
        memory = self._memory.take(box.nbytes)

        def read() -> np.ndarray:
            try:
                box.read_into(memory)
            finally:
                self._memory.give_concurrently(beside)
            return memory.view(box.dtype).reshape(box.shape)

        return read


def _question(read: Callable[[], np.ndarray]) -> Question[np.ndarray]:
    return Question(lambda moved: read())


class _ReadGroup:
    """Boxes of which the first that is fetched has all of them read, by a question that is put once."""

    def __init__(self, boxes: Sequence[LazyBox]) -> None:
        first, *others = boxes
        self.question = Question[Sequence[np.ndarray]](lambda moved: first.read_with(others))
        self._lock = threading.Lock()
        self._found: list[np.ndarray | None] = []
        self._error: BaseException | None = None

    def take(self, place: int) -> np.ndarray:
        """One of them, once the question is answered; it is not kept."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._found:
                try:
                    self._found = [*self.question.take()]
                except BaseException as error:  # for each of them: it can be taken once
                    self._error = error
                    raise
            found, self._found[place] = self._found[place], None
        assert found is not None
        return found


class _KeptMemory:
    """Buffers of arrays that come and go: what comes back is lent again, as its first touch costs more than to read."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget, self._lent, self._beside = budget_bytes, 0, 0
        self._returned, self._free = deque[mmap.mmap](), list[mmap.mmap]()
        self._over = deque[int]()  # of what was taken beside: other threads give it back

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more are within the budget, or nothing is lent."""
        self._take_back()
        return self._lent == 0 or self._lent + self._beside + size <= self._budget

    def take_concurrently(self, size: int) -> None:
        """So many bytes are about to be used beside what is lent."""
        self._beside += size

    def give_concurrently(self, size: int) -> None:
        """They are used no more."""
        self._over.append(size)

    def take(self, size: int) -> np.ndarray:
        """A flat uint8 array at a page boundary, with whatever was in it."""
        self._take_back()
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fitting = [area for area in self._free if rounded <= len(area) <= 2 * rounded]
        if fitting:
            area = min(fitting, key=len)
            self._free.remove(area)
        else:
            self._forget(rounded)
            area = fresh_area(rounded)
        self._lent += len(area)
        array = np.frombuffer(area, np.uint8, size)
        weakref.finalize(array, self._returned.append, area).atexit = False
        return array

    def _take_back(self) -> None:
        while self._over:
            self._beside -= self._over.popleft()
        while self._returned:
            area = self._returned.popleft()
            self._lent -= len(area)
            self._free.append(area)
        self._forget(0)

    def _forget(self, more: int) -> None:
        """Let go of free ones that would be beyond the budget, with so many bytes more."""
        while self._free and self._lent + self._beside + sum(map(len, self._free)) + more > self._budget:
            self._free.pop(0)


def kept_boxes(array: ArrayRecord, itemsize: int, most_bytes: int) -> list[Box]:
    """The boxes of the chunks of a copy, none of more than `most_bytes`."""
    return [box for chunk in array.chunks for box in _cut(chunk.box, itemsize, most_bytes)]


def _cut(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """A box in pieces that are whole blocks where that goes: the digests of the source are theirs then."""
    if not box or box_elements(box) * itemsize <= most_bytes:
        yield box
        return
    (start, stop), inner = box[0], box[1:]
    row = box_elements(inner) * itemsize
    rows = most_bytes // row
    if not rows:
        for at in range(start, stop):
            yield from (((at, at + 1), *rest) for rest in _cut(inner, itemsize, most_bytes))
        return
    whole = BLOCK_BYTES // math.gcd(BLOCK_BYTES, row)  # rows that make whole blocks
    rows = rows // whole * whole or rows
    yield from (((at, min(at + rows, stop)), *inner) for at in range(start, stop, rows))


def same_digests(
    source: Manifest, array: ArrayRecord, copy: Manifest, copied: ArrayRecord, itemsize: int, most_bytes: int
) -> bool | None:
    """Whether the digests of an array and of its copy are the same; None: they are not of the same bytes.

    Args:
        source, array: what was copied.
        copy, copied: what came of it.
        itemsize, most_bytes: as the boxes were made with.
    """
    if (source.digest, source.block_bytes) != (copy.digest, copy.block_bytes):
        return None
    by_box = {chunk.box: chunk for chunk in copied.chunks}
    for chunk in array.chunks:
        pieces = [by_box.get(box) for box in _cut(chunk.box, itemsize, most_bytes)]
        found = [piece for piece in pieces if piece is not None]
        if len(found) < len(pieces) or any(piece.length % copy.block_bytes for piece in found[:-1]):
            return None
        if "".join(piece.digests for piece in found) != chunk.digests:
            return False
    return True


def copy_checkpoint(
    files: Opener,
    source: Committed,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    info: Mapping[str, Any],
    if_taken: str,
    parts: Sequence[str] | None = None,
    replace: bool = False,
    keep_chunks: bool = False,
    decoding: int = 0,
    check: Callable[[str], object] = lambda directory: None,
    progress: ReadProgress | None = None,
) -> Committed:
    """Write what an opened checkpoint holds as a checkpoint of ours, and commit it.

    Args:
        files: what the source is read from.
        source: the opened checkpoint.
        backend: where the new one is written.
        final: its absolute path.
        settings: how the source is verified, and the new one is written.
        info: what the manifest says of it.
        if_taken: what is to be done if something gets that path meanwhile, for the error.
        parts: names of the checkpointables; None: all.
        replace: whether a checkpoint there is replaced.
        keep_chunks: whether arrays are in the same chunks as in the source, but for very large ones.
        decoding: how many times its size reading an array of the source takes beside that, as of `Opened`.
        check: called with the directory in which all is written and committed, before that gets its name; what it
            raises is raised, and nothing is left of the copy.
        progress: called with numbers of bytes as they are written.

    Raises:
        CorruptCheckpointError: bytes of the source are not what was saved; nothing is left of the copy.
        CheckpointExistsError: something has got that path meanwhile, and `replace` is false.
        UnsupportedLeafError: an array is larger than any that is copied.
        MismatchError: a value of the source does not fit what an operation makes of it; nothing is left of the copy.
        StorageError: a file system refused.
    """
    checked: list[str] = []

    def check_once() -> None:  # it is called again if what was published has to be taken back
        if not checked:
            check(transaction.directory)
            checked.append(transaction.directory)

    transaction = Transaction(backend, final, settings, check_once)
    with _removed_on_error(transaction):
        segments: list[SegmentRecord] = []
        copier = _Copier(files, source, backend, transaction, settings, keep_chunks, decoding, progress)
        wanted = [part for part in source.manifest.parts if parts is None or part.name in parts]
        records = [copier.copy_part(part, segments) for part in wanted]
        manifest = Manifest(
            FORMAT, FORMAT_VERSION, settings.digest, BLOCK_BYTES, tuple(segments), tuple(records), dict(info)
        )
        return transaction.commit(manifest, replace=replace, if_taken=if_taken)


@contextlib.contextmanager
def _removed_on_error(transaction: Transaction) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        transaction.abort_after(error)
        raise


@dataclasses.dataclass(frozen=True)
class _Copier:
    """Copies one checkpointable after the other."""

    files: Opener
    source: Committed
    backend: Backend
    transaction: Transaction
    settings: StoreSettings
    keep_chunks: bool
    decoding: int
    progress: ReadProgress | None

    def copy_part(self, part: PartRecord, segments: list[SegmentRecord]) -> PartRecord:
        """Copy one; its segments are added to those that there are."""
        self.transaction.add_folder(part.name)
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
        """The arrays, whose boxes are read in the order in which they are written."""
        found = []
        for array in part.arrays:
            boxes = self._boxes_of(array)
            to_come = ahead.of([LazyBox(self.files, self.source, array, box, self.settings) for box in boxes])
            chunks = [ChunkSource(*each) for each in zip(boxes, to_come, strict=True)]
            found.append(ArraySource(array.name, array.shape, DTYPES[array.dtype], chunks, array.sharding))
        ahead.order(lambda box: alignment_class(box.nbytes))
        return found

    def _boxes_of(self, array: ArrayRecord) -> list[Box]:
        itemsize = DTYPES[array.dtype].itemsize
        if self.keep_chunks:
            return kept_boxes(array, itemsize, CHUNK_BYTES)
        if self.source.manifest.block_bytes >= WHOLE_CHUNKS:
            return [chunk.box for chunk in array.chunks]  # each can only be read whole
        return chunk_boxes(array.shape, itemsize, f"{self.source.directory}: array {array.name!r}")

    def _copy_files(self, part: PartRecord) -> Iterator[FileRecord]:
        folders = {part.name}
        manifest = self.source.manifest
        for record in part.files:
            folder = record.file.rpartition("/")[0]
            for depth in range(2, folder.count("/") + 2):
                inner = "/".join(folder.split("/")[:depth])
                if inner not in folders:
                    folders.add(inner)
                    self.transaction.add_folder(inner)
            digest = manifest.digest if self.settings.verify_on_load and record.digests else None
            data = read_recorded(self.files, self.source.directory, record, digest, manifest.block_bytes)
            yield self.transaction.write_file(record.file, bytes(memoryview(data)))
            if self.progress is not None:
                self.progress(record.bytes)


def chunk_boxes(shape: Sequence[int], itemsize: int, subject: str, most: int = CHUNK_BYTES) -> list[Box]:
    """An array in boxes of at most `most` bytes, cut along its first axes; none of an array without elements.

    Raises:
        UnsupportedLeafError: it would be millions; the message begins with `subject`.
    """
    total = math.prod(shape) * itemsize
    if not total:
        return []
    if total > most * MOST_CHUNKS:
        raise UnsupportedLeafError(f"{subject}: {total:,} bytes, expected at most {most * MOST_CHUNKS:,} to be copied")
    return list(cut_box(full_box(shape), itemsize, most))
