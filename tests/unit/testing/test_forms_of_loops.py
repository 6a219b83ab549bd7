"""Loops of other forms: objects restored in place, data passed again, iterated data, hooks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxckpt_train as jct
from jaxckpt_train import loop as loop_observer
from jaxckpt_train.testing import ResumeNotExactError
from jaxckpt_train.testing.processes import Plan, ScriptTarget
from jaxckpt_train.testing.recorder import Recorder
from tests.support.in_one_process import prove_here
from tests.support.training_loops import Batches


class Model(nnx.Module):
    """A linear layer behind dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(3, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: np.ndarray) -> jax.Array:
        return self.linear(self.dropout(x))


def in_place(directory: Path, whole: bool = True, returned: bool = True) -> None:
    """A loop with NNX objects restored in place; `whole=False` leaves the optimizer out by mistake."""
    model, data = Model(nnx.Rngs(0)), Batches()
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    with jct.CheckpointCallback(directory, save_interval_steps=2) as ckpt:
        _, same = ckpt.resume((model, optimizer) if whole else model, data)
        for _ in ckpt.steps(5):
            x = next(same if returned else data)["x"].astype(np.float32)

            def loss_of(model: Model, x: np.ndarray = x) -> jax.Array:
                return ((model(x)[:, 0] - 1) ** 2).mean()

            loss, grads = nnx.value_and_grad(loss_of)(model)
            optimizer.update(model, grads)
            ckpt(metrics={"loss": loss})


def test_objects_in_place_resume_exactly(tmp_path: Path) -> None:
    proof = prove_here(in_place, tmp_path / "proof", 3)
    assert (proof.resumed_at, proof.compared_updates, proof.compared_batches) == ((2,), 3, 3)


def test_ignored_iterator_is_proven_by_losses(tmp_path: Path) -> None:
    proof = prove_here(functools.partial(in_place, returned=False), tmp_path / "proof", 3)
    assert (proof.compared_updates, proof.compared_batches) == (3, 0)


def test_missing_optimizer_in_place_is_found(tmp_path: Path) -> None:
    with pytest.raises(ResumeNotExactError, match=r"^update 3: state/linear/bias float32\[1\] differs") as caught:
        prove_here(functools.partial(in_place, whole=False), tmp_path / "proof", 3)
    assert caught.value.causes[0].startswith("the optimizer state is not saved")


class Opaque:
    """A batch whose content cannot be compared."""

    def __init__(self, value: int) -> None:
        self.value = value


def opaque(directory: Path, forgets: bool = False) -> None:
    """A loop over opaque batches; with `forgets` it continues from a wrong one after a resume."""
    data = iter(grain.MapDataset.range(20).map(Opaque).to_iter_dataset(grain.ReadOptions(num_threads=1)))
    with jct.CheckpointCallback(directory, save_interval_steps=2) as ckpt:
        state, same = ckpt.resume({"sum": np.int64(0)}, data)
        for step in ckpt.steps(5):
            was_resumed = ckpt.completed_steps > 0 and step == 4
            state = {"sum": state["sum"] + next(same).value + (forgets and was_resumed and is_second(directory))}
            ckpt(state)


def is_second(directory: Path) -> bool:
    return (directory / "step-0000000002").exists() and directory.parent.name == "interrupted"


def test_opaque_batches_do_not_count_as_equal(tmp_path: Path) -> None:
    proof = prove_here(opaque, tmp_path / "proof", 3)
    assert (proof.compared_updates, proof.compared_batches) == (3, 0)
    with pytest.raises(ResumeNotExactError, match=r"batch, an object .*Opaque"):
        prove_here(functools.partial(opaque, forgets=True), tmp_path / "other", 3)


class Forgetful:
    """A checkpointable that saves its state but does not restore it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get_state(self) -> dict[str, int]:
        return {"value": self.value}

    def set_state(self, state: dict[str, int]) -> None:
        pass


def test_initial_save_is_compared_after_restore(tmp_path: Path) -> None:
    def run(directory: Path) -> None:
        with jct.CheckpointCallback(directory, save_interval_steps=100, save_initial=True) as ckpt:
            is_second = any(directory.glob("step-*"))
            state, _ = ckpt.resume({"w": np.zeros(2)}, kept=Forgetful(int(is_second)))
            for _ in ckpt.steps(4):
                state = {"w": state["w"] + 1}
                ckpt(state)

    with pytest.raises(ResumeNotExactError, match=r"restored from step 0 .*: kept/"):
        prove_here(run, tmp_path / "proof", 3)


def numbers() -> Any:
    return iter(grain.MapDataset.range(20).shuffle(seed=3).to_iter_dataset(grain.ReadOptions(num_threads=1)))


def data_passed_again(directory: Path) -> None:
    """A loop that passes its data to each call of `ckpt(...)` too, as it may pass other checkpointables."""
    with jct.CheckpointCallback(directory, save_interval_steps=2) as ckpt:
        state, data = ckpt.resume({"sum": np.int64(0)}, numbers())
        for _ in ckpt.steps(5):
            state = {"sum": state["sum"] + next(data)}
            ckpt(state, data=data)


def test_saved_data_is_the_plain_iterator(tmp_path: Path) -> None:
    data_passed_again(tmp_path / "alone")
    loop_observer.observe(Recorder(tmp_path, Plan(ScriptTarget(()), str(tmp_path))))
    try:
        data_passed_again(tmp_path / "watched")
    finally:
        loop_observer.observe(None)
    alone, watched = (
        jct.load_checkpointables(tmp_path / run / "step-0000000004", {"data": None})["data"]
        for run in ("alone", "watched")
    )
    assert alone == watched


def data_iterated(directory: Path) -> None:
    """A loop that iterates over its data."""
    with jct.CheckpointCallback(directory, save_interval_steps=2) as ckpt:
        state, data = ckpt.resume({"sum": np.int64(0)}, numbers())
        for _, element in zip(ckpt.steps(5), data, strict=False):
            state = {"sum": state["sum"] + element}
            ckpt(state)


def hooked(directory: Path) -> None:
    """A loop that calls a hook after each step."""
    with jct.CheckpointCallback(directory, save_interval_steps=2) as ckpt:
        state, data = ckpt.resume({"sum": np.int64(0)}, numbers())
        hook = ckpt.as_hook(lambda: state)
        for step in range(ckpt.completed_steps, 5):
            state = {"sum": state["sum"] + next(data)}
            hook(step + 1)


@pytest.mark.parametrize("make_run", [data_passed_again, data_iterated, hooked])
def test_a_loop_of_another_form_resumes_exactly(make_run: Any, tmp_path: Path) -> None:
    proof = prove_here(make_run, tmp_path / "proof", 3)
    assert (proof.updates, proof.resumed_at, proof.compared_updates, proof.compared_batches) == (5, (2,), 3, 3)


def batch_taken_ahead(directory: Path) -> None:
    """A loop that takes a batch ahead of its update, and so saves the position after the next batch."""
    with jct.CheckpointCallback(directory, save_interval_steps=2) as ckpt:
        state, data = ckpt.resume({"sum": np.int64(0)}, numbers())
        coming = next(data)
        for _ in ckpt.steps(5):
            element, coming = coming, next(data)
            state = {"sum": state["sum"] + element}
            ckpt(state)


def test_batch_taken_before_its_update_is_found(tmp_path: Path) -> None:
    with pytest.raises(ResumeNotExactError, match=r"^update 3: number of batches: 1 ") as caught:
        prove_here(batch_taken_ahead, tmp_path / "proof", 3)
    assert caught.value.causes[0].endswith("batches are skipped (1)")
