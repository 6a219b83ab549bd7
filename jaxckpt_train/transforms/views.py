"""Lazy arrays: views that transpose, cut, join, pad, reshape or convert other arrays when they are read.

A view lists its pieces, so that chunks which an operation leaves unchanged are copied as they are.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.formats.foreign import read_range
from jaxckpt_train.store.boxes import (
    Box,
    box_elements,
    box_shape,
    cut_box,
    element_span,
    full_box,
    intersect,
    slices_within,
)
from jaxckpt_train.store.manifest import ChunkRecord
from jaxckpt_train.store.segment import is_inexact

PIECE_BYTES = 16 << 20
"""The limit of what a view computes at a time, in addition to its input."""


class Piece(NamedTuple):
    """A part of an array that is read at a time, and the chunk with exactly its bytes, unless it must be computed."""

    box: Box
    stored: ChunkRecord | None = None


class View(abc.ABC):
    """An array that is computed when it is read."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    def pieces(self) -> Sequence[Piece]:
        """Return boxes that tile the array, each of which is cheap to read alone."""
        return [Piece(box) for box in _cut(full_box(self.shape), self.dtype)] if math.prod(self.shape) else []

    @abc.abstractmethod
    def read(self, box: Box, target: np.ndarray) -> None:
        """Fill `target`, which has the shape of the box. Any thread may call it."""


def _cut(box: Box, *dtypes: np.dtype) -> Iterator[Box]:
    """Cut a box along its first axes into bands of at most `PIECE_BYTES` in the widest of the dtypes."""
    return cut_box(box, max(dtype.itemsize for dtype in dtypes), PIECE_BYTES)


def _start(box: Box) -> list[int]:
    return [start for start, _ in box]


class Stored(View):
    """A stored array of the checkpoint. `read_box` reads a box of it."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype,
        chunks: Sequence[ChunkRecord],
        read_box: Callable[[Box, np.ndarray], None],
    ) -> None:
        super().__init__(shape, dtype)
        self.chunks, self._read_box = chunks, read_box

    def pieces(self) -> Sequence[Piece]:
        return [Piece(chunk.box, chunk) for chunk in self.chunks]

    def read(self, box: Box, target: np.ndarray) -> None:
        self._read_box(box, target)


class _OfOne(View):
    def __init__(self, inner: View, shape: Sequence[int], dtype: np.dtype | None = None) -> None:
        super().__init__(shape, inner.dtype if dtype is None else dtype)
        self._inner = inner

    def _bands(self) -> Iterator[Box]:
        for piece in self._inner.pieces():
            yield from _cut(piece.box, self._inner.dtype, self.dtype)


def _content(view: View, box: Box) -> np.ndarray:
    found = np.empty(box_shape(box), view.dtype)
    view.read(box, found)
    return found


class Transposed(_OfOne):
    """An array with its axes in another order: axis `n` is axis `axes[n]` of the input."""

    def __init__(self, inner: View, axes: Sequence[int]) -> None:
        super().__init__(inner, [inner.shape[axis] for axis in axes])
        self._axes = tuple(axes)

    def pieces(self) -> Sequence[Piece]:
        return [Piece(tuple(box[axis] for axis in self._axes)) for box in self._bands()]

    def read(self, box: Box, target: np.ndarray) -> None:
        inner = tuple(box[self._axes.index(axis)] for axis in range(len(self._axes)))
        target[...] = _content(self._inner, inner).transpose(self._axes)


class Cast(_OfOne):
    """An array in another dtype. `subject` is its name in messages."""

    def __init__(self, inner: View, dtype: np.dtype, subject: str) -> None:
        super().__init__(inner, inner.shape, dtype)
        self._subject = subject

    def pieces(self) -> Sequence[Piece]:
        return [Piece(box) for box in self._bands()]

    def read(self, box: Box, target: np.ndarray) -> None:
        target[...] = convert_array(_content(self._inner, box), self.dtype, self._subject, _start(box))


class Sliced(_OfOne):
    """A box of an array, without the axes in `dropped`, whose size in the box is 1."""

    def __init__(self, inner: View, box: Box, dropped: Sequence[int] = ()) -> None:
        self._box, self._dropped = box, frozenset(dropped)
        super().__init__(inner, box_shape(self._without(box)))

    def pieces(self) -> Sequence[Piece]:
        found = []
        for piece in self._inner.pieces():
            common = intersect(piece.box, self._box)
            if common is not None and common == piece.box and piece.stored is not None:
                found.append(Piece(self._outer(common), piece.stored))
            elif common is not None:
                found.extend(Piece(self._outer(band)) for band in _cut(common, self.dtype))
        return found

    def read(self, box: Box, target: np.ndarray) -> None:
        sides = iter(box)
        inner = tuple(
            side if axis in self._dropped else _shifted(next(sides), side[0]) for axis, side in enumerate(self._box)
        )
        self._inner.read(inner, target.reshape(box_shape(inner)))

    def _outer(self, box: Box) -> Box:
        return self._without(tuple(_shifted(side, -own) for side, (own, _) in zip(box, self._box, strict=True)))

    def _without(self, box: Box) -> Box:
        return tuple(side for axis, side in enumerate(box) if axis not in self._dropped)


def _shifted(side: tuple[int, int], by: int) -> tuple[int, int]:
    return side[0] + by, side[1] + by


class Joined(View):
    """Arrays joined along an axis. With `new`, they are stacked along an axis that the inputs do not have."""

    def __init__(self, inner: Sequence[View], axis: int, *, new: bool) -> None:
        self._inner, self._axis, self._new = list(inner), axis, new
        self._widths = [1 if new else each.shape[axis] for each in inner]
        self._starts = [sum(self._widths[:number]) for number in range(len(inner))]
        shape = inner[0].shape
        super().__init__((*shape[:axis], sum(self._widths), *shape[axis + (not new) :]), inner[0].dtype)

    def pieces(self) -> Sequence[Piece]:
        return [
            Piece(self._outer(piece.box, start), piece.stored)
            for each, start in zip(self._inner, self._starts, strict=True)
            for piece in each.pieces()
        ]

    def read(self, box: Box, target: np.ndarray) -> None:
        low, high = box[self._axis]
        for each, start, width in zip(self._inner, self._starts, self._widths, strict=True):
            first, last = max(low, start), min(high, start + width)
            if first >= last:
                continue
            part = target[(*[slice(None)] * self._axis, slice(first - low, last - low))]
            own = () if self._new else ((first - start, last - start),)
            content = _content(each, (*box[: self._axis], *own, *box[self._axis + 1 :]))
            part[...] = content.reshape(part.shape)

    def _outer(self, box: Box, start: int) -> Box:
        if self._new:
            return (*box[: self._axis], (start, start + 1), *box[self._axis :])
        return (*box[: self._axis], _shifted(box[self._axis], start), *box[self._axis + 1 :])


class Padded(_OfOne):
    """An array that is enlarged at its ends with a value."""

    def __init__(self, inner: View, shape: Sequence[int], value: np.ndarray) -> None:
        super().__init__(inner, shape)
        self._value = value

    def read(self, box: Box, target: np.ndarray) -> None:
        target[...] = self._value
        common = intersect(box, full_box(self._inner.shape))
        if common is not None:
            target[slices_within(common, box)] = _content(self._inner, common)


class Reshaped(_OfOne):
    """An array in another shape, with the same elements in row-major order."""

    def pieces(self) -> Sequence[Piece]:
        pieces = self._inner.pieces()
        if len(pieces) == 1 and pieces[0].stored is not None:
            return [Piece(full_box(self.shape), pieces[0].stored)]
        return super().pieces()

    def read(self, box: Box, target: np.ndarray) -> None:
        """Read whole rows of the first axes, and keep the part inside the box."""
        for band in _row_bands(box, self.shape, self.dtype.itemsize):
            content = np.empty(box_elements(band), self.dtype)
            first, _ = element_span(band, full_box(self.shape))
            read_range(self._inner.read, full_box(self._inner.shape), first, content)
            common = intersect(band, box)
            assert common is not None
            target[slices_within(common, box)] = content.reshape(box_shape(band))[slices_within(common, band)]


def _row_bands(box: Box, shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Yield boxes that cover a box. The elements of each are consecutive in row-major order."""
    axis = next((axis for axis, (start, stop) in enumerate(box) if stop - start > 1), None)
    if axis is None:
        yield box
        return
    (start, stop), tail = box[axis], full_box(shape[axis + 1 :])
    rows = max(1, PIECE_BYTES // max(1, box_elements(tail) * itemsize))
    for at in range(start, stop, rows):
        yield (*box[:axis], (at, min(at + rows, stop)), *tail)


class Constant(View):
    """A new array of a single value."""

    def __init__(self, shape: Sequence[int], value: np.ndarray) -> None:
        super().__init__(shape, value.dtype)
        self._value = value

    def read(self, box: Box, target: np.ndarray) -> None:
        target[...] = self._value


def number_as(value: float, dtype: np.dtype) -> np.ndarray | None:
    """Return a number in a dtype, rounded if the dtype is a float, or None if it does not fit."""
    if not is_inexact(dtype):
        low, high = _range_of(dtype)
        fits = low <= value <= high and value == int(value)
        return np.asarray(int(value)).astype(dtype) if fits else None
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
    """Convert the box at `start` of an array. Floats are rounded; an integer that does not fit is a MismatchError."""
    if not is_inexact(array.dtype) and array.dtype.kind not in "biu":
        array = array.astype(np.int8)  # ml_dtypes cannot compare its integers, or convert them into each other
    if array.size and not is_inexact(array.dtype) and not is_inexact(dtype):
        (low, high), (least, most) = _range_of(dtype), _range_of(array.dtype)
        if (low > least and array.min() < low) or (high < most and array.max() > high):
            wrong = (array < max(low, least)) | (array > min(high, most))
            place = [int(at) for at in np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
            where = [at + first for at, first in zip(place, start, strict=True)]
            raise MismatchError(
                f"{subject}: {int(array[tuple(place)])} at {where} does not fit {dtype.name} ({low} to {high})"
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
