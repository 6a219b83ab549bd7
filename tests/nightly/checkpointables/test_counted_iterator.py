"""CountedIterator: a training that is killed or preempted continues with the data of the saved loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct


def noisy(start: int) -> Iterator[np.ndarray]:
    for number in itertools.count(start):
        yield np.random.default_rng([1, number]).normal(size=4).astype(np.float32)


def train(directory: Path) -> None:
    with jct.CheckpointCallback(directory, save_interval_steps=3) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(4)}, jct.CountedIterator(noisy))
        for _ in ckpt.steps(10):
            state = {"w": state["w"] * 0.9 + next(data)}
            ckpt(state)


@pytest.mark.parametrize("how", ["kill", "preempt"])
def test_training_with_counted_iterator_resumes_exactly(how: Any) -> None:
    jct.testing.assert_resume_exact(train, kill_at=5, how=how)
