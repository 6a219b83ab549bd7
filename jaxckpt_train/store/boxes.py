"""Boxes: rectangles of an array, per dimension a half-open range [start, stop)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]


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


def cut_box(box: Box, itemsize: int, most_bytes: int) -> Iterator[Box]:
    """A box in boxes of at most so many bytes, cut along its first axes; what has no elements is one."""
    if not box or box_elements(box) * itemsize <= most_bytes:
        yield box
        return
    (start, stop), inner = box[0], box[1:]
    rows = most_bytes // (box_elements(inner) * itemsize)
    if rows:
        for at in range(start, stop, rows):
            yield ((at, min(at + rows, stop)), *inner)
        return
    for at in range(start, stop):
        for rest in cut_box(inner, itemsize, most_bytes):
            yield ((at, at + 1), *rest)
