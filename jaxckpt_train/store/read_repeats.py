"""Repeated reads: how many bytes a job reads of an array if each process reads whatever it needs itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_plan import is_read_by_bands, parts_bytes

Needs = tuple[tuple[Box, ...], ...]
"""Of each process of a job, the distinct boxes of an array that it needs, lowest first."""


class RepeatedReads:
    """Counts them; arrays that are stored and needed alike are counted once.

    Args:
        block_bytes: of the digests: what is read whole.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._known: dict[object, int] = {}

    def job_bytes(self, array: ArrayRecord, needs: Needs) -> int:
        """Bytes that all processes read together of the blocks that they need any of.

        Never too few; where the boxes of one process share blocks among each other, at times too many.
        """
        places = tuple((chunk.box, is_read_by_bands(chunk)) for chunk in array.chunks)
        key = needs, places, array.dtype
        found = self._known.get(key)
        if found is None:
            counts = Counter(needs)
            reads = _Reads(array, self._block_bytes)
            found = self._known[key] = sum(reads.of(each) * count for each, count in counts.items())
        return found


class _Common(NamedTuple):
    """What a box has in common with each chunk.

    Attributes:
        elements: of the box.
        low: of each chunk the lower edges of it, from the chunk's own lower ones on.
        high: likewise the upper edges.
        is_any: whether there is anything.
    """

    elements: int
    low: np.ndarray
    high: np.ndarray
    is_any: np.ndarray


class _Reads:
    """What is read of one array."""

    def __init__(self, array: ArrayRecord, block_bytes: int) -> None:
        self._block_bytes, self._band_bytes = block_bytes, parts_bytes(block_bytes)
        self._lengths = {chunk.box: chunk.length for chunk in array.chunks}
        self._length = np.array([chunk.length for chunk in array.chunks], np.int64)
        shape = len(array.chunks), len(array.shape), 2
        self._edges = np.array([chunk.box for chunk in array.chunks], np.int64).reshape(shape)
        sizes = self._edges[:, :, 1] - self._edges[:, :, 0]
        self._elements = np.prod(sizes, axis=1)
        inner = np.cumprod(sizes[:, ::-1], axis=1)[:, ::-1]  # elements of this and all later dimensions
        self._strides = np.concatenate([inner[:, 1:], np.ones((len(sizes), 1), np.int64)], axis=1)[:, : sizes.shape[1]]
        self._item = self._length // np.maximum(self._elements, 1)
        self._by_bands = np.array([is_read_by_bands(chunk) for chunk in array.chunks], bool)

    def of(self, boxes: Sequence[Box]) -> int:
        """Bytes of all blocks that hold anything of these boxes."""
        if all(box in self._lengths for box in boxes):
            return sum(self._lengths[box] for box in boxes)
        common = [self._common(box) for box in boxes if box_elements(box)]
        if not common:
            return 0
        spans = [self._blocks(each) for each in common]
        first = np.minimum.reduce([low for low, _ in spans])
        last = np.maximum.reduce([high for _, high in spans])
        by_bands = self._by_bands & ~np.logical_or.reduce([self._lies_whole(each) for each in common])
        holes = np.sum([self._holes(each) for each in common], axis=0) * by_bands
        one_by_one = np.sum([np.maximum(high - low, 0) for low, high in spans], axis=0) - holes
        return int(np.minimum(one_by_one, np.maximum(last - first, 0)).sum())

    def _common(self, box: Box) -> _Common:
        edges = np.array(box, np.int64).reshape(len(box), 2)
        low = np.maximum(self._edges[:, :, 0], edges[:, 0]) - self._edges[:, :, 0]
        high = np.minimum(self._edges[:, :, 1], edges[:, 1]) - self._edges[:, :, 0]
        return _Common(box_elements(box), low, high, np.all(low < high, axis=1))

    def _lies_whole(self, common: _Common) -> np.ndarray:
        """Of each chunk whether a box lies in it in one piece."""
        elements, low, high, is_common = common
        span = ((high - low - 1) * self._strides).sum(axis=1) + 1
        is_whole: np.ndarray = is_common & (span == elements) & (np.prod(high - low, axis=1) == span)
        return is_whole

    def _holes(self, common: _Common) -> np.ndarray:
        """Of each chunk the bytes between its first and last block that are not read, as they hold nothing of a box.

        Only where one piece of the box ends a band or more before the next one begins: in few chunks, and alike there.
        """
        _, low, high, is_common = common
        spans = (high - low - 1) * self._strides
        behind = spans[:, ::-1].cumsum(axis=1)[:, ::-1] - spans + 1  # elements from the first to the last of a piece
        gaps = (self._strides - behind) * self._item[:, None]
        is_far = (gaps >= self._band_bytes) & (high - low > 1)
        found = np.zeros(len(low), np.int64)
        which = np.flatnonzero(is_far.any(axis=1) & is_common)
        if not len(which):
            return found
        geometry = np.concatenate([low, high, self._strides, is_far, self._item[:, None]], axis=1)[which]
        _, some, same = np.unique(geometry, axis=0, return_index=True, return_inverse=True)
        holes = [self._empty_bands(low[at], high[at], is_far[at], behind[at], at) for at in which[some]]
        found[which] = np.array(holes)[same.reshape(-1)] * self._band_bytes
        return found

    def _empty_bands(
        self, low: np.ndarray, high: np.ndarray, is_far: np.ndarray, behind: np.ndarray, chunk: int
    ) -> int:
        """How many bands of one chunk lie between pieces of a box."""
        inner = int(np.flatnonzero(is_far)[-1])  # the pieces along this dimension lie far apart
        starts = np.zeros(1, np.int64)
        for size, first, stride in zip((high - low)[: inner + 1], low, self._strides[chunk], strict=False):
            starts = (starts[:, None] + (first + np.arange(size)) * stride).reshape(-1)
        starts += (low[inner + 1 :] * self._strides[chunk][inner + 1 :]).sum()
        item = self._item[chunk]
        first_bands = starts * item // self._band_bytes
        last_bands = ((starts + behind[inner]) * item - 1) // self._band_bytes
        return int(np.maximum(first_bands[1:] - last_bands[:-1] - 1, 0).sum())

    def _blocks(self, common: _Common) -> tuple[np.ndarray, np.ndarray]:
        """Of each chunk the bytes from the first to the last block that hold anything of a box; none: from far on."""
        _, low, high, is_common = common
        first = (low * self._strides).sum(axis=1) * self._item
        last = (((high - 1) * self._strides).sum(axis=1) + 1) * self._item
        begin = first // self._block_bytes * self._block_bytes
        end = np.minimum(-(-last // self._block_bytes) * self._block_bytes, self._length)
        far = np.iinfo(np.int64).max // 4
        return np.where(is_common, begin, far), np.where(is_common, end, -far)
