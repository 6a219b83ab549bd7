"""Trainings with `model.fit`: a model with all kinds of state, data of three kinds, interruptions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import keras
import numpy as np

from jaxckpt_train.integrations.keras import KerasCheckpoint, KerasState

STEPS, EPOCHS = 5, 3
INPUTS = np.random.RandomState(0).normal(size=(40, 6)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


class Shuffled:
    """An iterator of batches whose state it changes in place."""

    def __init__(self) -> None:
        self._state = {"count": 0}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        self._state["count"] += 1
        rows = np.random.RandomState(self._state["count"]).permutation(40)[:8]
        return INPUTS[rows], TARGETS[rows]

    def get_state(self) -> dict[str, int]:
        return self._state

    def set_state(self, state: dict[str, int]) -> None:
        self._state = state


class Reordered(keras.utils.PyDataset):
    """A data set that shuffles its current order after each epoch."""

    def __init__(self, rng: Any, **more: Any) -> None:
        super().__init__(**more)
        self._rng, self._rows = rng, np.arange(len(INPUTS))

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows[index * 8 : (index + 1) * 8]
        return INPUTS[rows], TARGETS[rows]

    def on_epoch_end(self) -> None:
        self._rng.shuffle(self._rows)


def grain_data() -> grain.IterDataset:
    """Return batches of a shuffled data set that ends within the second epoch and restarts."""
    rows = grain.MapDataset.range(40).shuffle(seed=3).repeat(2).batch(8)
    return rows.map(lambda index: (INPUTS[index], TARGETS[index])).to_iter_dataset()


class AskToLeave(keras.callbacks.Callback):
    """Sends SIGTERM to its own process within a batch, of the training or of the validation, of an epoch."""

    def __init__(self, epoch: int, batch: int, validating: bool = False) -> None:
        super().__init__()
        self.epoch, self._at, self._validating, self._epoch = epoch, (epoch, batch), validating, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._ask(batch, False)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._ask(batch, True)

    def _ask(self, batch: int, validating: bool) -> None:
        if ((self._epoch, batch), validating) == (self._at, self._validating):
            os.kill(os.getpid(), signal.SIGTERM)


class Watch(keras.callbacks.Callback):
    """Records the first reported loss of each batch, and the logs of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: dict[tuple[int, int], float] = {}
        self.epochs: dict[int, dict[str, float]] = {}
        self._epoch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.setdefault((self._epoch, batch), logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs[epoch] = dict(logs)


class Skewed(keras.layers.Layer):
    """A layer with a seed and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.3, seed=7)
        self.norm = keras.layers.BatchNormalization()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.norm(self.dropout(inputs, training=training), training=training)


def build(**compiled: Any) -> keras.Model:
    """Return a model whose optimizer has moments and averaged weights, which replace the weights at the end."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4), Skewed(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def fit(directory: Path | None, kind: str, watch: Watch, ask: AskToLeave | None = None) -> dict[str, list[bytes]]:
    """Train or resume, and return the final state. Without a `directory`, nothing is saved."""
    model = build(steps_per_execution=2 if kind == "iterator" else 1)
    ckpt = KerasCheckpoint(directory or "none", enabled=directory is not None)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    data: dict[str, Any] = {"x": INPUTS, "y": TARGETS, "batch_size": 8}
    if kind != "arrays":
        data = {"x": ckpt.data(grain_data() if kind == "grain" else Shuffled(), steps_per_epoch=STEPS)}
    validation = {"validation_data": (INPUTS, TARGETS), "validation_batch_size": 20}
    callbacks = [schedule, watch, *([] if ask is None else [ask]), ckpt]
    model.fit(**data, **validation, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    values = KerasState(model).values()
    return {name: [np.asarray(value).tobytes() for value in group] for name, group in values.items()}
