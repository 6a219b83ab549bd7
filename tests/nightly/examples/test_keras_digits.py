"""keras_digits.py: preempted within an epoch, the next process resumes exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.compiled_once import environment
from tests.support.runs import talking_to

# Trains; after a batch of the second epoch it prints "here" and waits for input, so that the signal arrives there.
ASKED = """
import sys
import keras
from examples.loops import keras_digits

class Halt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 6):
            print("here", flush=True)
            sys.stdin.readline()

keras_digits.main(sys.argv[1], epochs=2, more_callbacks=(Halt(),))
"""
# Resumes, and trains from the start in another directory: weights, seeds, optimizer and losses must be equal.
GOES_ON = """
import sys
import keras, numpy as np
from examples.loops import keras_digits
from jaxckpt_train.integrations.keras import KerasState

class Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs["loss"].hex())

def trained(directory):
    losses = Losses()
    model = keras_digits.main(directory, epochs=2, more_callbacks=(losses,))
    values = KerasState(model).values()
    return {name: [np.asarray(each).tobytes() for each in group] for name, group in values.items()}, losses.seen

resumed, some = trained(sys.argv[1])
alone, every = trained(sys.argv[2])
print("losses", len(some), len(every), some[7:] == every[47:], len(set(every)))
print("state", *[f"{name} {len(group)} {resumed[name] == group}" for name, group in alone.items()])
"""


def test_preempted_training_resumes_in_another_process(
    tmp_path: Path, run_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"KERAS_BACKEND": "jax", "PYTHONWARNINGS": "error", **environment(tmp_path / "compiled")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with talking_to(ASKED, tmp_path / "run") as training:
        while training.read() != "here":
            pass
        os.kill(training.process.pid, signal.SIGTERM)
        training.tell("go on")
        assert training.finish()[0] == 75
    assert jct.StepManager(tmp_path / "run").latest == 47
    printed = run_python(GOES_ON, tmp_path / "run", tmp_path / "alone", check=True).stdout.splitlines()
    assert "losses 40 80 True 80" in printed
    counts = {"trainable_variables": 6, "non_trainable_variables": 3, "metrics_variables": 4, "optimizer_variables": 14}
    for name, count in counts.items():
        assert f" {name} {count} True" in printed[-1]
