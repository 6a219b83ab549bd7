"""Entries whose `stat` fails: they are listed as files, and hide no other entry."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.transaction import Transaction
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import made_run, save_steps, segment_of, step_path


@contextlib.contextmanager
def stat_refused(is_refused: Callable[[str], bool]) -> Iterator[None]:
    """Within the context, directory listings include these files, but `stat` of them fails."""
    scandir = os.scandir

    class Item:
        def __init__(self, item: os.DirEntry[str]) -> None:
            self._item, self.name, self.path = item, item.name, item.path
            self.is_dir, self.is_file, self.is_symlink = item.is_dir, item.is_file, item.is_symlink

        def stat(self, **_: Any) -> os.stat_result:
            if is_refused(self.path):
                raise OSError(errno.EUCLEAN, "structure needs cleaning")
            return self._item.stat(follow_symlinks=False)

    class Listing:
        def __init__(self, path: str) -> None:
            self._found = scandir(path)

        def __enter__(self) -> Any:
            return (Item(item) for item in self._found)

        def __exit__(self, *_: object) -> None:
            self._found.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", Listing)
        yield


class Synced(RefusingBackend):
    """Records what is synced, and refuses some syncs."""

    def __init__(self, part: str, times: int) -> None:
        super().__init__("sync", part, errno.EIO, times)
        self.synced: list[str] = []

    def sync(self, path: str) -> None:
        self._refuse("sync", path)
        super().sync(path)
        self.synced.append(path)


def test_unknown_entry_hides_no_other(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1)
    with stat_refused(lambda path: path.endswith("history.jsonl")):
        assert StepManager(run).steps == [1]
        kinds = {entry.name: entry.kind for entry in LocalBackend().list(str(run))}
    assert (kinds["history.jsonl"], kinds["step-0000000001"]) == ("file", "directory")


@pytest.mark.parametrize("refusals", [0, 99])
def test_older_step_waits_for_sync_of_newest(tmp_path: Path, refusals: int) -> None:
    newest = str(segment_of(step_path(tmp_path, 2)))
    backend, unsynced = Synced(newest, refusals), jct.StoreSettings(durability="none")
    with stat_refused(lambda path: path == newest):
        manager = StepManager(tmp_path, preservation_policy=LatestN(1), settings=unsynced, backend=backend)
        save_steps(manager, 1, 2)
        manager.close()
    assert (newest in backend.synced) == (refusals == 0)
    assert step_path(tmp_path, 1).exists() == (refusals > 0)
    assert StepManager(tmp_path).latest == 2


def test_files_of_unknown_size_are_adopted(tmp_path: Path) -> None:
    transaction = Transaction(LocalBackend(), str(tmp_path / "c"), jct.StoreSettings())
    Path(transaction.add_folder("data"), "own.bin").write_bytes(b"own")
    with stat_refused(lambda path: path.endswith("own.bin")):
        (record,) = transaction.adopt_folder("data", lambda done: None)
    assert (record.file, record.bytes) == ("data/own.bin", 3)


def test_folder_with_unstorable_name_is_refused(tmp_path: Path) -> None:
    transaction = Transaction(LocalBackend(), str(tmp_path / "c"), jct.StoreSettings())
    Path(transaction.add_folder("data"), ".cache").mkdir()
    with pytest.raises(jct.UnsupportedLeafError, match=r"\.cache"):
        transaction.adopt_folder("data", lambda done: None)
