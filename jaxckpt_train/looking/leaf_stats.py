"""Statistics of an array, from its pieces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

BINS = 20


@dataclasses.dataclass
class LeafStats:
    """What the values of an array are; of finite values but for the counts. Complex ones count by their size.

    Attributes:
        count: of all values.
        nan, inf, zeros: of these.
        least, most: None: no value is finite.
        total, squares: sums of the values and of their squares.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    least: float | None = None
    most: float | None = None
    total: float = 0.0
    squares: float = 0.0

    @property
    def finite(self) -> int:
        """How many are finite."""
        return self.count - self.nan - self.inf

    @property
    def mean(self) -> float | None:
        """Of the finite values."""
        return self.total / self.finite if self.finite else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the finite values."""
        if not self.finite:
            return None
        return math.sqrt(max(0.0, self.squares / self.finite - (self.total / self.finite) ** 2))

    @property
    def norm(self) -> float:
        """The square root of the sum of the squares of the finite values."""
        return math.sqrt(self.squares)

    def merge(self, other: LeafStats) -> None:
        """Count what has been counted of other pieces, too."""
        for name in ("count", "nan", "inf", "zeros", "total", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.least = min((each for each in (self.least, other.least) if each is not None), default=None)
        self.most = max((each for each in (self.most, other.most) if each is not None), default=None)

    def add(self, piece: np.ndarray) -> None:
        """Count the values of a piece."""
        values = as_numbers(piece)
        self.count += values.size
        is_nan, is_inf = np.isnan(values), np.isinf(values)
        nan, inf = int(np.count_nonzero(is_nan)), int(np.count_nonzero(is_inf))
        self.nan, self.inf = self.nan + nan, self.inf + inf
        if nan or inf:
            values = values[~(is_nan | is_inf)]
        if not values.size:
            return
        self.zeros += values.size - int(np.count_nonzero(values))
        least, most = float(values.min()), float(values.max())
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)
        with np.errstate(over="ignore"):
            self.total += float(values.sum(dtype=np.float64))
            flat = values.reshape(-1)
            self.squares += float(np.dot(flat, flat)) if flat.dtype == np.float64 else _squares(flat)


def _squares(values: np.ndarray, width: int = 1 << 20) -> float:
    """In double precision, without a copy of all of it."""
    total = 0.0
    for at in range(0, len(values), width):
        part = values[at : at + width].astype(np.float64)
        total += float(np.dot(part, part))
    return total


def as_numbers(piece: np.ndarray) -> np.ndarray:
    """The values as float32 or float64, which numpy calculates with; integers of 64 bits may be rounded."""
    if piece.dtype.kind == "c" or "complex" in piece.dtype.name:
        return np.abs(piece.astype(np.complex128))
    if piece.dtype in (np.float32, np.float64):
        return piece
    return piece.astype(np.float64 if piece.dtype.itemsize > 2 and piece.dtype.kind in "iu" else np.float32)


class Histogram:
    """Counts of values in bins of one width.

    Args:
        least, most: the ends of the first and of the last bin.
        bins: how many.
    """

    def __init__(self, least: float, most: float, bins: int = BINS) -> None:
        self.edges = np.linspace(least, most, bins + 1) if most > least else np.array([least, least])
        self.counts = np.zeros(max(1, len(self.edges) - 1), np.int64)

    def counts_of(self, piece: np.ndarray) -> np.ndarray:
        """The counts of a piece alone; what is not finite is left out."""
        values = as_numbers(piece).reshape(-1)
        values = values[np.isfinite(values)]
        if len(self.edges) == 2 and self.edges[0] == self.edges[1]:
            return np.array([len(values)], np.int64)
        return np.histogram(values, self.edges)[0]


def stats_of(pieces: Iterable[np.ndarray]) -> LeafStats:
    """The statistics of an array of these pieces."""
    found = LeafStats()
    for piece in pieces:
        found.add(piece)
    return found
