"""A loop that was written for Orbax's `CheckpointManager`: only its import has changed.

    python examples/loops/orbax_manager.py WORKDIR

It saves the state, the position in the data and some notes, and ends early after SIGTERM, as in Orbax's documentation.
The same command resumes it.
"""

from __future__ import annotations

import sys
from typing import Any

import grain
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from jaxckpt_train.integrations import orbax_manager as ocp  # instead of: import orbax.checkpoint as ocp

OPTIMIZER = optax.adam(1e-2)


@jax.jit
def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    """One update of a linear classifier."""

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        logits = batch["image"] @ params["w"] + params["b"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def batches(batch_size: int) -> grain.DatasetIterator:
    """Endless shuffled batches of handwritten digits."""
    images, labels = load_digits(return_X_y=True)
    examples = grain.MapDataset.range(len(labels)).seed(0).shuffle().repeat()
    pairs = examples.map(lambda index: {"image": (images[index] / 16).astype("float32"), "label": labels[index]})
    return iter(pairs.batch(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1)))


def train(workdir: str, num_steps: int) -> dict[str, Any]:
    """Start or resume the training, and return the state at the end, or after a request to leave."""
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    state: dict[str, Any] = {"params": params, "opt_state": OPTIMIZER.init(params)}
    data, start = batches(batch_size=32), 0
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=50, max_to_keep=3, best_fn=lambda metrics: -metrics["loss"]
    )
    with ocp.CheckpointManager(workdir, options=options) as manager:
        if manager.latest_step() is not None:
            restored = manager.restore(
                manager.latest_step(),
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(state),
                    data=ocp.args.CheckpointRestore(data),  # with Orbax and Grain: grain.checkpoint.CheckpointRestore
                    notes=ocp.args.JsonRestore(),
                ),
            )
            state, start = restored.state, restored.notes["completed"]
        for step in range(start + 1, num_steps + 1):
            state, loss = train_step(state, next(data))
            is_asked = manager.reached_preemption(step)
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.CheckpointSave(data),
                    notes=ocp.args.JsonSave({"completed": step}),
                ),
                metrics={"loss": loss},
                force=step == num_steps,
            )
            if is_asked:
                print(f"asked to leave: step {step} is saved")
                break
    return state


if __name__ == "__main__":
    train(sys.argv[1], num_steps=300)
