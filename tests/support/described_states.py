"""A state with a leaf of each kind, sharded over eight devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class Point(NamedTuple):
    x: Any
    y: Any


def spread(array: jax.Array, *spec: Any) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def state() -> dict[str, Any]:
    return {
        "w": spread(jnp.arange(256.0).reshape(16, 16), "data", "model"),
        "rows": spread(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), ("data", "model")),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "host": np.arange(3),
        "point": Point(1.5, [None, {}, "text"]),
    }
