"""The owner's lock: which process gets a directory, which is refused, and how a dead owner is recognised."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from jaxckpt_train.errors import DirectoryLockedError, StorageError
from jaxckpt_train.run import lock as lock_module
from jaxckpt_train.run.lock import HEARTBEAT_S, LOCK_NAME, SILENCE_S, OwnerLock
from jaxckpt_train.store.backends.base import StoredRecord
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.locks import Between, edit_owner, is_owned, lock_file, new_lock, replace_lock, take_over


def test_same_pid_in_other_container_is_another(tmp_path: Path, quick_looks: None) -> None:
    """As in two containers without /proc, in which each process has PID 1."""
    first = new_lock(tmp_path)
    first.acquire()
    edit_owner(tmp_path, start="", boot="", namespace="", nonce="of-another")
    dead = new_lock(tmp_path).acquire()
    assert dead is not None
    assert dead.pid == os.getpid()
    first.release()  # ends its heartbeat, which would log an error in a later test


def test_heartbeat_fits_thrice_into_silence_limit() -> None:
    assert HEARTBEAT_S * 3 <= SILENCE_S


def test_a_heartbeat_changes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock = new_lock(tmp_path)
    lock.acquire()
    before = lock_file(tmp_path).stat().st_mtime_ns
    while lock_file(tmp_path).stat().st_mtime_ns == before:
        pass  # ends with the next beat; without one, pytest's time limit ends it
    lock.release()


def test_replaced_owner_raises_and_stops_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    sleeper, others = new_lock(tmp_path), threading.enumerate()
    sleeper.acquire()
    sleeper.check()
    (beating,) = [each for each in threading.enumerate() if each.name == "jaxckpt-heartbeat" and each not in others]
    take_over(tmp_path, host="another-machine", pid=4711)
    beating.join(60)
    assert not beating.is_alive()
    assert "was taken over" in caplog.text
    with pytest.raises(DirectoryLockedError, match="process 4711 on another-machine"):
        sleeper.check()
    sleeper.release()
    assert json.loads(lock_file(tmp_path).read_bytes())["token"] == "of-another"
    shutil.rmtree(tmp_path / LOCK_NAME)
    with pytest.raises(DirectoryLockedError, match="is gone"):
        sleeper.check()


def test_briefly_missing_lock_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_looks: None) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock, path = new_lock(tmp_path), tmp_path / LOCK_NAME
    lock.acquire()
    path.rename(tmp_path / "aside")
    assert lock._beat_once()
    (tmp_path / "aside").rename(path)
    lock.check()
    before = lock_file(tmp_path).stat().st_mtime_ns
    while lock_file(tmp_path).stat().st_mtime_ns == before:
        pass  # as above: ends with the next beat
    lock.release()


def test_heartbeat_ends_after_a_takeover_that_is_over(tmp_path: Path) -> None:
    beats: list[None] = []
    sleeper = OwnerLock(LocalBackend(), str(tmp_path), lambda: beats.append(None))
    sleeper.acquire()
    content = lock_file(tmp_path).read_bytes()
    replace_lock(tmp_path, content.replace(sleeper._record.token.encode(), b"of-another"))
    replace_lock(tmp_path, lock_file(tmp_path).read_bytes()[:-1] + b',"is_released":true}')
    assert not is_owned(tmp_path)
    assert not sleeper._beat_once()
    assert not beats, "the history has the progress of owners only"
    with pytest.raises(DirectoryLockedError, match="is gone"):
        sleeper.check()
    sleeper.release()


def test_second_lock_of_same_process_is_refused(tmp_path: Path) -> None:
    first = new_lock(tmp_path)
    first.acquire()
    with pytest.raises(DirectoryLockedError, match="owned by this process"):
        new_lock(tmp_path).acquire()
    first.acquire()  # the owner itself may ask again
    first.release()
    new_lock(tmp_path).acquire()


def test_replaced_owner_cannot_reacquire(tmp_path: Path) -> None:
    lock = new_lock(tmp_path)
    lock.acquire()
    take_over(tmp_path)
    other = lock_file(tmp_path)
    content = other.read_bytes()
    with pytest.raises(DirectoryLockedError, match="held by process"):
        lock.acquire()
    assert lock_file(tmp_path) == other
    assert other.read_bytes() == content
    lock.release()


def test_released_lock_has_one_small_file(tmp_path: Path) -> None:
    for _ in range(3):
        lock = new_lock(tmp_path)
        lock.acquire()
        lock.release()
        lock.release()
        assert not is_owned(tmp_path)
    assert os.listdir(tmp_path) == [LOCK_NAME]
    assert len(os.listdir(tmp_path / LOCK_NAME)) == 1


def test_lock_released_meanwhile_is_not_taken_twice(tmp_path: Path) -> None:
    """A late process has seen a dead owner; before it takes over, others take over, end, and start again."""
    dead = new_lock(tmp_path)
    dead.acquire()
    edit_owner(tmp_path, pid=os.getppid(), nonce="", start="1")  # alive, but with another start time
    newest = new_lock(tmp_path)

    def others() -> None:
        for lock in (new_lock(tmp_path), new_lock(tmp_path)):
            lock.acquire()
            lock.release()
        newest.acquire()

    with pytest.raises(DirectoryLockedError, match="this process"):
        new_lock(tmp_path, Between(others, lambda: None)).acquire()
    newest.check()
    newest.release()


def test_release_leaves_the_lock_of_another_alone(tmp_path: Path) -> None:
    lock = new_lock(tmp_path)
    lock.acquire()
    take_over(tmp_path)
    lock.release()
    assert json.loads(lock_file(tmp_path).read_bytes())["token"] == "of-another"
    assert is_owned(tmp_path)


class ReleasedAfterRead(LocalBackend):
    """Another thread of this process releases a lock between a look at it and what follows."""

    def __init__(self, lock: OwnerLock, look: int) -> None:
        super().__init__()
        self._lock, self._looks_left = lock, look

    def read_record(self, path: str) -> StoredRecord | None:
        found = super().read_record(path)
        self._looks_left -= 1
        if self._looks_left == 0:
            self._lock.release()
        return found


@pytest.mark.parametrize("look", [1, 2])
def test_lock_that_this_process_has_just_released_is_free(tmp_path: Path, look: int) -> None:
    first = new_lock(tmp_path)
    first.acquire()
    first.end()
    second = new_lock(tmp_path, ReleasedAfterRead(first, look))
    second.acquire()
    second.check()
    second.release()


class StuckBackend(LocalBackend):
    """Refuses to release the lock, once."""

    def __init__(self) -> None:
        self.refusals = 1

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        if b"is_released" in data and self.refusals:
            self.refusals -= 1
            raise StorageError(errno.EIO, "refused to release", path)
        return super().swap_record(path, data, version)


def test_unreleased_lock_does_not_block_own_process(tmp_path: Path) -> None:
    stuck = new_lock(tmp_path, StuckBackend())
    stuck.acquire()
    with pytest.raises(StorageError):
        stuck.release()
    assert is_owned(tmp_path)
    again = new_lock(tmp_path)
    assert again.acquire() is None
    with pytest.raises(DirectoryLockedError, match="this process"):
        new_lock(tmp_path).acquire()
    again.check()
    again.release()


class FullDisk(LocalBackend):
    """Has no space for another file once it is full."""

    is_full = False

    def write_new(self, path: str, data: bytes) -> bool:
        if self.is_full:
            raise StorageError(errno.ENOSPC, "full", path)
        return super().write_new(path, data)


def test_full_disk_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Its process may live on, as in a notebook, so that no other process could save."""
    disk = FullDisk()
    lock = new_lock(tmp_path, disk)
    lock.acquire()
    disk.is_full = True
    lock.release()
    assert not is_owned(tmp_path)
    new_lock(tmp_path).acquire()
