"""A small training that saves every step, keeps one, and prints its progress line by line.

Run as `python training.py DIRECTORY UPDATES [--off]`: `resumed N` first, then `N LOSS` after each update is handed to
the callback, the loss as exact hexadecimal. A line for update N means that update N - 1 is committed.
"""

from __future__ import annotations

import sys
from typing import Any

import grain
import jax
import jax.numpy as jnp

import jaxckpt_train as jct

SIZE = 500_000


@jax.jit(donate_argnums=0)
def update(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """One update with dropout; the loss depends on all updates before."""
    key, dropout = jax.random.split(state["key"])
    mask = jax.random.bernoulli(dropout, 0.9, (SIZE,))
    gradient = state["weights"] * mask - batch.mean()
    momentum = 0.9 * state["momentum"] + gradient
    weights = state["weights"] - 1e-3 * momentum
    new = {"weights": weights, "momentum": momentum, "key": key, "step": state["step"] + 1}
    return new, jnp.square(weights).mean()


def fresh_state() -> dict[str, jax.Array]:
    """Return the state before training."""
    weights = jax.random.normal(jax.random.key(0), (SIZE,))
    return {"weights": weights, "momentum": jnp.zeros(SIZE), "key": jax.random.key(1), "step": jnp.int32(0)}


def batches() -> Any:
    """Return shuffled batches; the position of the iterator determines the next one."""
    return iter(grain.MapDataset.range(1000).shuffle(seed=3).repeat().batch(4).to_iter_dataset())


def main(directory: str, updates: int, enabled: bool) -> None:
    """Train from the last saved step."""
    ckpt = jct.CheckpointCallback(directory, save_interval_steps=1, keep_latest=1, enabled=enabled)
    with ckpt:
        state, data = ckpt.resume(fresh_state(), batches())
        print(f"resumed {ckpt.completed_steps}", flush=True)
        for step in ckpt.steps(updates):
            state, loss = update(state, jnp.asarray(next(data)))
            ckpt(state)
            print(step + 1, float(loss).hex(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "--off" not in sys.argv)
