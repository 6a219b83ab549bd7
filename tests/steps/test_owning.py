"""Taking a directory and letting go of it: an interrupt on any line of that locks nobody out and hangs nobody."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.steps import lock as lock_module
from jaxckpt_train.steps.lock import OwnerLock
from jaxckpt_train.steps.retention import Deleter, hidden_name
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.store.quiet_gc import paused_collection
from tests.interrupts import interrupt_at
from tests.steps.runs import made_run, save_steps

pytestmark = pytest.mark.timeout(120)

OWNING = (
    RunDirectory.own,
    RunDirectory._own,
    OwnerLock.acquire,
    OwnerLock._acquire,
    OwnerLock._keep_beating,
    OwnerLock._clean,
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
    (run / "step-0000000001").rename(run / hidden_name("step-0000000001"))
    return run


def names(run: Path) -> list[str]:
    return [name for name in sorted(os.listdir(run)) if not name.startswith(".new-")]


def test_an_interrupt_while_the_directory_is_taken_locks_nobody_out(left: Path, tmp_path: Path) -> None:
    interrupted = 0
    for number in itertools.count(1):
        run = tmp_path / f"run-{number}"
        shutil.copytree(left, run)
        manager = jct.StepManager(run)
        with paused_collection(), interrupt_at(number, *OWNING) as seen, contextlib.suppress(KeyboardInterrupt):
            manager.own()
        interrupted += seen[0] >= number
        save_steps(manager, 3)
        manager.close()
        assert names(run) == ["history.jsonl", "step-0000000002", "step-0000000003"]
        assert jct.StepManager(run).steps == [2, 3]
        if seen[0] < number:
            break
    assert interrupted > 30


def test_who_is_interrupted_while_taking_it_lets_go_of_it(left: Path, tmp_path: Path) -> None:
    for number in itertools.count(1):
        run = tmp_path / f"run-{number}"
        shutil.copytree(left, run)
        manager = jct.StepManager(run)
        with paused_collection(), interrupt_at(number, *OWNING) as seen, contextlib.suppress(KeyboardInterrupt):
            manager.own()
        manager.close()
        assert ".owner" not in names(run)
        if seen[0] < number:
            break


def beating() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "jaxckpt-heartbeat"}


class NoRoom(LocalBackend):
    """Has no room for the small file that tells the time."""

    def age_s(self, path: str) -> float:
        raise StorageError(errno.ENOSPC, "cannot find the age of the file", path)


def test_a_lock_of_the_dead_that_cannot_be_removed_stops_no_heartbeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".owner.dead-x").write_bytes(b"{}")
    before, held = beating(), OwnerLock(NoRoom(), str(tmp_path))
    held.acquire()
    assert len(beating() - before) == 1
    assert "was not removed" in caplog.text
    held.release()


def test_a_deletion_that_fails_in_a_way_nobody_thought_of_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job is done all the same, and whoever waits is let go."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    deleter, fail = Deleter(LocalBackend(), str(tmp_path), lambda: None), iter([True])
    (tmp_path / "step-0000000002").mkdir()
    hide = deleter._hide

    def failing(name: str) -> str | None:
        if next(fail, False):
            raise MemoryError(name)
        return hide(name)

    monkeypatch.setattr(deleter, "_hide", failing)
    deleter._jobs.append((["step-0000000001"], None))
    deleter.delete(["step-0000000002"])
    assert deleter.wait(60)
    deleter.close()
    assert [each.exc_type for each in told] == [MemoryError]
    assert os.listdir(tmp_path) == []


def test_the_heartbeat_begins_before_the_lock_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = OwnerLock(LocalBackend(), str(tmp_path))
    seen: list[bool] = []
    monkeypatch.setattr(held, "_keep_beating", lambda: seen.append(held._held))
    held.acquire()
    assert seen == [False]
    held.release()
    assert not (tmp_path / lock_module.LOCK_NAME).exists()
