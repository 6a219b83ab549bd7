"""The owner's lock: who gets a directory, who is refused, and how a dead owner is told from a live one."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.errors import DirectoryLockedError, StorageError
from jaxckpt_train.steps import lock as lock_module
from jaxckpt_train.steps.lock import HEARTBEAT_S, LOCK_NAME, SILENCE_S, OwnerLock
from jaxckpt_train.store.local import LocalBackend
from tests.steps.runs import Talker, talking_to

OWN = """
import sys
from jaxckpt_train.steps.lock import OwnerLock
from jaxckpt_train.store.local import LocalBackend
lock = OwnerLock(LocalBackend(), sys.argv[1])
lock.acquire()
print("owned", flush=True)
if sys.stdin.readline().strip() == "release":
    lock.release()
"""
RACE = """
import sys
from jaxckpt_train.errors import DirectoryLockedError
from jaxckpt_train.steps.lock import OwnerLock
from jaxckpt_train.store.local import LocalBackend
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


def new_lock(directory: Path, backend: Any = None) -> OwnerLock:
    return OwnerLock(backend or LocalBackend(), str(directory))


def dead_owner(directory: Path) -> Talker:
    """A process that owned the directory and was killed."""
    with talking_to(OWN, directory) as owner:
        assert owner.read() == "owned"
    return owner


def edit_owner(directory: Path, **process: Any) -> None:
    """Make the lock that of another process."""
    path = directory / LOCK_NAME
    record = json.loads(path.read_bytes())
    record["process"].update(process)
    path.write_text(json.dumps(record))


def silent_for(directory: Path, seconds: float) -> None:
    path = directory / LOCK_NAME
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


class Heartbeats(LocalBackend):
    """A disk whose lock has these ages, one at each look."""

    def __init__(self, *ages_s: float) -> None:
        self._ages_s = list(ages_s)

    def age_s(self, path: str) -> float:
        return self._ages_s.pop(0)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "LOOK_S", 0.001)


def test_the_directory_of_a_live_process_is_refused_by_host_pid_and_age(tmp_path: Path) -> None:
    with talking_to(OWN, tmp_path) as owner:
        assert owner.read() == "owned"
        silent_for(tmp_path, 7)
        who = f"owned by process {owner.process.pid} on {socket.gethostname()}, last heard of [78] s ago"
        with pytest.raises(DirectoryLockedError, match=who):
            new_lock(tmp_path).acquire()


def test_a_live_process_of_this_machine_keeps_its_lock_however_silent_it_is(tmp_path: Path) -> None:
    with talking_to(OWN, tmp_path) as owner:
        assert owner.read() == "owned"
        silent_for(tmp_path, 100 * SILENCE_S)
        with pytest.raises(DirectoryLockedError, match=f"process {owner.process.pid}"):
            new_lock(tmp_path).acquire()
        owner.tell("release")
        assert owner.finish()[0] == 0
    assert new_lock(tmp_path).acquire() is None


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    owner = dead_owner(tmp_path)
    assert (tmp_path / LOCK_NAME).exists()
    dead = new_lock(tmp_path).acquire()
    assert dead is not None
    assert (dead.pid, dead.host) == (owner.process.pid, socket.gethostname())
    assert f"took over from process {owner.process.pid}" in caplog.text


def test_an_owner_that_is_dead_but_not_yet_buried_is_replaced(tmp_path: Path) -> None:
    with talking_to(OWN, tmp_path) as owner:
        assert owner.read() == "owned"
        owner.process.kill()
        owner.process.wait_until_zombie()
        dead = new_lock(tmp_path).acquire()
        assert dead is not None
        assert dead.pid == owner.process.pid


def test_a_pid_that_is_used_again_is_not_the_owner(tmp_path: Path) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, pid=os.getppid())  # alive, and began at another time
    dead = new_lock(tmp_path).acquire()
    assert dead is not None
    assert dead.pid == os.getppid()


def test_an_owner_from_before_a_reboot_is_dead_after_its_silence(tmp_path: Path) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, boot="another-boot-id")
    silent_for(tmp_path, SILENCE_S + 5)
    assert new_lock(tmp_path).acquire() is not None


def test_a_live_owner_on_another_machine_of_the_same_name_is_refused(tmp_path: Path, quick_looks: None) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, boot="another-boot-id")
    with pytest.raises(DirectoryLockedError, match="last heard of 0 s ago"):
        new_lock(tmp_path, Heartbeats(8, 9, 9.5, 0.2)).acquire()


def test_an_owner_on_another_machine_that_gives_a_sign_of_life_is_refused(tmp_path: Path, quick_looks: None) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, host="another-machine")
    with pytest.raises(DirectoryLockedError, match="on another-machine, last heard of 0 s ago"):
        new_lock(tmp_path, Heartbeats(8, 9, 9.5, 0.2)).acquire()
    assert json.loads((tmp_path / LOCK_NAME).read_bytes())["process"]["host"] == "another-machine"


def test_one_look_that_sees_no_change_is_no_sign_of_life(tmp_path: Path, quick_looks: None) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, host="another-machine")
    backend = Heartbeats(5, 5, 30, SILENCE_S, SILENCE_S + 1, 0, 0)
    assert new_lock(tmp_path, backend).acquire() is not None


def test_an_owner_on_another_machine_is_replaced_after_its_silence(tmp_path: Path) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, host="another-machine")
    silent_for(tmp_path, SILENCE_S + 5)
    dead = new_lock(tmp_path).acquire()
    assert dead is not None
    assert dead.host == "another-machine"


def test_an_owner_in_another_container_is_believed_by_its_heartbeat(tmp_path: Path, quick_looks: None) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, namespace="pid:[1]")
    with pytest.raises(DirectoryLockedError, match="last heard of"):
        new_lock(tmp_path, Heartbeats(8, 0)).acquire()
    silent_for(tmp_path, SILENCE_S + 5)
    assert new_lock(tmp_path).acquire() is not None


def test_the_heartbeat_is_often_enough_to_be_heard() -> None:
    assert HEARTBEAT_S * 3 <= SILENCE_S


def test_a_heartbeat_makes_the_lock_young_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock = new_lock(tmp_path)
    lock.acquire()
    silent_for(tmp_path, 1000)
    backend = LocalBackend()
    while backend.age_s(str(tmp_path / LOCK_NAME)) > 500:
        pass  # ends with the next beat; without one, pytest's time limit ends it
    lock.release()


def test_an_owner_that_was_taken_for_dead_says_so_and_keeps_nobody_elses_lock_young(
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
    with pytest.raises(DirectoryLockedError, match=r"is held by process 4711 on another-machine.*start it again"):
        sleeper.check()
    sleeper.release()
    assert json.loads((tmp_path / LOCK_NAME).read_bytes())["token"] == "of-the-other"
    (tmp_path / LOCK_NAME).unlink()
    with pytest.raises(DirectoryLockedError, match="is gone"):
        sleeper.check()


def test_a_lock_out_of_sight_for_a_moment_is_kept_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_looks: None
) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock, path = new_lock(tmp_path), tmp_path / LOCK_NAME
    lock.acquire()
    path.rename(tmp_path / "aside")
    assert lock._beat_once()
    (tmp_path / "aside").rename(path)
    lock.check()
    silent_for(tmp_path, 1000)
    while LocalBackend().age_s(str(path)) > 500:
        pass  # as above: ends with the next beat
    lock.release()


def test_the_same_process_twice_is_refused_and_told_so(tmp_path: Path) -> None:
    first = new_lock(tmp_path)
    first.acquire()
    with pytest.raises(DirectoryLockedError, match=r"owned by this very process.*close its manager"):
        new_lock(tmp_path).acquire()
    first.acquire()  # the owner itself may ask again
    first.release()
    new_lock(tmp_path).acquire()


def test_who_holds_it_and_asks_again_is_refused_if_another_has_taken_it_over(tmp_path: Path) -> None:
    lock = new_lock(tmp_path)
    lock.acquire()
    other = (tmp_path / LOCK_NAME).read_bytes().replace(lock._record.token.encode(), b"another")
    (tmp_path / LOCK_NAME).write_bytes(other)
    with pytest.raises(DirectoryLockedError, match="this job owned it, and its lock is held by process"):
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


def test_of_six_processes_that_want_a_dead_owners_lock_one_gets_it(tmp_path: Path) -> None:
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


class Between(LocalBackend):
    """Calls something right before and right after its first rename."""

    def __init__(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._before: Callable[[], object] | None = before
        self._after = after

    def rename(self, source: str, target: str) -> None:
        before, self._before = self._before, None
        if before is None:
            super().rename(source, target)
            return
        before()
        try:
            super().rename(source, target)
        finally:
            self._after()


def test_whoever_is_late_to_take_over_does_not_unseat_who_was_quicker(tmp_path: Path) -> None:
    dead_owner(tmp_path)
    quick, third = new_lock(tmp_path), new_lock(tmp_path)
    refused = []

    def try_as_third() -> None:
        try:
            third.acquire()
        except DirectoryLockedError:
            refused.append("third")

    late = new_lock(tmp_path, Between(quick.acquire, try_as_third))
    with pytest.raises(DirectoryLockedError, match="this very process"):
        late.acquire()
    assert refused == ["third"]


def test_takeovers_leave_no_heap_of_files(tmp_path: Path) -> None:
    for _ in range(3):
        dead_owner(tmp_path)
        for path in tmp_path.iterdir():
            os.utime(path, (1, 1))
    lock = new_lock(tmp_path)
    lock.acquire()
    lock.release()
    assert len(os.listdir(tmp_path)) <= 1


class StuckBackend(LocalBackend):
    """Refuses to remove the lock, once."""

    def __init__(self) -> None:
        self.refusals = 1

    def remove(self, path: str) -> None:
        if path.endswith(LOCK_NAME) and self.refusals:
            self.refusals -= 1
            raise StorageError(errno.EIO, "refused to remove", path)
        super().remove(path)


def test_a_lock_that_the_disk_refused_to_release_does_not_lock_its_process_out(tmp_path: Path) -> None:
    stuck = new_lock(tmp_path, StuckBackend())
    stuck.acquire()
    with pytest.raises(StorageError):
        stuck.release()
    assert (tmp_path / LOCK_NAME).exists()
    again = new_lock(tmp_path)
    assert again.acquire() is None
    with pytest.raises(DirectoryLockedError, match="this very process"):
        new_lock(tmp_path).acquire()
    again.check()
    again.release()


def test_a_clock_that_was_put_back_does_not_make_the_wait_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_looks: None
) -> None:
    """The lock is of tomorrow, and its owner of another boot: only its heartbeat could tell."""
    dead_owner(tmp_path)
    edit_owner(tmp_path, boot="another-boot-id")
    monkeypatch.setattr(lock_module, "SILENCE_S", 0.5)
    ages_s = itertools.count(-86_400.0, 0.001)
    monkeypatch.setattr(LocalBackend, "age_s", lambda self, path: next(ages_s))
    assert new_lock(tmp_path).acquire() is not None


def test_nor_is_an_owner_that_lives_then_taken_for_dead(tmp_path: Path, quick_looks: None) -> None:
    dead_owner(tmp_path)
    edit_owner(tmp_path, boot="another-boot-id")
    with pytest.raises(DirectoryLockedError, match="last heard of 0 s ago"):
        new_lock(tmp_path, Heartbeats(-86_400, -86_399, 19, 20, 0)).acquire()
