"""Mean and standard deviation of many values, as the sums of their squares would be lost: to cancellation, or range."""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np

TINY, HUGE = 2.0**-400, 2.0**400  # beyond them squares of values, or of what these differ by, may not be numbers
_FEW = 1 << 13


@dataclasses.dataclass(frozen=True)
class Moments:
    """What values come to that can be merged with others. None of it is larger than the largest value.

    Attributes:
        count: of the values.
        mean, rest: their sum is the mean, which one number may be too short for.
        deviation: the standard deviation, of these values and not of what they are a sample of.
    """

    count: int = 0
    mean: float = 0.0
    rest: float = 0.0
    deviation: float = 0.0

    def plus(self, other: Moments) -> Moments:
        """Of the values of both."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        mine, theirs = self.count / count, other.count / count
        scale = 1.0 if math.isfinite(other.mean - self.mean) else 0.5
        apart = (other.mean * scale - self.mean * scale) + (other.rest - self.rest) * scale
        step, rest = apart * theirs, self.rest * scale
        mean, error = _exact_sum(self.mean * scale, step)
        mean, rest = _exact_sum(mean, error + rest)
        squares = (math.sqrt(mine) * self.deviation, math.sqrt(theirs) * other.deviation)
        between = math.sqrt(mine * theirs) / scale * apart
        deviation = min(math.hypot(*squares, between), sys.float_info.max)  # which it was rounded up from
        return Moments(count, mean / scale, rest / scale, deviation)


NO_MOMENTS = Moments()


def moments_of(values: np.ndarray, largest: float) -> Moments:
    """Of a flat array of finite floats, few enough for a cache.

    Args:
        values: at least one.
        largest: the absolute value of the largest one.
    """
    wide, exponent = values.astype(np.float64, copy=False), 0
    if largest and not TINY < largest < HUGE:
        exponent = math.frexp(largest)[1]
        wide = np.ldexp(wide, -exponent)
    count, most = len(wide), math.ldexp(largest, -exponent)
    mean = max(-most, min(most, float(wide.sum()) / count))
    apart = np.subtract(wide, mean, out=None if wide is values else wide)
    rest = float(apart.sum()) / count
    deviation = min(most, math.sqrt(max(0.0, sum_of_squares(apart) / count - rest * rest)))
    return Moments(count, *(math.ldexp(each, exponent) for each in (mean, rest, deviation)))


def sum_of_squares(values: np.ndarray) -> float:
    """Of a flat array; by few at a time, as BLAS has threads for more, which wait for each other."""
    parts = (values[at : at + _FEW] for at in range(0, len(values), _FEW))
    return sum(float(np.dot(part, part)) for part in parts)


def _exact_sum(first: float, second: float) -> tuple[float, float]:
    """The sum as one number, and what it lacks."""
    total = first + second
    part = total - first
    return total, (first - (total - part)) + (second - part)
