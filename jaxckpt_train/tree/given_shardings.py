"""Shardings that a caller gives for a whole tree: one for all, or a tree of them, by the paths of the leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.tree.flatten import EMPTY, flatten


def shardings_by_name(shardings: Any) -> Callable[[str], jax.sharding.Sharding | None]:
    """From one sharding, or a tree of shardings that may end above the leaves, to a function of the leaf path."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return lambda name: shardings
    flat = flatten(shardings)
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if not isinstance(leaf, jax.sharding.Sharding) and leaf is not None and leaf is not EMPTY:
            raise SettingsError(
                f"shardings: leaf {name!r}: expected a jax.sharding.Sharding or None, found {leaf!r}; "
                "of a mesh and a PartitionSpec make jax.sharding.NamedSharding(mesh, spec)"
            )
    known = dict(zip(flat.names, flat.leaves, strict=True))

    def find(name: str) -> jax.sharding.Sharding | None:
        while True:
            if name in known:
                return known[name] if isinstance(known[name], jax.sharding.Sharding) else None
            if "/" not in name:
                return None
            name = name.rpartition("/")[0]

    return find
