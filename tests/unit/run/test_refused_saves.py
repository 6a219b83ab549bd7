"""Saves that can only be mistakes are refused before anything is written, and lose nothing."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import RefusingBackend
from tests.support.file_content import content
from tests.support.runs import files_below, folder_of, made_run, remove_tree, save_steps, state_of, step_of, step_path

STATE = {"w": np.arange(1000.0)}


def test_a_step_is_no_run(tmp_path: Path) -> None:
    """Retention of its run would delete it, with everything saved inside."""
    made_run(tmp_path / "run", 5)
    step = step_path(tmp_path / "run", 5)
    before = content(tmp_path)
    with jct.StepManager(step) as steps, pytest.raises(jct.SettingsError, match="found a single checkpoint"):
        steps.save(1, {"state": state_of(1)})
    ckpt = jct.CheckpointCallback(step, save_interval_steps=1)
    with pytest.raises(jct.SettingsError, match="init_from"):
        ckpt.resume(state_of(0))
    assert content(tmp_path) == before


@pytest.mark.parametrize("other", ["config.yaml", "eval/results.json", "finetune/step-0000000001/COMMIT"])
def test_checkpoint_with_foreign_files_is_not_replaced(tmp_path: Path, other: str) -> None:
    jct.save(tmp_path / "c", STATE)
    path = tmp_path / "c" / other
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    before = content(tmp_path)
    name = other.partition("/")[0]
    with pytest.raises(jct.CheckpointExistsError, match=f"other .*: {name}"):
        jct.save(tmp_path / "c", {"w": 1}, overwrite=True)
    assert content(tmp_path) == before
    path.unlink() if path.parent == tmp_path / "c" else remove_tree(tmp_path / "c" / name)
    jct.save(tmp_path / "c", {"w": 1}, overwrite=True)
    assert jct.load(tmp_path / "c") == {"w": 1}


def test_checkpoint_with_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", STATE)
    (tmp_path / "c" / "eval").mkdir()
    with pytest.raises(jct.CheckpointExistsError, match="other files: eval"):
        jct.save(tmp_path / "c", {"w": 1}, overwrite=True)
    assert jct.load(tmp_path / "c")["w"].tobytes() == STATE["w"].tobytes()


def test_damaged_checkpoint_can_be_overwritten(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", {"state": STATE, "more": jct.JsonValue(3)})
    (folder_of(tmp_path / "c") / "manifest.json").write_bytes(b"?")
    jct.save(tmp_path / "c", {"w": 1}, overwrite=True)
    assert jct.load(tmp_path / "c") == {"w": 1}


def test_unseen_newer_steps_are_not_abandoned(tmp_path: Path) -> None:
    made_run(tmp_path, 10)
    with jct.StepManager(tmp_path) as first:
        first.restore()
        with jct.StepManager(tmp_path) as second:
            second.restore()
            save_steps(second, 11, 12, 20)
        with pytest.raises(jct.CheckpointExistsError, match="11, 12, 20"):
            first.save(11, {"state": state_of(11)})
        assert first.steps == [10, 11, 12, 20]
        first.restore(step=10)  # an explicit restore shows the intent
        save_steps(first, 11)
        assert first.latest == 11


def test_second_restore_adopts_foreign_saves(tmp_path: Path) -> None:
    """As the error advises; also after a note, which makes the manager the owner."""
    for is_noted in (False, True):
        run = made_run(tmp_path / f"run{is_noted}", 5)
        with jct.StepManager(run) as steps:
            assert step_of(steps.restore()) == 5
            with jct.StepManager(run) as job:
                job.restore()
                save_steps(job, 6, 7)
            assert (steps.latest, steps.is_committed(7)) == (7, True)
            if is_noted:
                steps.attach_metrics(5, {"accuracy": 0.5})
            else:
                with pytest.raises(jct.CheckpointExistsError, match="has saved 6, 7"):
                    steps.save(6, {"state": state_of(6)})
            assert (steps.latest, steps.is_committed(7)) == (7, True)
            assert step_of(steps.restore()) == 7
            save_steps(steps, 8)
        assert jct.StepManager(run).steps == [5, 6, 7, 8]


def test_renumbered_run_resumes_from_last_save(tmp_path: Path) -> None:
    made_run(tmp_path, 5, 10)
    step_path(tmp_path, 5).rename(step_path(tmp_path, 20))
    with jct.StepManager(tmp_path) as steps:
        assert step_of(steps.restore()) == 10
        with pytest.raises(jct.SettingsError, match="expected a step above 10"):
            steps.save(9, {"state": state_of(9)})
        save_steps(steps, 11, 12, 20)
        assert step_of(steps.restore(step=20)) == 20
    with jct.StepManager(tmp_path) as steps:
        assert step_of(steps.restore()) == 20


def test_evaluation_may_annotate_but_not_save(tmp_path: Path) -> None:
    """The evaluation ends after a training job that saved meanwhile."""
    made_run(tmp_path, 3)
    with jct.StepManager(tmp_path) as evaluation:
        assert step_of(evaluation.restore(step=3)) == 3
        with jct.StepManager(tmp_path) as job:
            job.restore()
            save_steps(job, 4, 5)
        evaluation.attach_metrics(3, {"accuracy": 0.5})
        evaluation.pin(3)
        for options in ({}, {"overwrite": True}):
            with pytest.raises(jct.CheckpointExistsError, match="has saved 4, 5"):
                evaluation.save(4, {"state": state_of(4)}, **options)
    with jct.StepManager(tmp_path) as job:
        assert (job.steps, job.best("accuracy", "max")) == ([3, 4, 5], 3)
        assert [entry.pinned for entry in job._run.entries()] == [True, False, False]


def test_unreadable_step_is_no_foreign_save(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    backend = RefusingBackend("open", "step-0000000003", errno.EIO, 1000)
    with jct.StepManager(tmp_path, backend=backend) as steps:
        assert step_of(steps.restore()) == 2
        backend.times = 0
        save_steps(steps, 3)
    assert step_of(jct.StepManager(tmp_path).restore()) == 3


def test_earlier_step_is_refused_without_roll_back(tmp_path: Path) -> None:
    """The next process would continue from it and find the later steps already committed."""
    made_run(tmp_path, 8, 9, 10)
    with jct.StepManager(tmp_path) as steps:
        steps.restore()
        for _ in range(2):
            with pytest.raises(jct.SettingsError, match=r"above 10, .* found 5"):
                steps.save(5, {"state": state_of(5)})
            assert steps.steps == [8, 9, 10]
        save_steps(steps, 5, overwrite=True)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2)) as steps:
        assert step_of(steps.restore()) == 5
        save_steps(steps, *range(6, 13))
        assert steps._run._deleter.wait(60)
        assert steps.steps == [11, 12]


def test_closed_manager_remembers_its_saves(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    with jct.StepManager(tmp_path) as steps:
        steps.restore(step=2)
        save_steps(steps, 3, 4)
    assert [steps.is_committed(step) for step in range(1, 6)] == [True, True, True, True, False]
    assert steps.latest == 4


def test_commit_file_makes_run_no_checkpoint(tmp_path: Path) -> None:
    """For example a file with a version number that a script wrote."""
    made_run(tmp_path, 1)
    (tmp_path / "COMMIT").write_text("5929cbd\n")
    with jct.StepManager(tmp_path) as steps:
        assert step_of(steps.restore()) == 1
        save_steps(steps, 2)
    assert (tmp_path / "COMMIT").read_text() == "5929cbd\n"


def test_lower_step_without_restore_is_refused(tmp_path: Path) -> None:
    made_run(tmp_path, 1000, 2000)
    before = files_below(tmp_path)
    with jct.StepManager(tmp_path) as steps:
        with pytest.raises(jct.SettingsError, match=r"above 2000, .* found 10"):
            steps.save(10, {"state": state_of(10)})
        assert files_below(tmp_path) == before
        save_steps(steps, 3000)
        assert steps.steps == [1000, 2000, 3000]
    with jct.StepManager(tmp_path) as steps:
        steps.save(10, {"state": state_of(10)}, overwrite=True)


def test_step_removed_during_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by retention: the step is renamed at any moment of the read."""
    made_run(tmp_path / "run", 1)
    step, hidden = step_path(tmp_path / "run", 1), tmp_path / "run" / ".step-0000000001.tmp-00000000-00000000-1-1-0"
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
            raise AssertionError("the read opens more files than expected")


@pytest.mark.parametrize("is_noticed", [False, True])
def test_foreign_save_during_restore_is_not_abandoned(tmp_path: Path, is_noticed: bool) -> None:
    owner, reader = jct.StepManager(tmp_path), jct.StepManager(tmp_path)
    save_steps(owner, 10)
    to_save = [20]

    def meanwhile(done: int) -> None:
        if not done:
            return
        while to_save:
            save_steps(owner, to_save.pop())
        if is_noticed:
            assert reader.latest == 20

    assert step_of(reader.restore(step=10, progress=meanwhile)) == 10
    owner.close()
    with pytest.raises(jct.CheckpointExistsError, match="has saved 20"):
        reader.save(11, {"state": state_of(11)})
    reader.close()
    assert jct.StepManager(tmp_path).latest == 20


@pytest.mark.parametrize("begin", ["restore", "callback"])
def test_fresh_start_refuses_foreign_saves(tmp_path: Path, begin: str) -> None:
    first = jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1))
    if begin == "callback":
        first.check_fresh()
    else:
        with pytest.raises(jct.StepNotFoundError):
            getattr(first, begin)()
    made_run(tmp_path, 10, 20)
    for overwrite in (False, True):
        with pytest.raises(jct.CheckpointExistsError, match="has saved 10, 20"):
            first.save(30, {"state": state_of(30)}, overwrite=overwrite)
    assert step_of(first.restore()) == 20
    save_steps(first, 30)
    first.close()
    assert jct.StepManager(tmp_path).latest == 30


def test_fresh_start_continues_its_own_saves(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as steps:
        with pytest.raises(jct.StepNotFoundError):
            steps.restore()
        save_steps(steps, 10, 20)
    assert jct.StepManager(tmp_path).steps == [10, 20]


@pytest.mark.parametrize("method", ["metadata", "path"])
def test_lookup_is_no_fresh_start(tmp_path: Path, method: str) -> None:
    with jct.StepManager(tmp_path) as steps:
        with pytest.raises(jct.StepNotFoundError):
            getattr(steps, method)()
        made_run(tmp_path, 10)
        save_steps(steps, 20)
    assert jct.StepManager(tmp_path).steps == [10, 20]


def test_own_thread_may_save_during_restore(tmp_path: Path) -> None:
    to_save = [20]

    def meanwhile(done: int) -> None:
        while done and to_save:
            thread = threading.Thread(target=save_steps, args=(steps, to_save.pop()))
            thread.start()
            thread.join()

    with jct.StepManager(tmp_path) as steps:
        save_steps(steps, 10)
        assert step_of(steps.restore(progress=meanwhile)) == 10
        assert not to_save
        save_steps(steps, 30)
    assert jct.StepManager(tmp_path).latest == 30
