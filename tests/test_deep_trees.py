"""Directories in directories, deeper than calls can be or paths are long: no save fails for them with their depth."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxckpt_train.store.local import LocalBackend
from tests.killed_saves import OF_KILLED_SAVES, names

pytestmark = OF_KILLED_SAVES


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory that is removed by what can remove such trees."""
    yield tmp_path / "place"
    subprocess.run(["rm", "-rf", str(tmp_path / "place")], check=True)


def make_deep(directory: Path, depth: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    here = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=here)
        above, here = here, os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(above)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize("depth", [1, 49, 50, 51, 101, 1500, 5000])
def test_a_tree_is_removed_however_deep(place: Path, depth: int) -> None:
    make_deep(place / "tree", depth)
    make_deep(place / "tree" / "a" / "b", depth)
    (place / "tree" / "a" / "link").symlink_to(place)
    before = len(os.listdir("/proc/self/fd"))
    LocalBackend().remove(str(place / "tree"))
    assert names(place) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_another_process_removes_meanwhile_is_no_reason_to_stop(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        make_deep(place / "tree" / str(number), 2)
    real = os.unlink

    def unlink_after_the_other(name: str, *, dir_fd: int) -> None:
        real(name, dir_fd=dir_fd)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_after_the_other)
    LocalBackend().remove(str(place / "tree"))
    assert names(place) == []
