"""What a leaf becomes of its data on the host: host arrays, scalars, keys, and weakly typed JAX scalars."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.tree.caller_context import nothing_set
from jaxckpt_train.tree.target import Want


def spans_processes(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether it names devices of other processes: all processes make such an array, in the same order."""
    return sharding is not None and not sharding.is_fully_addressable


def value_of(name: str, want: Want, array: np.ndarray) -> Any:
    """The leaf, of all of its data."""
    match want.form:
        case "numpy":
            return array
        case "scalar":
            return array[()]
        case "python":
            value = array.item()
            return value if want.python is None else want.python(value)
        case "key":
            return _key(name, array, want)
        case _:
            return weak_or_put(want, array)


def _key(name: str, data: np.ndarray, want: Want) -> jax.Array:
    try:
        if want.sharding is not None and spans_processes(want.sharding):
            return _made_on_all(data, want.sharding, want.impl)
        key: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=want.impl)
    except (TypeError, ValueError) as error:
        raise MismatchError(
            f"leaf {name!r}: saved as a key of implementation {want.impl!r}, of which this JAX makes none of "
            f"{data.dtype}{list(data.shape)}: {error}"
        ) from error
    return key if want.sharding is None else jax.device_put(key, want.sharding)


def weak_or_put(want: Want, array: np.ndarray) -> jax.Array:
    """A JAX array, of the weak type where that is wanted and JAX makes one."""
    if want.weak:
        value = jnp.asarray(array.item())
        if value.dtype == want.dtype:
            return value if want.sharding is None else _put(array.item(), want.sharding)
    return _put(array, want.sharding)


def _put(value: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is not None and spans_processes(sharding):
        return _made_on_all(value, sharding)
    placed: jax.Array = jax.device_put(
        jnp.asarray(value) if isinstance(value, (int, float, complex)) else value, sharding
    )
    return placed


def _made_on_all(value: Any, sharding: jax.sharding.Sharding, impl: str | None = None) -> jax.Array:
    """An array over devices of several processes, of what each of them has. No process waits for another.

    `jax.device_put` compares the values of all processes first.
    """

    def make(value: Any) -> Any:
        return value if impl is None else jax.random.wrap_key_data(value, impl=impl)

    with nothing_set():
        made: jax.Array = jax.jit(make, out_shardings=sharding)(value)
    return made
