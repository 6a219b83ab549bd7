"""Statistics of arrays: mean, deviation, norm and histogram, computed in double precision from pieces.

The results are accurate for values of any magnitude, where plain sums of squares would lose digits to cancellation, or
overflow. Arrays are processed in blocks that fit into a cache.
"""

from __future__ import annotations

import dataclasses
import math
import sys

import numpy as np

TINY, HUGE = 2.0**-400, 2.0**400  # beyond these limits, squares of values or differences may underflow or overflow
_FEW = 1 << 13
_LEAST = 1074  # every double is a multiple of 2**-1074
_ROWS = 64
_BITS = sys.float_info.mant_dig - 6  # 64 rows of whole numbers with these bits add up without rounding
BINS = 20
BLOCK = 1 << 14  # values at a time; the allocator reuses temporary arrays of this size


@dataclasses.dataclass(frozen=True)
class Moments:
    """The count, sum and deviation of values, which can be merged with those of other values.

    Attributes:
        count: the number of values.
        total: their exact sum, in units of the smallest double. Cancellation loses nothing.
        deviation: the standard deviation of the population, not that of a sample.
    """

    count: int = 0
    total: int = 0
    deviation: float = 0.0

    @property
    def mean(self) -> float:
        """The mean of at least one value, rounded once."""
        return self.total / (self.count << _LEAST)

    def plus(self, other: Moments) -> Moments:
        """Return the moments of the values of both."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        mine, theirs = self.count / count, other.count / count
        apart = other.total * self.count - self.total * other.count
        half_apart = apart / (self.count * other.count << (_LEAST + 1))  # the whole difference could overflow
        squares = (math.sqrt(mine) * self.deviation, math.sqrt(theirs) * other.deviation)
        between = 2 * math.sqrt(mine * theirs) * half_apart
        deviation = min(math.hypot(*squares, between), sys.float_info.max)  # rounding may have exceeded the maximum
        return Moments(count, self.total + other.total, deviation)


NO_MOMENTS = Moments()


@dataclasses.dataclass
class LeafStats:
    """Statistics of an array. All but the counts are about its finite values; complex values count by magnitude.

    Attributes:
        count: the number of values.
        nan, inf, zeros: the numbers of such values.
        least, most: the smallest and largest value. None: no value is finite.
        moments: the mean and the deviation.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    least: float | None = None
    most: float | None = None
    moments: Moments = NO_MOMENTS

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        return self.moments.mean if self.moments.count else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the finite values."""
        return self.moments.deviation if self.moments.count else None

    @property
    def norm(self) -> float:
        """The root of the sum of squares of the finite values. inf: it exceeds the largest double."""
        if not self.moments.count:
            return 0.0
        return math.hypot(self.moments.mean, self.moments.deviation) * math.sqrt(self.moments.count)

    def merge(self, other: LeafStats) -> None:
        """Add the statistics of other values."""
        for name in ("count", "nan", "inf", "zeros"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.moments = self.moments.plus(other.moments)
        self.least = min((each for each in (self.least, other.least) if each is not None), default=None)
        self.most = max((each for each in (self.most, other.most) if each is not None), default=None)

    def add(self, piece: np.ndarray) -> None:
        """Add the values of a piece."""
        flat = np.ascontiguousarray(piece).reshape(-1)
        with np.errstate(all="ignore"):
            for at in range(0, len(flat), BLOCK):
                self.merge(_block_stats(as_numbers(flat[at : at + BLOCK])))


def _block_stats(values: np.ndarray) -> LeafStats:
    found = LeafStats(count=len(values))
    least, most = float(values.min()), float(values.max())
    if not (math.isfinite(least) and math.isfinite(most)):  # a nan makes both of them nan
        found.nan = int(np.count_nonzero(np.isnan(values)))
        found.inf = int(np.count_nonzero(np.isinf(values)))
        values = values[np.isfinite(values)]
        if not len(values):
            return found
        least, most = float(values.min()), float(values.max())
    found.least, found.most = least, most
    if least <= 0 <= most:
        found.zeros = int(np.count_nonzero(values == 0))  # faster than counting non-zero floats
    found.moments = moments_of(values, max(abs(least), abs(most)))
    return found


def as_numbers(piece: np.ndarray) -> np.ndarray:
    """Return the values as float32 or float64, in which numpy can compute. 64-bit integers may be rounded."""
    if has_complex(piece.dtype):
        with np.errstate(over="ignore"):
            return np.abs(piece.astype(np.complex128))
    if piece.dtype in (np.float32, np.float64):
        return piece
    return piece.astype(np.float64 if piece.dtype.itemsize > 2 and piece.dtype.kind in "iu" else np.float32)


def has_complex(dtype: np.dtype) -> bool:
    """Return whether values are complex, also for dtypes that numpy does not define."""
    return dtype.kind == "c" or "complex" in dtype.name


def moments_of(values: np.ndarray, largest: float) -> Moments:
    """Return the moments of a flat array of finite floats, which should fit into a cache.

    Args:
        values: at least one value.
        largest: the largest absolute value.
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
    """Return a quotient as a double, and the remainder of its rounding."""
    found = above / below
    numerator, denominator = found.as_integer_ratio()
    return found, (above * denominator - numerator * below) / (below * denominator)


def _exact_sum(values: np.ndarray, largest: float) -> int:
    """Return a sum in units of the smallest double:

    the leading bits of all values as integers, then those of the rest.
    """
    total, exponent = 0, 0  # the values are scaled by 2**exponent
    while largest:
        shift = min(_BITS - math.frexp(largest)[1], _LEAST - exponent)
        wide = np.ldexp(values, shift) if shift >= sys.float_info.max_exp else np.multiply(values, 2.0**shift)
        whole = np.trunc(wide)
        total += _sum_of_whole(whole) << (_LEAST - exponent - shift)
        if shift >= 0:
            values, exponent = np.subtract(wide, whole, out=wide), exponent + shift
        else:  # the product of the smallest values was rounded
            values = np.subtract(values, np.multiply(whole, 2.0**-shift, out=whole))
        largest = max(float(values.max()), -float(values.min()))
    return total


def _sum_of_whole(values: np.ndarray) -> int:
    even = len(values) // _ROWS * _ROWS
    columns = values[:even].reshape(_ROWS, -1).sum(axis=0)
    return int(columns.astype(np.int64).sum()) + int(values[even:].sum())


def sum_of_squares(values: np.ndarray) -> float:
    """Return the sum of squares of a flat array.

    Short parts keep BLAS from starting threads that wait for each other.
    """
    parts = (values[at : at + _FEW] for at in range(0, len(values), _FEW))
    return sum(float(np.dot(part, part)) for part in parts)


class Histogram:
    """Counts of values in bins of equal width.

    Args:
        least, most: the lower end of the first bin, and the upper end of the last one.
        bins: the number of bins.
    """

    def __init__(self, least: float, most: float, bins: int = BINS) -> None:
        self.edges = _edges(least, most, bins) if most > least else np.array([least, least])
        self.counts = np.zeros(max(1, len(self.edges) - 1), np.int64)

    def add(self, piece: np.ndarray) -> None:
        """Count the finite values of a piece."""
        flat = np.ascontiguousarray(piece).reshape(-1)
        for at in range(0, len(flat), BLOCK):
            values = as_numbers(flat[at : at + BLOCK])
            is_finite = np.isfinite(values)
            self.counts += self._count(values if is_finite.all() else values[is_finite])

    def _count(self, values: np.ndarray) -> np.ndarray | int:
        least, most, bins = float(self.edges[0]), float(self.edges[-1]), len(self.counts)
        if least == most:
            return len(values)
        if not TINY < most - least < HUGE:
            return np.histogram(values, self.edges)[0]
        place = np.multiply(np.subtract(values, least, dtype=np.float64), bins / (most - least)).astype(np.int32)
        np.minimum(place, bins - 1, out=place)
        # Rounding may have put a value next to an edge into the wrong bin.
        np.subtract(place, values < self.edges.take(place), out=place, casting="unsafe")
        np.add(place, (values >= self.edges.take(place + 1)) & (place < bins - 1), out=place, casting="unsafe")
        return np.bincount(place, minlength=bins)


def _edges(least: float, most: float, bins: int) -> np.ndarray:
    if math.isfinite(most - least):
        return np.linspace(least, most, bins + 1)
    return np.linspace(least / 2, most / 2, bins + 1) * 2  # the total width would overflow
