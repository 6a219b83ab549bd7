"""Pending deletions: a restore or a pin cancels them, or fails if they have started."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Restored
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import flip_a_payload_byte, save_steps, state_of, step_of, step_path

PLAIN = jct.StoreSettings(durability="none")


def steps_there(run: Path) -> list[int]:
    return sorted(int(path.name[-10:]) for path in run.glob("step-*"))


class Late(LocalBackend):
    """Refuses to sync step 2 and holds the sync of step 3 until `go` is set; while `stays`, step 1 is not renamed."""

    def __init__(self) -> None:
        self.held, self.go, self.stays = threading.Event(), threading.Event(), False

    def sync(self, path: str) -> None:
        if "/step-0000000002" in path:
            raise StorageError(errno.EIO, "refused", path)
        if path.endswith("/step-0000000003"):
            self.held.set()
            assert self.go.wait(60)
        super().sync(path)

    def rename(self, source: str, target: str) -> None:
        if self.stays and source.endswith("/step-0000000001"):
            raise StorageError(errno.EACCES, "refused", source)
        super().rename(source, target)


def waiting_for_the_third(run: Path, backend: Late, meanwhile: Callable[[jct.StepManager], Any]) -> jct.StepManager:
    """A run whose step 1 is deleted when step 3 is on the disk; `meanwhile` is called after the save of step 2."""
    steps = jct.StepManager(run, preservation_policy=LatestN(1), settings=PLAIN, backend=backend)
    save_steps(steps, 1, 2)
    assert steps._run._deleter.wait(60)
    meanwhile(steps)
    save_steps(steps, 3)
    assert backend.held.wait(60)
    return steps


@pytest.mark.parametrize("stays", [False, True])
def test_expired_pin_is_not_renewed(tmp_path: Path, stays: bool) -> None:
    backend = Late()
    with waiting_for_the_third(tmp_path, backend, lambda steps: steps.pin(1)) as steps:
        steps.pin(1, False)
        backend.stays = stays
        backend.go.set()
        assert steps._run._deleter.wait(60)
        assert steps.steps == ([1, 3] if stays else [3])
        backend.stays = False
        if stays:  # the disk refused its deletion, so it can be kept
            steps.pin(1)
        else:
            with pytest.raises(jct.StepNotFoundError):
                steps.pin(1)
        save_steps(steps, 4)
        assert steps._run._deleter.wait(60)
        assert steps.steps == steps_there(tmp_path) == ([1, 4] if stays else [4])


def test_restore_cancels_pending_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, take_note = Late(), RunDirectory.note_restore

    def late(run: RunDirectory, restored: Restored, there: Any, **more: Any) -> None:
        backend.go.set()
        assert run._deleter.wait(60)  # pending deletions are reconsidered before this process continues
        take_note(run, restored, there, **more)

    monkeypatch.setattr(RunDirectory, "note_restore", late)
    with waiting_for_the_third(tmp_path, backend, lambda _: None) as steps:
        assert step_of(steps.restore(step=1)) == 1
        steps.pin(1)
        save_steps(steps, 2, overwrite=True)
    with jct.StepManager(tmp_path) as later:
        assert step_of(later.restore()) == 2
        assert step_of(later.restore(step=1)) == 1


def test_step_about_to_be_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, reading = Late(), RunDirectory.reading

    def late(run: RunDirectory, entries: Any) -> Any:
        deleter = threading.Thread(target=run._deleter.wait, args=(60,))
        backend.go.set()
        deleter.start()
        deleter.join(0.3)  # it waits for the reader; otherwise it would have ended by now
        return reading(run, entries)

    with waiting_for_the_third(tmp_path, backend, lambda _: None) as steps:
        monkeypatch.setattr(RunDirectory, "reading", late)
        assert step_of(steps.restore(step=1)) == 1
        monkeypatch.undo()
        assert steps._run._deleter.wait(60)
        assert steps.is_committed(1)
        assert 1 in steps_there(tmp_path)


def test_undeletable_last_whole_step_is_restored(tmp_path: Path) -> None:
    backend = RefusingBackend("rename", "/step-0000000001", errno.EACCES, 1)
    with jct.StepManager(tmp_path, preservation_policy=LatestN(1), backend=backend) as steps:
        save_steps(steps, 1, 2)
        assert steps._run._deleter.wait(60)
        assert steps.steps == [1, 2]
        flip_a_payload_byte(step_path(tmp_path, 2))
        assert step_of(steps.restore()) == 1
        save_steps(steps, 3)
        assert steps._run._deleter.wait(60)
        assert steps.steps == [3]
    assert steps_there(tmp_path) == [2, 3]  # the damaged step stays


def test_deletion_after_unreadable_lock_is_reconsidered(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=LatestN(1)) as steps:
        save_steps(steps, 1)
        lock, is_away = steps._run._lock, [False]
        check = lock.check

        def checked() -> None:
            if is_away[0] and threading.current_thread().name == "jaxckpt-retention":
                raise StorageError(errno.EIO, "refused", lock.path)
            check()

        steps._run._deleter._check = checked
        is_away[0] = True
        save_steps(steps, 2)
        assert steps._run._deleter.wait(60)
        is_away[0] = False
        steps.pin(1)  # it was not deleted, so it can be kept
        steps.save(3, {"state": state_of(3)})
        steps.wait()
        assert steps._run._deleter.wait(60)
        assert steps.steps == steps_there(tmp_path) == [1, 3]


def test_failed_pin_keeps_step_listed(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=LatestN(1), settings=PLAIN) as steps:
        save_steps(steps, 1)
        deleter, reached, go = steps._run._deleter, threading.Event(), threading.Event()
        check = deleter._check

        def refused() -> None:
            reached.set()
            assert go.wait(60)
            raise StorageError(errno.EIO, "refused", str(tmp_path / ".lock"))

        deleter._check = refused
        save_steps(steps, 2)
        assert reached.wait(60)
        steps.pin(1)
        go.set()
        assert deleter.wait(60)
        assert steps.is_committed(1)
        deleter._check = check
        save_steps(steps, 3)
        assert deleter.wait(60)
        assert steps.steps == steps_there(tmp_path) == [1, 3]
