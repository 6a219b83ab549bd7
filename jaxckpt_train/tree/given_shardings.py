"""Shardings that a caller gives for a load: one for a whole tree, or a tree of them, or those that a target brings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jaxckpt_train.errors import CheckpointError, SettingsError
from jaxckpt_train.tree.flatten import EMPTY, flatten
from jaxckpt_train.tree.patterns import Only, leaf_filter
from jaxckpt_train.tree.target import wanted


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


def wanted_shardings(like: Any, only: Only, shardings: Any) -> Iterator[jax.sharding.Sharding]:
    """Those that a load wants which begins with these, as far as it can be told before a checkpoint is opened.

    What is wrong with one leaf is no error here, and keeps nothing of the others from being told.
    """
    try:
        given, selected = shardings_by_name(shardings), leaf_filter(only)
        flat = flatten(shardings if like is None else like)
    except CheckpointError:  # as the load will say
        with contextlib.suppress(TypeError, ValueError):
            yield from _shardings_in(jax.tree_util.tree_leaves((like, shardings)))
        return
    if like is None:  # which leaves there are is not known
        yield from _shardings_in(flat.leaves)
        return
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if selected(name):
            with contextlib.suppress(CheckpointError):
                yield from _shardings_in([wanted(name, leaf, given(name)).sharding])


def _shardings_in(found: Iterable[Any]) -> Iterator[jax.sharding.Sharding]:
    """These, and those of arrays and of what stands for arrays."""
    for each in found:
        sharding = each if isinstance(each, jax.sharding.Sharding) else getattr(each, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding):
            yield sharding
