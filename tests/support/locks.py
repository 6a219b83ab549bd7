"""Locks of an owner: of other processes, with chosen times, and backends that interfere."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.run import lock as lock_module
from jaxckpt_train.run.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.store.backends.base import StoredRecord
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.bucket_paths import BucketPath


def new_lock(directory: Path, backend: Any = None) -> OwnerLock:
    return OwnerLock(backend or LocalBackend(), str(directory))


def lock_file(directory: Path) -> Path:
    """The file with the newest version of the lock."""
    return max((directory / LOCK_NAME).glob("*.json"))


def is_owned(directory: Path) -> bool:
    """Whether any process holds the lock."""
    return new_lock(directory).owner() is not None


def remove_lock(directory: Path) -> None:
    """Remove the lock, as a user may do by hand."""
    if isinstance(directory, BucketPath):
        (directory / f"{LOCK_NAME}.json").unlink()
    else:
        shutil.rmtree(directory / LOCK_NAME)


def replace_lock(directory: Path, content: bytes) -> None:
    """Make this the newest version of the lock, as another process does that takes over."""
    disk, path = LocalBackend(), f"{directory}/{LOCK_NAME}"
    found = disk.read_record(path)
    assert disk.swap_record(path, content, None if found is None else found.version) is not None


def take_over(directory: Path, **process: Any) -> None:
    """Have another process own the directory from now on."""
    record = json.loads(lock_file(directory).read_bytes())
    record["process"].update(process)
    replace_lock(directory, json.dumps(record | {"token": "of-another"}).encode())


def edit_owner(directory: Path, **process: Any) -> None:
    """Change the process that is recorded in the lock."""
    path = lock_file(directory)
    record = json.loads(path.read_bytes())
    record["process"].update(process)
    path.write_text(json.dumps(record))


class Beats(LocalBackend):
    """A disk that reports these times of the lock one by one, and then always the last one."""

    def __init__(self, *refreshed_ns: int) -> None:
        self._refreshed_ns = list(refreshed_ns)

    def read_record(self, path: str) -> StoredRecord | None:
        found = super().read_record(path)
        assert found is not None
        times = self._refreshed_ns
        return dataclasses.replace(found, refreshed_ns=times.pop(0) if len(times) > 1 else times[0])


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a lock over after 0.2 s of silence instead of a minute."""
    monkeypatch.setattr(lock_module, "POLL_S", 0.001)
    monkeypatch.setattr(lock_module, "SILENCE_S", 0.2)


class Between(LocalBackend):
    """Calls something right before and right after its first change of a record."""

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._before: Callable[[], object] | None = before
        self._after = after

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        before, self._before = self._before, None
        if before is None:
            return super().swap_record(path, data, version)
        before()
        try:
            return super().swap_record(path, data, version)
        finally:
            self._after()
