"""The common ground of the readers of other tools' formats.

Every reader describes a checkpoint with the library's own manifest and opens its bytes through `ForeignFiles`. The rest
of the library then reads it like a checkpoint of its own: `make_foreign_checkpoint` builds the manifest, and
`DecodedArraySource` serves arrays that another library decodes.

Calls of other tools' native code run inside `foreign_call`. Python stops daemon threads at exit as soon as they return
to the interpreter, and a stopped thread with C++ frames on its stack aborts the whole process ("terminate called
without an active exception"). The exit of the process therefore waits for these calls.
"""

from __future__ import annotations

import atexit
import bisect
import dataclasses
import errno
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.pytree.leaves import TreeRecord, encode_tree
from jaxckpt_train.pytree.paths import find_nested_leaves
from jaxckpt_train.store.backends.base import Backend, Opener, Source
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, row_major_range
from jaxckpt_train.store.committed import CommitRecord, Committed
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    FORMAT,
    FORMAT_VERSION,
    WHOLE_CHUNKS,
    ArrayRecord,
    ChunkRecord,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    shown,
)
from jaxckpt_train.store.segment import ALIGNMENT, MAX_DIMENSIONS, array_bytes
from jaxckpt_train.store.threads import PerProcess
from jaxckpt_train.store.timeouts import call_started_s

EXIT_WAIT_S = 30.0  # the exit waits no longer than this for foreign calls, because storage may never answer
INTERRUPTED_EXIT_WAIT_S = 2.0  # the same, after the user has interrupted the process
CACHED_PIECES_BYTES = 256 << 20
_HEAD_BYTES = 6
PYTREE, JSON = "pytree", "json"  # kinds of the library's own handlers
ReadBox = Callable[[Box, np.ndarray], None]
"""Fills a row-major array with the content of a box."""
Direct = bool | Literal["auto"]
Open = Callable[[Direct], Source]


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint that another tool has written.

    Attributes:
        kind: the name of the tool in messages, such as "Orbax".
        files: opens the segments and files of the checkpoint.
        committed: its content as a committed checkpoint of this library, without digests.
        decoding: memory that another library needs to decode an array, as a multiple of the size of the array.
    """

    kind: str
    files: ForeignFiles
    committed: Committed
    decoding: int = 0


@dataclasses.dataclass(frozen=True)
class ForeignSegment:
    """A source of chunks of arrays.

    Attributes:
        name: a name that is unique within the checkpoint.
        size: the size in bytes.
        open: opens a source of that size.
    """

    name: str
    size: int
    open: Open


@dataclasses.dataclass(frozen=True)
class ForeignTree:
    """A checkpointable that is a tree: its leaves, and the records of its stored arrays in any order."""

    record: TreeRecord
    arrays: Sequence[ArrayRecord]


@dataclasses.dataclass(frozen=True)
class ForeignValue:
    """A checkpointable that is a JSON value, and the kind of the handler that restores it."""

    kind: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class ForeignDamage:
    """A checkpointable that cannot be read although it should exist. Reading it raises an error; the others are intact.

    Attributes:
        kind: the kind of the handler that restores it.
        message: the message of the error.
    """

    kind: str
    message: str


ForeignPart = ForeignTree | ForeignValue | ForeignDamage


class ForeignFiles:
    """An opener of the segments and files of a foreign checkpoint.

    Args:
        open_by_name: opens each file.
        others: opens files with other names. None: there are no other files.
    """

    def __init__(self, open_by_name: Mapping[str, Open], others: Opener | None = None) -> None:
        self._open_by_name, self._others = open_by_name, others

    def open(self, directory: str, name: str, *, direct: Direct) -> Source:
        """Open a file by its name."""
        found = self._open_by_name.get(name)
        if found is None and self._others is not None:
            return self._others.open(directory, name, direct=direct)
        if found is None:
            raise StorageError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}/{name}")
        return found(direct)


class MemorySource:
    """A source of bytes in memory."""

    alignment = 1

    def __init__(self, name: str, data: bytes) -> None:
        self._name, self._data, self.size = name, data, len(data)

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """Read bytes, see `Source.read_into`."""
        found = self._data[offset : offset + len(data)]
        if len(found) < needed:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {offset + len(found)}, expected more")
        data[: len(found)] = np.frombuffer(found, np.uint8)

    def close(self) -> None:
        """Do nothing: a memory source holds no file."""


def make_foreign_checkpoint(
    kind: str,
    directory: str,
    parts: Mapping[str, ForeignPart],
    segments: Sequence[ForeignSegment],
    *,
    block_bytes: int = WHOLE_CHUNKS,
    info: Mapping[str, Any] | None = None,
    decoding: int = 0,
) -> ForeignCheckpoint:
    """Describe the content of another tool's checkpoint as a checkpoint of this library.

    Args:
        kind: the name of the tool.
        directory: the path for messages.
        parts: the checkpointables by name: trees, values, and damaged ones.
        segments: the segments that chunks of arrays refer to by index.
        block_bytes: the number of bytes in which a chunk is read.
        info: the `info` of the manifest: `step`, `created`, `metrics` and `custom_metadata`, where the tool stores
            them.
        decoding: see `ForeignCheckpoint`.

    Raises:
        CorruptCheckpointError: an array has an impossible shape, or a leaf is below another leaf.
    """
    opens = {segment.name: segment.open for segment in segments}
    records = []
    for name, part in parts.items():
        if isinstance(part, ForeignTree):
            _check_tree(part, directory)
            records.append(PartRecord(name, PYTREE, tuple(part.arrays), (), encode_tree(part.record)))
        else:
            size = len(part.data) if isinstance(part, ForeignValue) else 0
            file = FileRecord(f"{name}/p00000.json", size, "")
            opens[file.file] = _opens_part(f"{directory}/{file.file}", part)
            records.append(PartRecord(name, part.kind, (), (file,), msgspec.Raw(b"null")))
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        digest="none",
        block_bytes=block_bytes,
        segments=tuple(SegmentRecord(segment.name, segment.size, 0, "") for segment in segments),
        parts=tuple(records),
        info=dict(info or {}),
    )
    # A check whether the checkpoint still exists reads this file.
    commit = msgspec.json.encode(CommitRecord(FORMAT, FORMAT_VERSION, 0, ""))
    opens[COMMIT_NAME] = _opens(f"{directory}/{COMMIT_NAME}", commit)
    return ForeignCheckpoint(kind, ForeignFiles(opens), Committed(directory, manifest, ""), decoding)


def _check_tree(tree: ForeignTree, directory: str) -> None:
    """Refuse a tree that could be copied into a checkpoint of this library but not be opened there."""
    for array in tree.arrays:
        check_shape(array.shape, DTYPES[array.dtype].itemsize, f"{directory}: leaf {shown(array.name)}")
    pair = find_nested_leaves(tree.record.leaves)
    if pair is not None:
        raise CorruptCheckpointError(f"{directory}: leaf {shown(pair[0])} is below leaf {shown(pair[1])}")


def check_shape(shape: Sequence[int], itemsize: int, subject: str) -> None:
    """Raise CorruptCheckpointError if the shape is impossible. The message begins with `subject`."""
    if array_bytes(shape, itemsize) is None:
        raise CorruptCheckpointError(f"{subject}: impossible shape {shown(list(shape[: MAX_DIMENSIONS + 1]))}")


def _opens(name: str, data: bytes) -> Open:
    return lambda direct: cast("Source", MemorySource(name, data))


def _opens_part(name: str, part: ForeignValue | ForeignDamage) -> Open:
    if isinstance(part, ForeignValue):
        return _opens(name, part.data)
    message = part.message

    def fail(direct: Direct) -> Source:
        raise CorruptCheckpointError(message)

    return fail


def grid_boxes(shape: Sequence[int], chunk_shape: Sequence[int]) -> list[Box]:
    """Return the boxes of a regular grid over an array, in row-major order. Boxes at the upper ends may be smaller.

    An array without elements has no boxes.
    """
    if not math.prod(shape):
        return []  # avoids the product below: another axis may be huge
    cuts = [
        [(start, min(start + width, size)) for start in range(0, size, width)]
        for size, width in zip(shape, chunk_shape, strict=True)
    ]
    return [tuple(box) for box in itertools.product(*cuts)]


def page_aligned_chunks(boxes: Sequence[Box], itemsize: int, segment: int) -> tuple[ChunkRecord, ...]:
    """Return the records of the chunks of an `DecodedArraySource`. Every chunk starts on a page of its own."""
    records, at = [], 0
    for box in boxes:
        length = box_elements(box) * itemsize
        records.append(ChunkRecord(box, segment, at, length, ""))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return tuple(records)


def array_record(name: str, shape: Sequence[int], dtype: str, chunks: tuple[ChunkRecord, ...]) -> ArrayRecord:
    """Return the record of an array. An array without elements has no chunks."""
    return ArrayRecord(name, tuple(shape), dtype, chunks if math.prod(shape) else ())


def segment_size(chunks: Sequence[ChunkRecord]) -> int:
    """Return the size in bytes of a segment with these chunks."""
    return chunks[-1].offset + chunks[-1].length if chunks else 0


class DecodedArraySource:
    """A source of the chunks of one array, which reads each chunk on request.

    Args:
        name: the name of the array for messages.
        dtype: the dtype of its elements.
        chunks: its chunks, as `page_aligned_chunks` places them.
        read: reads a box of the array. Several threads call it.
        cached: keeps whole chunks when reading a part of a chunk costs as much as reading all of it. All openings of
            the array share it.
    """

    alignment = 1

    def __init__(
        self,
        name: str,
        dtype: np.dtype,
        chunks: Sequence[ChunkRecord],
        read: ReadBox,
        cached: CachedPieces | None = None,
    ) -> None:
        self._name, self._dtype, self._chunks, self._read = name, dtype, chunks, read
        self._starts = [chunk.offset for chunk in chunks]
        self.size = segment_size(chunks)
        self._cached = cached

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """Read bytes, see `Source.read_into`. The padding between chunks is left as it is."""
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {self.size}, expected {offset + needed}")
        for chunk, low, high in self._touched(offset, offset + needed):
            self._read_part(chunk, low - chunk.offset, data[low - offset : high - offset])

    def close(self) -> None:
        """Do nothing: an array source holds no file."""

    def _touched(self, start: int, stop: int) -> Iterator[tuple[ChunkRecord, int, int]]:
        """Yield each chunk that has bytes in this range, with the first and the last of them."""
        for index in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._chunks)):
            chunk = self._chunks[index]
            low, high = max(start, chunk.offset), min(stop, chunk.offset + chunk.length)
            if chunk.offset >= stop:
                return
            if low < high:
                yield chunk, low, high

    def _read_part(self, chunk: ChunkRecord, skipped: int, target: np.ndarray) -> None:
        """Read whole elements of a chunk, starting `skipped` bytes after its first byte."""
        if self._cached is not None and len(target) < chunk.length:
            whole = self._cached.get(chunk.offset, self._name, chunk.length, functools.partial(self._read_whole, chunk))
            target[:] = whole[skipped : skipped + len(target)]
            return
        itemsize = self._dtype.itemsize
        elements, at = target.view(self._dtype), 0
        first = skipped // itemsize
        for box in row_major_range(chunk.box, first, first + len(elements)):
            count = box_elements(box)
            self._read(box, elements[at : at + count].reshape(box_shape(box)))
            at += count

    def _read_whole(self, chunk: ChunkRecord) -> np.ndarray:
        content = np.empty(chunk.length, np.uint8)
        self._read(chunk.box, content.view(self._dtype).reshape(box_shape(chunk.box)))
        return content


class RecentPieces:
    """Keeps the pieces that were used most recently: always one, and more within `CACHED_PIECES_BYTES` in total."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, content: np.ndarray) -> None:
        """Keep a piece, and drop the oldest pieces that exceed the limit."""
        with self._lock:
            if id(content) not in self._kept:
                self._kept[id(content)] = content
                self._bytes += content.nbytes
            self._kept.move_to_end(id(content))
            while self._bytes > CACHED_PIECES_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


class CachedPiece:
    """A piece of an array that can only be read as a whole. It is read on first use, and shared while it is alive.

    Args:
        name: the name for messages.
        size: the size in bytes.
        read: returns the whole content as flat uint8.
        recent: keeps the content for a while after its last use.
    """

    def __init__(self, name: str, size: int, read: Callable[[], np.ndarray], recent: RecentPieces) -> None:
        self._name, self._size, self._read, self._recent = name, size, read, recent
        self._content: weakref.ref[np.ndarray] | None = None
        self._lock = threading.Lock()

    def open(self, direct: Any) -> PieceSource:
        """Return a source of the bytes of the piece."""
        return PieceSource(self._name, self._size, self.whole)

    def whole(self) -> np.ndarray:
        """Return the whole content."""
        with self._lock:
            content = None if self._content is None else self._content()
            if content is None:
                content = self._read()
                self._content = weakref.ref(content)
        self._recent.keep(content)
        return content


class CachedPieces:
    """The pieces of one array, by their positions.

    Args:
        recent: keeps their content for a while after its last use.
    """

    def __init__(self, recent: RecentPieces) -> None:
        self._recent, self._pieces = recent, dict[int, CachedPiece]()

    def get(self, position: int, name: str, size: int, read: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the whole content of a piece as flat uint8, and read it unless it is cached."""
        return self._pieces.setdefault(position, CachedPiece(name, size, read, self._recent)).whole()


class PieceSource:
    """A source of the bytes of a piece. It holds the content from the first read until the last byte is read."""

    alignment = 1

    def __init__(self, name: str, size: int, whole: Callable[[], np.ndarray]) -> None:
        self._name, self.size, self._whole = name, size, whole
        self._content: np.ndarray | None = None

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """Read bytes, see `Source.read_into`."""
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {self.size}, expected {offset + needed}")
        content = self._content
        if content is None:
            content = self._whole()
        part = content[offset : offset + len(data)]
        data[: len(part)] = part
        self._content = None if offset + len(data) >= self.size else content

    def close(self) -> None:
        """Release the content."""
        self._content = None


class _Calls:
    """Counts the foreign calls of this process, and makes its exit wait for them."""

    def __init__(self, _: None) -> None:
        self._changed, self._count, self._process = threading.Condition(), 0, os.getpid()
        self._exiting_since, self.exit_wait_s = math.inf, EXIT_WAIT_S
        atexit.register(self._wait)

    def __enter__(self) -> None:
        with self._changed:
            since = call_started_s()
            # The request is older than the exit, so its caller is gone. No new foreign call may start for it.
            if since is not None and since < self._exiting_since < math.inf:
                raise StorageError(errno.ECANCELED, "the process is ending")
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        if os.getpid() == self._process:  # a forked child does not have the parent's threads
            with self._changed:
                self._exiting_since = time.monotonic()
                self._changed.wait_for(lambda: self._count == 0, self.exit_wait_s)


_calls = PerProcess(_Calls)


def foreign_call() -> _Calls:
    """Return a context manager for a call of foreign code: the exit of the process waits until the call has returned.

    Entering it raises StorageError when the process is ending and the request is older than that, since no caller waits
    for the result.
    """
    return _calls.get(None)


def shorten_exit_wait() -> None:
    """Shorten the wait at exit for foreign calls, because the user has interrupted the process."""
    _calls.get(None).exit_wait_s = INTERRUPTED_EXIT_WAIT_S


def first_bytes(backend: Backend, directory: str, name: str) -> tuple[bytes, int]:
    """Return the first bytes of a file, and the size of the file.

    Raises:
        StorageError: the file cannot be read.
    """
    source = backend.open(directory, name, direct=False)
    try:
        data = np.empty(min(source.size, _HEAD_BYTES), np.uint8)
        if len(data):
            source.read_into(0, data, len(data))
        return data.tobytes(), source.size
    finally:
        source.close()


def begins_as_msgpack_str(head: bytes) -> bool:
    """Return whether these are the first bytes of a msgpack string."""
    return bool(head) and (0xA0 <= head[0] < 0xC0 or 0xD9 <= head[0] <= 0xDB)
