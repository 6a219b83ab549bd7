"""Loops of other libraries: preempted and started again, each ends as if it had not been interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from examples.loops import clu_hooks, flax_train_and_evaluate, levanter_hooks, orbax_manager
from tests.support.compiled_once import compiled_once
from tests.support.signal_handlers import WATCHED, handlers_put_back

STEPS, PREEMPTED_AT = 12, 7


@pytest.fixture(scope="module", autouse=True)
def _each_update_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def as_bytes(state: Any) -> dict[str, bytes]:
    """Return the bytes of every leaf of a state by its path."""

    def plain(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(plain(leaf)).tobytes() for path, leaf in leaves}


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def clu(directory: Path, preempted_at: int | None) -> Any:
    def hook(step: int, t: float | None = None) -> None:
        if step == preempted_at:
            preempt()

    return clu_hooks.train(str(directory), STEPS, [hook])


def levanter(directory: Path, preempted_at: int | None) -> Any:
    def hook(info: Any) -> None:
        if info.step + 1 == preempted_at:
            preempt()

    return levanter_hooks.main(str(directory), STEPS, hook)


def flax(directory: Path, preempted_at: int | None) -> Any:
    config = flax_train_and_evaluate.Config(num_train_steps=STEPS, eval_every_steps=5, checkpoint_every_steps=5)
    with preempted_in_update(flax_train_and_evaluate, preempted_at):
        return flax_train_and_evaluate.train_and_evaluate(config, str(directory))


@contextlib.contextmanager
def preempted_in_update(example: ModuleType, number: int | None) -> Iterator[None]:
    """Send this process SIGTERM in the middle of this update of an example."""
    step, counted = example.train_step, iter(range(1, STEPS + 1))

    def train_step(state: Any, batch: Any) -> Any:
        if next(counted) == number:
            preempt()
        return step(state, batch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(example, "train_step", train_step)
        yield


@pytest.mark.parametrize("loop", [clu, levanter, flax])
def test_preempted_loop_resumes_exactly(loop: Callable[[Path, int | None], Any], tmp_path: Path) -> None:
    alone = as_bytes(loop(tmp_path / "alone", None))
    with pytest.raises(SystemExit) as left:
        loop(tmp_path / "preempted", PREEMPTED_AT)
    assert left.value.code == 75
    assert jct.StepManager(tmp_path / "preempted").latest == PREEMPTED_AT, "the label is not the number of updates"
    assert as_bytes(loop(tmp_path / "preempted", None)) == alone
    assert jct.StepManager(tmp_path / "preempted").latest == STEPS


def test_preempted_orbax_loop_resumes_exactly(tmp_path: Path) -> None:
    alone = as_bytes(orbax_manager.train(str(tmp_path / "alone"), STEPS))
    with preempted_in_update(orbax_manager, PREEMPTED_AT):
        orbax_manager.train(str(tmp_path / "preempted"), STEPS)
    assert jct.StepManager(tmp_path / "preempted").latest == PREEMPTED_AT
    assert as_bytes(orbax_manager.train(str(tmp_path / "preempted"), STEPS)) == alone
    assert jct.StepManager(tmp_path / "preempted").latest == STEPS
