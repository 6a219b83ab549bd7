"""The callback inside other people's loops: clu's hooks, Levanter's hooks, Orbax's manager."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxckpt_train as jct
from tests.steps.runs import made_run, state_of, step_of


def callback(directory: Path) -> jct.CheckpointCallback:
    return jct.CheckpointCallback(str(directory), save_interval_steps=2)


def test_a_hook_is_called_with_the_number_of_completed_updates(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        current = [0]
        hook = ckpt.as_hook(lambda: state_of(current[0]))
        told = []
        for step in range(1, 6):
            current[0] = step
            told.append(hook(step, t=1.5))
    assert told == [False, True, False, True, False]
    assert jct.StepManager(tmp_path).steps == [2, 4, 5]


def test_a_hook_takes_no_state_from_a_step_of_a_disabled_callback(tmp_path: Path) -> None:
    with jct.CheckpointCallback(str(tmp_path), enabled=False) as ckpt:
        assert not ckpt.as_hook(lambda: state_of(1))(1)


def test_levanters_hook_counts_from_zero(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        for step in range(3):
            ckpt.on_step(SimpleNamespace(step=step, state=state_of(step + 1)))
        ckpt.on_step(SimpleNamespace(step=2, state=state_of(3)), force=True)
        assert ckpt.manager.settle() is None
        assert ckpt.manager.steps == [2, 3]
        assert step_of(ckpt.manager.restore()) == 3


def test_the_names_of_other_managers(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        assert ckpt.latest_step() is None
        assert [ckpt.should_save(step) for step in (1, 2)] == [False, True]
        assert [ckpt.save(step, state_of(step)) for step in (1, 2, 3)] == [False, True, False]
        ckpt.wait_until_finished()
        assert ckpt.latest_step() == 2
        assert ckpt.save(3, state_of(3), metrics={"loss": 1.0}, force=True)
        assert not ckpt.save(3, state_of(3), force=True)
        ckpt.wait_until_finished()
        assert ckpt.latest_step() == 3
        assert step_of(ckpt.manager.restore(step=2)) == 2
        assert ckpt.manager.metadata(3).metrics == {"loss": 1.0}


def test_a_step_that_was_just_restored_is_not_saved_again(tmp_path: Path) -> None:
    with callback(made_run(tmp_path, 2)) as ckpt:
        ckpt.resume(state_of(0))
        assert not ckpt.save(2, state_of(2))
        assert ckpt.save(4, state_of(4))


def test_a_loop_that_calls_save_is_preempted_too(tmp_path: Path) -> None:
    notice = tmp_path / "leave"
    ckpt = jct.CheckpointCallback(
        str(tmp_path / "run"), save_interval_steps=100, notice_file=str(notice), on_preemption="raise"
    )
    with pytest.raises(jct.Preempted, match="step 1 is saved"), ckpt:
        ckpt.resume(state_of(0))
        notice.touch()
        ckpt.save(1, state_of(1))
        raise AssertionError("the loop went on")
    assert jct.StepManager(tmp_path / "run").steps == [1]
