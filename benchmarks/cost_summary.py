"""What a phase costs: a fixed part, a part for each leaf, chunk or byte, and how it grows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.cost_fit import fit_line, growth_exponent

LINEAR_EXPONENT = 1.15
NOTICEABLE_S = 0.02


@dataclasses.dataclass(frozen=True)
class Cost:
    """One phase, or one kind of bytes, over several sizes.

    Attributes:
        sizes: leaves, chunks or bytes, ascending.
        values: the median at each size, in seconds or bytes.
        fixed, each: of the line fixed + each * size that fits best by relative error.
        exponent: the p of value ~ size**p between the two largest sizes.
        linear: the exponent is about 1, or less. None: too short to tell.
    """

    sizes: list[int]
    values: list[float]
    fixed: float
    each: float
    exponent: float
    linear: bool | None

    @classmethod
    def of(cls, sizes: Sequence[int], values: Sequence[float], noticeable: float) -> Cost:
        """From the value at each of at least two ascending sizes; below `noticeable` growth is noise."""
        line = fit_line(sizes, values, relative=True)
        exponent = growth_exponent(sizes, values)
        linear = None if values[-1] < noticeable else exponent <= LINEAR_EXPONENT
        return cls(list(sizes), list(values), line.intercept, line.slope, exponent, linear)


def costs(answers: Mapping[int, Mapping[str, Mapping[str, float | list[float]]]]) -> dict[str, dict[str, Cost]]:
    """From the answers for each size to the costs by kind (`seconds`, `bytes`) and name."""
    sizes = sorted(answers)
    found: dict[str, dict[str, Cost]] = {}
    for kind, noticeable in (("seconds", NOTICEABLE_S), ("bytes", 1.0)):
        names = list(answers[sizes[-1]][kind])
        rows = {name: [_middle(answers[size][kind][name]) for size in sizes] for name in names}
        found[kind] = {name: Cost.of(sizes, row, noticeable) for name, row in rows.items() if min(row) > 0}
    return found


def _middle(value: float | list[float]) -> float:
    return statistics.median(value) if isinstance(value, list) else value
