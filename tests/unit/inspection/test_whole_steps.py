"""The newest intact step: by the sizes of its files, or by every byte of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.inspection.runs import NewestWhole, newest_whole_step
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import DAMAGE, flip_a_payload_byte, made_run, segment_of, step_path


def newest(directory: Path, *, every_byte: bool) -> NewestWhole:
    backend = LocalBackend()
    return newest_whole_step(backend, str(directory), scan(backend, str(directory)), every_byte=every_byte)


def step_of(found: NewestWhole) -> int | None:
    return None if found.entry is None else found.entry.step


def test_undamaged_run_gives_last_step(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    for every_byte in (False, True):
        found = newest(directory, every_byte=every_byte)
        assert (step_of(found), found.damaged) == (3, {})


@pytest.mark.parametrize("name", list(DAMAGE))
def test_full_check_finds_all_damage(tmp_path: Path, name: str) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    damage, file = DAMAGE[name]
    damage(step_path(directory, 2))
    found = newest(directory, every_byte=True)
    assert step_of(found) == 1
    assert file in found.damaged[2]
    assert step_of(newest(directory, every_byte=False)) == (2 if "flipped" in name else 1)


def test_all_damaged_steps_are_reported(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    for step in (1, 2):
        flip_a_payload_byte(step_path(directory, step))
    found = newest(directory, every_byte=True)
    assert (step_of(found), set(found.damaged)) == (None, {1, 2})


def test_step_deleted_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    directory, backend = made_run(tmp_path / "run", 1, 2), LocalBackend()

    def delete(nbytes: int) -> None:
        if step_path(directory, 2).exists():
            segment_of(step_path(directory, 2)).unlink()
            step_path(directory, 2).rename(directory / ".step-0000000002.deleting")

    entries = scan(backend, str(directory))
    found = newest_whole_step(backend, str(directory), entries, every_byte=True, progress=delete)
    assert (step_of(found), found.damaged) == (1, {})


@pytest.mark.parametrize("every_byte", [False, True])
def test_refused_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_byte: bool) -> None:
    directory = made_run(tmp_path / "run", 1)
    entries = scan(LocalBackend(), str(directory))

    def refuse(self: LocalBackend, directory: str, name: str, *, direct: object) -> None:
        raise StorageError(5, "cannot open the file: Input/output error", f"{directory}/{name}")

    monkeypatch.setattr(LocalBackend, "open", refuse)
    found = newest_whole_step(LocalBackend(), str(directory), entries, every_byte=every_byte)
    assert (found.entry, found.damaged, set(found.refused)) == (None, {}, {1})
    with pytest.raises(StorageError, match="Input/output error"):
        raise found.refused[1]
