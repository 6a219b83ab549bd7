"""Whether memory stays where it should: the limits of a save and of a load, and whether many saves leave anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.cost_fit import Line, fit_line

MIB = 1 << 20
ALLOWANCE_BYTES = 32 * MIB
COUNTED_FRACTION = 0.8
LEAK_BYTES_PER_SAVE = 16 * 1024
LEAK_ERRORS = 3.0


@dataclasses.dataclass(frozen=True)
class Series:
    """The memory after each of many saves.

    Attributes:
        line: bytes against the number of the save, over the last four fifths of the saves.
        first_bytes, last_bytes: of these.
        steady_slope: bytes for each save, the smaller of those of the two halves of these. An allocator that takes
            another megabyte once makes a slope in one half only; a leak makes it in both.
    """

    line: Line
    first_bytes: int
    last_bytes: int
    steady_slope: float

    @classmethod
    def of(cls, after_each: Sequence[int]) -> Series:
        """From the bytes after each of at least 5 saves; what the first fifth took is warming up."""
        counted = after_each[len(after_each) - round(COUNTED_FRACTION * len(after_each)) :]
        half = len(counted) // 2
        slopes = [fit_line(range(len(part)), part).slope for part in (counted[:half], counted[half:])]
        return cls(fit_line(range(len(counted)), counted), counted[0], counted[-1], min(slopes))

    @property
    def leaks(self) -> bool:
        """Whether memory grows steadily with the number of saves: by more than 16 KiB and three standard errors."""
        beyond_noise = self.line.slope > LEAK_ERRORS * self.line.slope_error
        return beyond_noise and self.steady_slope > LEAK_BYTES_PER_SAVE


def within(extra_bytes: int, budget_bytes: int) -> bool:
    """Whether memory beyond what was there stays below a budget and what small things may take."""
    return extra_bytes <= budget_bytes + ALLOWANCE_BYTES
