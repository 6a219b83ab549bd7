"""What a leaf becomes of its data on the host: host arrays, scalars, keys, and JAX arrays of Python numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.tree.caller_context import nothing_set
from jaxckpt_train.tree.device_put import weakly_typed
from jaxckpt_train.tree.target import Want


def spans_processes(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether it names devices of several processes: all processes make such an array, in the same order."""
    return sharding is not None and not sharding.is_fully_addressable and not _is_of_one_process(sharding)


@functools.lru_cache(maxsize=256)
def _is_of_one_process(sharding: jax.sharding.Sharding) -> bool:
    devices: Any = sharding.device_set
    return len({device.process_index for device in devices}) == 1


def is_elsewhere(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether no device of it belongs to this process."""
    return sharding is not None and not sharding.is_fully_addressable and not sharding.addressable_devices


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
            return _put(name, want, array)


def _key(name: str, data: np.ndarray, want: Want) -> jax.Array:
    try:
        if want.sharding is not None and is_elsewhere(want.sharding):
            dtype = jax.eval_shape(functools.partial(jax.random.wrap_key_data, impl=want.impl), data).dtype
            return jax.make_array_from_single_device_arrays(want.shape, want.sharding, [], dtype=dtype)
        if want.sharding is not None and spans_processes(want.sharding):
            return _made_on_all(data, want.sharding, want.impl)
        key: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=want.impl)
    except (TypeError, ValueError) as error:
        raise MismatchError(
            f"leaf {name!r}: saved as a key of implementation {want.impl!r}, of which this JAX makes none of "
            f"{data.dtype}{list(data.shape)}: {error}"
        ) from error
    return key if want.sharding is None else jax.device_put(key, want.sharding)


def _put(name: str, want: Want, array: np.ndarray) -> jax.Array:
    made: jax.Array
    if want.sharding is not None and is_elsewhere(want.sharding):
        made = jax.make_array_from_single_device_arrays(array.shape, want.sharding, [], dtype=array.dtype)
    elif want.sharding is not None and spans_processes(want.sharding):
        made = _made_on_all(array, want.sharding)
    else:
        made = jax.device_put(array, want.sharding)
    return weakly_typed(name, made) if want.weak else made


def _made_on_all(value: Any, sharding: jax.sharding.Sharding, impl: str | None = None) -> jax.Array:
    """An array over devices of several processes, of what each of them has. No process waits for another.

    `jax.device_put` compares the values of all processes first.
    """

    def make(value: Any) -> Any:
        return value if impl is None else jax.random.wrap_key_data(value, impl=impl)

    with nothing_set():
        made: jax.Array = jax.jit(make, out_shardings=sharding)(value)
    return made
