"""Helpers for the tests of Colocated Python: arrays over meshes, abstract trees, bytes by writer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxckpt_train as jct

HOSTS = jct.StoreSettings(colocated=True, durability="none")
PLAIN = jct.StoreSettings(durability="none")
MIB = 1 << 20


def spread(value: Any, sizes: tuple[int, ...], *spec: Any) -> jax.Array:
    mesh = jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def written_by(path: Path) -> Counter[int]:
    """Return the bytes of data by the number in the names of files."""
    manifest = json.loads((path / "manifest.json").read_text())
    counts: Counter[int] = Counter()
    for part in manifest["parts"]:
        for array in part["arrays"]:
            for _, segment, _, length, _ in array["chunks"]:
                counts[int(manifest["segments"][segment][0].partition("/p")[2][:5])] += length
    return counts


def abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
            if isinstance(leaf, jax.Array) and leaf.committed and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ),
        tree,
    )
