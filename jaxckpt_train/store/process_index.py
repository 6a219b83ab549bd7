"""The index of one process, which lists what it has written, and the merge of all indexes into one manifest.

Chunks are sent as columns of numbers, which are small, and which numpy merges quickly for any number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError, UnsupportedLeafError
from jaxckpt_train.store.boxes import Box, check_corners
from jaxckpt_train.store.manifest import (
    MAX_MANIFEST_BYTES,
    ChunkRecord,
    FileRecord,
    PartRecord,
    SegmentRecord,
)
from jaxckpt_train.store.threads import paused_collection

_WIDTHS = (1, 2, 4, 8)
_MIN_CHUNK_BYTES = len('[[],0,0,1,""],')  # in a manifest, without its digests


class ChunkColumns(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Chunks of some arrays as columns; a column is the width of its numbers in bytes, followed by the numbers."""

    arrays: bytes  # the index of each chunk's array
    boxes: bytes  # the starts and stops of all boxes
    segments: bytes
    offsets: bytes
    lengths: bytes
    digest_ends: bytes  # where the digests of each chunk end in `digests`
    digests: bytes


def _columns_of(chunks: Mapping[int, Sequence[ChunkRecord]]) -> ChunkColumns:
    lengths = np.array([len(found) for found in chunks.values()], np.int64)
    flat = list(chain.from_iterable(chunks.values()))
    digests = [chunk.digests for chunk in flat]
    return ChunkColumns(
        packed(np.repeat(np.array(list(chunks), np.int64), lengths)),
        packed(list(chain.from_iterable(chain.from_iterable([chunk.box for chunk in flat])))),
        packed([chunk.segment for chunk in flat]),
        packed([chunk.offset for chunk in flat]),
        packed([chunk.length for chunk in flat]),
        packed(np.cumsum(np.array([len(each) // 2 for each in digests], np.int64))),
        bytes.fromhex("".join(digests)),
    )


class MergedChunks:
    """The chunks that several processes have written of the same arrays.

    Raises ValueError: these cannot be chunks of these arrays.
    """

    def __init__(self, columns: Sequence[ChunkColumns], firsts: Sequence[int], dimensions: Sequence[int]) -> None:
        arrays = _joined(each.arrays for each in columns)
        if arrays.max(initial=-1) >= len(dimensions):
            raise ValueError(f"expected at most {len(dimensions)} arrays, found array number {arrays.max()}")
        order = np.argsort(arrays, kind="stable")
        self._numbers, sides = arrays[order], np.array(dimensions, np.int64)[arrays] * 2
        self._flat = _joined(each.boxes for each in columns)
        if sides.sum() != len(self._flat):
            raise ValueError("the number of dimensions of boxes and arrays differs")
        self._at = (np.cumsum(sides) - sides)[order]
        self._segments = _joined((each.segments for each in columns), firsts)[order]
        self._offsets = _joined(each.offsets for each in columns)[order]
        self._lengths = _joined(each.lengths for each in columns)[order]
        before = [0, *np.cumsum([len(each.digests) for each in columns]).tolist()]
        ends = _joined((each.digest_ends for each in columns), before[:-1])
        self._ends, self._starts = ends[order], np.append(0, ends[:-1])[order]
        self._digests = b"".join([each.digests for each in columns])

    def of(self, array: int, dimensions: int) -> tuple[np.ndarray, tuple[list[Any], ...]]:
        """The chunks of one array, in the order of the processes.

        Returns their boxes, with shape (chunks, dimensions, 2), and columns of the other fields of their records.
        """
        first, last = np.searchsorted(self._numbers, (array, array + 1)).tolist()
        corners = self._flat[self._at[first:last, None] + np.arange(2 * dimensions)]
        spans = zip(self._starts[first:last].tolist(), self._ends[first:last].tolist(), strict=True)
        digests = [self._digests[start:end].hex() for start, end in spans]
        numbers = [each[first:last].tolist() for each in (self._segments, self._offsets, self._lengths)]
        return corners.reshape(last - first, dimensions, 2), (*numbers, digests)


def to_boxes(corners: np.ndarray) -> list[Box]:
    """Boxes as tuples."""
    if not corners.shape[1]:
        return [()] * len(corners)
    sides = [zip(*side.T.tolist(), strict=True) for side in corners.transpose(1, 0, 2)]
    return list(zip(*sides, strict=True))


def packed(values: Sequence[int] | np.ndarray) -> bytes:
    """Encode numbers from 0 on with as few bytes each as the largest needs."""
    column = np.asarray(values, np.int64)
    most = int(column.max(initial=0))
    width = next(width for width in _WIDTHS if most < 1 << 8 * width)
    return bytes([width]) + column.astype(f"<u{width}").tobytes()


def unpacked(data: bytes) -> np.ndarray:
    """Decode numbers that `packed` has encoded. Raises ValueError: it cannot have encoded this."""
    if not data or data[0] not in _WIDTHS or (len(data) - 1) % data[0]:
        raise ValueError("not a column of numbers")
    return np.frombuffer(data, f"<u{data[0]}", offset=1).astype(np.int64)


def _joined(columns: Iterable[bytes], first: Sequence[int] | None = None) -> np.ndarray:
    """Concatenate the columns of all processes, after adding each process's first number."""
    found = [unpacked(column) for column in columns]
    for column, more in zip(found, first or (), strict=False):
        column += more
    return np.concatenate(found) if found else np.zeros(0, np.int64)


class PartIndex(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a process has written of one checkpointable; the segment numbers of its chunks index its `segments`."""

    segments: tuple[SegmentRecord, ...]
    chunks: ChunkColumns
    files: tuple[FileRecord, ...] = ()


def part_index(
    segments: Sequence[SegmentRecord] = (),
    chunks: Mapping[int, Sequence[ChunkRecord]] | None = None,
    files: Sequence[FileRecord] = (),
) -> PartIndex:
    """The index of what a process has written of one checkpointable, with its chunks by the number of their array."""
    return PartIndex(tuple(segments), _columns_of(chunks or {}), tuple(files))


class IndexSummary(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What the primary needs to know of an index file (`index_files.py`); `weights` and `cover` are those of its boxes.

    `groups` is a digest of the groups of arrays. A process without parts of arrays has no file: then `size` is 0.
    """

    size: int
    digest: bytes
    segments: int
    data_bytes: int
    groups: bytes
    weights: bytes
    cover: bytes


class ProcessIndex(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a process has written of each checkpointable; `alike` is a digest of what must be equal in all processes.

    With `summary`, the parts of arrays are in an index file, and only whole arrays are here.
    """

    alike: str
    parts: tuple[PartIndex, ...]
    taken_bytes: int = 0  # of segments that were taken over from the checkpoint before
    summary: IndexSummary | None = None


def encode_index(index: ProcessIndex) -> bytes:
    """The bytes that a process sends to the primary."""
    return msgspec.msgpack.encode(index)


def decode_index(data: bytes) -> ProcessIndex:
    """Decode what a process has sent."""
    return msgspec.msgpack.decode(data, type=ProcessIndex)


def merge_indexes(
    parts: Sequence[PartRecord], indexes: Sequence[ProcessIndex]
) -> tuple[list[SegmentRecord], list[PartRecord]]:
    """The segments and checkpointables of the whole checkpoint, without what is in index files.

    Raises UnsupportedLeafError: there are more chunks than a manifest can hold; CheckpointError: they are incomplete.
    """
    _refuse_too_many(indexes)
    segments: list[SegmentRecord] = []
    merged = []
    with paused_collection():
        for number, part in enumerate(parts):
            summaries = [index.parts[number] for index in indexes]
            firsts = itertools.accumulate([len(each.segments) for each in summaries], initial=len(segments))
            merged.append(_merge_part(part, summaries, list(firsts)[:-1], has_files=indexes[0].summary is not None))
            segments.extend(segment for each in summaries for segment in each.segments)
    return segments, merged


def _refuse_too_many(indexes: Sequence[ProcessIndex]) -> None:
    """Check the limit before merging takes memory, because a training may run in the same process."""
    summaries = [part.chunks for index in indexes for part in index.parts]
    chunks = sum((len(each.arrays) - 1) // each.arrays[0] for each in summaries)
    least_bytes = chunks * _MIN_CHUNK_BYTES + sum(2 * len(each.digests) for each in summaries)
    if least_bytes > MAX_MANIFEST_BYTES:
        raise UnsupportedLeafError(
            f"{chunks:,} chunks of {len(indexes):,} processes need a manifest of more than {MAX_MANIFEST_BYTES:,} "
            "bytes; stack arrays, or shard them over fewer processes"
        )


def _merge_part(
    part: PartRecord, summaries: Sequence[PartIndex], firsts: Sequence[int], *, has_files: bool
) -> PartRecord:
    try:
        chunks = MergedChunks([each.chunks for each in summaries], firsts, [len(array.shape) for array in part.arrays])
    except ValueError as error:
        raise CheckpointError(f"{part.name}: the processes reported different arrays: {error}") from error
    known: dict[object, list[Box]] = {}  # most arrays are cut as another one, and need not be checked again
    arrays = []
    for number, array in enumerate(part.arrays):
        corners, columns = chunks.of(number, len(array.shape))
        if has_files and not len(corners):  # its parts are in index files, or it has no elements
            arrays.append(array)
            continue
        cuts = array.shape, len(corners), corners.tobytes()
        if cuts not in known:
            check_corners(corners, array.shape, f"{part.name}: array {array.name!r}")
            known[cuts] = to_boxes(corners)
        arrays.append(msgspec.structs.replace(array, chunks=tuple(map(ChunkRecord, known[cuts], *columns))))
    files = part.files + tuple(file for each in summaries for file in each.files)
    return msgspec.structs.replace(part, arrays=tuple(arrays), files=files)
