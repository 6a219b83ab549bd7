"""Whether many chunks surely lie as they must; what is not sure is looked at one by one, to say what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, SegmentRecord

MANY = 16


class SegmentRoom:
    """What chunks of some segments must be like.

    Args:
        segments: whose sizes are below 2^62.
        width: hexadecimal digits of a digest.
        block_bytes: that one digest covers.
    """

    def __init__(self, segments: Sequence[SegmentRecord], width: int, block_bytes: int) -> None:
        self._heads = np.array([segment.header_bytes for segment in segments], np.int64)
        self._ends = np.array([segment.bytes for segment in segments], np.int64)
        self._width, self._block_bytes = width, block_bytes

    def surely_holds(self, chunks: Sequence[ChunkRecord], corners: np.ndarray, item_bytes: int) -> bool:
        """Whether each chunk is as long as its box, within its segment, and has as many digests as blocks.

        Args:
            chunks: of one array of less than 2^62 bytes.
            corners: of their boxes, which lie within the array; of shape (chunks, dimensions, 2).
            item_bytes: of an element.
        """
        columns = _columns(chunks)
        if columns is None:
            return False
        segments, offsets, lengths, digits = columns
        expected = np.prod(corners[:, :, 1] - corners[:, :, 0], axis=1) * item_bytes
        if (lengths != expected).any() or segments.min() < 0 or segments.max() >= len(self._ends):
            return False
        starts_well = offsets >= self._heads[segments]
        ends_well = offsets <= self._ends[segments] - lengths  # a sum could be too large
        return bool((starts_well & ends_well & (digits == -(-lengths // self._block_bytes) * self._width)).all())

    def surely_full(self, arrays: Sequence[ArrayRecord]) -> bool:
        """Whether all chunks, which their segments hold, fill the data of each segment exactly."""
        columns = _columns([chunk for array in arrays for chunk in array.chunks])
        if columns is None or not len(self._ends):
            return False
        segments, offsets, lengths, _ = columns
        order = np.lexsort((offsets, segments))
        segments, starts = segments[order], offsets[order]
        stops = starts + lengths[order]
        first = np.flatnonzero(np.diff(segments, prepend=-1))
        if not np.array_equal(segments[first], np.arange(len(self._ends))):
            return False
        expected = np.append(0, stops[:-1])
        expected[first] = self._heads
        last = np.append(first[1:], len(segments)) - 1
        return np.array_equal(starts, expected) and np.array_equal(stops[last], self._ends)


def _columns(chunks: Sequence[ChunkRecord]) -> Sequence[np.ndarray] | None:
    """Segments, offsets, lengths and how many digits of digests; None: none, or numbers beyond 64 bits."""
    if not chunks:
        return None
    try:
        return (
            np.array([chunk.segment for chunk in chunks], np.int64),
            np.array([chunk.offset for chunk in chunks], np.int64),
            np.array([chunk.length for chunk in chunks], np.int64),
            np.array([len(chunk.digests) for chunk in chunks], np.int64),
        )
    except OverflowError:
        return None
