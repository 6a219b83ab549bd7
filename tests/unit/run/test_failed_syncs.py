"""A disk that refuses a sync once and accepts the next one, after which the unwritten data may be lost.

A step that such a save replaces is therefore kept, by this process and by later ones, until a later step is synced.
"""

from __future__ import annotations

import errno
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.locks import remove_lock
from tests.support.runs import flip_a_payload_byte, save_steps, state_of, step_of, step_path

PLAIN = jct.StoreSettings(durability="none")


def step_directories(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


class RefusesOnce(LocalBackend):
    """Refuses the first sync of a data file below a directory with this name."""

    def __init__(self, name: str) -> None:
        self.name, self.refused = name, list[str]()

    def sync(self, path: str) -> None:
        if not self.refused and f"/{self.name}/" in path and path.endswith(".safetensors"):
            self.refused.append(path)
            raise StorageError(errno.EIO, "refused", path)
        super().sync(path)


class HeldSync(LocalBackend):
    """Holds the syncs of the data files of step 2 until `go` is set."""

    def __init__(self) -> None:
        self.held, self.go = threading.Event(), threading.Event()

    def sync(self, path: str) -> None:
        if "/step-0000000002/" in path:
            self.held.set()
            assert self.go.wait(60)
        super().sync(path)


def manager(run: Path, backend: LocalBackend, keep: int) -> jct.StepManager:
    return jct.StepManager(run, preservation_policy=LatestN(keep), settings=PLAIN, backend=backend)


def overwrite(steps: jct.StepManager, step: int) -> None:
    steps.save(step, {"state": state_of(step)}, overwrite=True)
    steps.wait()
    assert steps._run._deleter.wait(60)


def test_older_step_stays_until_later_sync(tmp_path: Path) -> None:
    backend = RefusesOnce("step-0000000002")
    with manager(tmp_path, backend, 1) as steps:
        save_steps(steps, 1, 2)
        assert steps._run._deleter.wait(60)
        assert backend.refused
        assert step_directories(tmp_path) == ["step-0000000001", "step-0000000002"]
        save_steps(steps, 3)
    assert step_directories(tmp_path) == ["step-0000000003"]


@pytest.mark.parametrize("is_new_process", [False, True])
def test_generation_before_unsynced_one_stays(tmp_path: Path, is_new_process: bool) -> None:
    steps = manager(tmp_path, RefusesOnce("step-0000000002.g1"), 2)
    save_steps(steps, 1, 2)
    overwrite(steps, 2)
    both = ["step-0000000002", "step-0000000002.g1"]
    assert step_directories(tmp_path) == ["step-0000000001", *both]
    if is_new_process:
        steps.close()
        steps = manager(tmp_path, LocalBackend(), 2)
        steps.restore()
    save_steps(steps, 3)
    assert steps._run._deleter.wait(60)
    assert step_directories(tmp_path) == [*both, "step-0000000003"]
    save_steps(steps, 4)
    steps.close()
    assert step_directories(tmp_path) == ["step-0000000003", "step-0000000004"]


def test_abandoned_steps_stay_after_refused_save(tmp_path: Path) -> None:
    """The disk refuses the sync of the new save, which comes before the note of the roll-back."""
    backend = RefusesOnce("step-0000000002.g1")
    with manager(tmp_path, backend, 2) as steps:
        save_steps(steps, 1, 2)
        steps.restore(step=1)
        save_steps(steps, 2)
        assert steps._run._deleter.wait(60)
        assert backend.refused
        assert step_directories(tmp_path) == ["step-0000000001", "step-0000000002", "step-0000000002.g1"]
        save_steps(steps, 3, 4)
    assert step_directories(tmp_path) == ["step-0000000003", "step-0000000004"]


def test_name_that_was_given_again_is_another_save(tmp_path: Path) -> None:
    """A note about a save does not apply to a later save of the same name."""
    with manager(tmp_path, RefusesOnce("step-0000000001.g1"), 1) as steps:
        save_steps(steps, 1)
        overwrite(steps, 1)
        assert [entry.is_unsynced for entry in steps._run.entries()] == [False, True]
        save_steps(steps, 2)
    with manager(tmp_path, LocalBackend(), 1) as steps:
        steps.restore()
        overwrite(steps, 1)
        overwrite(steps, 1)
        assert [entry.is_unsynced for entry in steps._run.entries()] == [False] * len(steps._run.entries())


@pytest.mark.parametrize("call", ["restore", "restore a step", "pin"])
def test_step_pending_deletion_can_be_kept(tmp_path: Path, call: str) -> None:
    backend = RefusesOnce("step-0000000003")
    with manager(tmp_path, backend, 1) as steps:
        save_steps(steps, 1)
        steps.pin(1)
        save_steps(steps, 2, 3)
        assert steps._run._deleter.wait(60)
        assert (backend.refused != [], steps.steps, len(step_directories(tmp_path))) == (True, [1, 2, 3], 3)
        flip_a_payload_byte(step_path(tmp_path, 3))  # as such a disk may lose data
        if call == "pin":
            steps.pin(2)
        else:
            assert step_of(steps.restore(step=None if call == "restore" else 2)) == 2, "1 is older"
        assert steps.steps[:2] == [1, 2]
        save_steps(steps, 4)
        assert steps._run._deleter.wait(60)
        assert steps.steps[-1] == 4
        assert (2 in steps.steps) == (call == "pin"), "the policy keeps one step and the pinned ones"
        assert step_path(tmp_path, 2).exists() == (call == "pin")


def test_late_sync_deletes_nothing_after_takeover(tmp_path: Path) -> None:
    """Before a step is deleted, the step that replaces it is synced, which may take minutes."""
    backend = HeldSync()
    with manager(tmp_path, backend, 1) as stale:
        save_steps(stale, 1, 2)
        assert backend.held.wait(60)
        remove_lock(tmp_path)  # as a takeover after a minute of silence
        with jct.StepManager(tmp_path) as owner:
            assert step_of(owner.restore(step=1)) == 1
            owner.pin(1)
            backend.go.set()
            assert stale._run._deleter.wait(60)
            assert (owner.steps, step_directories(tmp_path)) == ([1, 2], ["step-0000000001", "step-0000000002"])
            assert step_of(owner.restore(step=1)) == 1


def test_pinned_pending_deletion_survives_dropped_manager(tmp_path: Path) -> None:
    backend = HeldSync()
    steps = manager(tmp_path, backend, 1)
    save_steps(steps, 1, 2)
    assert backend.held.wait(60)
    steps.pin(1)
    deleter = steps._run._deleter
    del steps
    gc.collect()
    backend.go.set()
    assert deleter.wait(60)
    with jct.StepManager(tmp_path, preservation_policy=LatestN(1)) as other:
        save_steps(other, 3)
        assert other._run._deleter.wait(60)
        assert (other.steps, step_of(other.restore(step=1))) == ([1, 3], 1)


class FailsOnce(LatestN):
    """A policy whose metrics server does not answer the first call of the thread that deletes."""

    failed = False

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        if threading.current_thread().name == "jaxckpt-retention" and not FailsOnce.failed:
            FailsOnce.failed = True
            raise OSError("the metrics server does not answer")
        return super().should_preserve(checkpoints, context=context)


def test_a_policy_that_fails_once_costs_no_deletion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jct.StepManager(tmp_path, preservation_policy=FailsOnce(1), settings=PLAIN) as steps:
        save_steps(steps, 1, 2)
        assert steps._run._deleter.wait(60)
        assert step_directories(tmp_path) == ["step-0000000001", "step-0000000002"]
        assert "OSError('the metrics" in caplog.text
        save_steps(steps, 3)
        assert steps._run._deleter.wait(60)
        assert step_directories(tmp_path) == ["step-0000000003"]
