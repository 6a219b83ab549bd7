"""Branches: the steps that a roll-back leaves behind do not count, are no fallback, and later processes know them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.run.entry import entry_from_manifest, left_behind
from tests.support.runs import flip_a_payload_byte, made_run, save_steps, state_of, step_of, step_path


def rolled_back(tmp_path: Path, *later: int, to: int = 2, keep: int | None = None) -> Path:
    """Steps 1 to 5, rolled back, and continued by another process."""
    run = made_run(tmp_path / "run", 1, 2, 3, 4, 5)
    policy = None if keep is None else jct.LatestN(keep)
    with jct.StepManager(run, preservation_policy=policy) as manager:
        assert step_of(manager.restore(step=to)) == to
        save_steps(manager, *later)
    return run


def test_policy_counts_current_branch_only(tmp_path: Path) -> None:
    run = rolled_back(tmp_path, 21, 22, keep=3)
    assert jct.StepManager(run).steps == [2, 3, 4, 5, 21, 22]  # 2, 21 and 22 are on the current branch
    with jct.StepManager(run, preservation_policy=jct.LatestN(3)) as later:
        later.restore()
        save_steps(later, 23)
    assert jct.StepManager(run).steps == [3, 4, 5, 21, 22, 23]


def test_abandoned_step_is_replaced_by_new_save(tmp_path: Path) -> None:
    run = rolled_back(tmp_path, 3, 4, keep=10)
    assert sorted(path.name for path in run.glob("step-*")) == [
        "step-0000000001",
        "step-0000000002",
        "step-0000000003.g1",
        "step-0000000004.g1",
        "step-0000000005",
    ]


@pytest.mark.parametrize("later", [(3,), (21, 22), (6,)])
def test_damaged_newest_step_avoids_abandoned_branch(tmp_path: Path, later: list[int]) -> None:
    run = rolled_back(tmp_path, *later)
    manager = jct.StepManager(run)
    assert manager.latest == later[-1]
    for step in later:
        newest = max(run.glob(f"{step_path(run, step).name}*"))
        flip_a_payload_byte(newest)
    assert step_of(manager.restore()) == 2
    assert step_of(jct.StepManager(run).restore()) == 2  # another process knows it, too


def test_branch_that_was_left_is_still_last_resort(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = rolled_back(tmp_path, 21)
    for step in (1, 2, 21):
        flip_a_payload_byte(step_path(run, step))
    assert step_of(jct.StepManager(run).restore()) == 5
    assert caplog.text.count("cannot be restored") == 3


def test_only_abandoned_steps_may_be_saved_again(tmp_path: Path) -> None:
    run = rolled_back(tmp_path, 3)
    with jct.StepManager(run) as manager:  # a process that never restored
        save_steps(manager, 4)
        with pytest.raises(jct.CheckpointExistsError, match="step 2 is committed already"):
            save_steps(manager, 2)
    assert jct.StepManager(run).latest == 4


def test_skipped_damaged_step_is_not_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path / "run", 1, 2, 9)
    flip_a_payload_byte(step_path(run, 9))
    with jct.StepManager(run) as manager:
        assert step_of(manager.restore()) == 2
        save_steps(manager, 3)
    assert "step 9 cannot be restored" in caplog.text
    caplog.clear()
    again = jct.StepManager(run)
    assert (again.latest, step_of(again.restore())) == (3, 3)
    assert caplog.text == ""
    assert (again.steps, again.damaged) == ([1, 2, 3], [9])


def test_damaged_manifest_keeps_roll_back_known(tmp_path: Path) -> None:
    run = rolled_back(tmp_path, 21, 22)
    (step_path(run, 22) / "manifest.json").write_bytes(b"{")
    flip_a_payload_byte(step_path(run, 21))
    assert step_of(jct.StepManager(run).restore()) == 2


def test_a_branch_of_a_branch(tmp_path: Path) -> None:
    run = rolled_back(tmp_path, 21, 22, 23)
    with jct.StepManager(run) as manager:
        manager.restore(step=21)
        save_steps(manager, 31)
    for step in (31, 21):
        flip_a_payload_byte(step_path(run, step))
    assert step_of(jct.StepManager(run).restore()) == 2
    with jct.StepManager(run) as manager:  # back to the first branch
        manager.restore(step=4)
        save_steps(manager, 41)
    assert jct.StepManager(run).latest == 41
    flip_a_payload_byte(step_path(run, 41))
    assert step_of(jct.StepManager(run).restore()) == 4


def test_restoring_the_newest_leaves_nothing_behind(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    with jct.StepManager(run, preservation_policy=jct.LatestN(3)) as manager:
        manager.restore()
        save_steps(manager, 3, 4)
    assert jct.StepManager(run).steps == [2, 3, 4]


@pytest.mark.parametrize("saves", [1, 8])
def test_foreign_step_is_ordered_by_number(tmp_path: Path, saves: int) -> None:
    run = made_run(tmp_path / "run", 10, 20, 30)
    other = made_run(tmp_path / "other", *range(500 - saves, 501))
    shutil.copytree(step_path(other, 500), step_path(run, 500))
    shutil.copytree(step_path(other, 500), step_path(run, 15))
    found = jct.StepManager(run)
    assert found.latest == 500
    assert step_of(found.restore()) == 500
    with jct.StepManager(run, preservation_policy=jct.LatestN(2)) as manager:
        manager.restore()
        save_steps(manager, 510)
    assert jct.StepManager(run).steps == [500, 510]


def test_metrics_stay_with_the_generation_that_had_them(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    with jct.StepManager(run) as manager:
        manager.attach_metrics(2, {"loss": 0.1})
        manager.pin(2)
        manager.restore(step=1)
        manager.save(2, {"state": state_of(2)}, metrics={"loss": 7.0})
        manager.wait()
        assert manager.best("loss") == 2
        assert {info.step: info.metrics for info in manager._run.infos()} == {1: None, 2: {"loss": 7.0}}
    (entry,) = (entry for entry in jct.StepManager(run)._run.newest() if entry.step == 2)
    assert (entry.metrics, entry.pinned) == ({"loss": 7.0}, True)


def test_freed_name_is_not_abandoned(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 25, 30)
    flip_a_payload_byte(step_path(run, 30))
    with jct.StepManager(run) as manager:
        assert step_of(manager.restore()) == 25
        save_steps(manager, 28)
    shutil.rmtree(step_path(run, 30))
    with jct.StepManager(run, preservation_policy=jct.LatestN(2)) as manager:
        manager.restore()
        save_steps(manager, 30)
        assert manager.latest == 30
    again = jct.StepManager(run)
    assert (again.steps, step_of(again.restore())) == ([28, 30], 30)


def test_saving_earlier_step_anew_is_roll_back(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10, 20, 30)
    with jct.StepManager(run) as manager:
        save_steps(manager, 20, overwrite=True)
    with jct.StepManager(run) as manager:
        assert step_of(manager.restore()) == 20
        save_steps(manager, 30)
        assert manager.latest == 30
    assert sorted(path.name for path in run.glob("step-*"))[1:] == ["step-0000000020.g1", "step-0000000030.g1"]


def test_pinned_abandoned_step_survives_new_generation(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10, 20, 30)
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as manager:
        manager.pin(30)
        manager.restore(step=10)
        save_steps(manager, 20, 30)
    assert [jct.verify(each).ok for each in run.glob("step-0000000030*")] == [True, True]


def test_reused_name_gets_no_old_metrics(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    with jct.StepManager(run) as manager:
        manager.attach_metrics(2, {"loss": 0.01})
    shutil.rmtree(step_path(run, 2))
    with jct.StepManager(run) as manager:
        manager.save(2, {"state": state_of(2)}, metrics={"loss": 7.0})
    assert [info.metrics for info in jct.StepManager(run)._run.infos()] == [None, {"loss": 7.0}]


def test_copied_step_keeps_branch_abandoned(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10, 20, 30)
    with jct.StepManager(run) as manager:
        manager.restore(step=10)
        save_steps(manager, 15, 17)
    other = made_run(tmp_path / "other", 18)
    shutil.copytree(step_path(other, 18), step_path(run, 18))
    with jct.StepManager(run, preservation_policy=jct.LatestN(3)) as manager:
        assert step_of(manager.restore()) == 18
        save_steps(manager, 19)
    assert jct.StepManager(run).steps == [17, 18, 19, 20, 30]


def test_step_that_was_left_behind_is_not_committed(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10, 20, 30)
    with jct.StepManager(run) as manager:
        manager.restore(step=20)
        manager.own()
        assert [manager.is_committed(step) for step in (10, 20, 30, 40)] == [True, True, False, False]


def test_a_save_never_leaves_itself_behind() -> None:
    info = {"sequence": 0, "created": "2026-03-01T00:00:00+00:00", "left_behind": ["a", "b"]}
    first, second = (entry_from_manifest(name, 1, 0, {**info, "sequence": n}) for n, name in enumerate("ab"))
    assert left_behind([first, second]) == {"a"}


def test_undone_deletion_leaves_step_abandoned(tmp_path: Path) -> None:
    """As after a power cut that undoes the renaming of a deleted step, after a new branch was saved."""
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1, 2, 3)
        manager.restore(step=1)
        manager._run.forget("step-0000000003")
        save_steps(manager, 2)
    with jct.StepManager(tmp_path) as manager:
        assert manager.latest == 2
        save_steps(manager, 3)
        assert step_of(manager.restore()) == 3
        assert manager.steps == [1, 2, 3]


def test_name_under_deletion_is_not_reused(tmp_path: Path) -> None:
    """The deleter renamed the old step but has not reported it yet, and could mistake the new step for it."""
    manager = jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2))
    save_steps(manager, 1, 2, 3)
    assert manager._run._deleter.wait(60)
    manager._run._going.add("step-0000000004")
    save_steps(manager, 4)
    manager._run.forget("step-0000000004")
    assert manager.steps == [3, 4]
    assert step_of(manager.restore()) == 4
    manager.close()
