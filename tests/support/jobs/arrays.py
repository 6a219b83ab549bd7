"""Arrays over all devices of a job, for functions that its processes call."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Spec = list[Any]
# Arrays of many kinds, and how one job saves and another one loads them.
SHAPES: dict[str, tuple[list[int], str]] = {
    "a": ([64, 24], "float32"),
    "b": ([8, 16, 4], "int32"),
    "c": ([8], "float16"),
    "d": ([1024, 1024], "float32"),
    "e": ([], "float32"),
    "f": ([8, 0], "float32"),
    "g": ([13, 5], "int16"),
}
SAVED: dict[str, list[Any]] = {"a": ["x"], "b": [None, "y"], "c": ["x"], "d": [], "e": [], "f": ["x"], "g": []}
LOADED: dict[str, list[Any]] = {"a": [None, "x"], "b": ["x", "y"], "c": [], "d": ["y"], "e": [], "f": [], "g": []}


def values_of(shape: list[int], dtype: str = "float32") -> np.ndarray:
    """Return 0, 1, 2, ... in a shape."""
    return np.arange(np.prod(shape, dtype=np.int64)).astype(dtype).reshape(shape)


def sharding_of(mesh_shape: list[int], spec: Spec, devices: list[int] | None = None) -> NamedSharding:
    """Return a sharding over all devices of the job, or the chosen ones, with the axes "x", "y" and "z"."""
    chosen = jax.devices() if devices is None else [jax.devices()[place] for place in devices]
    mesh = Mesh(np.array(chosen).reshape(mesh_shape), ("x", "y", "z")[: len(mesh_shape)])
    return NamedSharding(mesh, P(*[tuple(part) if isinstance(part, list) else part for part in spec]))


def global_array(shape: list[int], mesh_shape: list[int], spec: Spec, dtype: str = "float32") -> jax.Array:
    """Return `values_of` in such a sharding."""
    return placed(values_of(shape, dtype), sharding_of(mesh_shape, spec))


def placed(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Return values that each process has as one array of the job."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index], dtype=values.dtype)


def is_right(array: jax.Array, shape: list[int], dtype: str = "float32") -> bool:
    """Return whether the local shards hold the bytes of `values_of`."""
    return holds(array, values_of(shape, dtype))


def holds(array: jax.Array, values: np.ndarray) -> bool:
    """Return whether the local shards hold the bytes of these values."""
    return array.shape == values.shape and all(
        np.asarray(shard.data).tobytes() == values[shard.index].tobytes() and shard.data.dtype == values.dtype
        for shard in array.addressable_shards
    )


def are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the local shards of two states are equal, byte for byte."""
    return one.keys() == other.keys() and all(
        np.asarray(mine.data).tobytes() == np.asarray(its.data).tobytes()
        for name in one
        for mine, its in zip(one[name].addressable_shards, other[name].addressable_shards, strict=True)
    )


def digest_of(tree: Any) -> str:
    """Return the digest of the local shards of a tree of JAX arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()
