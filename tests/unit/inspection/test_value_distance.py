"""The distance of arrays: as numpy computes it in double precision, also for infinities and extreme values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxckpt_train.inspection.diff import BLOCK, Distance, distance
from jaxckpt_train.store.segment import DTYPES

NUMBERS = sorted(set(DTYPES) - {"bool"})


def values_of(dtype: np.dtype, count: int, seed: int) -> np.ndarray:
    """An array of halves, which become 0 as integers, and ones; the seed selects some values to change."""
    base = np.random.default_rng(1).choice(np.array([0.5, 1], np.float32), count)
    base[np.random.default_rng(seed).integers(0, count, count // 9)] = 1
    return base.astype(dtype)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("count", [1, BLOCK, 3 * BLOCK + 5])
def test_sums_and_counts_are_those_of_numpy(name: str, count: int) -> None:
    one, other = values_of(DTYPES[name], count, 2), values_of(DTYPES[name], count, 3)
    exact, exact_other = one.astype(np.complex128), other.astype(np.complex128)
    apart = np.abs(exact - exact_other)
    found = distance(one, other)
    assert found.differing == int((apart != 0).sum())
    assert found.max_abs == apart.max()
    assert found.difference == pytest.approx(np.sqrt((apart**2).sum()), rel=1e-12)
    assert found.norm == pytest.approx(np.sqrt((np.abs(exact) ** 2).sum()), rel=1e-12)


def test_random_floats_are_compared_in_double_precision() -> None:
    random = np.random.default_rng(4)
    one = random.standard_normal((37, 1001)).astype(np.float32)
    other = one + random.standard_normal(one.shape).astype(np.float32) * (random.random(one.shape) < 0.1)
    found = distance(one, other)
    apart = one.astype(np.float64) - other.astype(np.float64)
    assert (found.differing, found.max_abs) == (int((one != other).sum()), np.abs(apart).max())
    expected = [np.linalg.norm(apart), np.linalg.norm(one.astype(float))]
    np.testing.assert_allclose([found.difference, found.norm], expected, rtol=1e-12)


def test_equal_infinities_and_nans_do_not_differ() -> None:
    """The same infinities, and nan with any bits in both."""
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
    one = np.array([np.inf, -np.inf, np.nan, np.nan, 1, 3], np.float32)
    other = np.array([np.inf, -np.inf, np.nan, payload, 1, 1], np.float32)
    assert distance(one, other) == Distance(differing=2, max_abs=2.0, difference=2.0, norm=math.sqrt(10.0))


def test_infinity_and_nan_determine_largest_difference() -> None:
    one, other = np.array([np.inf, 5.0]), np.array([1.0, 2.0])
    assert distance(one, other) == Distance(2, math.inf, 3.0, 5.0)
    assert math.isnan(distance(np.array([np.nan, 5.0]), other).max_abs)
    many = np.zeros(2 * BLOCK)
    many[0] = np.nan
    later = np.zeros(2 * BLOCK)
    later[-1] = 7
    assert math.isnan(distance(many, later).max_abs)
    assert math.isnan(distance(many[::-1], later).max_abs)


def test_large_integers_are_subtracted_exactly() -> None:
    big = np.array([2**63 - 1, -(2**63)], np.int64)
    assert distance(big, big - np.array([1, -1])).max_abs == 1.0
    assert distance(np.array([2**64 - 1], np.uint64), np.array([0], np.uint64)).max_abs == 2.0**64


def test_complex_difference_includes_angle() -> None:
    assert distance(np.array([1 + 0j, 3j]), np.array([-1 + 0j, 3j])) == Distance(1, 2.0, 2.0, math.sqrt(10.0))


def test_zeros_of_another_sign_differ_by_nothing() -> None:
    assert distance(np.array([0.0]), np.array([-0.0])) == Distance(1, 0.0, 0.0, 0.0)


def test_empty_arrays_have_no_distance() -> None:
    assert distance(np.zeros((0, 3)), np.zeros((0, 3))) == Distance()


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e300])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_norms_of_extreme_values_do_not_overflow(dtype: type, scale: float) -> None:
    one = np.array([3 * scale, 0, np.inf, np.nan] * BLOCK, dtype)
    other = np.array([2 * scale, 0, np.inf, np.nan] * BLOCK, dtype)
    found = distance(one, other)
    assert (found.differing, found.max_abs) == (BLOCK, pytest.approx(scale))
    root = math.sqrt(BLOCK)
    assert (found.difference, found.norm) == (pytest.approx(root * scale), pytest.approx(3 * root * scale))
