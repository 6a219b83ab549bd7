"""A trainer in Levanter's style: `trainer.add_hook(ckpt.on_step, every=1)`.

    python examples/loops/levanter_hooks.py WORKDIR

The trainer here has the parts of Levanter's trainer that hooks see. With Levanter itself, `resume` and `add_hook` are
used as in `main`, and `ckpt.on_step` replaces Levanter's own checkpointer among the hooks.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jaxckpt_train as jct

OPTIMIZER = optax.adam(1e-2)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "model", "opt_state", "training_key"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainerState:
    """`step` counts the completed updates, as an array."""

    step: jax.Array
    model: dict[str, jax.Array]
    opt_state: Any
    training_key: jax.Array

    @property
    def saveable_state(self) -> TrainerState:
        """The saved part of the state: Levanter leaves out what is not trained; here everything is trained."""
        return self


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """The argument of hooks: `step` is the number of the last update, counted from 0."""

    state: TrainerState
    loss: float

    @property
    def step(self) -> int:
        """Number of the last update: one less than the number of completed updates."""
        return int(self.state.step) - 1


class Trainer:
    """Runs updates, and its hooks after each of them."""

    def __init__(self, num_train_steps: int) -> None:
        self._num_train_steps = num_train_steps
        self._hooks: list[tuple[Callable[[StepInfo], Any], int]] = []

    def add_hook(self, hook: Callable[[StepInfo], Any], *, every: int = 1) -> None:
        """Call a hook after each update whose number, counted from 0, is a multiple of `every`."""
        self._hooks.append((hook, every))

    def run_hooks(self, info: StepInfo, force: bool = False) -> None:
        """Call the hooks that are due; at the end all of them, plain functions without `force`."""
        for hook, every in self._hooks:
            if force or info.step % every == 0:
                hook(info)

    def train(self, state: TrainerState, batches: Iterator[dict[str, Any]]) -> TrainerState:
        """Train until the number of updates is reached."""
        info = None
        while int(state.step) < self._num_train_steps:
            state, loss = train_step(state, next(batches))
            info = StepInfo(state, float(loss))
            self.run_hooks(info)
        if info is not None:
            self.run_hooks(info, force=True)
        return state


@jax.jit
def train_step(state: TrainerState, batch: dict[str, Any]) -> tuple[TrainerState, jax.Array]:
    """One update of a linear classifier, with noise on its inputs."""
    key, noise_key = jax.random.split(state.training_key)
    images = batch["image"] + 0.1 * jax.random.normal(noise_key, batch["image"].shape)

    def loss_of(model: dict[str, jax.Array]) -> jax.Array:
        logits = images @ model["w"] + model["b"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.model)
    updates, opt_state = OPTIMIZER.update(gradients, state.opt_state)
    return TrainerState(state.step + 1, optax.apply_updates(state.model, updates), opt_state, key), loss


def batches_from(step: int, batch_size: int = 32) -> Iterator[dict[str, Any]]:
    """The batches from update `step` on: as with Levanter's loader, the step determines the position in the data."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    while True:
        chosen = [(step * batch_size + index) % len(labels) for index in range(batch_size)]
        yield {"image": images[chosen], "label": labels[chosen]}
        step += 1


def main(workdir: str, num_train_steps: int, *more_hooks: Callable[[StepInfo], Any]) -> TrainerState:
    """Start or resume the training, and return the state at the end."""
    model = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    state = TrainerState(jnp.int32(0), model, OPTIMIZER.init(model), jax.random.key(0))
    trainer = Trainer(num_train_steps)
    with jct.CheckpointCallback(workdir, save_interval_steps=50, keep_latest=2) as ckpt:
        state, batches = ckpt.resume(state.saveable_state, jct.CountedIterator(batches_from))
        for hook in more_hooks:
            trainer.add_hook(hook, every=1)
        trainer.add_hook(ckpt.on_step, every=1)  # it decides by itself which updates are saved
        return trainer.train(state, batches)


if __name__ == "__main__":
    main(sys.argv[1], num_train_steps=300)
