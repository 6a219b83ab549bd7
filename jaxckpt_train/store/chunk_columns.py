"""Chunks as columns of numbers: small to send, and put together by numpy, however many processes have written them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.manifest import ChunkRecord

_WIDTHS = (1, 2, 4, 8)


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
