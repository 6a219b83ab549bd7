"""A directory that was made anew is made durable with its names again, also if it looks like the one of before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxckpt_train.store.backends import local_names
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import made_run

ROUNDS = 8  # a file system may give another number now and then


class Synced:
    """The directories that were synced since it was last asked."""

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


@pytest.fixture(params=["handles", "no handles"])
def marks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's handles, and without, as where the file system has none."""
    if request.param == "no handles":
        monkeypatch.setattr(local_names, "_handle_of", lambda path: b"")
    return str(request.param)


def make(path: Path, *, sync: bool = True) -> None:
    LocalBackend().make_directory(str(path), parents=True, sync=sync)


def make_long_ago(path: Path) -> None:
    """A directory that is known, in one that was last changed long ago."""
    path.mkdir(parents=True)
    os.utime(path.parent, ns=(10**18, 10**18))
    make(path)


def with_the_same_number(path: Path, again: Callable[[], None]) -> None:
    """Do it again and again; at least once the directory must get the inode number that it had before."""
    reused = 0
    for _ in range(ROUNDS):
        before = path.stat().st_ino
        again()
        reused += path.stat().st_ino == before
    if not reused:
        pytest.skip("this file system gives new numbers")


def test_a_directory_that_this_process_makes_anew(tmp_path: Path, synced: Synced, marks: str) -> None:
    run = tmp_path / "a" / "run"
    make(run)
    synced.since()

    def again() -> None:
        shutil.rmtree(run)
        make(run)
        assert synced.since()[:3] == [tmp_path / "a", tmp_path, tmp_path.parent]

    with_the_same_number(run, again)


def test_directory_above_it_that_this_process_makes_anew(tmp_path: Path, synced: Synced, marks: str) -> None:
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


def test_directory_that_was_made_anew_without_being_synced(tmp_path: Path, synced: Synced, marks: str) -> None:
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
def test_a_directory_that_somebody_else_makes_anew(tmp_path: Path, synced: Synced, marks: str, above: bool) -> None:
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


def test_within_the_same_moment_the_handle_tells(tmp_path: Path, synced: Synced) -> None:
    """As where times are of whole ticks, or seconds."""
    run = tmp_path / "a" / "run"
    make_long_ago(run)
    if not local_names._handle_of(str(run)):
        pytest.skip("this file system has no handles")
    synced.since()

    def again() -> None:
        shutil.rmtree(run)
        run.mkdir()
        os.utime(run.parent, ns=(10**18, 10**18))
        make(run)
        assert synced.since()[:2] == [tmp_path / "a", tmp_path]

    with_the_same_number(run, again)


def test_a_name_that_went_and_came_back(tmp_path: Path, synced: Synced, marks: str) -> None:
    run = tmp_path / "a" / "run"
    make_long_ago(run)
    synced.since()
    run.rename(run.parent / "aside")
    (run.parent / "aside").rename(run)
    make(run)
    assert synced.since()[:2] == [tmp_path / "a", tmp_path]


def test_what_is_unchanged_is_not_synced_again(tmp_path: Path, synced: Synced, marks: str) -> None:
    """Whatever is saved into it, and whatever others make further up."""
    run = tmp_path / "a" / "b" / "run"
    make(run)
    assert run.parent in synced.since()
    (run / "step").mkdir()
    (tmp_path / "a" / "other").mkdir()
    make(run)
    assert synced.since() == []


def test_run_that_begins_anew_in_same_process(tmp_path: Path, synced: Synced) -> None:
    run = made_run(tmp_path / "a" / "run", 1)

    def again() -> None:
        shutil.rmtree(run)
        synced.since()
        made_run(run, 1)
        assert {tmp_path / "a", tmp_path} <= set(synced.since())

    with_the_same_number(run, again)
