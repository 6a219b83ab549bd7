"""Held steps: damage to the record of a run keeps each step that may be pinned, and training continues."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.run.entry import entry_from_manifest
from jaxckpt_train.run.record import RECORD_NAME
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import (
    flip_a_payload_byte,
    made_run,
    record_file,
    save_steps,
    step_path,
    truncate_the_manifest,
)


def flip_a_pin(run: Path) -> None:
    file = record_file(run)
    file.write_bytes(file.read_bytes().replace(b'"pins":[1]', b'"pins":[3]'))


def link_elsewhere(run: Path) -> None:
    file = record_file(run)
    file.unlink()
    file.symlink_to("/nonexistent")


def make_it_a_directory(run: Path) -> None:
    file = record_file(run)
    file.unlink()
    file.mkdir()


def zero_a_part_of_a_pin(run: Path) -> None:
    data = record_file(run).read_bytes()
    record_file(run).write_bytes(data[:10] + bytes(30) + data[40:])


def cut_within_a_pin(run: Path) -> None:
    os.truncate(record_file(run), 50)


def empty_it(run: Path) -> None:
    os.truncate(record_file(run), 0)


def remove_it(run: Path) -> None:
    shutil.rmtree(run / RECORD_NAME)


def make_it_huge(run: Path) -> None:
    os.truncate(record_file(run), 1 << 40)


def pinned_run(directory: Path) -> Path:
    """A run with steps 1 to 3; the first is pinned, and the last manifest states a changed record."""
    run = made_run(directory, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        save_steps(manager, 3)
    return run


LOST = [zero_a_part_of_a_pin, cut_within_a_pin, empty_it, remove_it]


@pytest.mark.parametrize("damage", [flip_a_pin, link_elsewhere, make_it_a_directory, make_it_huge, *LOST])
def test_damaged_record_keeps_steps_maybe_pinned(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
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
    data = record_file(run).read_bytes()
    record_file(run).write_bytes(data.replace(b'"pins":[5]', b'"pins":[7]'))
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        save_steps(manager, 6, 7)
    assert StepManager(run).steps == [1, 2, 5, 7]


def test_record_removed_by_hand_is_no_damage(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    with StepManager(run) as manager:
        manager.pin(1)
    flip_a_pin(run)
    remove_it(run)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        manager.pin(2)
        save_steps(manager, 4)
    assert StepManager(run).steps == [2, 4]


@pytest.mark.parametrize("damage", LOST[1:])
def test_record_lost_again_holds_steps_again(tmp_path: Path, damage: Any) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        save_steps(manager, 3)
    for step in (4, 6):
        damage(run)
        with StepManager(run, preservation_policy=LatestN(1)) as manager:
            save_steps(manager, step, step + 1)
    assert StepManager(run).steps == [1, 2, 3, 5, 7]


@pytest.mark.parametrize("spoil", [flip_a_payload_byte, truncate_the_manifest])
def test_damaged_manifest_states_no_record_number(tmp_path: Path, spoil: Any) -> None:
    run = made_run(tmp_path, 1)
    with StepManager(run) as manager:
        manager.pin(1)
        save_steps(manager, 2)
    spoil(step_path(run, 2))
    remove_it(run)
    is_certain = spoil is flip_a_payload_byte
    assert [entry.is_held for entry in scan(LocalBackend(), str(run))] == [is_certain, True]


def test_copied_step_states_no_record_number(tmp_path: Path) -> None:
    other = made_run(tmp_path / "other", 1)
    with StepManager(other) as manager:
        manager.pin(1)
        save_steps(manager, 7)
    run = made_run(tmp_path / "run", 1, 2, 3)
    shutil.copytree(step_path(other, 7), step_path(run, 7))
    assert not any(entry.is_held for entry in scan(LocalBackend(), str(run)))


@pytest.mark.parametrize("value", [None, True, -1, 0.5, "3", [], 1 << 70])
def test_invalid_record_number_in_manifest_is_zero(value: object) -> None:
    assert entry_from_manifest("step-0000000001", 1, 0, {"step": 1, "record": value}).record_number == 0
