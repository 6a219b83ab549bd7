"""Unreadable files are not reported as damaged, and the rest of a run is still reported."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends.base import Source
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.commands import json_of, refused
from tests.support.runs import made_run, step_path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run", 1, 2, 3)


class _Failing(LocalBackend):
    """A disk with a bad sector in one file."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self._file = (str(folder), name)

    def open(self, directory: str, name: str, **options: Any) -> Source:
        source = super().open(directory, name, **options)
        return _FailingSource(source) if (directory, name) == self._file else source


class _FailingSource:
    def __init__(self, source: Source) -> None:
        self._source, self.size, self.alignment = source, source.size, source.alignment

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        raise StorageError(errno.EIO, "cannot read the file: Input/output error", "it")

    def close(self) -> None:
        self._source.close()


def test_failing_read_is_not_damage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later try may succeed, or another path to the disk."""
    failing = _Failing(step_path(directory, 3), "state/p00000-s000.safetensors")
    monkeypatch.setattr("jaxckpt_train.cli.maintain.BACKEND", failing)
    monkeypatch.setattr("jaxckpt_train.cli.inspect.BACKEND", failing)
    found = json_of("verify", directory, code=4)
    assert (found["ok"], found["damaged"], found["bytes"]) == (False, False, 0)
    assert [each["damaged"] for each in json_of("scrub", directory, code=4)["steps"]] == [False] * 3
    assert "Input/output error" in refused("stats", directory, code=4)


def test_unreadable_newer_step_blocks_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    monkeypatch.setattr("jaxckpt_train.cli.maintain.BACKEND", _Failing(step_path(directory, 3), "manifest.json"))
    refused("mv", directory, tmp_path / "moved", "--step", 1, code=4)
    assert step_path(directory, 1).is_dir()
    assert not (tmp_path / "moved").exists()
