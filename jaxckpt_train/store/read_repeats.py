"""Repeated reads: how many bytes a job reads of an array if each process reads whatever it needs itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.manifest import ArrayRecord

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
        boxes = tuple(chunk.box for chunk in array.chunks)
        key = needs, boxes, array.dtype
        found = self._known.get(key)
        if found is None:
            counts = Counter(needs)
            reads = _Reads(array, self._block_bytes)
            found = self._known[key] = sum(reads.of(each) * count for each, count in counts.items())
        return found


class _Reads:
    """What is read of one array."""

    def __init__(self, array: ArrayRecord, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._lengths = {chunk.box: chunk.length for chunk in array.chunks}
        self._length = np.array([chunk.length for chunk in array.chunks], np.int64)
        shape = len(array.chunks), len(array.shape), 2
        self._edges = np.array([chunk.box for chunk in array.chunks], np.int64).reshape(shape)
        sizes = self._edges[:, :, 1] - self._edges[:, :, 0]
        self._elements = np.prod(sizes, axis=1)
        inner = np.cumprod(sizes[:, ::-1], axis=1)[:, ::-1]  # elements of this and all later dimensions
        self._strides = np.concatenate([inner[:, 1:], np.ones((len(sizes), 1), np.int64)], axis=1)[:, : sizes.shape[1]]

    def of(self, boxes: Sequence[Box]) -> int:
        """Bytes of all blocks that hold anything of these boxes."""
        if all(box in self._lengths for box in boxes):
            return sum(self._lengths[box] for box in boxes)
        spans = [self._blocks(box) for box in boxes if box_elements(box)]
        if not spans:
            return 0
        first = np.minimum.reduce([low for low, _ in spans])
        last = np.maximum.reduce([high for _, high in spans])
        one_by_one = np.sum([np.maximum(high - low, 0) for low, high in spans], axis=0)
        return int(np.minimum(one_by_one, np.maximum(last - first, 0)).sum())

    def _blocks(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        """Of each chunk the bytes from the first to the last block that hold anything of a box; none: from far on."""
        edges = np.array(box, np.int64).reshape(len(box), 2)
        low = np.maximum(self._edges[:, :, 0], edges[:, 0])
        high = np.minimum(self._edges[:, :, 1], edges[:, 1])
        is_common = (low < high).all(axis=1)
        item = self._length // np.maximum(self._elements, 1)
        first = ((low - self._edges[:, :, 0]) * self._strides).sum(axis=1) * item
        last = (((high - 1 - self._edges[:, :, 0]) * self._strides).sum(axis=1) + 1) * item
        begin = first // self._block_bytes * self._block_bytes
        end = np.minimum(-(-last // self._block_bytes) * self._block_bytes, self._length)
        far = np.iinfo(np.int64).max // 4
        return np.where(is_common, begin, far), np.where(is_common, end, -far)
