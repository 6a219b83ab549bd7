"""Loads in jobs that count the bytes that each process reads, for functions that the processes call."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt_train as jct
from jaxckpt_train.distributed import shared_memory
from tests.support.jobs.arrays import sharding_of

Spec = list[Any]
Arrays = dict[str, tuple[list[int], str]]
MIB = 1 << 20
ARRAYS: Arrays = {
    "replicated": ([1031, 2053], "float32"),
    "columns": ([1024, 4096], "float32"),
    "grid": ([3000, 2048], "bfloat16"),
    "rows": ([1024, 512], "float32"),
    "third": ([48, 64, 1032], "int8"),
    "odd": ([13, 5], "int16"),
    "scalar": ([], "float32"),
    "empty": ([8, 0], "float32"),
    "long": ([7 * MIB], "uint8"),
}
SPECS: dict[str, list[Any]] = {
    "replicated": [], "columns": [None, "x"], "grid": [None, "y"], "rows": ["x"], "third": [None, "x", "y"],
    "odd": [], "scalar": [], "empty": ["x"], "long": [],
}  # fmt: skip


@contextlib.contextmanager
def apart(*, is_apart: bool = True) -> Iterator[None]:
    """If `is_apart`, each process believes that it is on its own machine."""
    with pytest.MonkeyPatch.context() as patch:
        if is_apart:
            patch.setattr(shared_memory, "machine_id", lambda: f"machine {jax.process_index()}")
        yield


class Count:
    """Counts the bytes that this process reads, from the progress of a load."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, done: int) -> None:
        self.bytes += done


def patterned(shape: list[int], dtype: str) -> np.ndarray:
    """Return pseudo-random bytes as values of a dtype."""
    wanted = np.dtype(getattr(jnp, dtype, dtype))
    size = int(np.prod(shape, dtype=np.int64)) * wanted.itemsize
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    if wanted == np.bool_:
        return (raw & 1).view(np.bool_).reshape(shape)
    if name_bits := re.fullmatch(r"u?int([124])|float([46])_.*", dtype):
        raw &= (1 << int(name_bits[1] or name_bits[2])) - 1
        raw = (raw & 1).astype(wanted).view(np.uint8) if name_bits[1] else raw  # bits that all integer types have
    return raw.view(wanted).reshape(shape)


def save_alone(path: str, arrays: Arrays) -> None:
    """Save whole arrays in the process of the test."""
    jct.save(path, {name: patterned(*each) for name, each in arrays.items()})


def load_counted(
    path: str,
    mesh: list[int],
    specs: dict[str, Spec],
    arrays: Arrays,
    read_once: Any,
    budget: int = 256 << 20,
    check: bool = True,
) -> dict[str, Any]:
    """Load with these shardings; return the names of wrong arrays, and the bytes that this process read."""
    count = Count()
    settings = jct.StoreSettings(read_once=read_once, read_budget_bytes=budget)
    loaded = jct.load(path, target_of(arrays, specs, mesh), settings=settings, progress=count)
    wrong = [name for name, each in arrays.items() if check and not holds(loaded[name], patterned(*each))]
    return {"wrong": wrong, "bytes": count.bytes}


def load_counted_apart(*arguments: Any) -> dict[str, Any]:
    """Like `load_counted`, in processes that believe that they are on different machines."""
    with apart():
        return load_counted(*arguments)


WAYS = [load_counted, load_counted_apart]
"""Through shared memory, and over devices."""


def target_of(arrays: Arrays, specs: dict[str, Spec], mesh: list[int] | Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the target of a load, on all devices of the job or on a mesh with the axes "x" and "y"."""
    return {
        name: jax.ShapeDtypeStruct(
            tuple(shape),
            np.dtype(getattr(jnp, dtype, dtype)),
            sharding=NamedSharding(mesh, P(*[tuple(part) if isinstance(part, list) else part for part in specs[name]]))
            if isinstance(mesh, Mesh)
            else sharding_of(mesh, specs[name]),
        )
        for name, (shape, dtype) in arrays.items()
    }


def devices_in(order: list[int], mesh: list[int]) -> Mesh:
    """Return a mesh of some devices of the job."""
    return Mesh(np.array([jax.devices()[number] for number in order]).reshape(mesh), ("x", "y"))


def holds(array: jax.Array, values: np.ndarray) -> bool:
    """Return whether the local shards hold these bytes."""
    return array.shape == values.shape and all(
        np.asarray(shard.data).tobytes() == values[shard.index].tobytes() and shard.data.dtype == values.dtype
        for shard in array.addressable_shards
    )


def size_of(arrays: Arrays) -> int:
    return sum(patterned(*each).nbytes for each in arrays.values())
