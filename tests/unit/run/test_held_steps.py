"""Held steps: damage to the notes of a run keeps each step that may be pinned, and training continues."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.annotations import NOTES_NAME
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.run.entry import entry_from_manifest
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import flip_a_payload_byte, made_run, save_steps, step_path, truncate_the_manifest


def flip_a_pin(run: Path) -> None:
    data = (run / NOTES_NAME).read_bytes()
    (run / NOTES_NAME).write_bytes(data.replace(b'"step":1', b'"step":3'))


def link_elsewhere(run: Path) -> None:
    (run / NOTES_NAME).unlink()
    (run / NOTES_NAME).symlink_to("/nonexistent")


def make_it_a_directory(run: Path) -> None:
    (run / NOTES_NAME).unlink()
    (run / NOTES_NAME).mkdir()


def zero_a_part_of_a_pin(run: Path) -> None:
    data = (run / NOTES_NAME).read_bytes()
    (run / NOTES_NAME).write_bytes(data[:10] + bytes(30) + data[40:])


def cut_within_a_pin(run: Path) -> None:
    os.truncate(run / NOTES_NAME, 50)


def empty_it(run: Path) -> None:
    os.truncate(run / NOTES_NAME, 0)


def remove_it(run: Path) -> None:
    (run / NOTES_NAME).unlink()


def make_it_huge(run: Path) -> None:
    os.truncate(run / NOTES_NAME, 1 << 40)


def pinned_run(directory: Path) -> Path:
    """A run with steps 1 to 3; the first is pinned, and the manifest of the last one counts that note."""
    run = made_run(directory, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        save_steps(manager, 3)
    return run


LOST = [zero_a_part_of_a_pin, cut_within_a_pin, empty_it, remove_it]


@pytest.mark.parametrize("damage", [flip_a_pin, link_elsewhere, make_it_a_directory, make_it_huge, *LOST])
def test_damaged_notes_keep_steps_maybe_pinned(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = pinned_run(tmp_path)
    damage(run)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        manager.restore()
        assert manager.restored_step == 3
        save_steps(manager, 4, 5, 6)
    assert step_path(run, 1).exists(), "it was pinned"
    assert StepManager(run).steps == [1, 2, 3, 6], "only the policy decides about later steps"
    assert "current 3 steps may be pinned" in caplog.text


@pytest.mark.parametrize("damage", [flip_a_pin, make_it_huge, *LOST])
def test_holds_do_not_grow_with_restarts(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = pinned_run(tmp_path)
    damage(run)
    for step in range(4, 9):
        with StepManager(run, preservation_policy=LatestN(1)) as manager:
            manager.restore()
            save_steps(manager, step)
    assert StepManager(run).steps == [1, 2, 3, 8]
    assert caplog.text.count("may be pinned") == 1
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        manager.pin(1)
        manager.pin(2, pinned=False)
        save_steps(manager, 9)
        manager.pin(3, pinned=False)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        save_steps(manager, 10)
    assert StepManager(run).steps == [1, 10]


def test_later_damage_holds_steps_again(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
    flip_a_pin(run)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        save_steps(manager, 5)
        manager.pin(5)
    data = (run / NOTES_NAME).read_bytes()
    (run / NOTES_NAME).write_bytes(data.replace(b'"step":5', b'"step":7'))
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        save_steps(manager, 6, 7)
    assert StepManager(run).steps == [1, 2, 5, 7]


def test_once_damaged_line_is_gone_policy_holds_again(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    with StepManager(run) as manager:
        manager.pin(1)
    flip_a_pin(run)
    os.unlink(run / NOTES_NAME)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        manager.pin(2)
        save_steps(manager, 4)
    assert StepManager(run).steps == [2, 4]


@pytest.mark.parametrize("damage", LOST[1:])
def test_notes_lost_again_hold_steps_again(tmp_path: Path, damage: Any) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        save_steps(manager, 3)
    for step in (4, 6):
        damage(run)
        with StepManager(run, preservation_policy=LatestN(1)) as manager:
            save_steps(manager, step, step + 1)
    assert StepManager(run).steps == [1, 2, 3, 5, 7]


def test_huge_notes_file_keeps_its_content(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        manager.attach_metrics(2, {"loss": 0.5})
    before = (run / NOTES_NAME).read_bytes()
    make_it_huge(run)
    assert [entry.is_held for entry in scan(LocalBackend(), str(run))] == [True, True]
    with StepManager(run) as manager:
        manager.pin(2)
    entries = scan(LocalBackend(), str(run))
    assert [(entry.pinned, entry.is_held, entry.metrics) for entry in entries] == [
        (True, True, None), (True, True, {"loss": 0.5}),
    ]  # fmt: skip
    with (run / NOTES_NAME).open("rb") as file:
        assert file.read(len(before) + 1) == before + b"\0"
        file.seek(1 << 40)
        assert file.read().count(b"\n{") == 2


@pytest.mark.parametrize("spoil", [flip_a_payload_byte, truncate_the_manifest])
def test_damaged_manifest_gives_no_note_count(tmp_path: Path, spoil: Any) -> None:
    run = made_run(tmp_path, 1)
    with StepManager(run) as manager:
        manager.pin(1)
        save_steps(manager, 2)
    spoil(step_path(run, 2))
    remove_it(run)
    is_certain = spoil is flip_a_payload_byte
    assert [entry.is_held for entry in scan(LocalBackend(), str(run))] == [is_certain, True]


def test_copied_step_gives_no_note_count(tmp_path: Path) -> None:
    other = made_run(tmp_path / "other", 1)
    with StepManager(other) as manager:
        manager.pin(1)
        save_steps(manager, 7)
    run = made_run(tmp_path / "run", 1, 2, 3)
    shutil.copytree(step_path(other, 7), step_path(run, 7))
    assert not any(entry.is_held for entry in scan(LocalBackend(), str(run)))


@pytest.mark.parametrize("value", [None, True, -1, 0.5, "3", [], 1 << 70])
def test_invalid_note_count_in_manifest_is_zero(value: object) -> None:
    assert entry_from_manifest("step-0000000001", 1, 0, {"step": 1, "notes": value}).notes == 0
