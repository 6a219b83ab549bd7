"""A damaged lock: only the heartbeat shows whether its owner is alive, and a dead owner delays a start only briefly."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from jaxckpt_train.errors import DirectoryLockedError
from jaxckpt_train.run import lock as lock_module
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.process_identity import this_process
from tests.support.locks import Beats, Between, is_owned, lock_file, new_lock, replace_lock


def lock_of(pid: int) -> bytes:
    """The lock of a process of this machine."""
    return msgspec.json.encode({"process": msgspec.structs.asdict(this_process()) | {"pid": pid}, "token": "t"})


DAMAGED = [
    *(lock_of(pid) for pid in (0, -1, 1 << 31, 10**15)),
    lock_of(0).replace(b'"pid":0', b'"pid":99999999999999999999'),
    b"",
    b"{}",
    b"\xff",
    b'{"process":1,"token":"x"}',
    b"x" * 100_000,
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lock_is_taken_over_after_silence(
    tmp_path: Path, quick_looks: None, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    replace_lock(tmp_path, content)
    with pytest.raises(DirectoryLockedError, match="which is alive"):
        new_lock(tmp_path, Beats(8, 8, 9)).acquire()
    assert lock_file(tmp_path).read_bytes() == content
    lock = new_lock(tmp_path)
    assert lock.acquire() is not None
    assert "took over from an unknown process" in caplog.text
    lock.check()
    lock.release()
    assert not is_owned(tmp_path)


def test_owner_of_damaged_lock_keeps_beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(lock_module, "POLL_S", 0.01)
    owner = new_lock(tmp_path)
    owner.acquire()
    with lock_file(tmp_path).open("r+b") as file:
        file.write(b"\0\0")
    with pytest.raises(DirectoryLockedError, match="is damaged"):
        new_lock(tmp_path).acquire()
    with pytest.raises(DirectoryLockedError, match="held by an unknown process"):
        owner.check()
    owner.release()
    assert is_owned(tmp_path)


def test_repeatedly_damaged_lock_is_taken_over(tmp_path: Path, quick_looks: None) -> None:
    for _ in range(3):
        replace_lock(tmp_path, b"")
        lock = new_lock(tmp_path)
        assert lock.acquire() is not None
        lock.check()
        lock.release()
    assert len(os.listdir(tmp_path / LOCK_NAME)) == 1, "damaged versions are removed"


@pytest.mark.parametrize("times", [0, 1, 2])
def test_late_process_does_not_unseat_new_owner(tmp_path: Path, quick_looks: None, times: int) -> None:
    for _ in range(times):
        replace_lock(tmp_path, b"")
        lock = new_lock(tmp_path)
        lock.acquire()
        lock.release()
    replace_lock(tmp_path, b"")
    quick = new_lock(tmp_path)
    with pytest.raises(DirectoryLockedError, match="this process"):
        new_lock(tmp_path, Between(quick.acquire, lambda: None)).acquire()
    quick.check()
    quick.release()
