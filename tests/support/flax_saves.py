"""Saves as in Flax's loops: with the real `flax.training.checkpoints`, as msgpack files or through Orbax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import numpy as np
from flax.training import checkpoints


@contextlib.contextmanager
def by_orbax(is_on: bool) -> Iterator[None]:
    """Let Flax write its checkpoints through Orbax, or not."""
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", is_on)
    try:
        yield
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)


def state_of(step: float) -> dict[str, Any]:
    """Return a state that differs at each step."""
    return {"params": {"w": np.arange(6.0).reshape(2, 3) + step, "b": np.float32(step) * np.ones(3, np.float32)}}


def save(directory: Path, *steps: float, orbax: bool = False, keep: int = 100, **options: Any) -> None:
    """Save the states of some steps in order."""
    with by_orbax(orbax):
        for step in steps:
            checkpoints.save_checkpoint(str(directory), state_of(step), step, keep=keep, **options)
