"""The index of one process: what it has written of a checkpoint; and how those of all become one manifest.

Chunks as columns of numbers: small to send, and put together by numpy, however many processes have written them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError, UnsupportedLeafError
from jaxckpt_train.store.boxes import Box, check_corners
from jaxckpt_train.store.manifest import (
    MAX_MANIFEST_BYTES,
    ArrayRecord,
    ChunkRecord,
    FileRecord,
    PartRecord,
    SegmentRecord,
)
from jaxckpt_train.store.threads import paused_collection

_WIDTHS = (1, 2, 4, 8)
_LEAST_CHUNK_BYTES = len('[[],0,0,1,""],')  # in a manifest, without its digests


class ChunkColumns(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Chunks of some arrays, one after the other; of each column the width of a number, and the numbers.

    Attributes:
        arrays: number of the array of each chunk.
        boxes: the starts and stops of all boxes.
        segments: number of the segment of each chunk.
        offsets: in the segment.
        lengths: in bytes.
        digest_ends: where the digests of each chunk end among all.
        digests: of all chunks, as bytes.
    """

    arrays: bytes
    boxes: bytes
    segments: bytes
    offsets: bytes
    lengths: bytes
    digest_ends: bytes
    digests: bytes


def to_columns(arrays: Sequence[int], chunks: Sequence[Sequence[ChunkRecord]]) -> ChunkColumns:
    """The columns of what was written of some arrays.

    Args:
        arrays: their numbers.
        chunks: of each.
    """
    numbers = np.repeat(np.array(arrays, np.int64), np.array([len(found) for found in chunks], np.int64))
    flat = list(chain.from_iterable(chunks))
    digests = [chunk.digests for chunk in flat]
    return ChunkColumns(
        _packed(numbers),
        _packed(list(chain.from_iterable(chain.from_iterable([chunk.box for chunk in flat])))),
        _packed([chunk.segment for chunk in flat]),
        _packed([chunk.offset for chunk in flat]),
        _packed([chunk.length for chunk in flat]),
        _packed(np.cumsum(np.array([len(each) // 2 for each in digests], np.int64))),
        bytes.fromhex("".join(digests)),
    )


def count_of(columns: ChunkColumns) -> int:
    """How many chunks they are."""
    return (len(columns.arrays) - 1) // columns.arrays[0]


class ArrayChunks(NamedTuple):
    """The chunks of one array: corners of shape (chunks, dimensions, 2), and what is left of the records."""

    corners: np.ndarray
    segments: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    digests: Sequence[str]

    def records(self, boxes: Sequence[Box]) -> tuple[ChunkRecord, ...]:
        """As a manifest has them."""
        columns = (self.segments.tolist(), self.offsets.tolist(), self.lengths.tolist())
        return tuple(map(ChunkRecord, boxes, *columns, self.digests))


class MergedChunks:
    """The chunks that several processes have written of the same arrays.

    Args:
        columns: of each process.
        firsts: of each process the number that its first segment has among all.
        dimensions: how many each array has.

    Raises:
        ValueError: these cannot be the chunks of such arrays.
    """

    def __init__(self, columns: Sequence[ChunkColumns], firsts: Sequence[int], dimensions: Sequence[int]) -> None:
        arrays = _joined(each.arrays for each in columns)
        if arrays.max(initial=-1) >= len(dimensions):
            raise ValueError(f"array number {arrays.max()} of {len(dimensions)}")
        order = np.argsort(arrays, kind="stable")
        self._numbers, sides = arrays[order], np.array(dimensions, np.int64)[arrays] * 2
        self._flat = _joined(each.boxes for each in columns)
        if sides.sum() != len(self._flat):
            raise ValueError("boxes of other dimensions than their arrays")
        self._at = (np.cumsum(sides) - sides)[order]
        self._segments = _joined((each.segments for each in columns), firsts)[order]
        self._offsets = _joined(each.offsets for each in columns)[order]
        self._lengths = _joined(each.lengths for each in columns)[order]
        before = [0, *np.cumsum([len(each.digests) for each in columns]).tolist()]
        ends = _joined((each.digest_ends for each in columns), before[:-1])
        self._ends, self._starts = ends[order], np.append(0, ends[:-1])[order]
        self._digests = b"".join([each.digests for each in columns])

    def of(self, array: int, dimensions: int) -> ArrayChunks:
        """Those of one array, those of the first process first."""
        first, last = np.searchsorted(self._numbers, (array, array + 1)).tolist()
        corners = self._flat[self._at[first:last, None] + np.arange(2 * dimensions)]
        spans = zip(self._starts[first:last].tolist(), self._ends[first:last].tolist(), strict=True)
        digests = [self._digests[start:end].hex() for start, end in spans]
        rest = (self._segments[first:last], self._offsets[first:last], self._lengths[first:last])
        return ArrayChunks(corners.reshape(last - first, dimensions, 2), *rest, digests)


def to_boxes(corners: np.ndarray) -> list[Box]:
    """As tuples."""
    if not corners.shape[1]:
        return [()] * len(corners)
    sides = [zip(*side.T.tolist(), strict=True) for side in corners.transpose(1, 0, 2)]
    return list(zip(*sides, strict=True))


def _packed(values: Sequence[int] | np.ndarray) -> bytes:
    """Numbers from 0 on, in as few bytes each as the largest needs."""
    column = np.asarray(values, np.int64)
    most = int(column.max(initial=0))
    width = next(width for width in _WIDTHS if most < 1 << 8 * width)
    return bytes([width]) + column.astype(f"<u{width}").tobytes()


def _unpacked(data: bytes) -> np.ndarray:
    return np.frombuffer(data, f"<u{data[0]}", offset=1).astype(np.int64)


def _joined(columns: Iterable[bytes], first: Sequence[int] | None = None) -> np.ndarray:
    """The columns of all processes, to the numbers of each of which its own is added."""
    found = [_unpacked(column) for column in columns]
    for column, more in zip(found, first or (), strict=False):
        column += more
    return np.concatenate(found) if found else np.zeros(0, np.int64)


class PartIndex(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a process has written of one checkpointable.

    Attributes:
        segments: its segment files.
        arrays: the numbers of the arrays of which it has written something.
        chunks: of each of these what it has written; their segment numbers count from the first of `segments`.
        files: its files that are no segments.
    """

    segments: tuple[SegmentRecord, ...]
    arrays: tuple[int, ...]
    chunks: tuple[tuple[ChunkRecord, ...], ...]
    files: tuple[FileRecord, ...] = ()


class ProcessIndex(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a process has written of a checkpoint.

    Attributes:
        alike: a digest of what must be the same in all processes.
        parts: one for each checkpointable.
    """

    alike: str
    parts: tuple[PartIndex, ...]


class PartSummary(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A PartIndex as it is sent: its files, and the rest as columns."""

    segments: tuple[SegmentRecord, ...]
    chunks: ChunkColumns
    files: tuple[FileRecord, ...] = ()


class IndexSummary(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A ProcessIndex as it is sent."""

    alike: str
    parts: tuple[PartSummary, ...]


def index_summary(index: ProcessIndex) -> IndexSummary:
    """An index as it is sent, and merged."""
    parts = tuple(PartSummary(part.segments, to_columns(part.arrays, part.chunks), part.files) for part in index.parts)
    return IndexSummary(index.alike, parts)


def encode_index(index: ProcessIndex) -> bytes:
    """The bytes that a process sends to process 0."""
    return msgspec.msgpack.encode(index_summary(index))


def decode_index(data: bytes) -> IndexSummary:
    """What a process has sent."""
    return msgspec.msgpack.decode(data, type=IndexSummary)


def merge_indexes(
    parts: Sequence[PartRecord], indexes: Sequence[IndexSummary]
) -> tuple[list[SegmentRecord], list[PartRecord]]:
    """The segments and checkpointables of the whole checkpoint.

    Args:
        parts: the checkpointables as process 0 knows them, whose arrays have no chunks yet.
        indexes: one of each process, in their order.

    Raises:
        UnsupportedLeafError: so many chunks that no manifest holds them.
        CheckpointError: together they are not whole, which only a mistake of this package can make.
    """
    _refuse_too_many(indexes)
    segments: list[SegmentRecord] = []
    merged = []
    with paused_collection():
        for number, part in enumerate(parts):
            told = [index.parts[number] for index in indexes]
            firsts = itertools.accumulate([len(each.segments) for each in told], initial=len(segments))
            merged.append(_merge_part(part, told, list(firsts)[:-1]))
            segments.extend(segment for each in told for segment in each.segments)
    return segments, merged


def _refuse_too_many(indexes: Sequence[IndexSummary]) -> None:
    """Before process 0 takes the memory that they need: a training may run beside it."""
    told = [part.chunks for index in indexes for part in index.parts]
    chunks = sum(map(count_of, told))
    least_bytes = chunks * _LEAST_CHUNK_BYTES + sum(2 * len(each.digests) for each in told)
    if least_bytes > MAX_MANIFEST_BYTES:
        raise UnsupportedLeafError(
            f"{chunks:,} chunks of {len(indexes):,} processes: a manifest of more than {MAX_MANIFEST_BYTES:,} bytes; "
            "stack arrays, or cut them over fewer processes"
        )


def _merge_part(part: PartRecord, told: Sequence[PartSummary], firsts: Sequence[int]) -> PartRecord:
    try:
        chunks = MergedChunks([each.chunks for each in told], firsts, [len(array.shape) for array in part.arrays])
    except ValueError as error:
        raise CheckpointError(f"{part.name}: the processes do not tell of the same arrays: {error}") from error
    known = _KnownTilings()
    arrays = []
    for number, array in enumerate(part.arrays):
        found = chunks.of(number, len(array.shape))
        boxes = known.boxes(found.corners, array, part.name)
        arrays.append(msgspec.structs.replace(array, chunks=found.records(boxes)))
    files = part.files + tuple(file for each in told for file in each.files)
    return msgspec.structs.replace(part, arrays=tuple(arrays), files=files)


class _KnownTilings:
    """Boxes of arrays: most are cut as another one was, and are then neither checked again nor made."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], bytes], list[Box]] = {}

    def boxes(self, corners: np.ndarray, array: ArrayRecord, part: str) -> list[Box]:
        """The boxes with these corners, which tile the array."""
        key = (array.shape, corners.tobytes())
        found = self._known.get(key)
        if found is None:
            check_corners(corners, array.shape, f"{part}: array {array.name!r}")
            found = self._known[key] = to_boxes(corners)
        return found
