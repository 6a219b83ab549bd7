"""Ownership of a directory: an interrupt on any line of taking or releasing it leaves it usable."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.pending import SaveSlot
from jaxckpt_train.run import ownership
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.run.retention import Deleter
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import attempt_paths
from jaxckpt_train.store.threads import Latch, paused_collection
from tests.support.interrupts import interrupt_at
from tests.support.locks import is_owned, lock_file, replace_lock
from tests.support.runs import made_run, save_steps

pytestmark = pytest.mark.timeout(120)

OWNING = (
    RunDirectory.own,
    RunDirectory._own,
    OwnerLock.acquire,
    OwnerLock._acquire,
    OwnerLock._keep_beating,
    OwnerLock._find_leftovers,
    OwnerLock.clean,
    Deleter.delete,
    Deleter._ensure_worker,
    threading.Thread.__init__,
    threading.Thread.start,
    LocalBackend.write_new,
)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two steps, one of which was being deleted when its owner was killed."""
    run = made_run(tmp_path_factory.mktemp("left") / "run", 1, 2)
    (run / "step-0000000001").rename(next(attempt_paths(str(run / "step-0000000001"))))
    return run


def names(run: Path) -> list[str]:
    return [name for name in sorted(os.listdir(run)) if not name.startswith((LOCK_NAME, *TEMPORARY_PREFIXES))]


def interrupted_owners(left: Path, tmp_path: Path) -> Iterator[tuple[Path, jct.StepManager]]:
    """Copies of the run with a manager each, interrupted on another line of taking ownership; the last is not."""
    for number in itertools.count(1):
        run = tmp_path / f"run-{number}"
        shutil.copytree(left, run)
        manager = jct.StepManager(run)
        with paused_collection(), interrupt_at(number, *OWNING) as seen, contextlib.suppress(KeyboardInterrupt):
            manager.own()
        yield run, manager
        if seen[0] < number:
            break


def test_interrupted_takeover_keeps_directory_usable(left: Path, tmp_path: Path) -> None:
    owners = 0
    for run, manager in interrupted_owners(left, tmp_path):
        owners += 1
        save_steps(manager, 3)
        manager.close()
        assert names(run) == ["history.jsonl", "step-0000000002", "step-0000000003"]
        assert jct.StepManager(run).steps == [2, 3]
    interrupted = owners - 1
    assert interrupted > 30


def test_close_after_interrupted_takeover_releases_lock(left: Path, tmp_path: Path) -> None:
    for run, manager in interrupted_owners(left, tmp_path):
        manager.close()
        assert not is_owned(run)


def beating() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "jaxckpt-heartbeat"}


class Keeping(LocalBackend):
    """Refuses to remove anything."""

    def remove(self, path: str) -> None:
        raise StorageError(errno.EPERM, "cannot remove", path)


def test_moved_run_directory_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with jct.StepManager(run) as manager:
        save_steps(manager, 1)
        run.rename(tmp_path / "moved")
        with pytest.raises(jct.DirectoryLockedError, match="removed or moved"):
            save_steps(manager, 2)
        (tmp_path / "moved").rename(run)
        save_steps(manager, 3)
    assert jct.StepManager(run).steps == [1, 3]


def test_undeletable_leftover_stops_no_heartbeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxckpt_train.run.lock.SILENCE_S", 0.0)
    (tmp_path / f"{TEMPORARY_PREFIXES[0]}x").write_bytes(b"{}")
    before, held = beating(), OwnerLock(Keeping(), str(tmp_path))
    held.acquire()
    assert held._beat_once()
    assert len(beating() - before) == 1
    assert "not removed" in caplog.text
    held.release()
    assert not is_owned(tmp_path)


def test_unexpected_deletion_error_blocks_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next deletion is carried out nevertheless, and waiting threads continue."""
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", errors.put)
    deleter, fail = Deleter(LocalBackend(), str(tmp_path), lambda: None), iter([True])
    (tmp_path / "step-0000000002").mkdir()
    hide = deleter._hide

    def failing(name: str) -> bool:
        if next(fail, False):
            raise MemoryError(name)
        return hide(name)

    monkeypatch.setattr(deleter, "_hide", failing)
    deleter._jobs.put(functools.partial(deleter._delete, ["step-0000000001"]))
    deleter.delete(["step-0000000002"])
    assert deleter.wait(60)
    deleter.close()
    assert (
        errors.get(timeout=60).exc_type is MemoryError
    )  # reported when the thread ends, perhaps after the next deletion
    assert errors.empty()
    assert os.listdir(tmp_path) == []


def test_heartbeat_begins_before_lock_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = OwnerLock(LocalBackend(), str(tmp_path))
    seen: list[bool] = []
    monkeypatch.setattr(held, "_keep_beating", lambda: seen.append(held._held))
    held.acquire()
    assert seen == [False]
    held.release()
    assert not is_owned(tmp_path)


class SlowRemoval(LocalBackend):
    """Holds the removal of a step until `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def remove(self, path: str) -> None:
        if "/.step-" in path:
            self.begun.set()
            assert self.go.wait(60)
        super().remove(path)


def retention_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "jaxckpt-retention"}


def test_interrupted_close_releases_lock_after_deletions(tmp_path: Path) -> None:
    backend, before = SlowRemoval(), retention_threads()
    manager = jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend)
    save_steps(manager, 1, 2)
    assert backend.begun.wait(60)
    with interrupt_at(1, Deleter._is_reached), pytest.raises(KeyboardInterrupt):
        manager.close()
    manager.close()
    assert lock_of(tmp_path) == "held"  # the deletion still needs the directory
    (thread,) = retention_threads() - before
    backend.go.set()
    thread.join(60)
    assert lock_of(tmp_path) == "free"
    with jct.StepManager(tmp_path) as other:
        other.own()
        assert other.steps == [2]


CLOSING = (
    jct.StepManager.close,
    SaveSlot.when_ended,
    RunDirectory.close,
    ownership.release_later,
    ownership.release,
    Deleter.close,
    Deleter.end,
    Deleter._has_work,
    Deleter._ensure_worker,
    Deleter._is_reached,
    OwnerLock.end,
    OwnerLock.release,
    OwnerLock._release,
    OwnerLock._find_leftovers,
    OwnerLock.clean,
    LocalBackend.remove,
)


def test_interrupted_close_keeps_directory_usable(tmp_path: Path) -> None:
    for number in itertools.count(1):
        run = tmp_path / f"run-{number}"
        manager = jct.StepManager(run, preservation_policy=jct.LatestN(1))
        save_steps(manager, 1, 2)
        with paused_collection(), interrupt_at(number, *CLOSING) as seen, contextlib.suppress(KeyboardInterrupt):
            manager.close()
        del manager
        gc.collect()
        with jct.StepManager(run) as other:
            other.own()
            assert other.steps == [2]
        assert names(run) == ["history.jsonl", "step-0000000002"]
        if seen[0] < number:
            break
    assert number > 20


def lock_of(run: Path) -> str:
    return "held" if is_owned(run) else "free"


def test_next_manager_awaits_deletions_of_dropped_one(tmp_path: Path) -> None:
    backend = SlowRemoval()
    manager = jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend)
    save_steps(manager, 1, 2)
    assert backend.begun.wait(60)
    del manager
    gc.collect()
    is_waiting = threading.Event()

    class Stop(Latch):
        def wait(self, timeout_s: float | None = None) -> bool:
            is_waiting.set()
            return super().wait(timeout_s)

    with jct.StepManager(tmp_path) as other:
        other._run._lock._stop = Stop()
        owning = threading.Thread(target=other.own)
        owning.start()
        assert is_waiting.wait(60)
        assert lock_of(tmp_path) == "held"
        backend.go.set()
        owning.join(60)
        assert other.steps == [2]


def test_a_manager_that_is_dropped_leaves_no_thread(tmp_path: Path) -> None:
    before = retention_threads()
    manager = jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1))
    save_steps(manager, 1, 2, 3)
    (thread,) = retention_threads() - before
    del manager
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert not is_owned(tmp_path)


class RefusesListing(LocalBackend):
    """Refuses to list the directory while the lock exists."""

    refuses = True

    def list(self, path: str) -> Any:
        if self.refuses and lock_of(Path(path)) == "held":
            raise StorageError(errno.EIO, "refused", path)
        return super().list(path)


def test_failed_takeover_checks_lock_again(tmp_path: Path) -> None:
    backend = RefusesListing()
    manager = jct.StepManager(tmp_path, backend=backend)
    with pytest.raises(StorageError):
        manager.own()
    assert lock_of(tmp_path) == "held"
    backend.refuses = False
    record = lock_file(tmp_path).read_bytes()
    token = manager._run._lock._record.token.encode()
    replace_lock(tmp_path, record.replace(token, b"another"))  # as after a takeover while this process slept
    under_way = tmp_path / ".step-0000000007.tmp-deadbeef-deadbeef-1-1-0"
    under_way.mkdir()
    with pytest.raises(jct.DirectoryLockedError, match="lock is held by"):
        manager.own()
    assert under_way.exists(), "it belongs to the other owner"
    replace_lock(tmp_path, record)
    manager.own()
    manager.close()
    assert not under_way.exists()


def test_release_removes_leftovers_of_dead_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = OwnerLock(LocalBackend(), str(tmp_path))
    for name in (
        ".owner",
        ".owner.dead-x",
        f"{TEMPORARY_PREFIXES[0]}x",
        f"{TEMPORARY_PREFIXES[1]}x",
        ".new-of-another",
        ".owner-of-this-run",
    ):
        (tmp_path / name).write_bytes(b"{}")
    held.acquire()
    (tmp_path / f"{TEMPORARY_PREFIXES[0]}young").write_bytes(b"")
    monkeypatch.setattr("jaxckpt_train.run.lock.SILENCE_S", 0.0)
    held.release()
    assert sorted(os.listdir(tmp_path)) == [
        f"{TEMPORARY_PREFIXES[0]}young",
        LOCK_NAME,
        ".new-of-another",
        ".owner-of-this-run",
    ]
