"""The catalog: which entries are committed steps, and in which order the steps were saved."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jaxckpt_train.callback import CheckpointCallback
from jaxckpt_train.manager import StepManager
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.run.entry import newest_generations
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.checkpoints import rewrite
from tests.support.runs import (
    Clock,
    made_run,
    record_file,
    remove_the_manifest,
    save_steps,
    state_of,
    step_path,
    truncate_the_manifest,
)


def names(directory: Path) -> list[str]:
    return [entry.name for entry in scan(LocalBackend(), str(directory))]


def test_directory_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    assert scan(LocalBackend(), str(tmp_path / "nothing")) == []


def test_steps_need_a_commit_and_valid_name(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    (step_path(run, 2) / "COMMIT").unlink()
    step_path(run, 3).mkdir()
    step_path(run, 4).write_text("a file")
    (run / "step-0000000005").symlink_to(step_path(run, 1))
    (run / ".step-0000000006.tmp-1-0").mkdir()
    step_path(run, 1).rename(run / "step-1")
    made_run(tmp_path / "other", 7)
    step_path(tmp_path / "other", 7).rename(step_path(run, 7))
    assert names(run) == ["step-0000000007"]


def test_steps_are_listed_in_save_order(tmp_path: Path) -> None:
    with StepManager(tmp_path) as manager:
        save_steps(manager, 5, 20)
        save_steps(manager, 3, overwrite=True)
        save_steps(manager, 10)
    run = tmp_path
    assert [entry.step for entry in scan(LocalBackend(), str(run))] == [5, 20, 3, 10]
    assert [entry.sequence for entry in scan(LocalBackend(), str(run))] == [0, 1, 2, 3]


def test_entry_has_what_policies_need(tmp_path: Path) -> None:
    clock = Clock()
    with StepManager(tmp_path, clock=clock) as manager:
        manager.save(3, {"state": state_of(3)}, metrics={"loss": math.inf, "accuracy": 0.5}, temporary=True)
        manager.wait()
        manager.pin(3)
    (entry,) = scan(LocalBackend(), str(tmp_path))
    assert (entry.step, entry.generation, entry.temporary, entry.pinned) == (3, 0, True, True)
    assert entry.metrics == {"loss": math.inf, "accuracy": 0.5}
    assert (clock.now - entry.time).total_seconds() < 600


def test_highest_generation_of_step_wins(tmp_path: Path) -> None:
    with StepManager(tmp_path) as manager:
        save_steps(manager, 1)
        manager.pin(1)
    step_path(tmp_path, 1).rename(tmp_path / "kept")
    with StepManager(tmp_path) as manager:
        save_steps(manager, 1, 2)
    step_path(tmp_path, 1).rename(tmp_path / "step-0000000001.g3")
    (tmp_path / "kept").rename(step_path(tmp_path, 1))
    found = newest_generations(scan(LocalBackend(), str(tmp_path)))
    assert [(entry.step, entry.generation) for entry in found] == [(1, 3), (2, 0)]


@pytest.mark.parametrize("damage", [remove_the_manifest, truncate_the_manifest])
def test_step_with_damaged_manifest_is_listed(tmp_path: Path, damage: object) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    assert callable(damage)
    damage(step_path(run, 2))
    assert [entry.step for entry in scan(LocalBackend(), str(run))] == [1, 2, 3]
    damage(step_path(run, 3))
    assert [entry.step for entry in scan(LocalBackend(), str(run))] == [1, 2, 3]


@pytest.mark.parametrize("created", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-23:59", "9999-12-31", "today"])
def test_extreme_creation_times_stop_no_training(tmp_path: Path, created: str) -> None:
    run = made_run(tmp_path, 1, 2)
    rewrite(step_path(run, 1), lambda manifest: manifest["info"].update(created=created))
    with CheckpointCallback(run, save_interval_steps=1, keep_latest=5) as ckpt:
        state = ckpt.resume(state_of(2))
        for step in ckpt.steps(3):
            ckpt(state_of(step))
    assert state is not None
    assert sorted(entry.step for entry in scan(LocalBackend(), str(run))) == [1, 2, 3]


def test_record_repeats_creation_time_verbatim(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1)
    rewrite(step_path(run, 1), lambda manifest: manifest["info"].update(created="2026-03-01T05:30:00+05:30"))
    with StepManager(run) as manager:
        manager.attach_metrics(1, {"acc": 1.0})
    (entry,) = scan(LocalBackend(), str(run))
    assert entry.metrics == {"acc": 1.0}
    assert '"saved":"2026-03-01T05:30:00+05:30"' in record_file(run).read_text()
