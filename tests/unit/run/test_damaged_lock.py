"""A damaged lock: only the heartbeat shows whether its owner is alive, and a dead owner delays a start only briefly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxckpt_train.errors import DirectoryLockedError
from jaxckpt_train.run import lock as lock_module
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.process_identity import this_process
from tests.support.locks import Beats, Between, new_lock


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
    b"x" * (lock_module.MAX_LOCK_BYTES + 1),
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lock_is_taken_over_after_silence(
    tmp_path: Path, quick_looks: None, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    with pytest.raises(DirectoryLockedError, match="which is alive"):
        new_lock(tmp_path, Beats(8, 8, 9)).acquire()
    assert (tmp_path / LOCK_NAME).read_bytes() == content
    lock = new_lock(tmp_path)
    assert lock.acquire() is not None
    assert "took over from an unknown process" in caplog.text
    lock.check()
    lock.release()
    assert not (tmp_path / LOCK_NAME).exists()


def test_owner_of_damaged_lock_keeps_beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(lock_module, "POLL_S", 0.01)
    owner = new_lock(tmp_path)
    owner.acquire()
    with (tmp_path / LOCK_NAME).open("r+b") as file:
        file.write(b"\0\0")
    with pytest.raises(DirectoryLockedError, match="is damaged"):
        new_lock(tmp_path).acquire()
    with pytest.raises(DirectoryLockedError, match="held by an unknown process"):
        owner.check()
    owner.release()
    assert (tmp_path / LOCK_NAME).exists()


def damage_lock(directory: Path) -> None:
    """Damage the lock in the same way each time."""
    (directory / LOCK_NAME).write_bytes(b"")


def test_repeatedly_damaged_lock_is_taken_over(tmp_path: Path, quick_looks: None) -> None:
    for _ in range(3):
        damage_lock(tmp_path)
        lock = new_lock(tmp_path)
        assert lock.acquire() is not None
        lock.check()
        lock.release()
    assert len(os.listdir(tmp_path)) <= 1, "the remains of dead owners are removed"


class BetweenNames(LocalBackend):
    """Calls `then` right after its second listing, with which the name of a dead lock is chosen."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then, self._listings = then, 0

    def list(self, path: str) -> Any:
        found = super().list(path)
        self._listings += 1
        if self._listings == 2:
            self._then()
        return found


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("between", [BetweenNames, lambda quick: Between(quick, lambda: None)], ids=["names", "rename"])
def test_late_process_does_not_unseat_new_owner(
    tmp_path: Path, quick_looks: None, times: int, between: Callable[[Callable[[], object]], LocalBackend]
) -> None:
    for _ in range(times):
        damage_lock(tmp_path)
        lock = new_lock(tmp_path)
        lock.acquire()
        lock.release()
    damage_lock(tmp_path)
    quick, renamed = new_lock(tmp_path), list[str]()

    def take() -> None:
        quick.acquire()
        renamed.append((tmp_path / LOCK_NAME).read_text())

    with pytest.raises(DirectoryLockedError, match="this process"):
        new_lock(tmp_path, between(take)).acquire()
    assert renamed == [(tmp_path / LOCK_NAME).read_text()]
    quick.check()
    quick.release()
