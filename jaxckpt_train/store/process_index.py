"""The index of one process: what it has written of a checkpoint; and how those of all become one manifest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, FileRecord, PartRecord, SegmentRecord
from jaxckpt_train.store.tiling import check_tiling


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


def encode_index(index: ProcessIndex) -> bytes:
    """The bytes that a process sends to process 0."""
    return msgspec.msgpack.encode(index)


def decode_index(data: bytes) -> ProcessIndex:
    """What a process has sent."""
    return msgspec.msgpack.decode(data, type=ProcessIndex)


def merge_indexes(
    parts: Sequence[PartRecord], indexes: Sequence[ProcessIndex]
) -> tuple[list[SegmentRecord], list[PartRecord]]:
    """The segments and checkpointables of the whole checkpoint.

    Args:
        parts: the checkpointables as process 0 knows them, whose arrays have no chunks yet.
        indexes: one of each process, in their order.

    Raises:
        CheckpointError: together they are not whole, which only a mistake of this package can make.
    """
    segments: list[SegmentRecord] = []
    merged = []
    for number, part in enumerate(parts):
        chunks: list[list[ChunkRecord]] = [[] for _ in part.arrays]
        for index in indexes:
            own, first = index.parts[number], len(segments)
            segments.extend(own.segments)
            for array, written in zip(own.arrays, own.chunks, strict=True):
                chunks[array].extend(_moved(chunk, first) for chunk in written)
        arrays = tuple(_whole(part, array, found) for array, found in zip(part.arrays, chunks, strict=True))
        files = part.files + tuple(file for index in indexes for file in index.parts[number].files)
        merged.append(msgspec.structs.replace(part, arrays=arrays, files=files))
    return segments, merged


def _moved(chunk: ChunkRecord, first: int) -> ChunkRecord:
    if not first:
        return chunk
    return ChunkRecord(chunk.box, chunk.segment + first, chunk.offset, chunk.length, chunk.digests)


def _whole(part: PartRecord, array: ArrayRecord, chunks: list[ChunkRecord]) -> ArrayRecord:
    check_tiling([chunk.box for chunk in chunks], array.shape, f"{part.name}: array {array.name!r}")
    return msgspec.structs.replace(array, chunks=tuple(chunks))
