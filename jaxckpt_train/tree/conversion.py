"""Converts arrays to another dtype or byte order while they are loaded; values that would be lost are an error."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.staging import empty_array

COMPARED_AT_ONCE = 1 << 18  # elements
_finfo: Any = jnp.finfo
_iinfo: Any = jnp.iinfo


def converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in another dtype or byte order, in new memory; floats are rounded.

    Raises:
        MismatchError: an integer would change, or a finite float would not be finite.
    """
    result = empty_array(array.shape, dtype)
    with np.errstate(all="ignore"):
        try:
            np.copyto(result, array, casting="unsafe")
        except TypeError:  # ml_dtypes does not know each pair of small floats; double precision holds all of them
            np.copyto(result, array.astype(np.float64), casting="unsafe")
        _check(name, array.reshape(-1), result.reshape(-1))
    return result


def _check(name: str, array: np.ndarray, result: np.ndarray) -> None:
    """Raise MismatchError unless the values have survived; in pieces, so that it takes little memory."""
    saved, wanted = array.dtype.newbyteorder("="), result.dtype.newbyteorder("=")
    least, most = _exact_range(saved, wanted)
    if saved == wanted or array.size == 0:
        return
    is_inexact = jnp.issubdtype(saved, jnp.inexact)
    if is_inexact and _finfo(saved).max <= most:
        return
    if not jnp.issubdtype(saved, jnp.complexfloating):
        values = array if is_inexact else _plain_integers(array)
        if least <= values.min() and values.max() <= most:
            return
    have_survived = _floats_survived if is_inexact else _integers_survived
    pieces = range(0, len(array), COMPARED_AT_ONCE)
    parts = ((array[at : at + COMPARED_AT_ONCE], result[at : at + COMPARED_AT_ONCE]) for at in pieces)
    if all(have_survived(old, new) for old, new in parts):
        return
    every = "every integer from " if not is_inexact and jnp.issubdtype(wanted, jnp.inexact) else ""
    raise MismatchError(
        f"leaf {name!r}: cast=True, but {wanted} does not hold all values of the saved {saved}: found "
        f"{_range_of_values(array)}, {wanted} holds {every}{least} to {most}; give the target a wider dtype"
    )


def _exact_range(saved: np.dtype, wanted: np.dtype) -> tuple[float, float]:
    """The range of values that survive for certain; some floats and integers beyond it may survive too."""
    if wanted == np.bool_:
        return 0, 1
    if not jnp.issubdtype(wanted, jnp.inexact):
        limits = _iinfo(wanted)
        return int(limits.min), int(limits.max)
    info = _finfo(wanted)
    if jnp.issubdtype(saved, jnp.inexact):
        return float(info.min), float(info.max)
    most = int(min(2 ** (info.nmant + 1), float(info.max)))
    return max(-most, int(info.min)), most


def _integers_survived(old: np.ndarray, new: np.ndarray) -> bool:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return False  # the range has decided
    old = _plain_integers(old)
    limits = np.iinfo(old.dtype)
    wide = new.real.astype(np.float64)
    # The float above the largest integer is exact, and compared first: no float beyond it becomes an integer.
    is_within = (wide >= float(limits.min)) & (wide < float(limits.max // 2 + 1) * 2)
    return bool(is_within.all()) and np.array_equal(wide.astype(old.dtype), old)


def _floats_survived(old: np.ndarray, new: np.ndarray) -> bool:
    if (np.isfinite(old) & ~np.isfinite(new)).any():
        return False
    if new.dtype.itemsize > 1:
        return True
    # Some of the small dtypes have no infinity, and give their largest number instead.
    found, wanted = np.abs(new.astype(np.float64)), np.abs(old.astype(np.float64))
    return not (np.isfinite(wanted) & (wanted >= 1) & (wanted > 2 * found)).any()


def _plain_integers(array: np.ndarray) -> np.ndarray:
    """Integers of ml_dtypes and booleans as numpy's own integers, which are compared faster; floats as they are."""
    is_plain = array.dtype.kind in "iu" or jnp.issubdtype(array.dtype, jnp.inexact)
    return array if is_plain else array.astype(np.int8)


def _range_of_values(array: np.ndarray) -> str:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = np.abs(array)
    if jnp.issubdtype(array.dtype, jnp.inexact):
        array = array[np.isfinite(array)].astype(np.float64)
    else:
        array = _plain_integers(array)
    return f"{array.min()} to {array.max()}"
