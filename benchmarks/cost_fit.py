"""The arithmetic of the figures: straight lines through points, growth exponents, quantiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Line:
    """y = intercept + slope * x, and the standard error of the slope (0.0 where two points leave none)."""

    intercept: float
    slope: float
    slope_error: float


def fit_line(xs: Sequence[float], ys: Sequence[float], *, relative: bool = False) -> Line:
    """The line of least squares.

    Args:
        xs: at least two different values.
        ys: as many values; positive if `relative`.
        relative: every point counts by its relative error. For points over several powers of ten: else the largest
            alone decides, and the intercept is left to chance.

    Raises:
        ValueError: fewer than two different `xs`.
    """
    if len(set(xs)) < 2:
        raise ValueError(f"a line needs two different x, found {sorted(set(xs))}")
    weights = [1 / y**2 if relative else 1.0 for y in ys]
    total = math.fsum(weights)
    points = list(zip(weights, xs, ys, strict=True))
    mean_x = math.fsum(w * x for w, x, _ in points) / total
    mean_y = math.fsum(w * y for w, _, y in points) / total
    spread_x = math.fsum(w * (x - mean_x) ** 2 for w, x, _ in points)
    slope = math.fsum(w * (x - mean_x) * (y - mean_y) for w, x, y in points) / spread_x
    intercept = mean_y - slope * mean_x
    residual = math.fsum(w * (y - intercept - slope * x) ** 2 for w, x, y in points)
    error = math.sqrt(residual / (len(points) - 2) / spread_x) if len(points) > 2 else 0.0
    return Line(intercept, slope, error)


def growth_exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The p of y ~ x**p between the two largest x: 1 is linear, 2 quadratic, 0 constant.

    Raises:
        ValueError: fewer than two different `xs`.
    """
    if len(set(xs)) < 2:
        raise ValueError(f"growth needs two different x, found {sorted(set(xs))}")
    (small_x, small_y), (large_x, large_y) = sorted(zip(xs, ys, strict=True))[-2:]
    return math.log(large_y / small_y) / math.log(large_x / small_x)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of the values lie below, between two values in proportion."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
