"""How far the values of two arrays are apart, in double precision, with no copy that is larger than a cache."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxckpt_train.looking.moments import HUGE, TINY, sum_of_squares

BLOCK = 1 << 16  # values at a time


class Distance(NamedTuple):
    """What adds up over the pieces of an array.

    Attributes:
        differing: how many values differ bit by bit.
        max_abs: the largest difference; nan: one value is nan where the other is not.
        difference, norm: of the finite differences, and of the finite values of the first array: the square root of the
            sum of their squares.
    """

    differing: int = 0
    max_abs: float = 0.0
    difference: float = 0.0
    norm: float = 0.0

    def plus(self, other: Distance) -> Distance:
        """Of both pieces together."""
        largest = (
            math.nan if math.isnan(other.max_abs) else max(self.max_abs, other.max_abs)
        )  # nan stays, if it is first
        difference, norm = math.hypot(self.difference, other.difference), math.hypot(self.norm, other.norm)
        return Distance(self.differing + other.differing, largest, difference, norm)


def distance(first: np.ndarray, second: np.ndarray) -> Distance:
    """How far two arrays of one shape and dtype are apart.

    What has the same bits is equal, and so are nan of other bits; 0 and -0 differ, by 0. Of complex numbers the size of
    the difference counts. Integers of 64 bits are rounded for the norm only.
    """
    one, other = (np.ascontiguousarray(each).reshape(-1) for each in (first, second))
    room = _Room(one.dtype, min(BLOCK, one.size))
    found = Distance()
    with np.errstate(all="ignore"):
        for at in range(0, len(one), BLOCK):
            found = found.plus(_of_a_block(one[at : at + BLOCK], other[at : at + BLOCK], room))
    return found


class _Room:
    """Memory for the values of a block of both arrays in double precision: new memory each time takes as long again."""

    def __init__(self, dtype: np.dtype, count: int) -> None:
        is_complex = dtype.kind == "c" or "complex" in dtype.name
        self._memory = np.empty((2, count), np.complex128 if is_complex else np.float64)

    def in_double(self, place: int, values: np.ndarray) -> np.ndarray:
        """The values, in the memory of this place."""
        found = self._memory[place, : len(values)]
        np.copyto(found, values, casting="unsafe")
        return found


def _of_a_block(one: np.ndarray, other: np.ndarray, room: _Room) -> Distance:
    values = room.in_double(0, one)
    norm = _norm(values)
    is_other = _are_other_bits(one, other)
    differing = int(np.count_nonzero(is_other))
    if not differing:
        return Distance(norm=norm)
    apart = _apart(one, other, values, room)
    largest = float(apart.max())
    if not math.isfinite(largest):
        apart[~is_other] = 0.0  # infinities
        apart[np.isnan(values) & np.isnan(other.astype(values.dtype))] = 0.0
        largest = float(apart.max())
    return Distance(differing, largest, _norm(apart), norm)


def _are_other_bits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    size = one.dtype.itemsize
    bits = f"u{min(size, 8)}"
    found = np.asarray(one.view(bits) != other.view(bits), np.bool_)
    return found if size <= 8 else np.asarray(found.reshape(len(one), -1).any(axis=1))


def _apart(one: np.ndarray, other: np.ndarray, values: np.ndarray, room: _Room) -> np.ndarray:
    found: np.ndarray
    if one.dtype.kind in "iu" and one.dtype.itemsize == 8:
        up, down = other.view("u8") - one.view("u8"), one.view("u8") - other.view("u8")
        found = np.where(one > other, down, up).astype(np.float64)
    elif values.dtype == np.complex128:
        found = np.abs(values - room.in_double(1, other))
    else:
        found = room.in_double(1, other)
        np.subtract(values, found, out=found)
        np.abs(found, out=found)
    return found


def _norm(values: np.ndarray) -> float:
    """Of the finite ones, of any size."""
    squares = sum_of_squares(values.view(np.float64))
    if TINY * TINY < squares < HUGE * HUGE:
        return math.sqrt(squares)
    finite = values[np.isfinite(values)].view(np.float64)
    largest = float(np.abs(finite).max()) if len(finite) else 0.0
    if largest == 0.0:
        return 0.0
    exponent = math.frexp(largest)[1]
    return float(np.ldexp(math.sqrt(sum_of_squares(np.ldexp(finite, -exponent))), exponent))
