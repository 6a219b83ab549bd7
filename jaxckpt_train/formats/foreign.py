"""A checkpoint of another tool, opened as if it were ours: a manifest of what it holds, and files behind it.

The bytes of an array that something else holds, box by box, as if they lay in a segment.

Pieces of arrays that can only be read whole, kept in memory while parts of them are asked for.

Calls of other tools' code that are under way, on whatever thread: the end of the process waits for them.

Where Python ends it ends its daemon threads too, as soon as they come back into it. One that has a frame of C++ below
it takes the whole process with it then: "terminate called without an active exception".

The first bytes of files that may be msgpack, as Flax and first versions of Orbax write it.
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
from jaxckpt_train.pytree.flatten import one_below_another
from jaxckpt_train.pytree.leaves import TreeRecord, encode_tree
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
from jaxckpt_train.store.timeouts import asks_since

_HEAD_BYTES = 6
PATIENCE_S = 30.0  # a disk that does not answer must not keep the process
MOMENT_S = 2.0  # nor somebody who has interrupted it
HELD_BYTES = 256 << 20
Read = Callable[[Box, np.ndarray], None]
"""Fills a row-major array with what lies in a box."""
Direct = bool | Literal["auto"]
Open = Callable[[Direct], Source]
PYTREE, JSON = "pytree", "json"  # the kinds of our own handlers


def first_bytes(backend: Backend, directory: str, name: str) -> tuple[bytes, int]:
    """The first bytes of a file, and how many there are in all.

    Raises:
        StorageError: it cannot be read.
    """
    source = backend.open(directory, name, direct=False)
    try:
        data = np.empty(min(source.size, _HEAD_BYTES), np.uint8)
        if len(data):
            source.read_into(0, data, len(data))
        return data.tobytes(), source.size
    finally:
        source.close()


def begins_as_text(head: bytes) -> bool:
    """Whether these are the first bytes of a text in msgpack."""
    return bool(head) and (0xA0 <= head[0] < 0xC0 or 0xD9 <= head[0] <= 0xDB)


class _Calls:
    """Those of this process."""

    def __init__(self, _: None) -> None:
        self._changed, self._count, self._process = threading.Condition(), 0, os.getpid()
        self._over_since, self.patience_s = math.inf, PATIENCE_S
        atexit.register(self._wait)

    def __enter__(self) -> None:
        with self._changed:
            since = asks_since()
            if since is not None and since < self._over_since < math.inf:  # reads ahead, and was between two calls
                raise StorageError(errno.ECANCELED, "the process is ending")
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        if os.getpid() == self._process:  # a forked child has none of these threads
            with self._changed:
                self._over_since = time.monotonic()
                self._changed.wait_for(lambda: self._count == 0, self.patience_s)


_calls = PerProcess(_Calls)


def foreign_call() -> _Calls:
    """A context: what is called within has come back before the process ends.

    In a process that is ending it raises StorageError where what is asked was begun before that: nobody waits for it.
    """
    return _calls.get(None)


def hurry() -> None:
    """Have the end of the process wait for a moment only: somebody has interrupted it."""
    _calls.get(None).patience_s = MOMENT_S


class Newest:
    """Keeps the pieces that were asked for last: one, and as many more as have at most `HELD_BYTES` together."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, content: np.ndarray) -> None:
        """Keep one, in place of the oldest ones."""
        with self._lock:
            if id(content) not in self._kept:
                self._kept[id(content)] = content
                self._bytes += content.nbytes
            self._kept.move_to_end(id(content))
            while self._bytes > HELD_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


class HeldPiece:
    """A piece: read when the first part of it is asked for, and once for all who ask before it is forgotten.

    Args:
        name: for messages.
        size: in bytes.
        read: gives all of it, flat uint8.
        newest: keeps it a little longer than it is in use.
    """

    def __init__(self, name: str, size: int, read: Callable[[], np.ndarray], newest: Newest) -> None:
        self._name, self._size, self._read, self._newest = name, size, read, newest
        self._content: weakref.ref[np.ndarray] | None = None
        self._lock = threading.Lock()

    def open(self, direct: Any) -> PieceBytes:
        """A source of its bytes."""
        return PieceBytes(self._name, self._size, self.whole)

    def whole(self) -> np.ndarray:
        """All of it."""
        with self._lock:
            content = None if self._content is None else self._content()
            if content is None:
                content = self._read()
                self._content = weakref.ref(content)
        self._newest.keep(content)
        return content


class HeldPieces:
    """Pieces of one array, by their places in it.

    Args:
        newest: keeps them a little longer than they are in use.
    """

    def __init__(self, newest: Newest) -> None:
        self._newest, self._pieces = newest, dict[int, HeldPiece]()

    def get(self, place: int, name: str, size: int, read: Callable[[], np.ndarray]) -> np.ndarray:
        """All of a piece, flat uint8: read, unless it is held; see `HeldPiece`."""
        return self._pieces.setdefault(place, HeldPiece(name, size, read, self._newest)).whole()


class PieceBytes:
    """A source of the bytes of a piece, which it holds from the first read to the one of the last byte."""

    alignment = 1

    def __init__(self, name: str, size: int, whole: Callable[[], np.ndarray]) -> None:
        self._name, self.size, self._whole = name, size, whole
        self._content: np.ndarray | None = None

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {self.size}, expected {offset + needed}")
        content = self._content
        if content is None:
            content = self._whole()
        part = content[offset : offset + len(data)]
        data[: len(part)] = part
        self._content = None if offset + len(data) >= self.size else content

    def close(self) -> None:
        """Hold it no more."""
        self._content = None


def grid_boxes(shape: Sequence[int], chunk_shape: Sequence[int]) -> list[Box]:
    """The boxes of a regular grid over an array, in row-major order; those at the ends may be smaller.

    An array without elements has none.
    """
    if not math.prod(shape):
        return []  # though one of its axes may have very many places
    cuts = [
        [(start, min(start + width, size)) for start in range(0, size, width)]
        for size, width in zip(shape, chunk_shape, strict=True)
    ]
    return [tuple(box) for box in itertools.product(*cuts)]


def chunks_in_a_row(boxes: Sequence[Box], itemsize: int, segment: int) -> tuple[ChunkRecord, ...]:
    """The records of chunks that `ArrayBytes` gives: each begins a page, so that no read touches two without need."""
    records, at = [], 0
    for box in boxes:
        length = box_elements(box) * itemsize
        records.append(ChunkRecord(box, segment, at, length, ""))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return tuple(records)


def record_of(name: str, shape: Sequence[int], dtype: str, chunks: tuple[ChunkRecord, ...]) -> ArrayRecord:
    """The record of an array, without chunks where it has no elements."""
    return ArrayRecord(name, tuple(shape), dtype, chunks if math.prod(shape) else ())


def size_of(chunks: Sequence[ChunkRecord]) -> int:
    """How many bytes a segment of such chunks has."""
    return chunks[-1].offset + chunks[-1].length if chunks else 0


class ArrayBytes:
    """A source of the chunks of one array, each read when it is asked for.

    Args:
        name: of the array, for messages.
        dtype: of its elements.
        chunks: as `chunks_in_a_row` places them.
        read: reads a box of it; called from several threads.
        held: where it costs as much to read a part of a chunk as all of it: keeps those that were read for a part,
            while others may be asked for; the same at each opening.
    """

    alignment = 1

    def __init__(
        self, name: str, dtype: np.dtype, chunks: Sequence[ChunkRecord], read: Read, held: HeldPieces | None = None
    ) -> None:
        self._name, self._dtype, self._chunks, self._read = name, dtype, chunks, read
        self._starts = [chunk.offset for chunk in chunks]
        self.size = size_of(chunks)
        self._held = held

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`: what lies between chunks stays as it is."""
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {self.size}, expected {offset + needed}")
        for chunk, low, high in self._touched(offset, offset + needed):
            self._read_part(chunk, low - chunk.offset, data[low - offset : high - offset])

    def close(self) -> None:
        """It holds no file."""

    def _touched(self, start: int, stop: int) -> Iterator[tuple[ChunkRecord, int, int]]:
        """The chunks with bytes between these two, and which bytes."""
        for index in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self._chunks)):
            chunk = self._chunks[index]
            low, high = max(start, chunk.offset), min(stop, chunk.offset + chunk.length)
            if chunk.offset >= stop:
                return
            if low < high:
                yield chunk, low, high

    def _read_part(self, chunk: ChunkRecord, skipped: int, target: np.ndarray) -> None:
        """Read whole elements, whose bytes begin `skipped` after the first of the chunk."""
        if self._held is not None and len(target) < chunk.length:
            whole = self._held.get(chunk.offset, self._name, chunk.length, functools.partial(self._read_whole, chunk))
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


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A checkpoint of another tool.

    Attributes:
        kind: the tool, as messages tell it, such as "Orbax".
        files: what is read from.
        committed: what it holds, as if a transaction of ours had committed it; without digests.
        decoding: how many times its size reading an array takes beside that: stored, and decoded by other libraries.
    """

    kind: str
    files: ForeignFiles
    committed: Committed
    decoding: int = 0


@dataclasses.dataclass(frozen=True)
class ForeignSegment:
    """What chunks of arrays are read from.

    Attributes:
        name: of this one alone, within the checkpoint.
        size: in bytes.
        open: gives a source of that size.
    """

    name: str
    size: int
    open: Open


@dataclasses.dataclass(frozen=True)
class ForeignTree:
    """A checkpointable that is a tree: its leaves, and the arrays of those that are stored, in any order."""

    record: TreeRecord
    arrays: Sequence[ArrayRecord]


@dataclasses.dataclass(frozen=True)
class ForeignValue:
    """A checkpointable that is a value, as JSON, and the kind of handler that restores it."""

    kind: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class ForeignDamage:
    """A checkpointable that should be there and cannot be read; who reads it is told, and the others are whole.

    Attributes:
        kind: of the handler that restored it.
        message: of the error.
    """

    kind: str
    message: str


ForeignPart = ForeignTree | ForeignValue | ForeignDamage


class ForeignFiles:
    """An opener of what a foreign checkpoint was found to hold.

    Args:
        open_by_name: what opens each.
        others: opens what has another name; None: there is nothing else.
    """

    def __init__(self, open_by_name: Mapping[str, Open], others: Opener | None = None) -> None:
        self._open_by_name, self._others = open_by_name, others

    def open(self, directory: str, name: str, *, direct: Direct) -> Source:
        """Open one of them."""
        found = self._open_by_name.get(name)
        if found is None and self._others is not None:
            return self._others.open(directory, name, direct=direct)
        if found is None:
            raise StorageError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}/{name}")
        return found(direct)


class HeldBytes:
    """A source of bytes that are in memory."""

    alignment = 1

    def __init__(self, name: str, data: bytes) -> None:
        self._name, self._data, self.size = name, data, len(data)

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        found = self._data[offset : offset + len(data)]
        if len(found) < needed:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {offset + len(found)}, expected more")
        data[: len(found)] = np.frombuffer(found, np.uint8)

    def close(self) -> None:
        """It holds nothing but memory."""


def foreign_checkpoint(
    kind: str,
    directory: str,
    parts: Mapping[str, ForeignPart],
    segments: Sequence[ForeignSegment],
    *,
    block_bytes: int = WHOLE_CHUNKS,
    info: Mapping[str, Any] | None = None,
    decoding: int = 0,
) -> Foreign:
    """Open what was found as a checkpoint of ours.

    Args:
        kind: the tool.
        directory: which messages name.
        parts: the checkpointables by name: trees, values, and what is damaged.
        segments: what the chunks of the arrays refer to, by their place in it.
        block_bytes: a chunk is read in pieces of this many bytes.
        info: as in a manifest: `step`, `created`, `metrics`, `custom_metadata`, as far as the tool tells them.
        decoding: as of `Foreign`.

    Raises:
        CorruptCheckpointError: an array has a shape that none can have, or a leaf lies below another one.
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
    commit = msgspec.json.encode(CommitRecord(FORMAT, FORMAT_VERSION, 0, ""))  # who asks whether it is still there
    opens[COMMIT_NAME] = _opens(f"{directory}/{COMMIT_NAME}", commit)
    return Foreign(kind, ForeignFiles(opens), Committed(directory, manifest, ""), decoding)


def _check_tree(tree: ForeignTree, directory: str) -> None:
    """Refuse what could be copied into a checkpoint of ours, but never be opened there."""
    for array in tree.arrays:
        check_shape(array.shape, DTYPES[array.dtype].itemsize, f"{directory}: leaf {shown(array.name)}")
    pair = one_below_another(tree.record.leaves)
    if pair is not None:
        raise CorruptCheckpointError(f"{directory}: leaf {shown(pair[0])} lies below leaf {shown(pair[1])}")


def check_shape(shape: Sequence[int], itemsize: int, subject: str) -> None:
    """Raise CorruptCheckpointError if no array can have this shape; the message begins with `subject`."""
    if array_bytes(shape, itemsize) is None:
        raise CorruptCheckpointError(f"{subject}: impossible shape {shown(list(shape[: MAX_DIMENSIONS + 1]))}")


def _opens(name: str, data: bytes) -> Open:
    return lambda direct: cast("Source", HeldBytes(name, data))


def _opens_part(name: str, part: ForeignValue | ForeignDamage) -> Open:
    if isinstance(part, ForeignValue):
        return _opens(name, part.data)
    message = part.message

    def fail(direct: Direct) -> Source:
        raise CorruptCheckpointError(message)

    return fail
