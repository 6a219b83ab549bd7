"""A lock that is damaged: its owner is told by its heartbeat alone, and a dead one stops no start for long."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from jaxckpt_train.errors import DirectoryLockedError
from jaxckpt_train.steps import lock as lock_module
from jaxckpt_train.steps.lock import LOCK_NAME, SILENCE_S
from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.store.machine import this_process
from tests.steps.test_lock import Heartbeats, new_lock, silent_for


def lock_of(pid: int) -> bytes:
    """Of this machine, as far as it tells."""
    return msgspec.json.encode({"process": msgspec.structs.asdict(this_process()) | {"pid": pid}, "token": "t"})


DAMAGED = [
    *(lock_of(pid) for pid in (0, -1, 1 << 31, 10**15)),
    lock_of(0).replace(b'"pid":0', b'"pid":99999999999999999999'),
    b"",
    b"{}",
    b"\xff",
    b'{"process":1,"token":"x"}',
    b"x" * (lock_module.MAX_LOCK_BYTES + 1),
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_lock_is_taken_over_only_after_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock_module, "LOOK_S", 0.01)
    (tmp_path / LOCK_NAME).write_bytes(content)
    with pytest.raises(DirectoryLockedError, match=r"does not tell \(it is damaged\), last heard of 0 s"):
        new_lock(tmp_path, Heartbeats(8, 9, 9.5, 0.2)).acquire()
    assert (tmp_path / LOCK_NAME).read_bytes() == content
    silent_for(tmp_path, SILENCE_S + 5)
    lock = new_lock(tmp_path)
    assert lock.acquire() is not None
    assert "took over from a process that it does not tell (it is damaged), which is dead" in caplog.text
    lock.check()
    lock.release()
    assert not (tmp_path / LOCK_NAME).exists()


def test_who_lives_beats_on_when_its_lock_is_damaged_and_saves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(lock_module, "LOOK_S", 0.01)
    owner = new_lock(tmp_path)
    owner.acquire()
    with (tmp_path / LOCK_NAME).open("r+b") as file:
        file.write(b"\0\0")
    silent_for(tmp_path, SILENCE_S + 5)
    ends_s = time.monotonic() + 30
    while LocalBackend().age_s(str(tmp_path / LOCK_NAME)) > SILENCE_S:
        assert time.monotonic() < ends_s
    with pytest.raises(DirectoryLockedError, match="it is damaged"):
        new_lock(tmp_path).acquire()
    with pytest.raises(DirectoryLockedError, match="its lock is held by a process that it does not tell"):
        owner.check()
    owner.release()
    assert (tmp_path / LOCK_NAME).exists()
