"""Converts arrays to another dtype or byte order while they are loaded."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.staging import empty_array

COMPARED_AT_ONCE = 1 << 18  # elements


def converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in another dtype or byte order, in new memory; integers must keep their values.

    Raises:
        MismatchError: an integer would not.
    """
    result = empty_array(array.shape, dtype)
    with np.errstate(all="ignore"):
        np.copyto(result, array, casting="unsafe")
    if jnp.issubdtype(dtype, np.integer) and not _are_same_integers(result.reshape(-1), array.reshape(-1)):
        raise MismatchError(
            f"leaf {name!r}: cast=True, but {dtype} does not hold all values of the saved {array.dtype}"
        )
    return result


def _are_same_integers(result: np.ndarray, array: np.ndarray) -> bool:
    """Whether a conversion has kept all values; looked at in pieces, so that it takes no memory worth counting."""
    for at in range(0, len(array), COMPARED_AT_ONCE):
        new, old = result[at : at + COMPARED_AT_ONCE], array[at : at + COMPARED_AT_ONCE]
        if not np.array_equal(new.astype(old.dtype), old) or not np.array_equal(new < 0, old < 0):
            return False
    return True
