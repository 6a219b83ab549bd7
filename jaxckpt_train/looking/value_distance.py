"""How far the values of two arrays are apart, in double precision, with no copy that is larger than a cache."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

BLOCK = 1 << 14  # values at a time


class Distance(NamedTuple):
    """What adds up over the pieces of an array.

    Attributes:
        differing: how many values differ bit by bit.
        max_abs: the largest difference; nan: one value is nan where the other is not.
        difference, norm: sums of the squares of the finite differences, and of the finite values of the first array.
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
        return Distance(
            self.differing + other.differing, largest, self.difference + other.difference, self.norm + other.norm
        )


def distance(first: np.ndarray, second: np.ndarray) -> Distance:
    """How far two arrays of one shape and dtype are apart.

    What has the same bits is equal, and so are nan of other bits; 0 and -0 differ, by 0. Of complex numbers the size of
    the difference counts. Integers of 64 bits are rounded for the norm only.
    """
    one, other = (np.ascontiguousarray(each).reshape(-1) for each in (first, second))
    found = Distance()
    with np.errstate(all="ignore"):
        for at in range(0, len(one), BLOCK):
            found = found.plus(_of_a_block(one[at : at + BLOCK], other[at : at + BLOCK]))
    return found


def _of_a_block(one: np.ndarray, other: np.ndarray) -> Distance:
    values = _in_double(one)
    norm = _finite_squares(values)
    is_other = (_bits(one) != _bits(other)).reshape(len(one), -1).any(axis=1)
    differing = int(np.count_nonzero(is_other))
    if not differing:
        return Distance(norm=norm)
    apart = _apart(one, other, values)
    if not np.isfinite(apart).all():
        apart[~is_other] = 0.0  # infinities
        apart[np.isnan(values) & np.isnan(_in_double(other))] = 0.0
    return Distance(differing, float(apart.max()), _finite_squares(apart), norm)


def _bits(values: np.ndarray) -> np.ndarray:
    size = values.dtype.itemsize
    return values.view(f"u{min(size, 8)}")


def _in_double(values: np.ndarray) -> np.ndarray:
    is_complex = values.dtype.kind == "c" or "complex" in values.dtype.name
    return values.astype(np.complex128 if is_complex else np.float64)


def _apart(one: np.ndarray, other: np.ndarray, values: np.ndarray) -> np.ndarray:
    if one.dtype.kind in "iu" and one.dtype.itemsize == 8:
        up, down = other.view("u8") - one.view("u8"), one.view("u8") - other.view("u8")
        apart: np.ndarray = np.where(one > other, down, up).astype(np.float64)
    else:
        apart = np.abs(values - _in_double(other))
    return apart


def _finite_squares(values: np.ndarray) -> float:
    found = float(np.vdot(values, values).real)
    if math.isfinite(found):
        return found
    finite = values[np.isfinite(values)]
    return float(np.vdot(finite, finite).real)
