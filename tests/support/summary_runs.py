"""Short runs, and the rows of their summaries."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jaxckpt_train as jct
from jaxckpt_train.run.goodput import Goodput
from tests.support.runs import Counter, state_of


def callback(directory: Path, **options: Any) -> jct.CheckpointCallback:
    return jct.CheckpointCallback(str(directory), **{"save_interval_steps": 10, **options})


def train(ckpt: jct.CheckpointCallback, updates: int, asked_at: int | None = None) -> None:
    with ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(updates):
            next(data)
            if step + 1 == asked_at:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt(state_of(step + 1))


def rows(found: Goodput) -> list[tuple[Any, ...]]:
    """Return the row of each process."""
    names = ("how", "first_step", "last_step", "useful_steps", "redone_steps", "saves")
    return [tuple(getattr(each, name) for name in names) for each in found.attempts]
