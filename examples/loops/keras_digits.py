"""Handwritten digits with Keras 3 on JAX: `model.fit` that resumes bit for bit, also within an epoch.

    KERAS_BACKEND=jax python examples/loops/keras_digits.py WORKDIR

Stop it (`kill`, on which it exits with code 75, or `kill -9`) and run the same command again.
"""

from __future__ import annotations

import sys
from typing import Any

import grain
import keras
import numpy as np
from sklearn.datasets import load_digits

from jaxckpt_train.integrations.keras import KerasCheckpoint

BATCH_SIZE, STEPS_PER_EPOCH, HELD_OUT = 32, 40, 300


def dataset(images: np.ndarray, labels: np.ndarray) -> grain.IterDataset:
    """Endless shuffled batches, each image with noise."""

    def noisy(index: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        noise = rng.normal(scale=0.1, size=images.shape[1:])
        return (images[index] + noise).astype("float32"), labels[index]

    examples = grain.MapDataset.range(len(labels)).seed(0).shuffle().repeat()
    return examples.random_map(noisy).batch(BATCH_SIZE).to_iter_dataset(grain.ReadOptions(num_threads=1))


def build_model() -> keras.Model:
    """Two layers with dropout, whose seeds are saved as well, and with batch normalisation."""
    layers = [
        keras.layers.Dense(32, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential([keras.layers.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def main(workdir: str, epochs: int = 5, more_callbacks: tuple[Any, ...] = ()) -> keras.Model:
    """Start the training, or resume it."""
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = images / 16, labels.astype("int32")  # JAX has no int64 by default
    with KerasCheckpoint(workdir, save_interval_steps=25, keep_latest=2) as ckpt:
        model = build_model()
        model.fit(
            ckpt.data(dataset(images[HELD_OUT:], labels[HELD_OUT:]), steps_per_epoch=STEPS_PER_EPOCH),
            validation_data=(images[:HELD_OUT], labels[:HELD_OUT]),
            epochs=epochs,
            callbacks=[*more_callbacks, ckpt],
            verbose=2,
        )
    # Only reached at the end of the training: after a request to leave the process has exited with code 75.
    return model


if __name__ == "__main__":
    main(sys.argv[1])
