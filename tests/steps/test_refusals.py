"""Saves that nobody can have meant are refused before anything is written, and nothing is lost by them."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.file_content import content
from tests.steps.runs import made_run, save_steps, state_of, step_path

STATE = {"w": np.arange(1000.0)}


def test_a_step_is_no_run(tmp_path: Path) -> None:
    """Its run would delete it, and with it all that was saved inside."""
    made_run(tmp_path / "run", 5)
    step = step_path(tmp_path / "run", 5)
    before = content(tmp_path)
    with jct.StepManager(step) as steps, pytest.raises(jct.SettingsError, match="is one checkpoint, and no directory"):
        steps.save(1, {"state": state_of(1)})
    ckpt = jct.CheckpointCallback(step, save_interval_steps=1)
    with pytest.raises(jct.SettingsError, match=r"is one checkpoint, .* `init_from`"):
        ckpt.resume(state_of(0))
    assert content(tmp_path) == before


@pytest.mark.parametrize("other", ["config.yaml", "eval/", "finetune/step-0000000001/"])
def test_what_is_none_of_a_checkpoints_own_is_not_replaced_with_it(tmp_path: Path, other: str) -> None:
    jct.save(tmp_path / "c", STATE)
    path = tmp_path / "c" / other
    path.mkdir(parents=True) if other.endswith("/") else path.write_text("x")
    before = content(tmp_path)
    name = other.partition("/")[0]
    with pytest.raises(jct.CheckpointExistsError, match=rf"expected nothing but a checkpoint.*found also {name}; move"):
        jct.save(tmp_path / "c", {"w": 1}, overwrite=True)
    assert content(tmp_path) == before
    shutil.rmtree(tmp_path / "c" / name) if other.endswith("/") else path.unlink()
    jct.save(tmp_path / "c", {"w": 1}, overwrite=True)
    assert jct.load(tmp_path / "c") == {"w": 1}


def test_a_damaged_checkpoint_is_replaced_all_the_same(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", {"state": STATE, "more": jct.JsonValue(3)})
    (tmp_path / "c" / "manifest.json").write_bytes(b"?")
    jct.save(tmp_path / "c", {"w": 1}, overwrite=True)
    assert jct.load(tmp_path / "c") == {"w": 1}


def test_steps_that_another_process_has_saved_since_the_restore_are_not_left_behind_unseen(tmp_path: Path) -> None:
    made_run(tmp_path, 10)
    with jct.StepManager(tmp_path) as first:
        first.restore()
        with jct.StepManager(tmp_path) as second:
            second.restore()
            save_steps(second, 11, 12, 20)
        with pytest.raises(jct.CheckpointExistsError, match=r"restored step 10, .* 11, 12, 20; restore"):
            first.save(11, {"state": state_of(11)})
        assert first.steps == [10, 11, 12, 20]
        first.restore(step=10)  # now it is meant
        save_steps(first, 11)
        assert first.latest == 11


def test_a_process_that_restored_nothing_does_not_begin_below_what_is_there(tmp_path: Path) -> None:
    made_run(tmp_path, 1000, 2000)
    before = content(tmp_path)
    with jct.StepManager(tmp_path) as steps:
        with pytest.raises(jct.SettingsError, match=r"expected a step above 2000, .* found 10: restore\(\) first"):
            steps.save(10, {"state": state_of(10)})
        assert {name: data for name, data in content(tmp_path).items() if name in before} == before
        save_steps(steps, 3000)
        assert steps.steps == [1000, 2000, 3000]
    with jct.StepManager(tmp_path) as steps:
        steps.save(10, {"state": state_of(10)}, overwrite=True)


def test_what_is_removed_while_it_is_verified_or_loaded_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As retention does: at once, under another name, at any moment of the reader's."""
    made_run(tmp_path / "run", 1)
    step, hidden = step_path(tmp_path / "run", 1), tmp_path / "run" / ".step-0000000001.deleting"
    opens = os.open
    for read in (jct.verify, jct.load):
        for moment in range(1, 60):
            left = iter(range(moment))
            turn = threading.Lock()

            def open_and_remove(path: Any, *more: Any, left: Any = left, turn: Any = turn, **options: Any) -> int:
                with turn:
                    if str(step) in os.fspath(path) and next(left, None) is None and step.exists():
                        step.rename(hidden)
                return opens(path, *more, **options)

            with monkeypatch.context() as patch:
                patch.setattr(os, "open", open_and_remove)
                try:
                    found = read(step)
                except jct.NotACheckpointError:
                    pass
                else:
                    assert read is jct.load or found.ok, found
            if not hidden.exists():
                break
            hidden.rename(step)
        else:
            raise AssertionError("there are more opens than were tried")
