"""Hypothesis strategies of the store: shapes, boxes, tilings, arrays of every dtype and memory layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.segment import DTYPES


def shapes(most_dimensions: int = 4, most: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with at least one element."""
    return st.lists(st.integers(1, most), max_size=most_dimensions).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """A box with at least one element in an array of this shape."""
    corners = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        corners.append((start, draw(st.integers(start + 1, size))))
    return tuple(corners)


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int], most_cuts: int = 6) -> list[Box]:
    """Boxes that cover an array exactly: repeatedly cut in two, and shuffled."""
    boxes = [full_box(shape)]
    for _ in range(draw(st.integers(0, most_cuts))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [axis for axis, (start, stop) in enumerate(box) if stop - start > 1]
        if not wide:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(wide))
        at = draw(st.integers(box[axis][0] + 1, box[axis][1] - 1))
        boxes.extend((*box[:axis], part, *box[axis + 1 :]) for part in ((box[axis][0], at), (at, box[axis][1])))
    return draw(st.permutations(boxes))


@st.composite
def arrays(draw: st.DrawFn, most: int = 40) -> np.ndarray:
    """An array of any storable dtype, 0-d and empty ones too, in any memory layout and byte order."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, most), max_size=3)))
    layout = draw(st.sampled_from(["plain", "fortran", "reversed", "every second", "big-endian", "unaligned"]))
    stretch = 2 if layout == "every second" else 1
    wide = tuple(size * stretch for size in shape)
    raw = np.random.default_rng(draw(st.integers(0, 1 << 30))).integers(0, 2, (*wide, dtype.itemsize), np.uint8)
    array = np.ascontiguousarray(raw).view(dtype).reshape(wide)
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "reversed":
        return array[tuple(slice(None, None, -1) for _ in shape)]
    if layout == "every second":
        return array[tuple(slice(None, None, 2) for _ in shape)]
    if layout == "big-endian" and dtype.kind in "iufc":
        return array.astype(dtype.newbyteorder(">"))
    if layout == "unaligned":
        room = np.empty(array.nbytes + 1, np.uint8)
        shifted = room[1:].view(dtype).reshape(shape)
        shifted[...] = array
        return shifted
    return array
