"""Statistics of arrays in double precision, block by block: mean, deviation, norm and histogram."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

_FEW = 1 << 13
BINS = 20
BLOCK = 1 << 14  # values at a time; the allocator reuses temporary arrays of this size


@dataclasses.dataclass
class LeafStats:
    """Statistics of an array. All but the counts are about its finite values; complex values count by magnitude.

    `least`, `most`, `mean` and `deviation` are None if no value is finite.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    least: float | None = None
    most: float | None = None
    _mean: float = 0.0
    _squares: float = 0.0  # the sum of the squared distances from the mean

    @property
    def finite(self) -> int:
        """The number of finite values."""
        return self.count - self.nan - self.inf

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        return self._mean if self.finite else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the finite values as a population."""
        return math.sqrt(self._squares / self.finite) if self.finite else None

    @property
    def norm(self) -> float:
        """The root of the sum of squares of the finite values."""
        return math.sqrt(self._squares + self.finite * self._mean * self._mean)

    def add(self, piece: np.ndarray) -> None:
        """Add the values of a piece."""
        with np.errstate(all="ignore"):
            for values in _blocks(piece):
                self._add_block(values)

    def _add_block(self, values: np.ndarray) -> None:
        before = self.finite
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
        mean = float(values.mean(dtype=np.float64))
        apart, share = mean - self._mean, len(values) / self.finite
        self._mean += apart * share
        self._squares += sum_of_squares(np.subtract(values, mean, dtype=np.float64)) + apart * before * share * apart


def _blocks(piece: np.ndarray) -> Iterator[np.ndarray]:
    flat = np.ascontiguousarray(piece).reshape(-1)
    for at in range(0, len(flat), BLOCK):
        yield _as_numbers(flat[at : at + BLOCK])


def _as_numbers(piece: np.ndarray) -> np.ndarray:
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


def sum_of_squares(values: np.ndarray) -> float:
    """Return the sum of squares of a flat array, in parts too short for BLAS to start threads for them."""
    parts = (values[at : at + _FEW] for at in range(0, len(values), _FEW))
    return sum(float(np.dot(part, part)) for part in parts)


class Histogram:
    """Counts of values in bins of equal width, from `least` to `most`. One bin if the range cannot be divided."""

    def __init__(self, least: float, most: float) -> None:
        with np.errstate(all="ignore"):
            edges = np.linspace(least, most, BINS + 1)
        is_divided = np.isfinite(edges).all() and bool((np.diff(edges) > 0).all())
        self.edges = edges if is_divided else np.array([least, most])
        self.counts = np.zeros(len(self.edges) - 1, np.int64)

    def add(self, piece: np.ndarray) -> None:
        """Count the finite values of a piece."""
        for values in _blocks(piece):
            self.counts += np.histogram(values[np.isfinite(values)], self.edges)[0]
