"""The index of one process: what it has written of a checkpoint; and how those of all become one manifest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError, UnsupportedLeafError
from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.chunk_columns import ChunkColumns, MergedChunks, count_of, to_boxes, to_columns
from jaxckpt_train.store.manifest import (
    MAX_MANIFEST_BYTES,
    ArrayRecord,
    ChunkRecord,
    FileRecord,
    PartRecord,
    SegmentRecord,
)
from jaxckpt_train.store.quiet_gc import paused_collection
from jaxckpt_train.store.tiling import check_corners

_LEAST_CHUNK_BYTES = len('[[],0,0,1,""],')  # in a manifest, without its digests


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


class ToldPart(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A PartIndex as it is sent: its files, and the rest as columns."""

    segments: tuple[SegmentRecord, ...]
    chunks: ChunkColumns
    files: tuple[FileRecord, ...] = ()


class ToldIndex(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A ProcessIndex as it is sent."""

    alike: str
    parts: tuple[ToldPart, ...]


def told_index(index: ProcessIndex) -> ToldIndex:
    """An index as it is sent, and merged."""
    parts = tuple(ToldPart(part.segments, to_columns(part.arrays, part.chunks), part.files) for part in index.parts)
    return ToldIndex(index.alike, parts)


def encode_index(index: ProcessIndex) -> bytes:
    """The bytes that a process sends to process 0."""
    return msgspec.msgpack.encode(told_index(index))


def decode_index(data: bytes) -> ToldIndex:
    """What a process has sent."""
    return msgspec.msgpack.decode(data, type=ToldIndex)


def merge_indexes(
    parts: Sequence[PartRecord], indexes: Sequence[ToldIndex]
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


def _refuse_too_many(indexes: Sequence[ToldIndex]) -> None:
    """Before process 0 takes the memory that they need: a training may run beside it."""
    told = [part.chunks for index in indexes for part in index.parts]
    chunks = sum(map(count_of, told))
    least_bytes = chunks * _LEAST_CHUNK_BYTES + sum(2 * len(each.digests) for each in told)
    if least_bytes > MAX_MANIFEST_BYTES:
        raise UnsupportedLeafError(
            f"{chunks:,} chunks of {len(indexes):,} processes: a manifest of more than {MAX_MANIFEST_BYTES:,} bytes; "
            "stack arrays, or cut them over fewer processes"
        )


def _merge_part(part: PartRecord, told: Sequence[ToldPart], firsts: Sequence[int]) -> PartRecord:
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
