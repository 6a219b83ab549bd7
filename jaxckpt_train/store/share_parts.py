"""Parts of shares: which bytes of a window become which parts of the boxes that a process needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.store.boxes import Box, box_elements, box_shape, intersect, row_major_range, slices_within
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_shares import Cut
from jaxckpt_train.store.reading import ReadBox
from jaxckpt_train.store.staging import empty_array

ROOM = 16
"""In a row for one process each part begins at a multiple of this: no element is longer."""


class Part(NamedTuple):
    """What a cut and box number `box` have in common. It lies in `inner`, whose bytes begin at `at` in the window."""

    box: int
    common: Box
    inner: Box
    at: int


def parts_of(cut: Cut, item: int, boxes: Sequence[Box]) -> Iterator[Part]:
    """The parts that boxes of an array have of a cut, always in one order; `item`: bytes of an element."""
    at = cut.at
    for inner in row_major_range(cut.chunk.box, cut.start // item, cut.stop // item):
        for number, box in enumerate(boxes):
            common = intersect(inner, box)
            if common is not None:
                yield Part(number, common, inner, at)
        at += box_elements(inner) * item


def data_of(part: Part, window: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A part as a view of the window that holds it."""
    stop = part.at + box_elements(part.inner) * dtype.itemsize
    inner = window[part.at : stop].view(dtype).reshape(box_shape(part.inner))
    return inner[slices_within(part.common, part.inner)]


def row_bytes(cut: Cut, item: int, boxes: Sequence[Box]) -> int:
    """How long the parts of a cut are in a row: each with the room after it."""
    return sum(_roomy(box_elements(part.common) * item) for part in parts_of(cut, item, boxes))


def pack(cut: Cut, window: np.ndarray, dtype: np.dtype, boxes: Sequence[Box], row: np.ndarray, at: int) -> int:
    """Put all parts of a cut into a row for another process, from `at` on; returns where they end."""
    for part in parts_of(cut, dtype.itemsize, boxes):
        _in_row(part, row, at, dtype)[...] = data_of(part, window, dtype)
        at += _roomy(box_elements(part.common) * dtype.itemsize)
    return at


def _in_row(part: Part, row: np.ndarray, at: int, dtype: np.dtype) -> np.ndarray:
    size = box_elements(part.common) * dtype.itemsize
    return row[at : at + size].view(dtype).reshape(box_shape(part.common))


def _roomy(size: int) -> int:
    return -(-size // ROOM) * ROOM


class Assembly:
    """The boxes that this process needs, put together of parts in any order.

    Args:
        arrays: which.
        boxes: of each, those that this process needs.

    Attributes:
        completed: boxes of which all parts have come; whoever takes them lets go of them here.
    """

    def __init__(self, arrays: Sequence[ArrayRecord], boxes: Sequence[Sequence[Box]]) -> None:
        self.completed: list[ReadBox] = []
        self._dtypes, self._boxes = [DTYPES[array.dtype] for array in arrays], boxes
        self._begun: dict[tuple[int, int], tuple[np.ndarray, int]] = {}  # with the number of missing elements

    def add_cut(self, cut: Cut, window: np.ndarray) -> None:
        """All that this process needs of a cut, of the window that holds it."""
        boxes, dtype = self._boxes[cut.wanted], self._dtypes[cut.wanted]
        if len(boxes) == 1 and boxes[0] == cut.chunk.box:  # bytes in their order, without looking at dimensions
            data = window[cut.at : cut.at + cut.stop - cut.start]
            self._target(cut.wanted, 0).reshape(-1).view(np.uint8)[cut.start : cut.stop] = data
            self._count(cut.wanted, 0, len(data) // dtype.itemsize)
            return
        for part in parts_of(cut, dtype.itemsize, boxes):
            self._add(cut.wanted, part, data_of(part, window, dtype))

    def add_row(self, cut: Cut, row: np.ndarray, at: int) -> int:
        """All that this process needs of a cut, as `pack` has put it into a row; returns where it ends."""
        dtype = self._dtypes[cut.wanted]
        for part in parts_of(cut, dtype.itemsize, self._boxes[cut.wanted]):
            self._add(cut.wanted, part, _in_row(part, row, at, dtype))
            at += _roomy(box_elements(part.common) * dtype.itemsize)
        return at

    def _add(self, wanted: int, part: Part, data: np.ndarray) -> None:
        box = self._boxes[wanted][part.box]
        self._target(wanted, part.box)[slices_within(part.common, box)] = data
        self._count(wanted, part.box, box_elements(part.common))

    def _target(self, wanted: int, number: int) -> np.ndarray:
        found = self._begun.get((wanted, number))
        if found is None:
            box = self._boxes[wanted][number]
            found = empty_array(box_shape(box), self._dtypes[wanted]), box_elements(box)
            self._begun[wanted, number] = found
        return found[0]

    def _count(self, wanted: int, number: int, elements: int) -> None:
        target, left = self._begun[wanted, number]
        if left > elements:
            self._begun[wanted, number] = target, left - elements
            return
        del self._begun[wanted, number]
        self.completed.append(ReadBox(wanted, number, target))
