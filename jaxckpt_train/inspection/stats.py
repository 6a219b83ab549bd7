"""Statistics of arrays in double precision, block by block: mean, deviation, norm and histogram.

They are accurate for values of any magnitude, where plain sums of squares lose digits or overflow.
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
        total: the exact sum, in units of the smallest double. Cancellation loses nothing.
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


@dataclasses.dataclass
class LeafStats:
    """Statistics of an array. All but the counts are about its finite values; complex values count by magnitude.

    `least` and `most` are None if no value is finite, and so are the mean and the deviation.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    least: float | None = None
    most: float | None = None
    moments: Moments = Moments()

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

    def add(self, piece: np.ndarray) -> None:
        """Add the values of a piece."""
        flat = np.ascontiguousarray(piece).reshape(-1)
        with np.errstate(all="ignore"):
            for at in range(0, len(flat), BLOCK):
                self._add_block(as_numbers(flat[at : at + BLOCK]))

    def _add_block(self, values: np.ndarray) -> None:
        self.count += len(values)
        least, most = float(values.min()), float(values.max())
        if not (math.isfinite(least) and math.isfinite(most)):  # a nan makes both of them nan
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.inf += int(np.count_nonzero(np.isinf(values)))
            values = values[np.isfinite(values)]
            if not len(values):
                return
            least, most = float(values.min()), float(values.max())
        self.least = least if self.least is None else min(least, self.least)
        self.most = most if self.most is None else max(most, self.most)
        if least <= 0 <= most:
            self.zeros += int(np.count_nonzero(values == 0))  # faster than counting non-zero floats
        self.moments = self.moments.plus(_moments_of(values, max(abs(least), abs(most))))


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


def _moments_of(values: np.ndarray, largest: float) -> Moments:
    """Return the moments of finite floats, of which there is at least one. `largest`: the largest absolute value."""
    values, exponent = values.astype(np.float64, copy=False), 0
    count, total = len(values), _exact_sum(values, largest)
    if largest and not TINY < largest < HUGE:
        exponent = math.frexp(largest)[1]
        values = np.ldexp(values, -exponent)
    below = count << (_LEAST + exponent)
    mean = total / below
    numerator, denominator = mean.as_integer_ratio()
    rest = (total * denominator - numerator * below) / (below * denominator)  # what the rounding of the mean lost
    apart = np.subtract(values, mean)
    most = math.ldexp(largest, -exponent)
    deviation = min(most, math.sqrt(max(0.0, sum_of_squares(apart) / count - rest * rest)))
    return Moments(count, total, math.ldexp(deviation, exponent))


def _exact_sum(values: np.ndarray, largest: float) -> int:
    """Return the sum in units of the smallest double: of the leading bits as integers, then of the rest."""
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
    """Return the sum of squares of a flat array, in parts too short for BLAS to start threads for them."""
    parts = (values[at : at + _FEW] for at in range(0, len(values), _FEW))
    return sum(float(np.dot(part, part)) for part in parts)


class Histogram:
    """Counts of values in `bins` bins of equal width, from `least` to `most`."""

    def __init__(self, least: float, most: float, bins: int = BINS) -> None:
        if most == least:
            self.edges = np.array([least, least])
        elif math.isfinite(most - least):
            self.edges = np.linspace(least, most, bins + 1)
        else:
            self.edges = np.linspace(least / 2, most / 2, bins + 1) * 2
        self.counts = np.zeros(len(self.edges) - 1, np.int64)

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
