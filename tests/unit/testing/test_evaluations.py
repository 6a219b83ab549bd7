"""Evaluations between two updates: their unsaved changes are found, whichever update the user interrupts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import jaxckpt_train as jct
from jaxckpt_train.testing import ResumeNotExactError
from tests.support.evaluations import CHANGES, EVERY, UPDATES, Place, counts, is_due
from tests.support.in_one_process import prove_here
from tests.support.training_loops import Batches


def replaces(directory: Path, polls: bool = True, place: Place = "after") -> None:
    """A loop whose evaluation returns a new state, as one that draws from a key in the state does."""
    state, data = {"w": np.zeros(3), "draws": 0}, Batches()
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume(state, data)
        for step in ckpt.steps(UPDATES):
            if place == "top" and is_due(step):
                state = {**state, "draws": state["draws"] + 1}
            state = {**state, "w": state["w"] + next(data)["x"].sum(axis=0)}
            ckpt(state)
            if polls and is_due(step + 1):
                ckpt.poll()
            if place == "after" and is_due(step + 1):
                state = {**state, "draws": state["draws"] + 1}


def normalizes(directory: Path, evaluates_as: str = "train") -> None:
    """A loop whose evaluation updates batch statistics, because it runs in training mode by mistake."""
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        model, data = ckpt.resume(model, Batches())
        for step in ckpt.steps(UPDATES):
            model.train()
            model(next(data)["x"])
            ckpt()
            if is_due(step + 1):
                model.eval() if evaluates_as == "eval" else model.train()
                model(np.ones((4, 3)))


def failure(make_run: Any, directory: Path, *kill_at: int) -> ResumeNotExactError:
    with pytest.raises(ResumeNotExactError) as caught:
        prove_here(make_run, directory / "proof", *kill_at)
    return caught.value


FAULTY = {
    "an object": (counts, "update 5: meter/count differs: 1 (uninterrupted) vs 5;"),
    "an object, with poll": (functools.partial(counts, polls=True), "update 5: meter/count differs: 1"),
    "a new state, with poll": (replaces, "update 5: state/draws differs: 1 (uninterrupted) vs 0;"),
    "batch statistics": (normalizes, "update 5: state/mean float32[3] differs"),
}


@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.parametrize("kill_at", [2, 7])
def test_change_by_evaluation_is_found_in_any_update(kind: str, kill_at: int, tmp_path: Path) -> None:
    make_run, first = FAULTY[kind]
    error = failure(make_run, tmp_path, kill_at)
    assert str(error).startswith(first)
    assert error.causes[0] == CHANGES


@pytest.mark.parametrize(
    ("make_run", "tried"),
    [
        (functools.partial(counts, place="before"), False),
        (functools.partial(counts, place="before", polls=True), True),
        (functools.partial(counts, place="top"), True),
        (functools.partial(replaces, place="top"), True),
        (functools.partial(normalizes, evaluates_as="eval"), False),
        (functools.partial(counts, updates=EVERY), False),  # nothing follows the last update
    ],
)
def test_an_evaluation_that_resumes_exactly_is_proven(make_run: Any, tried: bool, tmp_path: Path) -> None:
    proof = prove_here(make_run, tmp_path / "proof", 2)
    assert (proof.interrupted_in, proof.resumed_at) == (((2, 4), (1, 4)) if tried else ((2,), (1,)))
    assert not (tmp_path / "proof").exists()


def test_resume_right_before_evaluation_is_not_tried_twice(tmp_path: Path) -> None:
    proof = prove_here(functools.partial(counts, place="top"), tmp_path / "proof", 5)
    assert (proof.interrupted_in, proof.resumed_at) == ((5,), (4,))


def test_hidden_change_by_evaluation_is_found(tmp_path: Path) -> None:
    silent = functools.partial(replaces, polls=False)
    prove_here(silent, tmp_path / "unseen", 2)
    error = failure(silent, tmp_path, 2, 5)
    assert str(error).startswith("update 5: state/draws differs")
    assert error.causes[0] == CHANGES
