"""Numbers that fit a dtype or are refused: every pair of integer dtypes, and the limits of the floats."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.segment import DTYPES
from jaxckpt_train.transforms.views import convert_array, number_as

INTEGERS = [name for name in DTYPES if "int" in name] + ["bool"]
VALUES = [0, 1, -1, 2, -2, 7, -8, 8, 127, -128, 255, 2**15, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**64 - 1]


@pytest.mark.parametrize(("old", "new"), list(itertools.product(INTEGERS, INTEGERS)))
def test_integers_keep_value_or_are_refused(old: str, new: str) -> None:
    for value in VALUES:
        given, fits = number_as(value, DTYPES[old]), number_as(value, DTYPES[new]) is not None
        if given is None:
            continue
        array = np.stack([np.zeros((), given.dtype), given])
        if fits:
            assert [int(each) for each in convert_array(array, DTYPES[new], "it", [0])] == [0, value]
        else:
            with pytest.raises(MismatchError, match=rf"it: {value} at \[5\] .*{new}"):
                convert_array(array, DTYPES[new], "it", [4])


FLOATS = sorted(name for name in DTYPES if "float" in name)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(FLOATS, FLOATS)))
def test_each_float_dtype_converts_to_each_other(old: str, new: str) -> None:
    array = np.array([1, 2, 4], np.float32).astype(DTYPES[old])
    found = convert_array(array, DTYPES[new], "it", [0])
    assert found.dtype == DTYPES[new]
    assert found.astype(np.float64).tolist() == [1, 2, 4]


def test_floats_are_rounded() -> None:
    found = convert_array(np.array([1e30, 0.1, np.nan], np.float32), DTYPES["float16"], "it", [0])
    assert (found[0], np.isnan(found[2])) == (np.inf, True)
    assert float(found[1]) == float(np.float16(0.1))


@pytest.mark.parametrize(
    ("dtype", "fit", "unfit"),
    [
        ("int64", [0.0, -1, 2**63 - 1], [1.5, math.nan, math.inf, 1e30, 2**63, 10**400]),
        ("uint64", [2**64 - 1], [-1, 2**64]),
        ("bool", [0, 1.0], [2, 0.5]),
        ("float32", [0.1, 1e-60, math.nan, -math.inf], [1e39, 10**400]),
        ("bfloat16", [1e30, 10**30, math.inf], [1e39]),
        ("float8_e4m3fn", [448, math.nan], [1e30, math.inf]),
        ("float4_e2m1fn", [6, 0.1], [1e30, math.nan, math.inf]),
        ("float8_e8m0fnu", [2.0], [0.0, -1.0]),
        ("complex64", [1.5, math.nan], [1e39]),
    ],
)
def test_dtype_holds_number_or_refuses(dtype: str, fit: list[float], unfit: list[float]) -> None:
    if dtype not in DTYPES:
        pytest.skip("this ml_dtypes lacks it")
    assert all(number_as(value, DTYPES[dtype]) is not None for value in fit)
    assert [value for value in unfit if number_as(value, DTYPES[dtype]) is not None] == []
