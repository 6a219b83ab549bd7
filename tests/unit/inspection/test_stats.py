"""Statistics of leaves: they equal those of numpy in a higher precision."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxckpt_train.inspection import stats as leaf_stats
from jaxckpt_train.inspection.stats import BINS, Histogram, LeafStats
from jaxckpt_train.store.segment import DTYPES

FINITE = st.floats(allow_nan=False, allow_infinity=False)
LARGEST = sys.float_info.max
NUMBERS = sorted(set(DTYPES) - {"bool"})


def stats_of(pieces: Sequence[np.ndarray]) -> LeafStats:
    found = LeafStats()
    for piece in pieces:
        found.add(piece)
    return found


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
    assert found.finite == len(wide)
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


def test_non_finite_values_are_excluded() -> None:
    values = np.arange(2.0 * leaf_stats.BLOCK)
    values[[1, 5, leaf_stats.BLOCK + 7]] = [math.nan, math.inf, -math.inf]
    found, finite = stats_of([values]), values[np.isfinite(values)]
    assert (found.nan, found.inf, found.zeros, found.count) == (1, 2, 1, len(values))
    np.testing.assert_allclose([found.mean, found.deviation], [finite.mean(), finite.std()], rtol=1e-14)


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
    assert len(counts) in (1, BINS)
