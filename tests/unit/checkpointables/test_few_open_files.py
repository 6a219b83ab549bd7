"""Loads of many parts with few file descriptors: files opened in advance are closed for files that are needed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.same_trees import assert_same

PARTS = 5


class FewFiles(LocalBackend):
    """Limits the number of open files."""

    def __init__(self, most: int) -> None:
        self._most, self.open_files, self.refused = most, 0, 0

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        if self.open_files >= self._most:
            self.refused += 1
            raise jct.StorageError(errno.EMFILE, "too many open files", f"{directory}/{name}")
        self.open_files += 1
        return Counted(self, super().open(directory, name, direct=direct))


class Counted:
    """An open file that is counted until it is closed."""

    def __init__(self, files: FewFiles, inner: Any) -> None:
        self._files, self._inner = files, inner
        self.size, self.alignment = inner.size, inner.alignment

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        self._inner.read_into(offset, data, needed)

    def close(self) -> None:
        self._files.open_files -= 1
        self._inner.close()


@pytest.mark.parametrize("most", range(2, PARTS + 3))
def test_prefetched_files_close_when_descriptors_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    parts = {f"part{number}": {"w": np.full(5000, number)} for number in range(PARTS)}
    jct.save_checkpointables(tmp_path / "c", {**parts, "notes": jct.JsonValue([1])})
    files = FewFiles(most)
    monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _: files)
    names = [*reversed(parts), "notes"]
    found = jct.load_checkpointables(tmp_path / "c", dict.fromkeys(names))
    assert found.pop("notes") == jct.JsonValue([1])
    assert_same(found, parts)
    assert files.open_files == 0
    assert files.refused > 0 or most > PARTS
