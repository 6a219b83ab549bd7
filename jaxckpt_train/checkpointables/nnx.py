"""The handler of Flax objects: NNX modules, optimizers and Rngs are restored in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxckpt_train.checkpointables.base import Saved, Staged

_OBJECT: type = nnx.Pytree if hasattr(nnx, "Pytree") else nnx.Object  # Flax 0.11.0 has only the older name


def _is_object(value: object) -> bool:
    return isinstance(value, _OBJECT) and not isinstance(value, nnx.Variable)


class NnxHandler:
    """The handler of NNX objects, alone or among the leaves of a pytree.

    Each object is stored as the pure dict of its variables, and restored in place. Other leaves are new values.
    """

    kind = "pytree"
    early = False

    def handles(self, value: object) -> bool:
        """Return whether the value contains an NNX object."""
        try:
            leaves = jax.tree_util.tree_leaves(value, is_leaf=_is_object)
        except ValueError:  # JAX cannot flatten it; the snapshot reports where
            return False
        return any(map(_is_object, leaves))

    def is_current(self, value: object) -> bool:
        """Return whether the value consists of NNX objects only, which change in place."""
        return all(map(_is_object, jax.tree_util.tree_leaves(value, is_leaf=_is_object)))

    def stage(self, value: Any) -> Staged:
        """Stage the value with the states of its objects in their places."""
        return Staged(tree=_states(value))

    def tree_of(self, target: Any) -> Any:
        """Return the tree that `restore` loads: the states of the objects in their places."""
        return _states(target)

    def compare(self, target: Any, saved: Saved) -> None:
        """Raise an error with all differences to the target."""
        saved.compare(_states(target))

    def trace(self, make: Callable[[], Any]) -> Any:
        """Return what a function makes, with a `jax.ShapeDtypeStruct` in place of each array."""
        return nnx.eval_shape(make)

    def restore(self, target: Any, saved: Saved) -> Any:
        """Set the variables of the target's objects to the saved values, and return the target."""
        loaded = saved.tree(_states(target))
        return jax.tree_util.tree_map(_update, target, loaded, is_leaf=_is_object)


def _states(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: nnx.state(leaf) if _is_object(leaf) else leaf, tree, is_leaf=_is_object)


def _update(leaf: Any, loaded: Any) -> Any:
    if not _is_object(leaf):
        return loaded
    nnx.update(leaf, loaded)
    return leaf
