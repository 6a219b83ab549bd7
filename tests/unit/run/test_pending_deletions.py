"""Pending deletions: each waits until the step that replaces it is on the disk, and for nothing else."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.run.catalog import half_deleted
from jaxckpt_train.run.entry import hidden_name, shown_name
from jaxckpt_train.run.retention import Deleter
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, small_sizes
from tests.nightly.crash.facts import state_of, token_of
from tests.nightly.crash.image import Image, Rename
from tests.nightly.crash.programs import opened, process
from tests.nightly.crash.states import Order, crash_state
from tests.support.fake_backends import RecordingListener, RefusingBackend
from tests.support.runs import made_run, save_steps, step_of, step_path

ONE, TWO, THREE, FOUR, FIVE = (f"step-000000000{step}" for step in range(1, 6))


class Unsynced(LocalBackend):
    """Refuses syncs within some directories, and records what is synced and renamed."""

    def __init__(self, *names: str) -> None:
        self.refused, self.done = set(names), list[tuple[str, str]]()

    def sync(self, path: str) -> None:
        if not self.refused.isdisjoint(path.split("/")):
            raise StorageError(errno.EIO, "refused", path)
        super().sync(path)
        self.done.append(("sync", os.path.basename(path)))

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.done.append(("rename", os.path.basename(source)))


def saved(manager: jct.StepManager, *steps: int) -> None:
    """Save steps, and wait until the deletions that follow were carried out or refused."""
    for step in steps:
        save_steps(manager, step)
        assert manager._run._deleter.wait(60)


def names_in(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if "step-" in name)


def directories(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).mkdir()
    return directory


def test_expired_unsynced_step_keeps_no_other(tmp_path: Path) -> None:
    backend, settings = Unsynced(THREE), jct.StoreSettings(durability="none")
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend, settings=settings) as manager:
        saved(manager, 1, 2, 3)
        assert names_in(tmp_path) == [TWO, THREE]
        backend.done.clear()
        saved(manager, 4)
        assert names_in(tmp_path) == [FOUR]
        assert [*manager._run._pending_deletions] == []
    first_gone = min(backend.done.index(("rename", name)) for name in (TWO, THREE))
    assert ("sync", FOUR) in backend.done[:first_gone]


def test_unsynced_successors_delay_all_deletions(tmp_path: Path) -> None:
    run, backend = directories(tmp_path, ONE, TWO, THREE, FOUR), Unsynced(TWO, THREE)
    listener = RecordingListener()
    deleter = Deleter(backend, str(run), lambda: listener)
    for pending_deletions, instead in (([ONE], [TWO]), ([TWO], [THREE])):
        deleter.delete(pending_deletions, instead=instead)
        assert deleter.wait(60)
        assert names_in(run) == [ONE, TWO, THREE, FOUR]
    deleter.delete([THREE], instead=[FOUR])
    deleter.close()
    assert names_in(run) == [FOUR]


def test_deletion_waits_for_newer_synced_step(tmp_path: Path) -> None:
    run, backend = directories(tmp_path, ONE, TWO, THREE, FOUR), Unsynced(THREE)
    listener = RecordingListener()
    deleter = Deleter(backend, str(run), lambda: listener)
    for pending_deletions, instead in (([ONE], ["step-gone"]), ([TWO], [THREE])):
        deleter.delete(pending_deletions, instead=instead)
        assert deleter.wait(60)
        assert names_in(run) == [ONE, TWO, THREE, FOUR], (
            "the step that replaces the first one is not on the disk for certain"
        )
    (run / THREE).rmdir()
    deleter.delete([FIVE], instead=[FOUR])
    deleter.close()
    assert names_in(run) == [FOUR]


def test_unsynced_step_keeps_nothing_after_later_sync(tmp_path: Path) -> None:
    policy = jct.AnyPreservationPolicy([jct.LatestN(1), jct.EveryNSteps(3)])
    backend, settings = Unsynced(THREE), jct.StoreSettings(durability="none")
    with jct.StepManager(tmp_path, preservation_policy=policy, backend=backend, settings=settings) as manager:
        saved(manager, 1, 2, 3, 4, 5)
        assert names_in(tmp_path) == [THREE, FIVE]
    with jct.StepManager(tmp_path, preservation_policy=policy) as manager:
        saved(manager, 7)
        assert manager.steps == [3, 7]
    assert names_in(tmp_path) == [THREE, "step-0000000007"]


def test_step_that_was_removed_by_hand_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2)) as manager:
        saved(manager, 1, 2)
        shutil.rmtree(step_path(tmp_path, 1))
        saved(manager, 3, 4)
        assert (manager.steps, [*manager._run._pending_deletions]) == ([3, 4], [])
    assert caplog.text == ""


def test_misreported_rename_still_deletes_step(tmp_path: Path) -> None:
    class Late(LocalBackend):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            if source.endswith(ONE):
                raise StorageError(errno.EIO, "too late", source)

    run, listener = directories(tmp_path, ONE), RecordingListener()
    deleter = Deleter(Late(), str(run), lambda: listener)
    deleter.delete([ONE])
    deleter.close()
    assert (names_in(run), listener.gone) == ([], [ONE])


def test_undeletable_remains_do_not_block_reused_name(tmp_path: Path) -> None:
    """While remains of a step exist, a later save of its number gets another name."""
    backend = RefusingBackend("remove", hidden_name(THREE), errno.EBUSY, 1000)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        saved(manager, 2)
        manager.pin(2)
        saved(manager, 3, 4)
        assert names_in(tmp_path) == [hidden_name(THREE), TWO, FOUR]
        manager.restore(step=2)
        saved(manager, 3)
        assert step_of(manager.restore()) == 3
        assert names_in(tmp_path) == [hidden_name(THREE), TWO, f"{THREE}.g1", FOUR]
        saved(manager, 4, 5)
        assert manager.steps == [2, 5]
        assert f"{THREE}.g1" not in names_in(tmp_path)
    with jct.StepManager(tmp_path) as manager:
        manager.own()
        assert manager.steps == [2, 5]
    assert half_deleted(LocalBackend(), str(tmp_path)) == []


def test_occupied_deletion_name_is_cleared(tmp_path: Path) -> None:
    run = directories(tmp_path, ONE, hidden_name(ONE), TWO, THREE)
    backend, listener = RefusingBackend("remove", hidden_name(ONE), errno.EBUSY, 1), RecordingListener()
    deleter = Deleter(backend, str(run), lambda: listener)
    deleter.delete([ONE])
    assert deleter.wait(60)
    assert (names_in(run), listener.gone) == ([hidden_name(ONE), ONE, TWO, THREE], [])
    for name in (TWO, THREE):  # the first of them removes the remains, except for one refusal
        deleter.delete([name])
        assert deleter.wait(60)
        assert ONE in names_in(run) or ONE in listener.gone
    deleter.delete([FOUR])
    deleter.delete([FIVE])
    deleter.close()
    assert names_in(run) == []
    assert listener.gone.count(ONE) == 1


def test_foreign_hidden_entries_are_left_alone(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1)
    others = [".my-results.deleting", ".deleting", "step-0000000007.deleting", ".step-7.deleting", ".step.x.deleting"]
    directories(run, *others, hidden_name(TWO), hidden_name(f"{TWO}.g3"))
    (run / ".my-results.deleting" / "precious").write_text("precious\n")
    with jct.StepManager(run) as manager:
        manager.own()
    assert [name for name in sorted(os.listdir(run)) if "deleting" in name] == sorted(others)
    assert (run / ".my-results.deleting" / "precious").exists()


class NeverSynced(CrashDisk):
    """Refuses to sync the files of step 3."""

    def sync(self, path: str) -> None:
        if f"{THREE}/" in path:
            raise StorageError(errno.EIO, "refused", path)
        super().sync(path)


@pytest.mark.parametrize("order", ["ordered", "any"])
def test_power_cut_leaves_steps_that_replace_deleted_ones(order: Order) -> None:
    machine = Machine()
    with small_sizes(), process(1):
        settings = jct.StoreSettings(**{**SETTINGS, "durability": "none"})
        manager = opened(NeverSynced(machine), settings, 1)
        for step in (1, 2, 3, 4, 5):
            manager.save(step, state_of(step))
            manager.wait(60)
            assert manager._run._deleter.wait(60)
        assert manager.steps == [5]
        manager.close()
    least, seen = 0, set[int]()
    for moment, operation in enumerate(machine.log, 1):
        if isinstance(operation, Rename) and operation.new_name.endswith(".deleting"):
            least = max(least, {ONE: 2, TWO: 4, THREE: 4, FOUR: 5}[shown_name(operation.new_name)])
        seen.add(least)
        for seed in range(6 if least else 0):
            image = crash_state(Image(), machine.log, moment, order, random.Random(seed))
            reader = opened(CrashDisk(Machine(image)), jct.StoreSettings(), None)
            assert token_of(reader.restore()) >= least, (moment, seed)
    assert seen == {0, 2, 4, 5}
