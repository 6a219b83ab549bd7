"""Spread: what several measurements of the same thing come to."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Spread:
    """The middle and the ends of some values."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        """The median, and the range in brackets."""
        return f"{self.median:.2f} ({self.minimum:.2f} .. {self.maximum:.2f})"
