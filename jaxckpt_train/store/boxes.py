"""Boxes: rectangles of an array, with a half-open range [start, stop) per dimension; and checks of tilings.

The time of a check is about linear in the number of boxes, even if they were chosen to make it slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError

Box = tuple[tuple[int, int], ...]
_FEW_BOXES = 16
_PRIME = (1 << 31) - 1
_ROUNDS = 4


def full_box(shape: Sequence[int]) -> Box:
    """The box that covers a whole array of this shape."""
    return tuple([(0, size) for size in shape])  # called once per leaf; a generator takes twice as long


def box_from_index(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that a tuple of slices with step 1, as in JAX's shardings, selects from an array of this shape."""
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
    """Whether the elements of `inner` are contiguous in a row-major array that holds exactly `outer`."""
    first, last = element_span(inner, outer)
    return last - first == box_elements(inner)


def row_major_range(box: Box, first: int, last: int) -> Iterator[Box]:
    """Elements first to last of a box in row-major order, as boxes: at most 2 n - 1 boxes in n dimensions."""
    if not box:
        yield box
        return
    (low, _), inner = box[0], box[1:]
    row = box_elements(inner)
    begin, end = -(-first // row), last // row  # the range of whole rows
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
    """Cut a box into boxes of at most `most_bytes` along its first axes; a box without elements is not cut."""
    if not box or box_elements(box) * itemsize <= most_bytes:
        yield box
        return
    (start, stop), inner = box[0], box[1:]
    row = box_elements(inner) * itemsize
    rows = most_bytes // row
    if rows:
        for at in range(start, stop, rows):
            yield ((at, min(at + rows, stop)), *inner)
        return
    for at in range(start, stop):
        for rest in cut_box(inner, itemsize, most_bytes):
            yield ((at, at + 1), *rest)


def check_tiling(boxes: Sequence[Box], shape: Sequence[int], subject: str) -> None:
    """Check that boxes cover an array of this shape exactly: no gap, no overlap, nothing outside.

    Raises CorruptCheckpointError: they do not; the message starts with `subject`.
    """
    full = full_box(shape)
    if len(boxes) == 1 and boxes[0] == full:
        return
    corners = corners_of(boxes, len(full))
    if corners is None:
        raise _outside(next(box for box in boxes if not _is_inside(box, shape)), shape, subject)
    check_corners(corners, shape, subject)


def corners_of(boxes: Sequence[Box], dimensions: int) -> np.ndarray | None:
    """The boxes as an array of shape (boxes, dimensions, 2); None if one has other dimensions or huge numbers."""
    if {len(box) for box in boxes} - {dimensions}:
        return None
    numbers = chain.from_iterable(chain.from_iterable(boxes))
    try:
        return np.fromiter(numbers, np.int64, 2 * dimensions * len(boxes)).reshape(len(boxes), dimensions, 2)
    except OverflowError:
        return None


def check_corners(corners: np.ndarray, shape: Sequence[int], subject: str) -> None:
    """As `check_tiling`, for boxes in an array of shape (boxes, dimensions, 2).

    Raises CorruptCheckpointError: as `check_tiling`.
    """
    starts, stops = corners[:, :, 0], corners[:, :, 1]
    inside = ((starts >= 0) & (starts < stops) & (stops <= np.array(shape, np.int64))).all(axis=1)
    if not inside.all():
        raise _outside(_box(corners[inside.argmin()]), shape, subject)
    if len(corners) <= _FEW_BOXES:
        missed, holders = _few_wrong(corners, shape)
    else:
        missed, holders = _many_wrong(corners.copy(), shape)
    if len(holders) > 1:
        first, second = (_box(corners[number]) for number in holders[:2])
        raise CorruptCheckpointError(f"{subject}: boxes {first} and {second} overlap")
    if missed is not None:
        covered, wanted = sum(box_elements(_box(box)) for box in corners), math.prod(shape)
        raise CorruptCheckpointError(
            f"{subject}: boxes cover {covered} of {wanted} elements of shape {tuple(shape)}{missed}"
        )


def _is_inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(0 <= s < e <= n for (s, e), n in zip(box, shape, strict=True))


def _outside(box: Box, shape: Sequence[int], subject: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{subject}: box {box} is empty or outside shape {tuple(shape)}")


def _box(corners: np.ndarray) -> Box:
    return tuple((start, stop) for start, stop in corners.tolist())


def _few_wrong(corners: np.ndarray, shape: Sequence[int]) -> tuple[str | None, Sequence[int]]:
    """`_many_wrong` for few boxes, by comparing all pairs."""
    starts, stops = corners[:, :, 0], corners[:, :, 1]
    common = (np.maximum(starts[:, None], starts) < np.minimum(stops[:, None], stops)).all(axis=2)
    pairs = np.argwhere(np.triu(common, 1))
    if len(pairs):
        return None, pairs[0].tolist()
    return (None if sum(map(math.prod, (stops - starts).tolist())) == math.prod(shape) else ""), ()


def _many_wrong(corners: np.ndarray, shape: Sequence[int]) -> tuple[str | None, Sequence[int]]:
    """The end of a message about an element that no box covers, or None; and the indexes of overlapping boxes, if any.

    Boxes tile an array if, for every position on its first axis, the boxes at that position tile the remaining axes.
    This is tested with random weights: on every other axis each position gets a random weight, and the weight of a box
    is the product, over the axes, of the sums of the weights of its positions. Boxes that tile the rest have the same
    total weight as the rest. If they do not tile it, the difference is a non-zero polynomial of degree d - 1 in the
    random numbers, which vanishes with a probability below d / 2^31 (Schwartz and Zippel), and in all rounds below d^4
    / 2^124. A file cannot exploit that, because each check draws new numbers. A tiling is only refused with a position
    that proves it, so never by chance.
    """
    places = [np.unique(np.append(corners[:, axis], (0, size))) for axis, size in enumerate(shape)]
    for axis, known in enumerate(places):
        corners[:, axis] = np.searchsorted(known, corners[:, axis])
    chance = np.random.default_rng()
    for _ in range(_ROUNDS):
        weights = [chance.integers(_PRIME, size=len(known)) for known in places]
        found = _wrong_place(corners, weights)
        if found is not None:
            element = tuple(int(known[at]) for known, at in zip(places, found[0], strict=True))
            return f", but not element {element}", found[1].tolist()
    return None, ()


def _wrong_place(corners: np.ndarray, weights: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray] | None:
    """A position that not exactly one box covers, and the indexes of the boxes that do; None if the weights are right.

    If a sum of weights is wrong, it is also wrong at a position of the next axis, and so on to the last axis, where
    each box has weight one and the sum is the number of boxes.
    """
    inner, whole = [np.ones(len(corners), np.int64)], [1]  # weights on the following axes, of each box and of the rest
    for axis in range(len(weights) - 1, 0, -1):
        sums = weights[axis]
        inner.append(inner[-1] * (sums[corners[:, axis, 1]] - sums[corners[:, axis, 0]]) % _PRIME)
        whole.append(whole[-1] * int(sums[-1] - sums[0]) % _PRIME)
    place, numbers = list[int](), np.arange(len(corners))
    for axis, sums in enumerate(weights):
        weight, (starts, stops) = inner.pop()[numbers], corners[numbers, axis].T
        steps = np.zeros(len(sums), np.int64)
        np.add.at(steps, starts, weight)
        np.subtract.at(steps, stops, weight)
        wrong = np.flatnonzero((np.cumsum(steps[:-1]) - whole.pop()) % _PRIME)
        if not len(wrong):
            return None  # possible on the first axis only
        place.append(int(wrong[0]))
        numbers = numbers[(starts <= wrong[0]) & (wrong[0] < stops)]
    return place, numbers
