"""A loop with evaluations between two updates, which may change a saved object."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

import jaxckpt_train as jct
from tests.support.training_loops import Batches

EVERY, UPDATES = 4, 8
Place = Literal["after", "before", "top"]
CHANGES = "the state changes between ckpt(...) and the next update (an evaluation?)"


class Meter:
    """Counts the updates since the last evaluation, as metrics of an epoch do."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count = int(state["count"])


def is_due(updates: int) -> bool:
    return updates > 0 and updates % EVERY == 0


def counts(directory: Path, place: Place = "after", polls: bool = False, updates: int = UPDATES) -> None:
    """A loop whose evaluation resets a saved object."""
    meter, state, data = Meter(), {"w": np.zeros(3)}, Batches()
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data, meter = ckpt.resume(state, data, meter=meter)
        for step in ckpt.steps(updates):
            if place == "top" and is_due(step):
                meter.count = 0
            state = {"w": state["w"] + next(data)["x"].sum(axis=0)}
            meter.count += 1
            if place == "before" and is_due(step + 1):
                meter.count = 0
            ckpt(state)
            if place == "after" and is_due(step + 1):
                meter.count = 0
            if polls and is_due(step + 1):
                ckpt.poll()
