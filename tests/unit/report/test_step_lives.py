"""The life of each step: from hand-made events and inspections, and from real runs with rollbacks and damage."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import jaxckpt_train as jct
from jaxckpt_train.inspection.runs import StepStatus, inspect_run
from jaxckpt_train.report.series import StepLife, StepsFound
from jaxckpt_train.run.entry import step_name
from tests.support.history_events import at
from tests.support.report_runs import BACKEND, gathered_of, history_of
from tests.support.runs import START, made_run, save_steps, step_path, truncate_the_manifest


def saved(second: float, step: int, generation: int = 0, **fields: Any) -> dict[str, Any]:
    return at(second, "save", ok=True, step=step, name=step_name(step, generation), bytes=100 + step, **fields)


def deleted(second: float, step: int) -> dict[str, Any]:
    return at(second, "delete", name=step_name(step))


def present(*steps: int, **fields: Any) -> list[StepStatus]:
    nbytes = fields.get("nbytes", 999)
    return [StepStatus(step_name(step), step, None, nbytes, False, fields.get("problem")) for step in steps]


def steps_of(*events: dict[str, Any], inspected: list[StepStatus] | None = None) -> StepsFound:
    return history_of(*events).lives.found(inspected or [])


def lives(*events: dict[str, Any], inspected: list[StepStatus] | None = None) -> list[StepLife]:
    return steps_of(*events, inspected=inspected).lives


def second(number: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=number)


def test_step_lives_from_save_to_deletion() -> None:
    one, two = lives(saved(1, 10), saved(5, 20), deleted(6, 10), inspected=present(20))
    assert (one.saved, one.deleted, one.state, one.bytes) == (second(1), second(6), "deleted", 110)
    assert (two.saved, two.deleted, two.is_there) == (second(5), None, True)


def test_reused_name_is_another_step() -> None:
    found = lives(saved(1, 10), deleted(2, 10), saved(3, 10), deleted(4, 10))
    assert [(life.saved, life.deleted) for life in found] == [(second(1), second(2)), (second(3), second(4))]


def test_step_without_deletion_event_is_gone() -> None:
    assert [life.state for life in lives(saved(1, 10))] == ["gone"]


def test_deletion_without_save_event_is_shown() -> None:
    (life,) = lives(deleted(2, 10))
    assert (life.saved, life.deleted, life.state) == (None, second(2), "deleted")


def test_failed_saves_and_invalid_names_are_ignored() -> None:
    failed = {**saved(1, 10), "ok": False}
    assert lives(failed, at(2, "save", ok=True, step=3, name="../../etc"), at(3, "delete", name="best")) == []


def test_rollback_leaves_steps_behind_at_next_save() -> None:
    restored = at(4, "restore", step=10, name=step_name(10))
    assert [life.left for life in lives(saved(1, 10), saved(2, 20), restored)] == [None, None]
    found = lives(saved(1, 10), saved(2, 20), saved(3, 30), restored, saved(5, 15), inspected=[])
    assert {life.step: life.left for life in found} == {10: None, 20: second(5), 30: second(5), 15: None}


def test_saving_step_again_leaves_later_ones_behind() -> None:
    found = lives(saved(1, 10), saved(2, 20), saved(3, 10, generation=1))
    assert [life.left for life in found] == [second(3), second(3), None]


def test_disk_use_follows_saves_and_deletions() -> None:
    uses = steps_of(saved(1, 10), saved(5, 20), deleted(6, 10), saved(7, 30), inspected=present(20, 30)).uses
    assert [(use.time, use.steps, use.bytes) for use in uses] == [
        (second(1), 1, 110), (second(5), 2, 110 + 999), (second(6), 1, 999), (second(7), 2, 999 + 999)
    ]  # fmt: skip


def test_step_sizes_come_from_disk_or_history() -> None:
    events = saved(1, 10), saved(2, 20), deleted(3, 10)
    assert [life.bytes for life in lives(*events, inspected=present(20))] == [110, 999]
    assert [life.bytes for life in lives(*events, inspected=present(20, nbytes=None))] == [110, 120]


def test_states_of_a_real_run(tmp_path: Path) -> None:
    policy = jct.AnyPreservationPolicy([jct.LatestN(3), jct.CustomSteps([1])])
    with jct.StepManager(tmp_path, preservation_policy=policy) as manager:
        save_steps(manager, 1, 2, 3, 4)
        manager.pin(3)
        save_steps(manager, 5, 6)
    truncate_the_manifest(step_path(tmp_path, 5))
    found = {life.step: life for life in gathered_of(tmp_path).steps}
    assert {step: life.state for step, life in found.items()} == {
        1: "kept", 2: "deleted", 3: "pinned", 4: "kept", 5: "damaged", 6: "kept"
    }  # fmt: skip
    assert "manifest" in found[5].problem
    saved_at = [life.saved for life in found.values()]
    assert None not in saved_at
    assert saved_at == sorted(saved_at, key=str)


def test_real_rollback_leaves_steps_behind(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2, 3)
    with jct.StepManager(tmp_path) as manager:
        manager.restore(step=1)
        save_steps(manager, 4)
    found = {life.step: (life.state, life.left is not None) for life in gathered_of(tmp_path).steps}
    assert found == {1: ("kept", False), 2: ("left behind", True), 3: ("left behind", True), 4: ("kept", False)}


def test_steps_are_described_without_a_history(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    (tmp_path / "history.jsonl").unlink()
    inspected = inspect_run(BACKEND, str(tmp_path))
    times = [status.entry.time for status in inspected if status.entry is not None]
    found = lives(inspected=inspected)
    assert [(life.step, life.state, life.saved) for life in found] == [(1, "kept", times[0]), (2, "kept", times[1])]
    assert [life.bytes for life in found] == [status.nbytes for status in inspected]


def test_temporary_and_uncommitted_steps_are_reported(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1)
        manager.save(2, {"state": {"w": 1}}, temporary=True)
        manager.wait()
    (step_path(tmp_path, 1) / "COMMIT").unlink()
    assert {life.step: life.state for life in gathered_of(tmp_path).steps} == {1: "not committed", 2: "temporary"}


def test_missing_steps_are_all_counted() -> None:
    events = [saved(number, number) for number in range(1, 101)]
    found = steps_of(*events, deleted(101, 100), inspected=present(2, 99))
    assert found.states == {"not committed": 2, "deleted": 1, "gone": 97}
    assert {life.step for life in found.lives if life.is_there} == {2, 99}
    assert all(life.saved is not None for life in found.lives)
    assert [use.steps for use in found.uses] == [1, 2, 3, 2]


def test_deleted_steps_can_be_left_behind() -> None:
    restored = at(4, "restore", step=10, name=step_name(10))
    metrics = {"metrics": {"loss": 0.5}}
    events = saved(1, 10, **metrics), saved(2, 20, **metrics), restored, deleted(5, 20)
    assert [life.left for life in lives(*events)] == [None, None]
    found = steps_of(*events, saved(6, 15, **metrics))
    assert {life.step: life.left for life in found.lives} == {10: None, 20: second(6), 15: None}
    assert [value.step for value in found.metrics["loss"]] == [10, 15]
