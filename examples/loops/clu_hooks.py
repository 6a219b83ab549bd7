"""A loop in clu's style: it calls `hook(step)` after each update, and one of its hooks saves.

    python examples/loops/clu_hooks.py WORKDIR

Stop it with `kill` and run the same command again: it resumes after the last update. With clu itself (whose
`periodic_actions` need TensorFlow) the first hook is its `ReportProgress`, and the second stays as it is.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxckpt_train as jct

Hook = Callable[..., Any]
OPTIMIZER = optax.adam(1e-2)


class ReportProgress:
    """Like clu's periodic actions: called as `action(step, t)` after every update, it acts at some of them."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps, self._before = every_steps, (0, time.monotonic())

    def __call__(self, step: int, t: float | None = None) -> bool:
        """Print the speed of the training if it is due."""
        now = time.monotonic() if t is None else t
        if step % self._every_steps:
            return False
        print(f"step {step}: {(step - self._before[0]) / max(now - self._before[1], 1e-9):.0f} steps/s")
        self._before = step, now
        return True


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """One update of a linear classifier."""

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        logits = batch["image"] @ params["w"] + params["b"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}


def batches(batch_size: int) -> grain.DatasetIterator:
    """Endless shuffled batches of handwritten digits."""
    images, labels = load_digits(return_X_y=True)
    examples = grain.MapDataset.range(len(labels)).seed(0).shuffle().repeat()
    pairs = examples.map(lambda index: {"image": (images[index] / 16).astype("float32"), "label": labels[index]})
    return iter(pairs.batch(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1)))


def train(workdir: str, num_steps: int, more_hooks: Sequence[Hook] = ()) -> dict[str, Any]:
    """Start or resume the training, and return the state after `num_steps` updates."""
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    state: dict[str, Any] = {"params": params, "opt_state": OPTIMIZER.init(params)}
    with jct.CheckpointCallback(workdir, save_interval_steps=50, keep_latest=2) as ckpt:
        state, data = ckpt.resume(state, batches(batch_size=32))
        metrics: dict[str, Any] = {}
        hooks = [
            ReportProgress(every_steps=100),
            *more_hooks,
            # It looks at `state` when it is called, and sees the newest one. In a job of several processes all of them
            # need this hook, not only process 0.
            ckpt.as_hook(lambda: state, get_metrics=lambda: metrics),
        ]
        for step in range(ckpt.completed_steps, num_steps):
            state, metrics = train_step(state, next(data))
            for hook in hooks:
                # As clu's documentation has it: the number of completed updates. Where a loop calls `hook(step)`, as
                # Flax's examples do, the hook is made by `ckpt.as_hook(..., first_step=0)`.
                hook(step + 1)
    return state


if __name__ == "__main__":
    train(sys.argv[1], num_steps=300)
