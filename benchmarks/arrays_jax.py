"""JAX arrays on CPU devices, in nested dicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from benchmarks.arrays import State
from benchmarks.leaf import ITEM_BYTES, Leaf
from benchmarks.random_bytes import each_leaf
from benchmarks.workloads import REPLICATED, SAVED, Workload

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "int32": np.dtype(np.int32)}


class JaxArrays:
    """See `Arrays`."""

    def make(self, workload: Workload, seed: Sequence[int]) -> State:
        state: State = {}
        for leaf, content in each_leaf(workload, seed):
            host = content.view(DTYPES[leaf.dtype]).reshape(leaf.shape)
            _put(state, leaf.path, _placed(host, sharding_of(leaf, workload, SAVED)))
        return jax.block_until_ready(state)

    def like(self, workload: Workload, target: str) -> State:
        state: State = {}
        for leaf in workload.wanted(target):
            sharding = sharding_of(leaf, workload, target)
            _put(state, leaf.path, jax.ShapeDtypeStruct(leaf.shape, DTYPES[leaf.dtype], sharding=sharding))
        return state

    def wait(self, loaded: State) -> None:
        jax.block_until_ready(loaded)

    def found(self, loaded: State) -> dict[str, Any]:
        return {
            "/".join(str(key.key) for key in path): array for path, array in jax.tree_util.tree_leaves_with_path(loaded)
        }

    def difference(self, array: Any, leaf: Leaf, workload: Workload, target: str) -> str | None:
        if not isinstance(array, jax.Array):
            return f"loaded a {type(array).__name__}, wanted a jax.Array"
        if (array.shape, array.dtype) != (leaf.shape, DTYPES[leaf.dtype]):
            return f"loaded {array.dtype}{list(array.shape)}, saved was {leaf.dtype}{list(leaf.shape)}"
        wanted = sharding_of(leaf, workload, target)
        if not array.sharding.is_equivalent_to(wanted, array.ndim):
            return f"loaded with sharding {array.sharding}, wanted {wanted}"
        return None

    def pieces(self, array: Any, leaf: Leaf) -> Iterator[tuple[np.ndarray, tuple[slice, ...]]]:
        for shard in array.addressable_shards:
            memory = np.asarray(shard.data)
            item = ITEM_BYTES[leaf.dtype]
            yield memory.reshape(-1).view(np.uint8).reshape(*memory.shape, item), shard.index


def sharding_of(leaf: Leaf, workload: Workload, target: str) -> Sharding:
    """Where a leaf lies when it is saved (`SAVED`), or after a load onto `target`."""
    mesh = workload.mesh_of(target)
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    devices = np.array(jax.devices()[: mesh[0] * mesh[1]]).reshape(mesh)
    axes = () if target == REPLICATED else [axis and tuple(axis.split("+")) for axis in leaf.spec]
    return NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec(*axes))


def _placed(host: np.ndarray, sharding: Sharding) -> jax.Array:
    """In memory that is JAX's own, as after a training step: hence may_alias=False."""
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding, may_alias=False)
    places = sharding.addressable_devices_indices_map(host.shape)
    shards = [jax.device_put(host[index], device, may_alias=False) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


def _put(state: State, path: Sequence[str], value: Any) -> None:
    *parents, last = path
    for key in parents:
        state = state.setdefault(key, {})
    state[last] = value


IMPLEMENTATION = JaxArrays()
