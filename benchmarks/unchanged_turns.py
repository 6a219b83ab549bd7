"""What a process of the benchmark of unchanged leaves does: it saves a state with adapters several times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxckpt_train as jct
from benchmarks import page_cache, subjects_orbax
from benchmarks.unchanged_sizes import BLOCKS, RANK, WIDTH, base_rows, measured_saves

Answer = list[dict[str, float]]


class _Block(nnx.Module):
    def __init__(self, key: jax.Array, mib: int) -> None:
        self.base = nnx.Param(jax.random.normal(key, (base_rows(mib), WIDTH)))
        self.down = nnx.LoRAParam(0.01 * jax.random.normal(key, (WIDTH, RANK)))
        self.up = nnx.LoRAParam(jnp.zeros((RANK, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x * self.base[0] + x @ self.down[...] @ self.up[...])


class _Model(nnx.Module):
    def __init__(self, mib: int) -> None:
        self.blocks = nnx.List([_Block(key, mib) for key in jax.random.split(jax.random.key(0), BLOCKS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def _loss(model: _Model, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


@nnx.jit
def _update(model: _Model, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    gradients = nnx.grad(_loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
    optimizer.update(model, gradients)


def save_by_us(directory: str, mib: int, saves: int, frozen: str | None) -> Answer:
    """Saves of the model and its optimiser by a `StepManager`."""
    with jct.StepManager(directory, preservation_policy=jct.PreserveAll(), frozen=frozen) as manager:

        def save(step: int, state: Any) -> None:
            manager.save(step, {"state": state})
            manager.wait()

        return _saves(directory, mib, saves, save, lambda model, optimizer: (model, optimizer))


def save_by_orbax(directory: str, mib: int, saves: int) -> Answer:
    """Saves of the same arrays by Orbax, with its default options, and synced."""
    subject = subjects_orbax.OrbaxV0()

    def save(step: int, state: Any) -> None:
        path = Path(directory, str(step))
        subject.start_save(path, state)()
        page_cache.sync_tree(path)

    found = _saves(directory, mib, saves, save, _arrays)
    subject.close()
    return found


def _arrays(model: _Model, optimizer: nnx.Optimizer) -> Any:
    leaves = jax.tree.leaves(nnx.state((model, optimizer)))
    return {f"a{number:03d}": leaf for number, leaf in enumerate(leaves)}


def _saves(
    directory: str,
    mib: int,
    saves: int,
    save: Callable[[int, Any], None],
    state_of: Callable[[_Model, nnx.Optimizer], Any],
) -> Answer:
    model = _Model(mib)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    x = jnp.ones((4, WIDTH))

    def update() -> Any:
        _update(model, optimizer, x)
        return jax.block_until_ready(state_of(model, optimizer))

    return measured_saves(directory, mib, saves, update, save)
