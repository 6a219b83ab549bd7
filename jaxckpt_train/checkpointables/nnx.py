"""The handler of Flax objects: NNX modules, optimizers and Rngs in place, Linen's boxed values under their own path."""

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
    """NNX objects, alone or among the leaves of a pytree; each is stored as the pure dict of its variables.

    Restored in place; other leaves of the pytree are returned anew.
    """

    kind = "pytree"
    early = False

    def handles(self, value: object) -> bool:
        """Whether there is an NNX object in it."""
        try:
            leaves = jax.tree_util.tree_leaves(value, is_leaf=_is_object)
        except ValueError:  # JAX cannot flatten it; the snapshot says where
            return False
        return any(map(_is_object, leaves))

    def is_current(self, value: object) -> bool:
        """Whether it is nothing but NNX objects, which change in place."""
        return all(map(_is_object, jax.tree_util.tree_leaves(value, is_leaf=_is_object)))

    def stage(self, value: Any) -> Staged:
        """The states of its objects in their places."""
        return Staged(tree=_states(value))

    def tree_of(self, target: Any) -> Any:
        """What `restore` loads the leaves of: the states of the objects in their places."""
        return _states(target)

    def compare(self, target: Any, saved: Saved) -> None:
        """Raise all differences to the target."""
        saved.compare(_states(target))

    def made_abstractly(self, make: Callable[[], Any]) -> Any:
        """What a function makes, with a `jax.ShapeDtypeStruct` in place of each array."""
        return nnx.eval_shape(make)

    def restore(self, target: Any, saved: Saved) -> Any:
        """The target, the variables of its objects set to what was saved."""
        loaded = saved.tree(_states(target))
        return jax.tree_util.tree_map(_update, target, loaded, is_leaf=_is_object)


def _states(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: nnx.state(leaf) if _is_object(leaf) else leaf, tree, is_leaf=_is_object)


def _update(leaf: Any, loaded: Any) -> Any:
    if not _is_object(leaf):
        return loaded
    nnx.update(leaf, loaded)
    return leaf
