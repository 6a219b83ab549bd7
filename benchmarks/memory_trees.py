"""The trees whose saves and loads are measured: dense, small, and dense over a mesh of eight devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Tree = Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """`leaves` float32 arrays of one shape.

    Attributes:
        name: as on the command line.
        leaves: how many.
        shape: of each.
        saved_mesh: two axes that split an array's two dimensions when saved; None: one device.
        loaded_mesh: the same for a load.
    """

    name: str
    leaves: int
    shape: tuple[int, ...]
    saved_mesh: tuple[int, int] | None = None
    loaded_mesh: tuple[int, int] | None = None

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return int(np.prod(self.saved_mesh)) if self.saved_mesh else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return 4 * self.leaves * int(np.prod(self.shape))


def workloads(quick: bool) -> dict[str, Workload]:
    """By name; `quick` makes the dense ones a sixteenth as large."""
    leaves = 1 if quick else 16
    made = (
        Workload("dense", leaves, (4096, 4096)),
        Workload("small", 1000, (500,)),
        Workload("reshard", leaves, (4096, 4096), (4, 2), (1, 8)),
    )
    return {one.name: one for one in made}


def make(workload: Workload, seed: int = 0) -> Tree:
    """A new tree of random bytes, one leaf after the other."""
    rng = np.random.Generator(np.random.SFC64(seed))
    sharding = _sharding(workload.saved_mesh)
    return {f"leaf_{number:04d}": _leaf(rng, workload.shape, sharding) for number in range(workload.leaves)}


def target(workload: Workload) -> Tree:
    """What a load must return."""
    sharding = _sharding(workload.loaded_mesh)
    wanted = jax.ShapeDtypeStruct(workload.shape, np.float32, sharding=sharding)
    return {f"leaf_{number:04d}": wanted for number in range(workload.leaves)}


def device_bytes(tree: Tree) -> int:
    """What the arrays take on all devices together."""
    return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)


def byte_sum(tree: Tree) -> int:
    """The sum of all words of all arrays: touches every page, and equals that of the saved tree."""
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.replica_id == 0)
    return sum(int(np.asarray(shard.data).view(np.uint32).sum(dtype=np.uint64)) for shard in shards)


def _leaf(rng: np.random.Generator, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    content = np.frombuffer(rng.bytes(4 * int(np.prod(shape))), np.float32).reshape(shape)
    return jax.block_until_ready(jax.device_put(content, sharding, may_alias=False))


def _sharding(mesh: tuple[int, int] | None) -> jax.sharding.Sharding:
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    devices = np.array(jax.devices()[: mesh[0] * mesh[1]]).reshape(mesh)
    made = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    return NamedSharding(made, PartitionSpec("x", "y"))
