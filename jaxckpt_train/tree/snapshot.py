"""The snapshot: a pytree as it is now, safe against donation and in-place changes, as sources for the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.store.boxes import box_from_index, full_box
from jaxckpt_train.store.dtypes import is_storable
from jaxckpt_train.store.layout import ArraySource, ChunkSource
from jaxckpt_train.tree.flatten import EMPTY, flatten
from jaxckpt_train.tree.leaf_records import (
    ArrayLeaf,
    EmptyLeaf,
    KeyLeaf,
    LeafRecord,
    TreeRecord,
    check_storable,
    is_key_array,
    record_value,
)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A pytree on the host: its record, and the arrays to write. Holds the memory until it is dropped."""

    record: TreeRecord
    arrays: Sequence[ArraySource]

    @property
    def data_bytes(self) -> int:
        """How many bytes of array data it holds."""
        return sum(chunk.data.nbytes for array in self.arrays for chunk in array.chunks)


def snapshot(tree: Any) -> Snapshot:
    """Take a pytree as it is now.

    JAX arrays on the CPU are held as views: a later donation then copies instead of reusing their memory. Arrays on
    an accelerator are copied to the host, all started before the first is awaited. Numpy arrays are copied.
    Waits until the arrays are computed. Each distinct shard is taken once.

    Raises:
        UnsupportedLeafError: a leaf that cannot be stored, named by its path.
    """
    flat = flatten(tree)
    for leaf in flat.leaves:
        if isinstance(leaf, jax.Array) and not is_key_array(leaf) and _off_host(leaf):
            leaf.copy_to_host_async()
    records: dict[str, LeafRecord] = {}
    arrays: list[ArraySource] = []
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        records[name] = _take(name, leaf, arrays)
    return Snapshot(TreeRecord(flat.containers, records), arrays)


def _take(name: str, leaf: Any, arrays: list[ArraySource]) -> LeafRecord:
    if isinstance(leaf, jax.Array):
        return _take_jax(name, leaf, arrays)
    if leaf is EMPTY:
        return EmptyLeaf()
    inline = record_value(name, leaf)
    if inline is not None:
        return inline
    value = check_storable(name, leaf)
    native = value.dtype.newbyteorder("=")
    copy = np.array(value, dtype=native, order="C", copy=True)
    arrays.append(ArraySource(name, copy.shape, native, (ChunkSource(full_box(copy.shape), copy),)))
    return ArrayLeaf(host="scalar" if isinstance(value, np.generic) else "numpy", big_endian=value.dtype != native)


def _take_jax(name: str, leaf: jax.Array, arrays: list[ArraySource]) -> LeafRecord:
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedLeafError(
            f"leaf {name!r}: a traced value; save outside of jit, with the arrays that it returns"
        )
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            f"leaf {name!r}: its memory was given away (donated to a jitted function or deleted); "
            "save the arrays that the function returned"
        )
    if not leaf.is_fully_addressable:
        raise UnsupportedLeafError(
            f"leaf {name!r}: spans devices of other processes, which this version cannot save; "
            "gather it to the devices of one process first"
        )
    if is_key_array(leaf):
        data = jax.random.key_data(leaf)
        arrays.append(_source(name, data, leaf.sharding))
        return KeyLeaf(impl=str(jax.random.key_impl(leaf)))
    if not is_storable(np.dtype(leaf.dtype)):
        raise UnsupportedLeafError(f"leaf {name!r}: dtype {leaf.dtype} has no fixed byte form (float0 holds no data)")
    arrays.append(_source(name, leaf, leaf.sharding))
    return ArrayLeaf(weak=leaf.weak_type)


def _source(name: str, leaf: jax.Array, sharding: jax.sharding.Sharding) -> ArraySource:
    if len(sharding.device_set) == 1:
        chunks: Sequence[ChunkSource] = (ChunkSource(full_box(leaf.shape), np.asarray(leaf)),)
        return ArraySource(name, leaf.shape, np.dtype(leaf.dtype), chunks)
    chunks = tuple(
        ChunkSource(box_from_index(shard.index, leaf.shape), np.asarray(shard.data))
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    )
    return ArraySource(name, leaf.shape, np.dtype(leaf.dtype), chunks, describe_sharding(sharding))


def describe_sharding(sharding: jax.sharding.Sharding) -> dict[str, Any] | None:
    """A sharding as plain data, for people to read: the mesh's axis sizes and the partition of each dimension."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = [list(part) if isinstance(part, tuple) else part for part in sharding.spec]
        return {"mesh": {str(axis): size for axis, size in sharding.mesh.shape.items()}, "spec": _json_spec(spec)}
    return {"type": type(sharding).__name__, "devices": len(sharding.device_set)}


def _json_spec(spec: list[Any]) -> list[Any]:
    return [part if part is None or isinstance(part, (str, list)) else str(part) for part in spec]


def _off_host(leaf: jax.Array) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return False
    device: Any = next(iter(leaf.sharding.device_set))
    return bool(device.platform != "cpu")
