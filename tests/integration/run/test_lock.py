"""The owner's lock: which process gets a directory, which is refused, and how a dead owner is recognised."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import time
import types
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.errors import DirectoryLockedError, StorageError
from jaxckpt_train.run import lock as lock_module
from jaxckpt_train.run.lock import SILENCE_S
from jaxckpt_train.store.backends.base import StoredRecord
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.locks import Beats, Between, edit_owner, is_owned, lock_file, new_lock
from tests.support.runs import Talker, talking_to

OWN = """
import sys
from jaxckpt_train.run.lock import OwnerLock
from jaxckpt_train.store.backends.local import LocalBackend
lock = OwnerLock(LocalBackend(), sys.argv[1])
lock.acquire()
print("owned", flush=True)
if sys.stdin.readline().strip() == "release":
    lock.release()
"""
RACE = """
import sys
from jaxckpt_train.errors import DirectoryLockedError
from jaxckpt_train.run.lock import OwnerLock
from jaxckpt_train.store.backends.local import LocalBackend
lock = OwnerLock(LocalBackend(), sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    lock.acquire()
    print("won", flush=True)
except DirectoryLockedError:
    print("refused", flush=True)
sys.stdin.readline()
"""


def dead_owner(directory: Path) -> Talker:
    """A process that owned the directory and was killed."""
    with talking_to(OWN, directory) as owner:
        assert owner.read() == "owned"
    return owner


def test_refusal_names_process_and_host_of_owner(tmp_path: Path) -> None:
    with talking_to(OWN, tmp_path) as owner:
        assert owner.read() == "owned"
        who = f"process {owner.process.pid} on {socket.gethostname()}"
        with pytest.raises(DirectoryLockedError, match=who):
            new_lock(tmp_path).acquire()


@pytest.mark.parametrize("off_s", [-10_000, 10_000])
def test_live_local_owner_keeps_old_lock(tmp_path: Path, off_s: float) -> None:
    with talking_to(OWN, tmp_path) as owner:
        assert owner.read() == "owned"
        then = lock_file(tmp_path).stat().st_mtime + off_s
        os.utime(lock_file(tmp_path), (then, then))
        with pytest.raises(DirectoryLockedError, match=f"process {owner.process.pid}"):
            new_lock(tmp_path).acquire()
        owner.tell("release")
        assert owner.finish()[0] == 0
    assert new_lock(tmp_path).acquire() is None


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    owner = dead_owner(tmp_path)
    assert is_owned(tmp_path)
    dead = new_lock(tmp_path).acquire()
    assert dead is not None
    assert (dead.pid, dead.host) == (owner.process.pid, socket.gethostname())
    assert f"took over from process {owner.process.pid}" in caplog.text


def test_zombie_owner_is_replaced(tmp_path: Path) -> None:
    with talking_to(OWN, tmp_path) as owner:
        assert owner.read() == "owned"
        owner.process.kill()
        owner.process.wait_until_zombie()
        dead = new_lock(tmp_path).acquire()
        assert dead is not None
        assert dead.pid == owner.process.pid


def test_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, pid=os.getppid(), start="1")  # alive, but with another start time
    dead = new_lock(tmp_path).acquire()
    assert dead is not None
    assert dead.pid == os.getppid()


ELSEWHERE = [
    {"host": "another-machine"},
    {"boot": "another-boot-id"},
    {"namespace": "pid:[1]"},
    {"boot": "", "namespace": "", "start": ""},
    {"start": ""},
]
elsewhere = pytest.mark.parametrize("process", ELSEWHERE, ids=lambda process: "-".join(process))


@elsewhere
@pytest.mark.parametrize("off_s", [-10_000, 0, 10_000])
def test_silent_remote_owner_is_dead_despite_clocks(
    tmp_path: Path, quick_looks: None, process: dict[str, str], off_s: float
) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, **process)
    then = time.time() + off_s
    os.utime(lock_file(tmp_path), (then, then))
    began_s = time.monotonic()
    dead = new_lock(tmp_path).acquire()
    assert time.monotonic() - began_s >= lock_module.SILENCE_S
    assert dead is not None
    assert {name: getattr(dead, name) for name in process} == process


@elsewhere
@pytest.mark.parametrize("beats", [(1, 1, 1, 2), (-9, -8), (5, 5, 4), (10**20, 0)], ids=str)
def test_changing_lock_means_live_owner_despite_clocks(
    tmp_path: Path, quick_looks: None, process: dict[str, str], beats: tuple[int, ...]
) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, **process)
    before = lock_file(tmp_path).read_bytes()
    with pytest.raises(DirectoryLockedError, match="which is alive"):
        new_lock(tmp_path, Beats(*beats)).acquire()
    assert lock_file(tmp_path).read_bytes() == before


@pytest.mark.parametrize("hung_s", [3 * SILENCE_S, 100 * SILENCE_S])
def test_slow_lock_check_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hung_s: float) -> None:
    """While the storage hangs or this machine sleeps, the owner may be unable to update its lock, too."""
    now_s = [0.0]
    monkeypatch.setattr(lock_module, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))

    class Hanging(LocalBackend):
        looks = 0

        def read_record(self, path: str) -> StoredRecord | None:
            self.looks += 1
            now_s[0] += hung_s if self.looks == 3 else 1.0
            found = super().read_record(path)
            assert found is not None
            return dataclasses.replace(found, refreshed_ns=1 if self.looks < 10 else 2)

    monkeypatch.setattr(lock_module, "POLL_S", 0.001)
    dead_owner(tmp_path)
    edit_owner(tmp_path, host="another-machine")
    with pytest.raises(DirectoryLockedError, match="which is alive"):
        new_lock(tmp_path, Hanging()).acquire()


def test_unreadable_lock_is_not_taken_over(tmp_path: Path, quick_looks: None) -> None:
    class Refusing(LocalBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            raise StorageError(errno.EIO, "refused", f"{directory}/{name}")

    dead_owner(tmp_path)
    edit_owner(tmp_path, host="another-machine")
    before = lock_file(tmp_path).read_bytes()
    with pytest.raises(StorageError) as refused:
        new_lock(tmp_path, Refusing()).acquire()
    assert refused.value.errno == errno.EIO
    assert lock_file(tmp_path).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b'{"process":{"ho'], ids=["empty", "torn"])
def test_half_written_lock_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(lock_module, "POLL_S", 0.001)
    with talking_to(OWN, tmp_path) as owner:
        assert owner.read() == "owned"
        whole = lock_file(tmp_path).read_bytes()
        lock_file(tmp_path).write_bytes(content)

        class Written(LocalBackend):
            looks = 0

            def read_record(self, path: str) -> StoredRecord | None:
                self.looks += 1
                if self.looks == 3:
                    lock_file(tmp_path).write_bytes(whole)
                return super().read_record(path)

        with pytest.raises(DirectoryLockedError, match=f"owned by process {owner.process.pid}"):
            new_lock(tmp_path, Written()).acquire()


def test_one_of_six_processes_replaces_dead_owner(tmp_path: Path) -> None:
    racers = [Talker(RACE, tmp_path) for _ in range(6)]
    try:
        assert [racer.read() for racer in racers] == ["ready"] * 6
        dead_owner(tmp_path)
        for racer in racers:
            racer.tell("go")
        assert sorted(racer.read() for racer in racers) == ["refused"] * 5 + ["won"]
    finally:
        for racer in racers:
            racer.tell("end")
            racer.finish()


def test_late_takeover_does_not_unseat_new_owner(tmp_path: Path) -> None:
    dead_owner(tmp_path)
    quick, third = new_lock(tmp_path), new_lock(tmp_path)
    refused = []

    def try_as_third() -> None:
        try:
            third.acquire()
        except DirectoryLockedError:
            refused.append("third")

    late = new_lock(tmp_path, Between(quick.acquire, try_as_third))
    with pytest.raises(DirectoryLockedError, match="this process"):
        late.acquire()
    assert refused == ["third"]
