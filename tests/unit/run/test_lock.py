"""The owner's lock: which process gets a directory, which is refused, and how a dead owner is recognised."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from jaxckpt_train.errors import DirectoryLockedError, StorageError
from jaxckpt_train.run import lock as lock_module
from jaxckpt_train.run.lock import HEARTBEAT_S, LOCK_NAME, SILENCE_S
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.locks import edit_owner, new_lock


def test_same_pid_in_other_container_is_another(tmp_path: Path, quick_looks: None) -> None:
    """As in two containers without /proc, in which each process has PID 1."""
    first = new_lock(tmp_path)
    first.acquire()
    edit_owner(tmp_path, start="", boot="", namespace="", nonce="of-another")
    dead = new_lock(tmp_path).acquire()
    assert dead is not None
    assert dead.pid == os.getpid()


def test_heartbeat_fits_thrice_into_silence_limit() -> None:
    assert HEARTBEAT_S * 3 <= SILENCE_S


def test_a_heartbeat_changes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock = new_lock(tmp_path)
    lock.acquire()
    before = LocalBackend().modified_ns(lock.path)
    while LocalBackend().modified_ns(lock.path) == before:
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
    edit_owner(tmp_path, host="another-machine", pid=4711)
    record = json.loads((tmp_path / LOCK_NAME).read_bytes())
    (tmp_path / LOCK_NAME).write_text(json.dumps({**record, "token": "of-the-other"}))
    beating.join(60)
    assert not beating.is_alive()
    assert "was taken over" in caplog.text
    with pytest.raises(DirectoryLockedError, match="process 4711 on another-machine"):
        sleeper.check()
    sleeper.release()
    assert json.loads((tmp_path / LOCK_NAME).read_bytes())["token"] == "of-the-other"
    (tmp_path / LOCK_NAME).unlink()
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
    before = LocalBackend().modified_ns(str(path))
    while LocalBackend().modified_ns(str(path)) == before:
        pass  # as above: ends with the next beat
    lock.release()


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
    other = (tmp_path / LOCK_NAME).read_bytes().replace(lock._record.token.encode(), b"another")
    (tmp_path / LOCK_NAME).write_bytes(other)
    with pytest.raises(DirectoryLockedError, match="held by process"):
        lock.acquire()
    assert (tmp_path / LOCK_NAME).read_bytes() == other


def test_a_released_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    lock = new_lock(tmp_path)
    lock.acquire()
    lock.release()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_release_leaves_the_lock_of_another_alone(tmp_path: Path) -> None:
    lock = new_lock(tmp_path)
    lock.acquire()
    record = json.loads((tmp_path / LOCK_NAME).read_bytes())
    (tmp_path / LOCK_NAME).write_text(json.dumps(record | {"token": "another"}))
    lock.release()
    assert json.loads((tmp_path / LOCK_NAME).read_bytes())["token"] == "another"


class StuckBackend(LocalBackend):
    """Refuses to remove the lock, once."""

    def __init__(self) -> None:
        self.refusals = 1

    def remove(self, path: str) -> None:
        if path.endswith(LOCK_NAME) and self.refusals:
            self.refusals -= 1
            raise StorageError(errno.EIO, "refused to remove", path)
        super().remove(path)


def test_unreleased_lock_does_not_block_own_process(tmp_path: Path) -> None:
    stuck = new_lock(tmp_path, StuckBackend())
    stuck.acquire()
    with pytest.raises(StorageError):
        stuck.release()
    assert (tmp_path / LOCK_NAME).exists()
    again = new_lock(tmp_path)
    assert again.acquire() is None
    with pytest.raises(DirectoryLockedError, match="this process"):
        new_lock(tmp_path).acquire()
    again.check()
    again.release()
