"""A recreated directory is synced again, even if it has the inode number of the previous one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import made_run

ROUNDS = 8  # a file system may assign another number in some rounds


class Synced:
    """Record synced directories; `since` returns those synced since its last call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._paths: list[str] = []
        sync = LocalBackend.sync
        monkeypatch.setattr(
            LocalBackend, "sync", lambda backend, path: (self._paths.append(path), sync(backend, path))[1]
        )

    def since(self) -> list[Path]:
        paths, self._paths[:] = list(map(Path, self._paths)), []
        return paths


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    return Synced(monkeypatch)


def make(path: Path, *, sync: bool = True) -> None:
    LocalBackend().make_directory(str(path), parents=True, sync=sync)


def make_long_ago(path: Path) -> None:
    """Make a known directory, whose parent was last changed long ago."""
    path.mkdir(parents=True)
    os.utime(path.parent, ns=(10**18, 10**18))
    make(path)


def with_the_same_number(path: Path, again: Callable[[], None]) -> None:
    """Recreate the directory several times; skip unless it gets its previous inode number at least once."""
    reused = 0
    for _ in range(ROUNDS):
        before = path.stat().st_ino
        again()
        reused += path.stat().st_ino == before
    if not reused:
        pytest.skip("this file system does not reuse inode numbers")


def test_directory_recreated_by_this_process_is_synced(tmp_path: Path, synced: Synced) -> None:
    run = tmp_path / "a" / "run"
    make(run)
    synced.since()

    def again() -> None:
        shutil.rmtree(run)
        make(run)
        assert synced.since()[:3] == [tmp_path / "a", tmp_path, tmp_path.parent]

    with_the_same_number(run, again)


def test_recreated_parent_directory_is_synced(tmp_path: Path, synced: Synced) -> None:
    run = tmp_path / "a" / "b" / "run"
    make(run)
    synced.since()

    def again() -> None:
        shutil.rmtree(tmp_path / "a")
        make(tmp_path / "a" / "other", sync=False)
        os.makedirs(run)
        make(run)
        assert synced.since()[:3] == [tmp_path / "a" / "b", tmp_path / "a", tmp_path]

    with_the_same_number(run, again)


def test_directory_recreated_unsynced_is_synced_later(tmp_path: Path, synced: Synced) -> None:
    run = tmp_path / "a" / "run"
    make(run)

    def again() -> None:
        shutil.rmtree(run)
        make(run, sync=False)
        synced.since()
        make(run)
        assert synced.since()[:2] == [tmp_path / "a", tmp_path]

    with_the_same_number(run, again)


@pytest.mark.parametrize("above", [False, True])
def test_directory_recreated_by_others_is_synced(tmp_path: Path, synced: Synced, above: bool) -> None:
    run = tmp_path / "a" / "run"
    make_long_ago(run)
    synced.since()

    def again() -> None:
        os.utime(run.parent, ns=(10**18, 10**18))
        make(run)
        synced.since()
        shutil.rmtree(run.parent if above else run)
        os.makedirs(run)
        make(run)
        assert synced.since()[:2] == [tmp_path / "a", tmp_path]

    with_the_same_number(run, again)


def test_directory_renamed_and_back_is_synced(tmp_path: Path, synced: Synced) -> None:
    run = tmp_path / "a" / "run"
    make_long_ago(run)
    synced.since()
    run.rename(run.parent / "aside")
    (run.parent / "aside").rename(run)
    make(run)
    assert synced.since()[:2] == [tmp_path / "a", tmp_path]


def test_unchanged_directories_are_not_synced_again(tmp_path: Path, synced: Synced) -> None:
    """Also after files are saved into it, and directories are made further up."""
    run = tmp_path / "a" / "b" / "run"
    make(run)
    assert run.parent in synced.since()
    (run / "step").mkdir()
    (tmp_path / "a" / "other").mkdir()
    make(run)
    assert synced.since() == []


def test_restarted_run_is_synced_again(tmp_path: Path, synced: Synced) -> None:
    run = made_run(tmp_path / "a" / "run", 1)

    def again() -> None:
        shutil.rmtree(run)
        synced.since()
        made_run(run, 1)
        assert {tmp_path / "a", tmp_path} <= set(synced.since())

    with_the_same_number(run, again)
