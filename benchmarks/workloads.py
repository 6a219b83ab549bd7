"""Workloads: trees of random JAX arrays on the CPU device, and the byte for byte check of what a load returned."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

PAGE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Workload:
    """`leaves` float32 arrays of the same shape, spread over a nested dict.

    Attributes:
        name: as on the command line.
        leaves: number of arrays.
        shape: of each array.
    """

    name: str
    leaves: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return 4 * self.leaves * int(np.prod(self.shape))

    def make(self, seed: tuple[int, ...]) -> Tree:
        """A new tree; every bit of it is random, so nothing can be compressed or found twice."""
        rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))
        tree: dict[str, dict[str, jax.Array]] = {}
        for index in range(self.leaves):
            layer = tree.setdefault(f"layer_{index // 8:03d}", {})
            layer[f"param_{index % 8}"] = _random_array(rng, self.shape)
        return jax.block_until_ready(tree)


def workloads(quick: bool) -> dict[str, Workload]:
    """The workloads by name; `quick` makes the dense one a quarter as large."""
    made = (Workload("dense", 4 if quick else 16, (4096, 4096)), Workload("small", 1000, (500,)))
    return {workload.name: workload for workload in made}


def abstract(tree: Tree) -> Tree:
    """The shapes, dtypes and shardings that a load of `tree` must return."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def touch(tree: Tree) -> int:
    """Read one byte of every page, so that bytes which were only promised so far are read now."""
    return sum(int(as_bytes(leaf)[::PAGE_BYTES].max(initial=0)) for leaf in jax.tree.leaves(tree))


def check_equal(loaded: Tree, saved: Tree) -> None:
    """Compare structure, types, shardings and every byte.

    Raises:
        ValueError: names the first leaf that differs, and how.
    """
    if jax.tree.structure(loaded) != jax.tree.structure(saved):
        raise ValueError(f"loaded tree is {jax.tree.structure(loaded)}, saved was {jax.tree.structure(saved)}")
    for (path, want), got in zip(jax.tree.leaves_with_path(saved), jax.tree.leaves(loaded), strict=True):
        difference = _difference(got, want)
        if difference:
            raise ValueError(f"leaf {jax.tree_util.keystr(path)}: {difference}")


def as_bytes(leaf: jax.Array) -> np.ndarray:
    """The bytes of an array on the CPU device, without a copy."""
    return np.asarray(leaf).reshape(-1).view(np.uint8)


def _difference(got: object, want: jax.Array) -> str | None:
    if not isinstance(got, jax.Array):
        return f"loaded a {type(got).__name__}, wanted a jax.Array"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"loaded {got.dtype}{list(got.shape)}, saved was {want.dtype}{list(want.shape)}"
    if not got.sharding.is_equivalent_to(want.sharding, want.ndim):
        return f"loaded with sharding {got.sharding}, wanted {want.sharding}"
    if not np.array_equal(as_bytes(got), as_bytes(want)):
        return f"{np.count_nonzero(as_bytes(got) != as_bytes(want))} of {want.nbytes} bytes differ"
    return None


def _random_array(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.array(np.frombuffer(rng.bytes(4 * int(np.prod(shape))), np.float32).reshape(shape), copy=True)
