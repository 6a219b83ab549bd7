"""Removal of directories nested deeper than the recursion limit or the maximum length of a path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.killed_saves import OF_KILLED_SAVES, names

pytestmark = OF_KILLED_SAVES


def make_deep(directory: Path, depth: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    here = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=here)
        above, here = here, os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(above)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def test_listing_that_signal_interrupts_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    listed, interrupts = os.scandir, [4, 2]

    def scandir(path: int) -> Any:
        if interrupts and (number := interrupts.pop()) == 2:
            raise InterruptedError(number, "Interrupted system call")
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    LocalBackend().remove(str(tmp_path / "tree"))
    assert names(tmp_path) == []


def test_deep_directory_is_removed_after_interrupted_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_deep(tmp_path / "tree", 120)
    rename, moves = os.rename, list[str]()

    def interrupted(source: str, target: str, **folders: int) -> None:
        rename(source, target, **folders)
        moves.append(target)
        if len(moves) == 1:
            raise InterruptedError(4, "Interrupted system call")

    monkeypatch.setattr(os, "rename", interrupted)
    LocalBackend().remove(str(tmp_path / "tree"))
    assert names(tmp_path) == []
    assert len(moves) == 2
