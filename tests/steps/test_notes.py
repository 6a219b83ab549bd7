"""Notes: one flipped bit never takes a pin away in silence, and half a line costs nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.notes import NOTES_NAME, Notes, append_note
from jaxckpt_train.steps.preservation_policies import LatestN
from jaxckpt_train.store.local import LocalBackend
from tests.steps.runs import made_run, save_steps, step_path


def pinned(directory: Path) -> tuple[set[int], str | None]:
    notes = Notes(LocalBackend(), str(directory))
    return notes._pinned, notes.problem


@pytest.fixture
def two_pins(tmp_path: Path) -> bytes:
    for step in (100, 300):
        append_note(LocalBackend(), str(tmp_path), {"step": step, "name": f"step-{step:010d}", "pin": True})
    return (tmp_path / NOTES_NAME).read_bytes()


def test_whatever_bit_is_flipped_a_pin_is_there_or_the_notes_are_told_to_be_damaged(
    tmp_path: Path, two_pins: bytes
) -> None:
    assert pinned(tmp_path) == ({100, 300}, None)
    told = 0
    for at in range(len(two_pins) * 8):
        data = bytearray(two_pins)
        data[at // 8] ^= 1 << at % 8
        (tmp_path / NOTES_NAME).write_bytes(data)
        steps, problem = pinned(tmp_path)
        assert steps <= {100, 300}
        told += problem is not None
        if problem is None and b"\0" not in data:
            assert steps == {100, 300}, f"bit {at}"
    assert told > len(two_pins) * 6


def test_a_line_that_a_crash_cut_short_anywhere_is_left_out(tmp_path: Path, two_pins: bytes) -> None:
    first = len(two_pins) // 2
    for end in range(first + 1, len(two_pins)):
        (tmp_path / NOTES_NAME).write_bytes(two_pins[:end])
        steps, problem = pinned(tmp_path)
        assert problem is None
        assert {100} <= steps <= {100, 300}
        append_note(LocalBackend(), str(tmp_path), {"step": 500, "pin": True})
        steps, problem = pinned(tmp_path)
        assert problem is None
        assert {100, 500} <= steps <= {100, 300, 500}


def test_a_note_that_a_crash_cut_at_a_brace_is_left_out(tmp_path: Path, two_pins: bytes) -> None:
    (tmp_path / NOTES_NAME).write_bytes(two_pins + b'\n{"step":500,"metrics":{"a":0.5}')
    assert pinned(tmp_path) == ({100, 300}, None)
    append_note(LocalBackend(), str(tmp_path), {"step": 700, "pin": True})
    assert pinned(tmp_path) == ({100, 300, 700}, None)


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_that_was_lost_later_is_damage(tmp_path: Path, block: int) -> None:
    for step in range(100):
        append_note(LocalBackend(), str(tmp_path), {"step": step, "name": f"step-{step:010d}", "pin": True})
    data = bytearray((tmp_path / NOTES_NAME).read_bytes())
    data[4096 * block : 4096 * (block + 1)] = bytes(len(data[4096 * block : 4096 * (block + 1)]))
    (tmp_path / NOTES_NAME).write_bytes(data)
    steps, problem = pinned(tmp_path)
    assert len(steps) < 100
    assert problem is not None


def test_blocks_that_never_reached_the_disk_are_no_damage(tmp_path: Path, two_pins: bytes) -> None:
    (tmp_path / NOTES_NAME).write_bytes(two_pins + bytes(300))
    append_note(LocalBackend(), str(tmp_path), {"step": 500, "pin": True})
    assert pinned(tmp_path) == ({100, 300, 500}, None)


def flip_a_pin(run: Path) -> None:
    data = (run / NOTES_NAME).read_bytes()
    (run / NOTES_NAME).write_bytes(data.replace(b'"step":1', b'"step":3'))


def link_elsewhere(run: Path) -> None:
    (run / NOTES_NAME).unlink()
    (run / NOTES_NAME).symlink_to("/nonexistent")


def make_it_a_directory(run: Path) -> None:
    (run / NOTES_NAME).unlink()
    (run / NOTES_NAME).mkdir()


@pytest.mark.parametrize("damage", [flip_a_pin, link_elsewhere, make_it_a_directory])
def test_what_may_be_pinned_is_kept_and_the_run_goes_on(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    with StepManager(run) as manager:
        manager.pin(1)
    damage(run)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        manager.restore()
        assert manager.restored_step == 3
        save_steps(manager, 4, 5, 6)
    assert step_path(run, 1).exists(), "it was pinned"
    assert StepManager(run).steps == [1, 2, 3, 6], "what was saved since is kept by the policy alone"
    assert "the 3 steps that are there now are not deleted, as they may be pinned: pin(step) what must" in caplog.text


def test_what_is_held_does_not_grow_with_each_start_and_is_let_go_by_the_user(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    with StepManager(run) as manager:
        manager.pin(1)
    flip_a_pin(run)
    for step in range(4, 9):
        with StepManager(run, preservation_policy=LatestN(1)) as manager:
            manager.restore()
            save_steps(manager, step)
    assert StepManager(run).steps == [1, 2, 3, 8]
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        manager.pin(1)
        manager.pin(2, pinned=False)
        save_steps(manager, 9)
        manager.pin(3, pinned=False)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        save_steps(manager, 10)
    assert StepManager(run).steps == [1, 10]


def test_damage_after_that_is_damage_again(tmp_path: Path) -> None:
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


def test_once_the_damaged_line_is_gone_the_policy_holds_again(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    with StepManager(run) as manager:
        manager.pin(1)
    flip_a_pin(run)
    os.unlink(run / NOTES_NAME)
    with StepManager(run, preservation_policy=LatestN(1)) as manager:
        manager.pin(2)
        save_steps(manager, 4)
    assert StepManager(run).steps == [2, 4]
