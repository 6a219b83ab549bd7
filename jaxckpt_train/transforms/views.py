"""Lazy arrays: views that transpose, cut, join, pad, reshape or convert other arrays when they are read.

A view lists its pieces, so that chunks which an operation leaves unchanged are copied as they are. It also checks that
values fit their new dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.boxes import (
    Box,
    box_elements,
    box_shape,
    cut_box,
    full_box,
    intersect,
    row_major_range,
    slices_within,
)
from jaxckpt_train.store.dtypes import is_inexact
from jaxckpt_train.store.manifest import ChunkRecord

PIECE_BYTES = 16 << 20
"""The limit of what a view computes at a time, in addition to its input."""


class Piece(NamedTuple):
    """A part of an array that is read at a time.

    Attributes:
        box: the box of the part.
        stored: the chunk with exactly the bytes of the part. None: the part must be computed.
    """

    box: Box
    stored: ChunkRecord | None = None


class View(Protocol):
    """An array that is computed when it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""

    def pieces(self) -> Sequence[Piece]:
        """Return boxes that tile the array, each of which is cheap to read alone."""

    def read(self, box: Box, target: np.ndarray) -> None:
        """Fill `target`, which has the shape of the box. Any thread may call it."""


def cut(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box along its first axes into bands of at most `PIECE_BYTES`."""
    return cut_box(box, itemsize, PIECE_BYTES)


def _computed(boxes: Iterator[Box]) -> list[Piece]:
    return [Piece(box) for box in boxes]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored array of the checkpoint. `read_box` reads a box of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: Sequence[ChunkRecord]
    read_box: Callable[[Box, np.ndarray], None]

    def pieces(self) -> Sequence[Piece]:
        """Return the chunks."""
        return [Piece(chunk.box, chunk) for chunk in self.chunks]

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        self.read_box(box, target)


class _SingleInput:
    """The base of views of one array. Their pieces are bands of its pieces, with the axes moved."""

    def __init__(self, inner: View, shape: Sequence[int], dtype: np.dtype | None = None) -> None:
        self._inner, self.shape = inner, tuple(shape)
        self.dtype = inner.dtype if dtype is None else dtype

    def _bands(self) -> Iterator[Box]:
        itemsize = max(self._inner.dtype.itemsize, self.dtype.itemsize)  # a cast may make the elements larger
        for piece in self._inner.pieces():
            yield from cut(piece.box, itemsize)

    def _read_inner(self, box: Box) -> np.ndarray:
        found = np.empty(box_shape(box), self._inner.dtype)
        self._inner.read(box, found)
        return found


class Transposed(_SingleInput):
    """An array with its axes in another order: axis `n` is axis `axes[n]` of the input."""

    def __init__(self, inner: View, axes: Sequence[int]) -> None:
        super().__init__(inner, [inner.shape[axis] for axis in axes])
        self._axes = tuple(axes)

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`."""
        return _computed(tuple(box[axis] for axis in self._axes) for box in self._bands())

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        inner = tuple(box[self._axes.index(axis)] for axis in range(len(self._axes)))
        target[...] = self._read_inner(inner).transpose(self._axes)


class Cast(_SingleInput):
    """An array in another dtype. `subject` is its name in messages."""

    def __init__(self, inner: View, dtype: np.dtype, subject: str) -> None:
        super().__init__(inner, inner.shape, dtype)
        self._subject = subject

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`."""
        return _computed(self._bands())

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        target[...] = convert_array(self._read_inner(box), self.dtype, self._subject, [start for start, _ in box])


class Sliced(_SingleInput):
    """A box of an array, without the axes in `dropped`, whose size in the box is 1."""

    def __init__(self, inner: View, box: Box, dropped: Sequence[int] = ()) -> None:
        self._box, self._dropped = box, frozenset(dropped)
        super().__init__(inner, box_shape(self._without(box)))

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`. A chunk inside the box stays a chunk."""
        found = []
        for piece in self._inner.pieces():
            common = intersect(piece.box, self._box)
            if common is None:
                continue
            if common == piece.box and piece.stored is not None:
                found.append(Piece(self._outer(common), piece.stored))
                continue
            found.extend(Piece(self._outer(band)) for band in cut(common, self.dtype.itemsize))
        return found

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        sides = iter(box)
        inner = tuple(
            side if axis in self._dropped else _shifted(next(sides), side[0]) for axis, side in enumerate(self._box)
        )
        self._inner.read(inner, target.reshape(box_shape(inner)))

    def _outer(self, box: Box) -> Box:
        return self._without(
            tuple((start - own, stop - own) for (start, stop), (own, _) in zip(box, self._box, strict=True))
        )

    def _without(self, box: Box) -> Box:
        return tuple(side for axis, side in enumerate(box) if axis not in self._dropped)


def _shifted(side: tuple[int, int], by: int) -> tuple[int, int]:
    return side[0] + by, side[1] + by


class Joined:
    """Arrays joined along an axis. With `new`, they are stacked along an axis that the inputs do not have."""

    def __init__(self, inner: Sequence[View], axis: int, *, new: bool) -> None:
        self._inner, self._axis, self._new = list(inner), axis, new
        widths = [1 if new else each.shape[axis] for each in inner]
        self._starts = [sum(widths[:number]) for number in range(len(widths))]
        self._widths = widths
        shape, self.dtype = list(inner[0].shape), inner[0].dtype
        if new:
            shape.insert(axis, len(inner))
        else:
            shape[axis] = sum(widths)
        self.shape = tuple(shape)

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`. All chunks stay chunks."""
        return [
            Piece(self._outer(piece.box, start), piece.stored)
            for each, start in zip(self._inner, self._starts, strict=True)
            for piece in each.pieces()
        ]

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        low, high = box[self._axis]
        for each, start, width in zip(self._inner, self._starts, self._widths, strict=True):
            first, last = max(low, start), min(high, start + width)
            if first >= last:
                continue
            place = [slice(None)] * len(box)
            place[self._axis] = slice(first - low, last - low)
            inner = list(box)
            if self._new:
                del inner[self._axis]
            else:
                inner[self._axis] = (first - start, last - start)
            part = target[tuple(place)]
            content = np.empty(box_shape(tuple(inner)), self.dtype)
            each.read(tuple(inner), content)
            part[...] = content.reshape(part.shape)

    def _outer(self, box: Box, start: int) -> Box:
        if self._new:
            return (*box[: self._axis], (start, start + 1), *box[self._axis :])
        return (*box[: self._axis], _shifted(box[self._axis], start), *box[self._axis + 1 :])


class Padded(_SingleInput):
    """An array that is enlarged at its ends with a value."""

    def __init__(self, inner: View, shape: Sequence[int], value: np.ndarray) -> None:
        super().__init__(inner, shape)
        self._value = value

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`."""
        return _computed(cut(full_box(self.shape), self.dtype.itemsize))

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        target[...] = self._value
        common = intersect(box, full_box(self._inner.shape))
        if common is not None:
            target[slices_within(common, box)] = self._read_inner(common)


class Reshaped(_SingleInput):
    """An array in another shape, with the same elements in row-major order."""

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`. A single chunk stays a chunk."""
        pieces = self._inner.pieces()
        if len(pieces) == 1 and pieces[0].stored is not None:
            return [Piece(full_box(self.shape), pieces[0].stored)]
        return _computed(cut(full_box(self.shape), self.dtype.itemsize))

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`. This reads whole rows of the first axes, and keeps the part inside the box."""
        for band in _row_bands(box, self.shape, self.dtype.itemsize):
            first = _flat(tuple(start for start, _ in band), self.shape)
            content, at = np.empty(box_elements(band), self.dtype), 0
            for part in row_major_range(full_box(self._inner.shape), first, first + len(content)):
                count = box_elements(part)
                self._inner.read(part, content[at : at + count].reshape(box_shape(part)))
                at += count
            common = intersect(band, box)
            assert common is not None
            target[slices_within(common, box)] = content.reshape(box_shape(band))[slices_within(common, band)]


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for place, size in zip(index, shape, strict=True):
        flat = flat * size + place
    return flat


def _row_bands(box: Box, shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Yield boxes that cover a box. The elements of each are consecutive in row-major order."""
    axis = 0
    while axis < len(box) and box[axis][1] - box[axis][0] == 1:
        axis += 1  # find the first axis on which the box is wider than 1
    tail = full_box(shape[axis + 1 :])
    if axis == len(box):
        yield box
        return
    (start, stop), lead = box[axis], box[:axis]
    rows = max(1, PIECE_BYTES // max(1, box_elements(tail) * itemsize))
    for at in range(start, stop, rows):
        yield (*lead, (at, min(at + rows, stop)), *tail)


class Constant:
    """A new array of a single value."""

    def __init__(self, shape: Sequence[int], value: np.ndarray) -> None:
        self.shape, self.dtype, self._value = tuple(shape), value.dtype, value

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`."""
        return _computed(cut(full_box(self.shape), self.dtype.itemsize)) if math.prod(self.shape) else []

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        target[...] = self._value


class Filled:
    """A new array. `make` computes all of it, once. `subject` is its name in messages."""

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype, make: Callable[[tuple[int, ...]], np.ndarray], subject: str
    ) -> None:
        self.shape, self.dtype, self._make, self._subject = tuple(shape), dtype, make, subject
        self._made: np.ndarray | None = None

    def pieces(self) -> Sequence[Piece]:
        """See `View.pieces`."""
        return _computed(cut(full_box(self.shape), self.dtype.itemsize)) if math.prod(self.shape) else []

    def read(self, box: Box, target: np.ndarray) -> None:
        """See `View.read`."""
        if self._made is None:
            found = np.asarray(self._make(self.shape))
            self._made = convert_array(found, self.dtype, self._subject, [0] * found.ndim)
        target[...] = self._made[slices_within(box, full_box(self.shape))]


def number_as(value: float, dtype: np.dtype) -> np.ndarray | None:
    """Return a number in a dtype, rounded if the dtype is a float, or None if it does not fit."""
    if not is_inexact(dtype):
        low, high = _range_of(dtype)
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:
            return None
        return np.asarray(int(value)).astype(dtype)
    try:
        wanted = float(value)
    except OverflowError:
        return None
    with np.errstate(all="ignore"):
        found = np.asarray(wanted).astype(dtype)
        near = complex(found.astype(np.complex128)).real
    if not math.isfinite(wanted):
        fits = math.isnan(near) if math.isnan(wanted) else near == wanted
    else:  # a dtype without infinity and nan converts a number that is too large to its largest one
        fits = math.isfinite(near) and (abs(wanted) < 1 or abs(wanted) <= 2 * abs(near))
    return found if fits else None


def convert_array(array: np.ndarray, dtype: np.dtype, subject: str, start: Sequence[int]) -> np.ndarray:
    """Convert an array to another dtype. Floats are rounded, and may become infinite.

    Args:
        array: the array, a box of a larger one.
        dtype: the new dtype.
        subject: the larger array, for messages.
        start: the position of the box in the larger array.

    Raises:
        MismatchError: an integer does not fit.
    """
    if not is_inexact(array.dtype) and array.dtype.kind not in "biu":
        array = array.astype(np.int8)  # ml_dtypes cannot compare its integers, or convert them into each other
    if array.size and not is_inexact(array.dtype) and not is_inexact(dtype):
        (low, high), (least, most) = _range_of(dtype), _range_of(array.dtype)
        if (low > least and array.min() < low) or (high < most and array.max() > high):
            wrong = (array < max(low, least)) | (array > min(high, most))
            place = [int(at) for at in np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
            where = [at + first for at, first in zip(place, start, strict=True)]
            raise MismatchError(
                f"{subject}: {int(array[tuple(place)])} at {where} does not fit {dtype.name}, which is limited to "
                f"{low} to {high}; convert to a wider dtype, or keep the dtype of this leaf"
            )
    with np.errstate(all="ignore"):
        try:
            return array.astype(dtype)
        except TypeError:
            # ml_dtypes lacks some pairs of small floats. Double precision represents all of them exactly.
            is_complex = "complex" in array.dtype.name or "complex" in dtype.name
            return array.astype(np.complex128 if is_complex else np.float64).astype(dtype)


def _range_of(dtype: np.dtype) -> tuple[int, int]:
    if dtype.name == "bool":
        return 0, 1
    found: Any = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return int(found.min), int(found.max)
