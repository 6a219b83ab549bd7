"""Handwritten digits with Flax Linen, Optax, Grain and Hydra, in a loop that resumes bit for bit.

Run it, stop it (`kill`, on which it exits with code 75, or `kill -9`), and run the same command again:

    python examples/train_digits.py
    python examples/train_digits.py checkpoint=preemptible checkpoint.directory=/data/digits steps=5000
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import grain
import hydra
import jax
import numpy as np
import optax
from flax.training import train_state
from omegaconf import DictConfig
from sklearn.datasets import load_digits

import jaxckpt_train as jct

Batch = dict[str, Any]


class Classifier(nn.Module):
    """Two dense layers with dropout between them."""

    hidden: int
    dropout: float

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Logits [batch, 10] of images [batch, 64]."""
        hidden = nn.relu(nn.Dense(self.hidden)(images))
        hidden = nn.Dropout(self.dropout, deterministic=not train)(hidden)
        return nn.Dense(10)(hidden)


class TrainState(train_state.TrainState):
    """Flax's train state and the PRNG key that dropout draws from: a checkpoint of it holds all that a resume needs."""

    key: jax.Array


def dataset(images: np.ndarray, labels: np.ndarray, cfg: DictConfig) -> grain.IterDataset:
    """Endless shuffled batches, each image with noise; Grain's position is saved with the state."""

    def noisy(index: int, rng: np.random.Generator) -> Batch:
        noise = rng.normal(scale=0.1, size=images.shape[1:])
        return {"image": (images[index] + noise).astype(np.float32), "label": labels[index]}

    examples = grain.MapDataset.range(len(labels)).seed(cfg.seed).shuffle().repeat()
    return examples.random_map(noisy).batch(cfg.batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1))


@jax.jit(donate_argnames="state")
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update. The old state is donated, also while a save of it is running."""
    key, dropout_key = jax.random.split(state.key)

    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["image"], train=True, rngs={"dropout": dropout_key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients, key=key), {"loss": loss}


@hydra.main(version_base=None, config_path="conf", config_name="train_digits")
def main(cfg: DictConfig) -> None:
    """Start the training, or resume it."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16.0
    held_out = len(labels) // 5
    data = iter(dataset(images[held_out:], labels[held_out:], cfg))

    model = Classifier(cfg.hidden, cfg.dropout)
    init_key, key = jax.random.split(jax.random.key(cfg.seed))
    params = jax.jit(lambda key: model.init(key, images[:1], train=False)["params"])(init_key)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(cfg.learning_rate), key=key)

    with jct.CheckpointCallback.from_config(cfg.checkpoint) as ckpt, open(cfg.losses, "a", buffering=1) as losses:
        state, data = ckpt.resume(state, data)
        print(f"starting after {ckpt.completed_steps} of {cfg.steps} updates")
        for step in ckpt.steps(cfg.steps):
            # This line only queues the work for the device.
            state, metrics = train_step(state, next(data))
            # Here the loop waits for the device: float() needs the value. A log of every 100th update would cost less.
            # Written before the update is saved: after a preemption each update is in the log once; after a crash those
            # since the last save are there again, with the same values.
            losses.write(f"{step + 1} {float(metrics['loss']).hex()}\n")
            # Nothing is due: returns in microseconds. A save is: returns as soon as the state is safe from the next
            # update, and writes in the background.
            ckpt(state, metrics=metrics)
    # Only reached at the end of the training: after a request to leave the process has exited with code 75.

    logits = model.apply({"params": state.params}, images[:held_out], train=False)
    accuracy = np.mean(np.argmax(logits, axis=-1) == labels[:held_out])
    print(f"{ckpt.completed_steps} updates, accuracy on {held_out} held-out digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
