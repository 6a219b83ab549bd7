"""`save_on_error`, and `save_now` in an `except` block: a completed update is saved, and no exception is hidden."""

from __future__ import annotations

import errno
import functools
import logging
import math
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxckpt_train as jct
from jaxckpt_train import loop as loop_module
from tests.support.fake_backends import RefusingBackend, callback_on
from tests.support.runs import Counter, state_of, step_of

SELDOM: dict[str, Any] = {"save_interval_steps": 100, "save_on_error": True}


def numbers() -> Any:
    return iter(grain.MapDataset.range(100).to_iter_dataset())


class Failure(Exception):  # noqa: N818
    """The error of a loop."""


def train(
    directory: Path, make_data: Callable[[], Any], error: BaseException | None = None, **options: Any
) -> list[int]:
    """Train to step 5, or fail in update 4 after its batch is taken; return the batches that were taken."""
    seen = []
    with jct.CheckpointCallback(directory, **SELDOM | options) as ckpt:
        state, data = ckpt.resume(state_of(0), make_data())
        for step in ckpt.steps(5):
            seen.append(int(next(data)))
            if error is not None and step == 3:
                raise error
            assert int(state["step"]) == step
            state = state_of(step + 1)
            ckpt(state)
    return seen


@pytest.mark.parametrize("make_data", [Counter, numbers])
@pytest.mark.parametrize("error", [Failure("no"), KeyboardInterrupt(), StopIteration()])
def test_last_completed_update_is_saved_with_its_position(
    tmp_path: Path, make_data: Callable[[], Any], error: BaseException
) -> None:
    expected = jct.IteratorStateError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(expected) as raised:
        train(tmp_path, make_data, error)
    assert expected is not type(error) or raised.value is error
    assert not getattr(error, "__notes__", [])
    assert jct.StepManager(tmp_path).steps == [3]
    assert train(tmp_path, make_data) == [3, 4]


class InPlace(Counter):
    """An iterator whose state is one object, which each element changes."""

    def __init__(self, make_state: Callable[[], Any]) -> None:
        self.state = make_state()

    @property
    def position(self) -> int:  # type: ignore[override]
        return int(np.sum(jax.tree.leaves(self.state)[0]))

    def __next__(self) -> int:
        taken = self.position
        (box,) = self.state.values()
        box[0] += 1
        return taken

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = jax.tree.map(np.array, state)


@pytest.mark.parametrize(
    "make_state",
    [lambda: {"at": [0]}, lambda: {"at": np.zeros(1, np.int64)}, lambda: {"at": {0: np.int64(0)}}],
    ids=["list", "array", "dict"],
)
def test_early_position_is_no_view_of_iterator(tmp_path: Path, make_state: Callable[[], Any]) -> None:
    with pytest.raises(Failure):
        train(tmp_path, lambda: InPlace(make_state), Failure())
    assert jct.StepManager(tmp_path).steps == [3]
    saved = jct.load_checkpointables(jct.StepManager(tmp_path).path(3))["data"]
    assert int(np.sum(jax.tree.leaves(saved)[0])) == 3


@pytest.mark.parametrize("save_on_error", [True, False])
def test_early_position_has_the_fingerprint(tmp_path: Path, save_on_error: bool) -> None:
    with (
        pytest.raises(Failure),
        jct.CheckpointCallback(
            tmp_path, save_interval_steps=100, save_on_error=save_on_error, fingerprint="one"
        ) as ckpt,
    ):
        state, data = ckpt.resume(state_of(0), numbers())
        for step in ckpt.steps(5):
            next(data)
            if step == 2:
                try:
                    raise Failure
                except Failure:
                    assert save_on_error or ckpt.save_now()
                    raise
            ckpt(state)
    with (
        pytest.raises(jct.IteratorStateError, match="'one'"),
        jct.CheckpointCallback(tmp_path, fingerprint="other") as ckpt,
    ):
        ckpt.resume(state_of(0), numbers())


@pytest.mark.parametrize("error", [Failure("no"), KeyboardInterrupt()])
def test_without_the_option_nothing_new_is_saved(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        train(tmp_path, Counter, error, save_on_error=False)
    assert jct.StepManager(tmp_path).steps == []


def test_error_between_two_updates_saves_too(tmp_path: Path) -> None:
    with pytest.raises(Failure), jct.CheckpointCallback(tmp_path, **SELDOM) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(5):
            ckpt(state_of(step + 1))
            if step == 1:
                raise Failure
    assert step_of(jct.StepManager(tmp_path).restore({"state": state_of(0)})) == 2


def test_donated_state_is_not_saved_but_noted(tmp_path: Path) -> None:
    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any) -> Any:
        return {"w": state["w"] + 1}

    with pytest.raises(Failure) as raised, jct.CheckpointCallback(tmp_path, **SELDOM) as ckpt:
        state = ckpt.resume({"w": jnp.zeros(3)})
        for step in ckpt.steps(5):
            state = update(state)
            if step == 2:
                raise Failure
            ckpt(state)
    (note,) = raised.value.__notes__
    assert "step 2 is not saved" in note
    assert jct.StepManager(tmp_path).steps == []


@pytest.mark.parametrize(("is_in_update", "steps"), [(True, []), (False, [2])])
def test_nnx_objects_are_saved_only_until_next_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_in_update: bool, steps: list[int]
) -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(Failure), jct.CheckpointCallback(tmp_path, **SELDOM) as ckpt:
        ckpt.resume(model)
        for step in ckpt.steps(5):
            if is_in_update and step == 2:
                raise Failure
            model.kernel[...] += 1
            ckpt()
            if not is_in_update and step == 1:
                raise Failure
    assert jct.StepManager(tmp_path).steps == steps
    assert any("step 2 is not saved" in record.getMessage() for record in caplog.records) == is_in_update


@pytest.mark.parametrize("per_batch", [1, 2, 3])
@pytest.mark.parametrize("way", ["save_on_error", "save_now", "signal"])
@pytest.mark.parametrize("is_changed", [True, False])
def test_nnx_objects_in_next_update_are_not_saved(tmp_path: Path, per_batch: int, way: str, is_changed: bool) -> None:
    """Also where the position in the data does not say whether an update is under way."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.zeros((2, 2))
    options: dict[str, Any] = {
        "save_interval_steps": 100,
        "save_on_error": way == "save_on_error",
        "on_preemption": "raise",
    }
    with pytest.raises((Failure, jct.Preempted)), jct.CheckpointCallback(tmp_path, **options) as ckpt:
        _, data = ckpt.resume(model, numbers())
        for step in ckpt.steps(9):
            if step == 5:
                if way == "signal":
                    signal.raise_signal(signal.SIGTERM)
                if is_changed:
                    if step % per_batch == 0:
                        next(data)
                    model.kernel[...] += 1
                try:
                    raise Failure
                except Failure:
                    if way == "save_now":
                        ckpt.save_now()
                    raise
            if step % per_batch == 0:
                next(data)
            model.kernel[...] += 1
            ckpt()
    manager = jct.StepManager(tmp_path)
    assert manager.steps == ([5] if per_batch == 1 and not is_changed else [])
    if manager.steps:
        (kernel,) = [each for each in jax.tree.leaves(manager.load()["state"]) if each.ndim == 2]
        assert kernel.tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize("make_array", [np.zeros, lambda size: np.zeros((2, size))[1], lambda size: jnp.zeros(size)])
def test_numpy_arrays_of_failed_update_are_not_saved(tmp_path: Path, make_array: Callable[[int], Any]) -> None:
    with pytest.raises(Failure), jct.CheckpointCallback(tmp_path, **SELDOM) as ckpt:
        state = ckpt.resume({"w": make_array(3)})
        for step in ckpt.steps(5):
            array = state["w"]
            array += 1
            if step == 2:
                raise Failure
            state = {"w": array}
            ckpt(state)
    manager = jct.StepManager(tmp_path)
    assert manager.steps == ([2] if isinstance(state["w"], jax.Array) else [])


def test_failing_save_is_noted_on_the_error(tmp_path: Path) -> None:
    error = Failure("of the loop")
    with (
        pytest.raises(Failure) as raised,
        callback_on(RefusingBackend("rename", "step-", errno.ENOSPC, 9), tmp_path, **SELDOM) as ckpt,
    ):
        ckpt.resume(state_of(0))
        for step in ckpt.steps(5):
            ckpt(state_of(step + 1))
            raise error
    assert raised.value is error
    assert any("failed" in note for note in error.__notes__)


# save_now in an `except` block ---------------------------------------------------------------------------------------


def test_save_now_in_except_saves_completed_update(tmp_path: Path) -> None:
    with pytest.raises(Failure), jct.CheckpointCallback(tmp_path, save_interval_steps=100) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(5):
            try:
                if step == 2:
                    raise Failure  # update 3 is under way
            except Failure:
                assert ckpt.save_now()
                raise
            ckpt(state_of(step + 1))
    assert step_of(jct.StepManager(tmp_path).restore({"state": state_of(0)})) == 2


@pytest.mark.parametrize("first", [0, 2])
def test_save_now_does_not_hide_the_exception(tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int) -> None:
    """Before any update is complete, and where the position in the data is already a later one."""
    with pytest.raises(Failure), jct.CheckpointCallback(tmp_path, save_interval_steps=100) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(5):
            try:
                next(data)
                if step == first:
                    raise Failure
            except Failure:
                assert not ckpt.save_now()
                raise
            ckpt(state_of(step + 1))
    assert any(record.levelno == logging.WARNING and "save_now" in record.getMessage() for record in caplog.records)


def test_save_now_that_fails_keeps_exception_in_sight(tmp_path: Path) -> None:
    with (
        pytest.raises(jct.StorageError) as raised,
        callback_on(RefusingBackend("rename", "step-", errno.ENOSPC, 9), tmp_path, save_interval_steps=1) as ckpt,
    ):
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
        try:
            raise Failure("of the loop")
        except Failure:
            while True:  # until the save in the background has failed
                ckpt.save_now()
    text = "".join(traceback.format_exception(raised.value))
    assert "of the loop" in text


def test_save_now_outside_of_an_exception_still_raises(tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=100, save_on_exit=False) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(2):
            if step == 1:
                with pytest.raises(jct.SettingsError, match="save_now"):
                    ckpt.save_now()
            ckpt(state_of(step + 1))


def model() -> Any:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make_state", "make_data"),
    [
        (model, None),
        (model, Counter),
        (model, numbers),
        (lambda: state_of(0), Counter),
        (lambda: state_of(0), lambda: jct.CountedIterator(lambda first: range(first, 9))),
    ],
    ids=["nnx", "nnx, object", "nnx, grain", "object", "counted"],
)
def test_save_now_after_update_of_loop_without_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_state: Callable[[], Any], make_data: Callable[[], Any] | None
) -> None:
    """Also where taking positions would cost more than its share of the time."""
    monkeypatch.setattr(loop_module, "MAX_POSITION_TIME_SHARE", -math.inf)
    with jct.CheckpointCallback(tmp_path, save_interval_steps=100, save_on_exit=False) as ckpt:
        data: dict[str, Any] = {} if make_data is None else {"data": make_data()}
        found = ckpt.resume(make_state(), **data)
        for _ in range(3):
            for each in data.values():
                next(each)
            ckpt(found[0] if data else found)
            assert ckpt.save_now()
    assert jct.StepManager(tmp_path).latest == 3
