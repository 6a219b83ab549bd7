"""The newest valid step: by the sizes of its files, or by every byte of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.inspection.runs import StepStatus, check_newest, inspect_run, newest_whole
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import DAMAGE, flip_a_payload_byte, made_run, segment_of, state_of, step_path


def checked(directory: Path, *, every_byte: bool) -> list[StepStatus]:
    backend = LocalBackend()
    return check_newest(backend, str(directory), inspect_run(backend, str(directory)), every_byte=every_byte)


def newest_step(statuses: Sequence[StepStatus]) -> int | None:
    newest = newest_whole(statuses)
    return None if newest is None else newest.step


def problems(statuses: Sequence[StepStatus]) -> dict[int, str]:
    return {status.step: status.problem for status in statuses if status.problem is not None}


def test_undamaged_run_gives_last_step(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    for every_byte in (False, True):
        found = checked(directory, every_byte=every_byte)
        assert (newest_step(found), problems(found)) == (3, {})


@pytest.mark.parametrize("name", list(DAMAGE))
def test_full_check_finds_all_damage(tmp_path: Path, name: str) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    damage, file = DAMAGE[name]
    damage(step_path(directory, 2))
    found = checked(directory, every_byte=True)
    assert newest_step(found) == 1
    assert file in problems(found)[2]
    assert newest_step(checked(directory, every_byte=False)) == (2 if "flipped" in name else 1)


def test_all_damaged_steps_are_reported(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    for step in (1, 2):
        flip_a_payload_byte(step_path(directory, step))
    found = checked(directory, every_byte=True)
    assert (newest_step(found), set(problems(found))) == (None, {1, 2})


def test_step_deleted_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    directory, backend = made_run(tmp_path / "run", 1, 2), LocalBackend()

    def delete(nbytes: int) -> None:
        if step_path(directory, 2).exists():
            segment_of(step_path(directory, 2)).unlink()
            step_path(directory, 2).rename(directory / ".step-0000000002.tmp-00000000-00000000-1-1-0")

    statuses = inspect_run(backend, str(directory))
    found = check_newest(backend, str(directory), statuses, every_byte=True, progress=delete)
    assert (newest_step(found), problems(found)) == (1, {})


@pytest.mark.parametrize("every_byte", [False, True])
def test_refused_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_byte: bool) -> None:
    directory = made_run(tmp_path / "run", 1)
    statuses = inspect_run(LocalBackend(), str(directory))

    def refuse(self: LocalBackend, directory: str, name: str, *, direct: object) -> None:
        raise StorageError(5, "cannot open the file: Input/output error", f"{directory}/{name}")

    monkeypatch.setattr(LocalBackend, "open", refuse)
    (found,) = check_newest(LocalBackend(), str(directory), statuses, every_byte=every_byte)
    assert isinstance(found.refusal, StorageError)
    assert "Input/output error" in str(found.problem)


def test_older_save_counts_again_if_newer_one_was_set_aside(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    shutil.copytree(step_path(directory, 1), tmp_path / "older")
    with jct.StepManager(directory) as manager:
        manager.save(1, {"state": state_of(1)}, overwrite=True)
        manager.wait()
    (tmp_path / "older").rename(step_path(directory, 1))
    flip_a_payload_byte(directory / "step-0000000001.g1")
    with jct.StepManager(directory) as manager:
        manager.own()
        manager.restore()
    found = inspect_run(LocalBackend(), str(directory))
    assert [(status.name, status.is_restorable) for status in found] == [
        ("step-0000000001", True), ("step-0000000001.g1", False)
    ]  # fmt: skip
