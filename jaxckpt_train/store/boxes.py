"""Boxes: rectangles of an array, per dimension a half-open range [start, stop)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError

Box = tuple[tuple[int, int], ...]
_FEW_BOXES = 16


def full_box(shape: Sequence[int]) -> Box:
    """The box that covers a whole array of this shape."""
    return tuple([(0, size) for size in shape])  # once per leaf: a generator takes twice as long


def box_from_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that a tuple of slices (step 1, as JAX's shardings give them) selects from an array of this shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the array inside the box."""
    return tuple([stop - start for start, stop in box])


def box_elements(box: Box) -> int:
    """How many elements the box holds; 1 for the box of a 0-d array."""
    return math.prod([stop - start for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """The common box of two boxes of one array, or None if they share no element."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that select `inner` from an array that holds exactly `outer`."""
    return tuple(slice(i[0] - o[0], i[1] - o[0]) for i, o in zip(inner, outer, strict=True))


def element_span(inner: Box, outer: Box) -> tuple[int, int]:
    """The smallest range [first, last) of row-major elements of `outer` that holds all of `inner`."""
    first = last = 0
    for (i0, i1), (o0, o1) in zip(inner, outer, strict=True):
        first = first * (o1 - o0) + (i0 - o0)
        last = last * (o1 - o0) + (i1 - 1 - o0)
    return first, last + 1


def is_contiguous_within(inner: Box, outer: Box) -> bool:
    """Whether the elements of `inner` lie one after the other in a row-major array that holds exactly `outer`."""
    first, last = element_span(inner, outer)
    return last - first == box_elements(inner)


def row_major_range(box: Box, first: int, last: int) -> Iterator[Box]:
    """Elements first to last of a box, counted in row-major order, as boxes: at most 2 n - 1 in n dimensions."""
    if not box:
        yield box
        return
    (low, _), inner = box[0], box[1:]
    row = box_elements(inner)
    begin, end = -(-first // row), last // row  # the whole rows between
    if begin > end:
        for part in row_major_range(inner, first - end * row, last - end * row):
            yield ((low + end, low + begin), *part)
        return
    if first < begin * row:
        for part in row_major_range(inner, first - (begin - 1) * row, row):
            yield ((low + begin - 1, low + begin), *part)
    if begin < end:
        yield ((low + begin, low + end), *inner)
    if last > end * row:
        for part in row_major_range(inner, 0, last - end * row):
            yield ((low + end, low + end + 1), *part)


def check_tiling(boxes: Sequence[Box], shape: Sequence[int], subject: str) -> None:
    """Check that the boxes cover an array of this shape exactly: no hole, no overlap, nothing outside.

    Raises:
        CorruptCheckpointError: they do not; the message begins with `subject`.
    """
    full = full_box(shape)
    if len(boxes) == 1 and boxes[0] == full:
        return
    for box in boxes:
        inside = len(box) == len(full) and all(0 <= s < e <= n for (s, e), n in zip(box, shape, strict=True))
        if not inside:
            raise CorruptCheckpointError(f"{subject}: box {box} is empty or lies outside shape {tuple(shape)}")
    covered, wanted = sum(map(box_elements, boxes)), math.prod(shape)
    overlapping = _first_overlap(boxes)
    if overlapping is not None:
        raise CorruptCheckpointError(f"{subject}: boxes {overlapping[0]} and {overlapping[1]} overlap")
    if covered != wanted:
        raise CorruptCheckpointError(f"{subject}: boxes cover {covered} of {wanted} elements of shape {tuple(shape)}")


def _first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element. Cuts the boxes apart as long as it can, so that large grids take no square."""
    if len(boxes) < 2:
        return None
    if not boxes[0]:
        return boxes[0], boxes[1]
    corners = np.array(boxes, dtype=np.int64)
    pending = [(np.arange(len(boxes)), 0)]
    while pending:
        group, axis = pending.pop()
        parts, axis = (None, axis) if len(group) <= _FEW_BOXES else _cut_apart(corners[group], axis)
        if parts is not None:
            pending.extend((group[part], axis) for part in parts if len(part) > 1)
            continue
        found = _overlap_in(corners[group])
        if found is not None:
            return boxes[group[found[0]]], boxes[group[found[1]]]
    return None


def _cut_apart(corners: np.ndarray, axis: int) -> tuple[list[np.ndarray] | None, int]:
    """Groups of boxes with planes between, across the first axis from `axis` on with any; and the next axis."""
    dimensions = corners.shape[1]
    for turn in range(dimensions):
        along = corners[:, (axis + turn) % dimensions]
        order = np.argsort(along[:, 0], kind="stable")
        reach = np.maximum.accumulate(along[order, 1])
        cuts = np.flatnonzero(along[order[1:], 0] >= reach[:-1])
        if len(cuts):
            return np.split(order, cuts + 1), (axis + turn + 1) % dimensions
    return None, axis


def _overlap_in(corners: np.ndarray) -> tuple[int, int] | None:
    """The numbers of two boxes that share an element, by a sweep along the axis with the most distinct starts."""
    axis = int(np.argmax([len(np.unique(corners[:, d, 0])) for d in range(corners.shape[1])]))
    order = np.argsort(corners[:, axis, 0], kind="stable")
    corners = corners[order]
    ends = np.searchsorted(corners[:, axis, 0], corners[:, axis, 1], side="left")
    for i, end in enumerate(ends):
        rivals = corners[i + 1 : end]
        if len(rivals):
            lows = np.maximum(rivals[:, :, 0], corners[i, :, 0])
            highs = np.minimum(rivals[:, :, 1], corners[i, :, 1])
            hits = np.flatnonzero((lows < highs).all(axis=1))
            if len(hits):
                return int(order[i]), int(order[i + 1 + hits[0]])
    return None
