"""Loads in jobs that count what each process reads: for the functions that processes of tests call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt_train as jct
from tests.distributed.arrays import sharding_of, values_of

Spec = list[Any]
Arrays = dict[str, tuple[list[int], str]]


class Count:
    """How many bytes this process has read, told as the progress of a load."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, done: int) -> None:
        self.bytes += done


def patterned(shape: list[int], dtype: str) -> np.ndarray:
    """Bytes that differ from place to place, as values of any dtype."""
    wanted = np.dtype(getattr(jnp, dtype, dtype))
    size = int(np.prod(shape, dtype=np.int64)) * wanted.itemsize
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    if wanted == np.bool_:
        return (raw & 1).view(np.bool_).reshape(shape)
    if "int4" in dtype or "int2" in dtype:
        return (raw & 1).astype(wanted).reshape(shape)
    return raw.view(wanted).reshape(shape)


def save_alone(path: str, arrays: Arrays) -> None:
    """Save whole arrays, in a process of its own kind: that of the test."""
    jct.save(path, {name: patterned(*each) for name, each in arrays.items()})


def load_counted(
    path: str, mesh: list[int], specs: dict[str, Spec], arrays: Arrays, read_once: Any, budget: int = 256 << 20
) -> dict[str, Any]:
    """Load with these shardings; the names of arrays that are not right, and the bytes that this process read."""
    count = Count()
    places = {name: sharding_of(mesh, specs[name]) for name in arrays}
    target = {
        name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(getattr(jnp, dtype, dtype)), sharding=places[name])
        for name, (shape, dtype) in arrays.items()
    }
    settings = jct.StoreSettings(read_once=read_once, read_budget_bytes=budget)
    loaded = jct.load(path, target, settings=settings, progress=count)
    wrong = [name for name, (shape, dtype) in arrays.items() if not holds(loaded[name], patterned(shape, dtype))]
    return {"wrong": wrong, "bytes": count.bytes}


def holds(array: jax.Array, values: np.ndarray) -> bool:
    """Whether each shard that this process has holds these bytes."""
    return array.shape == values.shape and all(
        np.asarray(shard.data).tobytes() == values[shard.index].tobytes() and shard.data.dtype == values.dtype
        for shard in array.addressable_shards
    )
