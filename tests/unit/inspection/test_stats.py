"""Statistics of leaves: they equal exact arithmetic for values of any size and any difference."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxckpt_train.inspection import stats as leaf_stats
from jaxckpt_train.inspection.stats import BINS, Histogram, LeafStats
from jaxckpt_train.store.segment import DTYPES

FINITE = st.floats(allow_nan=False, allow_infinity=False)
LARGEST = sys.float_info.max
DECIMAL = Context(prec=60, Emax=10**6, Emin=-(10**6))
NUMBERS = sorted(set(DTYPES) - {"bool"})


def stats_of(pieces: Sequence[np.ndarray]) -> LeafStats:
    found = LeafStats()
    for piece in pieces:
        found.add(piece)
    return found


def root_of(value: Fraction) -> Decimal:
    return DECIMAL.sqrt(DECIMAL.divide(Decimal(value.numerator), Decimal(value.denominator)))


def exact_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, standard deviation and norm, rounded once."""
    numbers = [Fraction(value) for value in values]
    mean = sum(numbers) / len(numbers)
    deviation = root_of(sum((number - mean) ** 2 for number in numbers) / len(numbers))
    return float(mean), float(deviation), float(root_of(sum(number**2 for number in numbers) + Fraction(0)))


def assert_exact(found: LeafStats, values: Sequence[float]) -> None:
    mean, deviation, norm = exact_of(values)
    assert found.mean is not None
    assert found.deviation is not None
    assert found.mean == mean
    assert found.deviation == pytest.approx(deviation, rel=1e-12, abs=1e-322)
    if not LARGEST * (1 - 1e-12) < norm < math.inf:  # close to the limit, either result is possible
        assert found.norm == pytest.approx(norm, rel=1e-12, abs=1e-322)
    assert (found.least, found.most, found.zeros) == (min(values), max(values), values.count(0))


@given(st.lists(st.lists(FINITE, min_size=1, max_size=6), min_size=1, max_size=6))
@example([[1e200, 2e200]])
@example([[1e200], [2e200, 1.0]])
@example([[LARGEST, -LARGEST]])
@example([[LARGEST], [-LARGEST], [LARGEST, LARGEST]])
@example([[LARGEST] * 3, [LARGEST] * 5])
@example([[LARGEST, -LARGEST] * 3, [LARGEST, -LARGEST] * 2])
@example([[1e-200, 3e-200], [2e-200]])
@example([[5e-324, 5e-324], [1e-323]])
@example([[1e8, 1e8 + 1e-3], [1e8 + 2e-3]])
@example([[1e8], [1e8 + 1.5e-8]])
@example([[1e20, -1e20, 3.0]])
@example([[1e20], [3.0], [-1e20]])
@example([[1e200, 7.0, -1e200, 1e-200], [5e-324]])
@example([[LARGEST, 5e-324], [LARGEST, 3.0], [-LARGEST, -LARGEST]])
def test_statistics_of_any_doubles_are_exact(pieces: list[list[float]]) -> None:
    found = stats_of([np.array(piece) for piece in pieces])
    assert_exact(found, [value for piece in pieces for value in piece])


@given(FINITE.filter(lambda value: abs(value) < 1e300), st.lists(st.integers(0, 50), min_size=2, max_size=40))
def test_last_bit_differences_are_exact(base: float, steps: list[int]) -> None:
    values = [base + step * math.ulp(base) for step in steps]
    assert_exact(stats_of([np.array(values)]), values)
    assert_exact(stats_of([np.array([value]) for value in values]), values)


@pytest.mark.parametrize("name", NUMBERS)
@given(seed=st.integers(0, 1 << 20), shift=st.sampled_from([0.0, 1.0, 50.0]), cut=st.integers(1, 99))
def test_statistics_equal_numpy_in_longdouble(name: str, seed: int, shift: float, cut: int) -> None:
    dtype = DTYPES[name]
    values = np.random.default_rng(seed).standard_normal(100) * 3
    with np.errstate(all="ignore"):
        values = (abs(values) + (shift if dtype.itemsize > 1 else 0)).astype(np.float32).astype(dtype)
        is_complex = dtype.kind == "c" or "complex" in name
        wide = np.abs(values.astype(np.complex128)) if is_complex else values.astype(np.float64)
    wide = wide[np.isfinite(wide)].astype(np.longdouble)
    found = stats_of([values[:cut], values[cut:]])
    assert found.moments.count == len(wide) == found.count - found.nan - found.inf
    expected = [float(wide.mean()), float(wide.std()), float(np.sqrt((wide * wide).sum()))]
    np.testing.assert_allclose([found.mean, found.deviation, found.norm], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_blocks_of_one_piece_are_combined(dtype: type) -> None:
    count = 3 * leaf_stats.BLOCK + 17
    values = (np.random.default_rng(2).standard_normal(count) * 1000 + 1_000_000).astype(dtype)
    values[leaf_stats.BLOCK : leaf_stats.BLOCK + 1000] = 0
    found = stats_of([values.reshape(-1, 1)])
    exact = values.astype(np.longdouble)
    assert (found.count, found.zeros, found.most) == (count, 1000, values.max())
    np.testing.assert_allclose([found.mean, found.deviation], [float(exact.mean()), float(exact.std())], rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_values_of_other_blocks_cancel(dtype: type) -> None:
    large = (np.random.default_rng(3).standard_normal(leaf_stats.BLOCK + 5) * 1e20).astype(dtype)
    small = np.random.default_rng(4).standard_normal(leaf_stats.BLOCK).astype(dtype)
    found = stats_of([np.concatenate([large, small, np.flip(-large)]), small])
    assert found.mean == 2 * math.fsum(small.tolist()) / found.count
    assert found.norm == pytest.approx(math.sqrt(2 * math.fsum(float(each) ** 2 for each in large)), rel=1e-13)


def test_non_finite_values_are_excluded() -> None:
    values = np.arange(2.0 * leaf_stats.BLOCK)
    values[[1, 5, leaf_stats.BLOCK + 7]] = [math.nan, math.inf, -math.inf]
    found, finite = stats_of([values]), values[np.isfinite(values)]
    assert (found.nan, found.inf, found.zeros, found.count) == (1, 2, 1, len(values))
    np.testing.assert_allclose([found.mean, found.deviation], [finite.mean(), finite.std()], rtol=1e-14)


def test_overflowing_norm_is_infinite() -> None:
    assert stats_of([np.full(4, LARGEST)]).norm == math.inf


@given(st.lists(FINITE, min_size=1, max_size=50))
@example([LARGEST, -LARGEST, 0.0])
@example([1.7e308, -1.7e308])
@example([0.0, 5e-324])
def test_every_value_is_in_bin_of_histogram(values: list[float]) -> None:
    bins = Histogram(min(values), max(values))
    bins.add(np.array(values))
    counts = bins.counts
    assert counts.sum() == len(values)
    assert (bins.edges[0], bins.edges[-1]) == (min(values), max(values))
    assert np.isfinite(bins.edges).all()
    assert (np.diff(bins.edges / 2) >= 0).all()
    assert len(counts) == (BINS if max(values) > min(values) else 1)
