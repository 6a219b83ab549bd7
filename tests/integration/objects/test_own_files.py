"""Objects that write their own files, in checkpoints and runs on object stores."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import obstore
import pytest

import jaxckpt_train as jct
from jaxckpt_train.checkpointables.handlers import DirectoryAwaitingCreation
from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from tests.support.objects.stand_in import StandIn

pytestmark = pytest.mark.parametrize("cloud", ["s3", "gcs", "azure"], indirect=True)
FILES = {"large.bin": bytes(range(256)) * (40 << 10), "folder/empty": b"", "folder/text.txt": b"hello"}


class FileWriter:
    """Writes its files, and remembers what it has loaded, and from where."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files, self.folder = files or {}, Path()

    async def save(self, directory: DirectoryAwaitingCreation) -> Awaitable[None]:
        return self._write(directory)

    async def _write(self, directory: DirectoryAwaitingCreation) -> None:
        folder = await directory.await_creation()
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    async def load(self, directory: Path) -> Awaitable[None]:
        return self._read(directory)

    async def _read(self, directory: Path) -> None:
        self.folder = directory
        files = [file for file in directory.rglob("*") if file.is_file()]
        self.files = {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def keys_of(cloud: StandIn) -> list[str]:
    return [each["path"] for batch in obstore.list(cloud.access.store()) for each in batch]


def test_own_files_are_uploaded_once_and_loaded(cloud: StandIn, temporary_files: Path) -> None:
    jct.save_checkpointables(cloud.url("one"), {"state": {"w": np.arange(5)}, "own": FileWriter(FILES)})
    assert list(temporary_files.iterdir()) == []
    assert [each for each in cloud.requests if each.key.endswith("large.bin") and each.method == "GET"] == []

    own = FileWriter()
    loaded = jct.load_checkpointables(cloud.url("one"), {"state": None, "own": own})
    assert own.files == FILES
    assert loaded["state"]["w"].tolist() == list(range(5))
    assert own.folder.is_relative_to(temporary_files)
    assert list(temporary_files.iterdir()) == []
    assert jct.verify(cloud.url("one")).ok


def test_digests_of_own_files_equal_those_of_a_local_checkpoint(cloud: StandIn, tmp_path: Path) -> None:
    for place in (cloud.url("one"), tmp_path / "one"):
        jct.save_checkpointables(place, {"own": FileWriter(FILES)})
    found = [jct.metadata(place).checkpointables["own"] for place in (cloud.url("one"), tmp_path / "one")]
    assert found[0] == found[1]


def test_run_restores_own_files(cloud: StandIn) -> None:
    with jct.StepManager(cloud.url("run")) as manager:
        manager.save(3, {"own": FileWriter(FILES)})
    own = FileWriter()
    with jct.StepManager(cloud.url("run")) as manager:
        manager.restore({"own": own})
        assert manager.restored_step == 3
    assert own.files == FILES


def test_damaged_own_file_is_refused(cloud: StandIn, temporary_files: Path) -> None:
    jct.save_checkpointables(cloud.url("one"), {"own": FileWriter(FILES)})
    (key,) = [key for key in keys_of(cloud) if key.endswith("text.txt")]
    obstore.put(cloud.access.store(), key, b"jello")
    with pytest.raises(CorruptCheckpointError, match=r"text\.txt"):
        jct.load_checkpointables(cloud.url("one"), {"own": FileWriter()})
    assert list(temporary_files.iterdir()) == []


def test_unstorable_name_leaves_nothing(cloud: StandIn, temporary_files: Path) -> None:
    with pytest.raises(UnsupportedLeafError):
        jct.save_checkpointables(cloud.url("one"), {"own": FileWriter({"a": b"1", "CON": b"2", "b\n": b"3"})})
    assert keys_of(cloud) == []
    assert list(temporary_files.iterdir()) == []
