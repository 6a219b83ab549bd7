"""Whether values fit a dtype: a number that is given, and arrays of integers that become narrower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.dtypes import is_inexact


def held(value: float, dtype: np.dtype) -> np.ndarray | None:
    """A number in a dtype, rounded if that is a float; None: it has nothing near that."""
    if not is_inexact(dtype):
        low, high = _range_of(dtype)
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:
            return None
        return np.asarray(int(value)).astype(dtype)
    try:
        wanted = float(value)
    except OverflowError:
        return None
    with np.errstate(all="ignore"):
        found = np.asarray(wanted).astype(dtype)
        near = complex(found.astype(np.complex128)).real
    if not math.isfinite(wanted):
        fits = math.isnan(near) if math.isnan(wanted) else near == wanted
    else:  # some dtypes have neither infinity nor nan, and give their largest number instead
        fits = math.isfinite(near) and (abs(wanted) < 1 or abs(wanted) <= 2 * abs(near))
    return found if fits else None


def converted(array: np.ndarray, dtype: np.dtype, subject: str, start: Sequence[int]) -> np.ndarray:
    """An array in another dtype; floats are rounded, and may become infinite.

    Args:
        array: what is converted.
        dtype: to what.
        subject: it, for messages.
        start: where its first element lies in the array that it is a box of.

    Raises:
        MismatchError: an integer does not fit.
    """
    if not is_inexact(array.dtype) and array.dtype.kind not in "biu":
        array = array.astype(np.int8)  # ml_dtypes' integers are neither compared nor converted into each other
    if array.size and not is_inexact(array.dtype) and not is_inexact(dtype):
        (low, high), (least, most) = _range_of(dtype), _range_of(array.dtype)
        if (low > least and array.min() < low) or (high < most and array.max() > high):
            wrong = (array < max(low, least)) | (array > min(high, most))
            place = [int(at) for at in np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
            where = [at + first for at, first in zip(place, start, strict=True)]
            raise MismatchError(
                f"{subject}: {int(array[tuple(place)])} at {where} does not fit {dtype.name}, which holds {low} to "
                f"{high}; convert to a wider dtype, or leave this leaf as it is"
            )
    with np.errstate(all="ignore"):
        try:
            return array.astype(dtype)
        except TypeError:
            # Of small floats ml_dtypes does not know each pair; all of them are exact in double precision.
            is_complex = "complex" in array.dtype.name or "complex" in dtype.name
            return array.astype(np.complex128 if is_complex else np.float64).astype(dtype)


def _range_of(dtype: np.dtype) -> tuple[int, int]:
    if dtype.name == "bool":
        return 0, 1
    found: Any = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return int(found.min), int(found.max)
