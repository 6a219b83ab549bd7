"""Mean and standard deviation of many values, as the sums of their squares would be lost: to cancellation, or range."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np

TINY, HUGE = 2.0**-400, 2.0**400  # beyond them squares of values, or of what these differ by, may not be numbers
_FEW = 1 << 13
_LEAST = 1074  # every double is a multiple of 2 to the power of minus this
_ROWS = 64
_BITS = sys.float_info.mant_dig - 6  # of whole numbers so many rows of which are added without rounding


@dataclasses.dataclass(frozen=True)
class Moments:
    """What values come to that can be merged with others.

    Attributes:
        count: of the values.
        total: their sum in units of the least double. It is exact: whatever cancels, what is left is not lost.
        deviation: the standard deviation, of these values and not of what they are a sample of.
    """

    count: int = 0
    total: int = 0
    deviation: float = 0.0

    @property
    def mean(self) -> float:
        """Of at least one value; rounded once."""
        return self.total / (self.count << _LEAST)

    def plus(self, other: Moments) -> Moments:
        """Of the values of both."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        mine, theirs = self.count / count, other.count / count
        apart = other.total * self.count - self.total * other.count
        half_apart = apart / (self.count * other.count << (_LEAST + 1))  # all of it may be larger than any number
        squares = (math.sqrt(mine) * self.deviation, math.sqrt(theirs) * other.deviation)
        between = 2 * math.sqrt(mine * theirs) * half_apart
        deviation = min(math.hypot(*squares, between), sys.float_info.max)  # which it was rounded up from
        return Moments(count, self.total + other.total, deviation)


NO_MOMENTS = Moments()


def moments_of(values: np.ndarray, largest: float) -> Moments:
    """Of a flat array of finite floats, few enough for a cache.

    Args:
        values: at least one.
        largest: the absolute value of the largest one.
    """
    values, exponent = values.astype(np.float64, copy=False), 0
    count, total = len(values), _exact_sum(values, largest)
    if largest and not TINY < largest < HUGE:
        exponent = math.frexp(largest)[1]
        values = np.ldexp(values, -exponent)
    mean, rest = _quotient(total, count << (_LEAST + exponent))
    apart = np.subtract(values, mean)
    most = math.ldexp(largest, -exponent)
    deviation = min(most, math.sqrt(max(0.0, sum_of_squares(apart) / count - rest * rest)))
    return Moments(count, total, math.ldexp(deviation, exponent))


def _quotient(above: int, below: int) -> tuple[float, float]:
    """As one number, and what that lacks."""
    found = above / below
    numerator, denominator = found.as_integer_ratio()
    return found, (above * denominator - numerator * below) / (below * denominator)


def _exact_sum(values: np.ndarray, largest: float) -> int:
    """In units of the least double: the first bits of all values, as whole numbers, then the next ones of the rest."""
    total, exponent = 0, 0  # the values are multiplied by 2 to the power of this
    while largest:
        shift = min(_BITS - math.frexp(largest)[1], _LEAST - exponent)
        wide = np.ldexp(values, shift) if shift >= sys.float_info.max_exp else np.multiply(values, 2.0**shift)
        whole = np.trunc(wide)
        total += _sum_of_whole(whole) << (_LEAST - exponent - shift)
        if shift >= 0:
            values, exponent = np.subtract(wide, whole, out=wide), exponent + shift
        else:  # the product of the least values was rounded
            values = np.subtract(values, np.multiply(whole, 2.0**-shift, out=whole))
        largest = max(float(values.max()), -float(values.min()))
    return total


def _sum_of_whole(values: np.ndarray) -> int:
    even = len(values) // _ROWS * _ROWS
    columns = values[:even].reshape(_ROWS, -1).sum(axis=0)
    return int(columns.astype(np.int64).sum()) + int(values[even:].sum())


def sum_of_squares(values: np.ndarray) -> float:
    """Of a flat array; by few at a time, as BLAS has threads for more, which wait for each other."""
    parts = (values[at : at + _FEW] for at in range(0, len(values), _FEW))
    return sum(float(np.dot(part, part)) for part in parts)
