"""The structure of Flax's own examples, `train_and_evaluate(config, workdir)`: what has to change, and what stays.

    python examples/loops/flax_train_and_evaluate.py WORKDIR

Comments that start with `was:` show the lines for checkpoints in Flax's examples.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import flax.linen as nn
import grain
import jax
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import jaxckpt_train as jct


@dataclasses.dataclass
class Config:
    """What Flax's examples read from their `ml_collections.ConfigDict`."""

    num_train_steps: int = 200
    eval_every_steps: int = 50
    checkpoint_every_steps: int = 40
    batch_size: int = 32
    learning_rate: float = 0.1


class TrainState(train_state.TrainState):
    """Flax's train state, with the key that dropout draws from: it is saved with the rest."""

    key: jax.Array


class Classifier(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Logits [batch, 10] of images [batch, 64]."""
        hidden = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(32)(images)))
        return nn.Dense(10)(hidden)


def get_datasets(config: Config) -> tuple[grain.DatasetIterator, dict[str, Any]]:
    """Endless shuffled batches to train on, and one batch to evaluate on."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    examples = grain.MapDataset.range(300, len(labels)).seed(0).shuffle().repeat()
    pairs = examples.map(lambda index: {"image": images[index], "label": labels[index]})
    batches = pairs.batch(config.batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1))
    return iter(batches), {"image": images[:300], "label": labels[:300]}


@jax.jit
def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update."""
    key, dropout_key = jax.random.split(state.key)

    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["image"], train=True, rngs={"dropout": dropout_key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients, key=key), {"loss": loss}


@jax.jit
def eval_step(state: TrainState, batch: dict[str, Any]) -> jax.Array:
    """The fraction of right answers."""
    logits = state.apply_fn({"params": state.params}, batch["image"], train=False)
    return (logits.argmax(-1) == batch["label"]).mean()


def train_and_evaluate(config: Config, workdir: str) -> TrainState:
    """Start or resume the training, and return the state at the end."""
    train_iter, eval_batch = get_datasets(config)
    init_key, key = jax.random.split(jax.random.key(0))
    model = Classifier()
    params = jax.jit(lambda key: model.init(key, eval_batch["image"][:1], train=False)["params"])(init_key)
    tx = optax.sgd(config.learning_rate, momentum=0.9)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, key=key)

    with jct.CheckpointCallback(workdir, save_interval_steps=config.checkpoint_every_steps, keep_latest=3) as ckpt:
        # was: state = checkpoints.restore_checkpoint(workdir, state)
        # was: start_step = int(state.step)
        state, train_iter = ckpt.resume(state, train_iter)  # and the data continues at its position
        # was: for step in range(start_step, config.num_train_steps):
        for step in ckpt.steps(config.num_train_steps):
            state, metrics = train_step(state, next(train_iter))
            # was: if step % config.checkpoint_every_steps == 0 or is_last_step:
            # was:     checkpoints.save_checkpoint_multiprocess(workdir, state, step, keep=3)
            # Called after every update, before the evaluation: it decides by itself, and the last update is saved.
            ckpt(state, metrics=metrics)
            if (step + 1) % config.eval_every_steps == 0:
                print(f"step {step + 1}: accuracy {float(eval_step(state, eval_batch)):.3f}")
    return state


if __name__ == "__main__":
    train_and_evaluate(Config(), sys.argv[1])
