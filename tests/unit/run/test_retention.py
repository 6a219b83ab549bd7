"""Retention: deletions run on their own thread, are never seen half done, and never affect a step that must stay."""

from __future__ import annotations

import datetime
import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.run.catalog import leftovers
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import attempt_paths
from jaxckpt_train.store.removal import final_name
from tests.support.fake_backends import HoldingBackend, RecordingBackend, RefusingBackend
from tests.support.runs import Clock, made_run, save_steps, state_of, step_of, step_path

HIDDEN = ".tmp-"
ONE = "step-0000000001"


def left_in(directory: Path) -> list[str]:
    """The final names of the leftovers in a run."""
    return [final_name(name) or name for name in leftovers(LocalBackend(), str(directory))]


def hides(done: list[tuple[str, str]]) -> int:
    """The position of the operation that hides step 1."""
    return next(at for at, (operation, name) in enumerate(done) if operation == "rename" and final_name(name) == ONE)


def step_directories(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("step-"))


def deleted_events(manager: jct.StepManager) -> list[str]:
    return [event["name"] for event in manager.history.events() if event["event"] == "delete"]


def test_deleted_steps_are_gone_and_in_history(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3, 4, preservation_policy=jct.LatestN(2))
    manager = jct.StepManager(run)
    assert manager.steps == [3, 4]
    assert sorted(os.listdir(run)) == [".lock", "history.jsonl", "step-0000000003", "step-0000000004"]
    assert deleted_events(manager) == ["step-0000000001", "step-0000000002"]


def test_without_a_policy_everything_stays(tmp_path: Path) -> None:
    assert jct.StepManager(made_run(tmp_path, *range(6))).steps == list(range(6))


def test_slow_deletion_blocks_neither_loop_nor_saves(tmp_path: Path) -> None:
    backend = HoldingBackend("remove", HIDDEN)
    manager = jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend)
    save_steps(manager, 1, 2)
    assert backend.reached.wait(60)
    save_steps(manager, 3, 4, 5)  # each of them is committed while the first deletion still waits
    assert manager.latest == 5
    assert manager.steps == [5]
    assert [event["step"] for event in manager.history.events() if event["event"] == "save"] == [1, 2, 3, 4, 5]
    backend.go.set()
    manager.close()
    assert set(backend.threads) == {"jaxckpt-retention"}
    assert step_directories(tmp_path) == ["step-0000000005"]


@pytest.mark.parametrize("durability", ["none", "file", "full"])
def test_kept_step_is_synced_before_older_deletion(tmp_path: Path, durability: Any) -> None:
    """With any durability: a deletion may reach the disk long before new data do."""
    backend = RecordingBackend()
    settings = jct.StoreSettings(durability=durability)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend, settings=settings) as manager:
        save_steps(manager, 1)
        files = {name for operation, name in backend.done if operation == "sync"} - {"", ".lock", *tmp_path.parts}
        assert (files == set()) == (durability == "none"), "without durability only directories are synced"
        save_steps(manager, 2)
    gone = hides(backend.done)
    synced = {name for operation, name in backend.done[:gone] if operation == "sync"}
    expected = {"step-0000000002", "state", tmp_path.name}
    if durability == "none":
        expected |= {"COMMIT", "manifest.json", "p00000-s000.safetensors"}
    if durability == "full":  # the step was synced under the name of its attempt
        expected -= {"step-0000000002"}
        assert any(name.startswith(".step-0000000002.tmp-") for name in synced)
    assert expected <= synced
    assert step_directories(tmp_path) == ["step-0000000002"]


def test_nothing_is_deleted_while_sync_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Unsynced(LocalBackend):
        refuses = False

        def sync(self, path: str) -> None:
            if self.refuses:
                raise StorageError(errno.EIO, "refused to sync", path)
            super().sync(path)

    backend, settings = Unsynced(), jct.StoreSettings(durability="none")
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend, settings=settings) as manager:
        manager.own()
        backend.refuses = True
        save_steps(manager, 1, 2)
        assert manager._run._deleter.wait(60)
        assert step_directories(tmp_path) == ["step-0000000001", "step-0000000002"]
        assert "step-0000000002 could not be synced" in caplog.text
        backend.refuses = False
        save_steps(manager, 3)
    assert step_directories(tmp_path) == ["step-0000000003"]


def test_deletions_work_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name in ("jaxckpt-retention", "jaxckpt-heartbeat"):
            raise RuntimeError("can't start new thread")
        start(self)

    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            save_steps(manager, 1, 2, 3)
            assert step_directories(tmp_path) == ["step-0000000003"]
        save_steps(manager, 4)
        assert any(thread.name == "jaxckpt-retention" for thread in threading.enumerate())
    assert step_directories(tmp_path) == ["step-0000000004"]


def test_deletions_work_without_directory_syncs(tmp_path: Path) -> None:
    class NoDirectorySync(LocalBackend):
        def sync(self, path: str) -> None:
            if os.path.isdir(path):
                raise StorageError(errno.EINVAL, "not for directories", path)
            super().sync(path)

    settings = jct.StoreSettings(durability="none")
    policy = jct.LatestN(1)
    run = tmp_path / "new" / "run"
    with jct.StepManager(run, preservation_policy=policy, backend=NoDirectorySync(), settings=settings) as manager:
        save_steps(manager, 1, 2)
    assert step_directories(run) == ["step-0000000002"]


@pytest.mark.parametrize("is_of_earlier_version", [False, True])
def test_half_deleted_step_is_hidden_and_cleaned(tmp_path: Path, is_of_earlier_version: bool) -> None:
    run = made_run(tmp_path, 1, 2)
    hidden = run / f".{ONE}.deleting" if is_of_earlier_version else Path(next(attempt_paths(str(run / ONE))))
    step_path(run, 1).rename(hidden)
    assert jct.StepManager(run).steps == [2]
    assert hidden.exists()  # a reader cleans nothing
    assert leftovers(LocalBackend(), str(run)) == [hidden.name]
    with jct.StepManager(run) as owner:
        owner.own()
    assert step_directories(run) == ["step-0000000002"]
    assert leftovers(LocalBackend(), str(run)) == []


def test_leftover_of_earlier_version_hides_no_step(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    (run / f".{ONE}.deleting").mkdir()
    with jct.StepManager(run, preservation_policy=jct.LatestN(2)) as owner:
        owner.own()
        assert owner.steps == [1, 2]
        assert deleted_events(owner) == []
        save_steps(owner, 3)
    assert step_directories(run) == ["step-0000000002", "step-0000000003"]


def test_leftovers_are_removed_in_background(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1)
    (run / f".{ONE}.deleting").mkdir()
    backend = HoldingBackend("remove", ".deleting")
    with jct.StepManager(run, backend=backend) as owner:
        owner.own()
        save_steps(owner, 2)
        assert backend.reached.wait(60)
        assert owner.steps == [1, 2]
        backend.go.set()
    assert left_in(run) == []


def test_step_is_hidden_before_its_removal(tmp_path: Path) -> None:
    backend = RecordingBackend()
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        save_steps(manager, 1, 2)
    changes = [operation for operation, name in backend.done if final_name(name) == ONE and operation != "sync"]
    assert changes == ["rename", "remove"]


def test_new_step_is_durable_before_deletion(tmp_path: Path) -> None:
    backend = RecordingBackend()
    run = tmp_path / "run"
    with jct.StepManager(run, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        save_steps(manager, 1)
        backend.done.clear()
        save_steps(manager, 2)
    order = backend.done
    published = order.index(("rename", "step-0000000002"))
    durable = order.index(("sync", "run"), published)
    gone = hides(order)
    assert published < durable < gone
    assert not [entry for entry in order[:durable] if entry[0] == "remove" and "step" in entry[1]]


@pytest.mark.parametrize("operation", ["rename", "remove"])
def test_deletion_that_fails_warns_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    part = ONE if operation == "rename" else f".{ONE}.tmp-"
    backend = RefusingBackend(operation, part, errno.EBUSY, 0)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        save_steps(manager, 1)
        backend.times = 1
        save_steps(manager, 2)
        manager._run._deleter.wait()  # the deletion runs on its own thread: wait for the refusal
        assert f"deleting {'.' if operation == 'remove' else ''}{ONE}" in caplog.text
        assert manager.steps == ([1, 2] if operation == "rename" else [2])
        save_steps(manager, 3)
    assert step_directories(tmp_path) == ["step-0000000003"]
    assert left_in(tmp_path) == []


def test_deletion_that_never_succeeds_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = RefusingBackend("remove", f".{ONE}.tmp-", errno.EACCES, 1000)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        save_steps(manager, 1, 2, 3, 4)
        assert manager.steps == [4]
    assert step_directories(tmp_path) == ["step-0000000004"]
    assert left_in(tmp_path) == [ONE]
    with jct.StepManager(tmp_path) as next_owner:
        next_owner.own()
    assert left_in(tmp_path) == []


def test_pinned_steps_stay_until_unpinned(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:
        save_steps(manager, 1)
        manager.pin(1)
        save_steps(manager, 2, 3)
        assert manager.steps == [1, 3]
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:
        save_steps(manager, 4)
        assert manager.steps == [1, 4]
        manager.pin(1, pinned=False)
        save_steps(manager, 5)
        assert manager.steps == [5]


@pytest.mark.parametrize("durability", ["full", "none"])
def test_retain_deletes_before_next_commit(tmp_path: Path, durability: Any) -> None:
    settings = jct.StoreSettings(durability=durability)
    made_run(tmp_path, 1, 2, 3, settings=settings)
    manager = jct.StepManager(tmp_path, preservation_policy=jct.CustomSteps([1]), settings=settings)
    assert manager.steps == [1, 2, 3]
    with manager:
        manager.retain()
        assert manager.steps == [1, 3], "step 3 is the newest, which always stays"
    assert step_directories(tmp_path) == ["step-0000000001", "step-0000000003"]
    with pytest.raises(jct.SettingsError, match="closed"):
        manager.retain()


def test_step_of_earlier_process_is_synced_before_deletion(tmp_path: Path) -> None:
    """It was saved without syncs, although this process saves with them."""
    made_run(tmp_path, 1, 2, settings=jct.StoreSettings(durability="none"))
    backend = RecordingBackend()
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        manager.retain()
        assert manager.steps == [2]
    synced = {name for operation, name in backend.done[: hides(backend.done)] if operation == "sync"}
    assert {"COMMIT", "manifest.json", "p00000-s000.safetensors", "step-0000000002"} <= synced


def test_deletions_since_last_commit_are_counted(tmp_path: Path) -> None:
    """The other processes of a job learn of them with the next commit."""
    settings = jct.StoreSettings(durability="none")
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), settings=settings) as manager:
        for step in (1, 2, 3):
            save_steps(manager, step)
            assert manager._run._deleter.wait(60)
        assert manager._run.take_deleted() == []
        save_steps(manager, 4)
        assert manager._run._deleter.wait(60)
        assert manager._run.take_deleted() == ["step-0000000003"]
        assert manager._run.take_deleted() == []


def test_step_being_read_is_kept(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:
        save_steps(manager, 1)
        with manager._run.reading(manager._run.entries()):
            save_steps(manager, 2, 3)
            assert manager.steps == [1, 3]
            assert step_of(jct.load_checkpointables(step_path(tmp_path, 1))) == 1
        save_steps(manager, 4)
        assert manager.steps == [4]


def test_reader_finishes_step_that_is_deleted_under_it(tmp_path: Path) -> None:
    """A segment that is open can be read to its end after it was unlinked."""
    run = made_run(tmp_path, 1)
    source = LocalBackend().open(str(step_path(run, 1)), "state/p00000-s000.safetensors", direct=False)
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as owner:
        save_steps(owner, 2)
    data = np.empty(source.size, np.uint8)
    source.read_into(0, data, source.size)
    source.close()
    assert not step_path(run, 1).exists()


@pytest.mark.parametrize("policy", [None, jct.EveryNSteps(10)])
def test_temporary_steps_go_after_the_next_commit(tmp_path: Path, policy: Any) -> None:
    with jct.StepManager(tmp_path, preservation_policy=policy) as manager:
        save_steps(manager, 10)
        save_steps(manager, 11, temporary=True)
        assert manager.steps == [10, 11]
        save_steps(manager, 12, temporary=True)
        assert manager.steps == [10, 12]
        save_steps(manager, 20)
        assert manager.steps == [10, 20]


class KeepNothing:
    """A policy that keeps no step at all."""

    def should_preserve(self, checkpoints: object, *, context: object) -> list[bool]:
        return [False] * len(checkpoints)  # type: ignore[arg-type]  # a sequence


def test_policy_that_keeps_nothing_cannot_take_newest(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=KeepNothing()) as manager:
        for step in (5, 6, 7):
            save_steps(manager, step)
            assert manager.steps == [step]
            assert step_of(manager.restore()) == step


def test_new_step_survives_clock_set_back(tmp_path: Path) -> None:
    clock = Clock()
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2), clock=clock) as manager:
        save_steps(manager, 10, 30)
        manager.restore(step=10)
        clock.now -= datetime.timedelta(days=1)
        save_steps(manager, 11)
        assert manager.latest == 11
        assert 11 in manager.steps
        assert step_of(manager.restore()) == 11


def test_overwritten_generation_goes_after_new_one_is_committed(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1)
        manager.save(1, {"state": state_of(100)}, overwrite=True)
        manager.wait()
        assert step_of(manager.restore()) == 100
    assert step_directories(tmp_path) == ["step-0000000001.g1"]


class FailingPolicy:
    """A policy that raises."""

    def should_preserve(self, checkpoints: object, *, context: object) -> list[bool]:
        raise KeyError("a mistake")


def test_failing_policy_costs_no_step(tmp_path: Path) -> None:
    manager = jct.StepManager(tmp_path, preservation_policy=FailingPolicy())
    manager.save(1, {"state": state_of(1)})
    with pytest.raises(KeyError, match="a mistake"):
        manager.wait()
    assert manager.steps == [1]
    manager.close()
    assert step_of(jct.StepManager(tmp_path).restore()) == 1
