"""Loading an older step does not change a run; a roll-back is explicit and reports the steps that it leaves behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.file_content import content
from tests.support.runs import (
    Counter,
    files_below,
    flip_a_payload_byte,
    made_run,
    save_steps,
    state_of,
    step_of,
    step_path,
)


def load_step_2(ckpt: jct.CheckpointCallback) -> list[Any]:
    """Load step 2 during training, in each of the ways to do so."""
    return [
        ckpt.manager.load({"state": state_of(0)}, 2)["state"],
        ckpt.manager.load(step=2)["state"],
        ckpt.manager.restore({"state": state_of(0)}, step=2)["state"],
    ]


@pytest.mark.parametrize("way", range(3))
def test_loading_older_step_makes_no_branch(tmp_path: Path, way: int) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=2, keep_latest=3) as ckpt:
        state = ckpt.resume(state_of(0))
        for step in ckpt.steps(8):
            state = state_of(step + 1)
            ckpt(state)
            if step == 5:
                ckpt.wait()
                assert step_of({"state": load_step_2(ckpt)[way]}) == 2
    manager = jct.StepManager(tmp_path)
    assert manager.steps == [4, 6, 8]
    assert manager.metadata(8).custom_metadata is None
    assert step_of(manager.restore({"state": state_of(0)})) == 8
    assert manager.restored_step == 8


@pytest.mark.parametrize("way", range(3))
def test_loading_older_step_logs_nothing(tmp_path: Path, way: int, caplog: pytest.LogCaptureFixture) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=2) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(4):
            next(data)
            ckpt(state_of(step + 1))
        ckpt.wait()
        assert step_of({"state": load_step_2(ckpt)[way]}) == 2
        assert data.position == 4
    assert caplog.text == ""


def test_loading_right_after_resume_makes_no_branch(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
        ckpt.resume(state_of(0))
        assert step_of(ckpt.manager.restore(step=1)) == 1
        for step in ckpt.steps(4):
            ckpt(state_of(step + 1))
    assert jct.StepManager(tmp_path).steps == [1, 2, 3, 4]


def test_manager_load_changes_nothing(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    before = content(tmp_path)
    manager = jct.StepManager(tmp_path)
    assert step_of(manager.load({"state": state_of(0)}, 1)) == 1
    assert step_of(manager.load()) == 3
    assert (content(tmp_path), manager.restored_step) == (before, None)
    save_steps(manager, 4)
    manager.close()
    assert jct.StepManager(tmp_path).steps == [1, 2, 3, 4]


def test_load_falls_back_without_setting_aside(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(tmp_path, 2))
    before = files_below(tmp_path)
    manager = jct.StepManager(tmp_path)
    assert step_of(manager.load({"state": state_of(0)})) == 1
    with pytest.raises(jct.CorruptCheckpointError):
        manager.load(step=2)
    with pytest.raises(jct.StepNotFoundError):
        manager.load(step=7)
    assert (manager.damaged, files_below(tmp_path)) == ([], before)


def test_roll_back_warning_names_later_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1, 2, 3, 4)
        manager.wait()
        manager.restore(step=4)
        assert not caplog.records
        manager.restore(step=2)
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert "later steps (3, 4)" in record.getMessage()
        manager.restore(step=4)  # as the warning advises
        save_steps(manager, 5)
        caplog.clear()
        manager.restore(step=2, roll_back=True)
        assert not caplog.records
        save_steps(manager, 6)
    assert step_of(jct.StepManager(tmp_path).restore({"state": state_of(0)})) == 6
    assert jct.StepManager(tmp_path).infos[-1].step == 6
    with jct.StepManager(tmp_path) as manager:
        assert not manager.is_committed(5)  # left behind
        assert manager.is_committed(2)


def test_callback_names_steps(tmp_path: Path) -> None:
    with jct.CheckpointCallback(
        tmp_path, save_interval_steps=1, best_metric="loss", keep_best=1, keep_latest=9
    ) as ckpt:
        ckpt.resume(state_of(0))
        assert (ckpt.all_steps(), ckpt.latest_step(), ckpt.manager.best("loss")) == ([], None, None)
        for step, loss in zip(ckpt.steps(3), (3.0, 1.0, 2.0), strict=True):
            ckpt(state_of(step + 1), metrics={"loss": loss, "accuracy": loss})
        ckpt.wait()
        assert (ckpt.all_steps(), ckpt.latest_step()) == ([1, 2, 3], 3)
        assert (ckpt.manager.best("loss"), ckpt.manager.best("accuracy", "max")) == (2, 1)
        with pytest.raises(jct.SettingsError, match="accuracy"):
            ckpt.manager.best("accuracy")
    off = jct.CheckpointCallback(tmp_path, enabled=False)
    assert (off.all_steps(), off.latest_step()) == ([], None)


def test_save_result_is_true_where_step_is_saved(tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=2) as ckpt:
        ckpt.resume(state_of(0))
        assert [bool(ckpt(state_of(step + 1))) for step in ckpt.steps(4)] == [False, True, False, True]
        assert not ckpt.save_now()
    with jct.StepManager(tmp_path) as manager:
        assert manager.save(5, {"state": state_of(5)})


def test_load_of_run_names_step_and_manager(tmp_path: Path) -> None:
    made_run(tmp_path, 2, 10)
    for call in (lambda: jct.load(tmp_path), lambda: jct.load(tmp_path, state_of(0)), lambda: jct.metadata(tmp_path)):
        with pytest.raises(jct.NotACheckpointError, match=r"step-0000000010.*StepManager"):
            call()
    with pytest.raises(jct.NotACheckpointError, match="step-0000000010"):
        jct.CheckpointCallback(tmp_path / "new", init_from=tmp_path).resume(state_of(0))
    assert step_of(jct.StepManager(str(tmp_path)).load()) == 10
    np.testing.assert_equal(jct.load(step_path(tmp_path, 10))["step"], 10)


@pytest.mark.parametrize(("num_steps", "warns"), [(2, True), (0, True), (3, False), (4, False)])
def test_steps_below_completed_updates_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_steps: int, warns: bool
) -> None:
    made_run(tmp_path, 3)
    with jct.CheckpointCallback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(num_steps):
            ckpt(state_of(step + 1))
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(found) == warns
    assert all(f"steps({num_steps})" in each and "completed 3 updates" in each for each in found)
