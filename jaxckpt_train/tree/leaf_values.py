"""Which values can be stored: PRNG keys, and what numpy has a fixed byte form of."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.store.dtypes import is_storable
from jaxckpt_train.tree.paths import escapes_in


def is_key_array(value: Any) -> bool:
    """Whether the value is a typed PRNG key array, or an abstract one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and _is_key_dtype(dtype)


WITHOUT_FUNCTIONS = (
    "save, and load into, the arrays alone: of an Equinox module eqx.filter(model, eqx.is_array), which eqx.combine "
    "joins with the functions again; in other trees keep functions in static fields, or outside"
)


def is_function(value: object) -> bool:
    """Whether a leaf is a function or another callable that holds no data of its own."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "__array__")


@functools.cache
def _is_key_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def check_storable(name: str, value: Any) -> np.ndarray | np.generic:
    """The value as numpy, if it is a numpy array or scalar that can be stored.

    Raises:
        UnsupportedLeafError: it is neither, or of a dtype without fixed bytes.
    """
    plain = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and type(value) in (np.ndarray, np.memmap))
    if not plain:
        iterable = hasattr(value, "__iter__") and not hasattr(value, "__next__")
        hint = "; of a data set pass its iterator, iter(...)" if iterable else ""
        if is_function(value):
            raise UnsupportedLeafError(
                f"leaf {name!r}: a function or other callable cannot be stored{escapes_in(name)}; {WITHOUT_FUNCTIONS}"
            )
        raise UnsupportedLeafError(
            f"leaf {name!r}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored{escapes_in(name)}; "
            "expected arrays, numbers, text, bytes or None. Convert it, or register a handler "
            f"(jaxckpt_train.register_handler){hint}"
        )
    if not is_storable(value.dtype):
        raise UnsupportedLeafError(
            f"leaf {name!r}: numpy dtype {value.dtype} has no fixed byte form; convert it, for example to uint8 or text"
        )
    storable: np.ndarray | np.generic = value
    return storable
