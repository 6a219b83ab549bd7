"""State that drifts from what `resume` was given, data that does not move, and data that ends are reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxckpt_train as jct
from tests.support.runs import Counter

BFLOAT = jnp.ones(2, jnp.bfloat16)


def train(directory: Path, initial: Any, update: Callable[[Any], Any], num_steps: int = 4, interval: int = 1) -> Any:
    with jct.CheckpointCallback(directory, save_interval_steps=interval) as ckpt:
        state = ckpt.resume(initial)
        for _ in ckpt.steps(num_steps):
            state = update(state)
            ckpt(state)
    return state


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def with_loss(state: Any) -> Any:
    return {**state, "loss": jnp.float32(1)}


def appended(state: Any) -> Any:
    return {"log": jnp.append(state["log"], 1.0)}


DRIFTS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "dtype": ({"w": BFLOAT}, lambda state: {"w": state["w"] - jnp.float32(0.1)}, "'w'"),
    "grows": ({"log": jnp.zeros(1)}, appended, "'log'"),
    "new leaf": ({"w": jnp.zeros(1)}, with_loss, "'loss'"),
    "lost leaf": ({"w": jnp.zeros(1), "old": jnp.zeros(2)}, lambda state: {"w": state["w"]}, "'old'"),
    "key to data": ({"key": jax.random.key(0)}, lambda state: {"key": jnp.zeros(2, jnp.uint32)}, "'key'"),
    "nested": ({"opt": (jnp.zeros(2), {"mu": BFLOAT})}, lambda s: jax.tree.map(jnp.float32, s), "'opt/1/mu'"),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_drifted_save_warns_as_next_start_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    initial, update, leaf = DRIFTS[name]
    train(tmp_path, initial, update)
    (warning,) = warnings_of(caplog)
    with pytest.raises(jct.MismatchError) as refused:
        train(tmp_path, initial, update, 6)
    assert "step 1:" in warning
    (difference,) = refused.value.differences
    assert leaf in difference
    if name != "grows":  # its size differs at each step
        assert difference in warning


def test_late_drift_is_reported_at_its_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def update(state: Any) -> Any:
        state = {**state, "step": state["step"] + 1}
        return {**state, "w": jnp.float32(state["w"])} if state["step"] == 5 else state

    train(tmp_path, {"w": BFLOAT, "step": 0}, update, 8, interval=2)
    (warning,) = warnings_of(caplog)
    assert "step 6:" in warning


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_intermediates_of_a_module_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow(nnx.Intermediate, "hidden", x)
            return self.layer(x)

    with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
        model = ckpt.resume(Model())
        for _ in ckpt.steps(2):
            model(jnp.ones((1, 2)))
            ckpt()
    (warning,) = warnings_of(caplog)
    assert "hidden" in warning
    caplog.clear()
    with jct.CheckpointCallback(tmp_path / "popped", save_interval_steps=1) as ckpt:
        model = ckpt.resume(Model())
        for _ in ckpt.steps(2):
            model(jnp.ones((1, 2)))
            nnx.pop(model, nnx.Intermediate)
            ckpt()
    assert warnings_of(caplog) == []


def test_what_the_next_start_takes_is_no_drift(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tx = optax.adam(1e-2)
    params = {"w": jnp.ones(3)}
    initial = {"step": 0, "rate": 0.5, "params": params, "opt": tx.init(params), "key": jax.random.key(1), "none": None}

    def update(state: Any) -> Any:
        updates, opt = tx.update(state["params"], state["opt"], state["params"])
        done = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": jnp.asarray(state["step"])}
        return {**state, **done, "rate": np.float64(0.5).item(), "key": jax.random.split(state["key"])[0]}

    train(tmp_path, initial, update, 3)
    train(tmp_path, initial, update, 5)
    assert warnings_of(caplog) == []
    assert jct.StepManager(tmp_path).steps == [1, 2, 3, 4, 5]


# The position in the data ----------------------------------------------------------------------------------------


def epochs() -> grain.IterDataset:
    return grain.MapDataset.range(8).batch(2).to_iter_dataset()


def batches(directory: Path, num_steps: int, next_batch: Callable[[Any, Any], tuple[Any, Any, Any]], data: Any) -> Any:
    seen = []
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(1)}, data)
        for _ in ckpt.steps(num_steps):
            batch, data, more = next_batch(data, state)
            seen.append(np.asarray(batch).tolist())
            ckpt(state, **more)
    return seen


def replaced(data: Any, state: Any) -> tuple[Any, Any, Any]:
    try:
        return next(data), data, {}
    except StopIteration:
        data = iter(epochs())
        return next(data), data, {}


def handed_over(data: Any, state: Any) -> tuple[Any, Any, Any]:
    try:
        return next(data), data, {}
    except StopIteration:
        data = iter(epochs())
        return next(data), data, {"data": data}  # once; later calls save its position too


def drawn(data: Any, state: Any) -> tuple[Any, Any, Any]:
    return next(data), data, {}


def test_iterator_replaced_by_loop_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches(tmp_path, 7, replaced, iter(epochs()))
    (warning,) = warnings_of(caplog)
    assert "step 5:" in warning
    assert "'data'" in warning


@pytest.mark.parametrize("make", [Counter, lambda: iter(epochs())])
def test_iterator_that_never_moves_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    batches(tmp_path, 4, lambda data, state: (0, data, {}), make())
    (warning,) = warnings_of(caplog)
    assert "step 2:" in warning


def test_reported_iterator_resumes_in_its_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert batches(tmp_path, 6, handed_over, iter(epochs())) == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3]]
    assert batches(tmp_path, 9, handed_over, iter(epochs())) == [[4, 5], [6, 7], [0, 1]]
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("make", [Counter, lambda: iter(epochs())])
@pytest.mark.parametrize("always", [True, False])
def test_reported_iterators_may_end_at_one_position(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], always: bool
) -> None:
    """Save at the end of each epoch, and pass its iterator in each call or in the first one."""
    with jct.CheckpointCallback(tmp_path, save_interval_steps=4) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(1)}, make())
        for step in ckpt.steps(12):
            is_new = step > 0 and step % 4 == 0
            data = make() if is_new else data
            next(data)
            ckpt(state, **({"data": data} if always or is_new else {}))
    assert jct.StepManager(tmp_path).latest == 12
    assert warnings_of(caplog) == []


def test_data_that_repeats_resumes_in_its_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def data() -> Any:
        return iter(grain.MapDataset.range(8).seed(3).shuffle().batch(2).repeat().to_iter_dataset())

    whole = batches(tmp_path / "whole", 9, drawn, data())
    assert batches(tmp_path / "parts", 6, drawn, data()) + batches(tmp_path / "parts", 9, drawn, data()) == whole
    assert warnings_of(caplog) == []


def test_counting_object_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert batches(tmp_path, 3, drawn, Counter()) == [0, 1, 2]
    assert warnings_of(caplog) == []


# Data that ends ----------------------------------------------------------------------------------------------------


class Short(Counter):
    """Ends after three elements."""

    def __next__(self) -> int:
        if self.position == 3:
            raise StopIteration
        return super().__next__()


def in_steps(directory: Path) -> None:
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(1)}, Short())
        for _ in ckpt.steps(7):
            next(data)
            ckpt(state)


def without_steps(directory: Path) -> None:
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(1)}, Short())
        while True:
            next(data)
            ckpt(state)


def as_a_generator(directory: Path) -> Iterator[int]:
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(1)}, Short())
        for _ in ckpt.steps(7):
            yield next(data)
            ckpt(state)


@pytest.mark.parametrize("loop", [in_steps, without_steps, lambda directory: list(as_a_generator(directory))])
def test_data_that_ends_in_loop_is_clear_error(tmp_path: Path, loop: Callable[[Path], Any]) -> None:
    with pytest.raises(jct.IteratorStateError, match=r"ended at step 3.*repeat") as ended:
        loop(tmp_path)
    assert ("of 7" in str(ended.value)) == (loop is not without_steps)
    assert isinstance(ended.value.__cause__, StopIteration)
    assert jct.StepManager(tmp_path).steps == [1, 2, 3]


def test_loop_may_end_with_its_data(tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=100) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(1)}, Short())
        while True:
            try:
                next(data)
            except StopIteration:
                break
            ckpt(state)
    assert jct.StepManager(tmp_path).steps == [3]
