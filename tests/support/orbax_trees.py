"""Trees of Flax and Optax, saved by a manager of Orbax's form and restored in a process that has not saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState

from jaxckpt_train.integrations import orbax_manager

LIBRARIES = {"orbax": ocp, "ours": orbax_manager}


class _Boxed(nn.Module):
    """A layer whose parameters are boxed with the names of their axes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_partitioning(nn.initializers.ones, ("x", None))
        self.param("bias", nn.initializers.zeros, (3,))
        return x @ self.param("kernel", init, (4, 3))


def _nnx_state(seed: int) -> Any:
    return {"model": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(seed))), "step": seed}


def _boxed(seed: int) -> Any:
    params = _Boxed().init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
    return {"params": jax.tree.map(lambda leaf: leaf + seed, params), "step": seed}


def _train_state(seed: int) -> Any:
    model = nn.Dense(3)
    params = model.init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
    chained = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=chained)
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params)) if seed else state


def _optimizer(seed: int) -> Any:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.sgd(optax.constant_schedule(0.1), momentum=0.9), wrt=nnx.Param)
    return nnx.state((model, optimizer))


TREES = {"nnx": _nnx_state, "boxed": _boxed, "train state": _train_state, "optimizer": _optimizer}

TARGETS = ("concrete", "abstract", "arguments")


def described(tree: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return the containers of a tree, and the type and bytes of each leaf by its path, as text."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    del structure  # the structure of a train state contains functions
    kinds = [type(node).__name__ for node in (tree, *(tree.values() if isinstance(tree, dict) else ()))]
    found = [
        (
            jax.tree_util.keystr(path),
            [type(leaf).__name__, str(np.asarray(leaf).dtype), np.asarray(leaf).tobytes().hex()],
        )
        for path, leaf in leaves
    ]
    return " ".join(kinds), found


def save(library: Any, directory: Path, kind: str) -> None:
    """Save the tree of seed 1."""
    with library.CheckpointManager(directory) as manager:
        assert manager.save(1, args=library.args.StandardSave(TREES[kind](1)))


def restore(library: Any, directory: Path, kind: str, target: str) -> Any:
    """Restore it, into a tree of seed 0, or an abstract one."""
    tree = TREES[kind](0)
    if target == "abstract":
        tree = jax.tree.map(
            lambda leaf: ocp.utils.to_shape_dtype_struct(leaf) if hasattr(leaf, "shape") else leaf, tree
        )
    with library.CheckpointManager(directory) as manager:
        if target == "arguments":
            arguments = ocp.checkpoint_utils.construct_restore_args(tree)
            return manager.restore(1, args=library.args.PyTreeRestore(tree, restore_args=arguments))
        return manager.restore(1, args=library.args.StandardRestore(tree))


if __name__ == "__main__":
    _, directory, kind = sys.argv
    for wanted in TARGETS:
        print({name: described(restore(each, Path(directory, name), kind, wanted)) for name, each in LIBRARIES.items()})
