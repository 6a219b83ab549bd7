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
from jaxckpt_train.run.catalog import leftovers
from jaxckpt_train.run.retention import Deleter
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import attempt_paths
from jaxckpt_train.store.removal import final_name
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, small_sizes
from tests.nightly.crash.facts import state_of, token_of
from tests.nightly.crash.image import Image, Rename
from tests.nightly.crash.programs import opened, process
from tests.nightly.crash.states import Order, crash_state
from tests.support.fake_backends import RecordingBackend, RecordingRun, RefusingBackend
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
    first_gone = min(backend.done.index(("rename", name)) for name in (TWO, THREE))
    assert ("sync", FOUR) in backend.done[:first_gone]


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
        assert manager.steps == [3, 4]
    assert caplog.text == ""


def test_misreported_rename_still_deletes_step(tmp_path: Path) -> None:
    class Late(LocalBackend):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            if source.endswith(ONE):
                raise StorageError(errno.EIO, "too late", source)

    run, listener = directories(tmp_path, ONE), RecordingRun()
    deleter = Deleter(Late(), str(run), lambda: listener)
    deleter.delete([ONE])
    deleter.close()
    assert (names_in(run), listener.gone) == ([], [ONE])


def test_undeletable_remains_do_not_block_reused_name(tmp_path: Path) -> None:
    """While remains of a step exist, a later save of its number may have its name."""
    backend = RefusingBackend("remove", f".{THREE}.tmp-", errno.EBUSY, 1000)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        saved(manager, 2)
        manager.pin(2)
        saved(manager, 3, 4)
        assert names_in(tmp_path)[1:] == [TWO, FOUR]
        manager.restore(step=2)
        saved(manager, 3)
        assert step_of(manager.restore()) == 3
        assert names_in(tmp_path)[1:] == [TWO, THREE, FOUR]
        saved(manager, 4, 5)
        assert manager.steps == [2, 5]
        assert names_in(tmp_path)[2:] == [TWO, FIVE], "both deletions of step 3 are left"
        assert len(leftovers(LocalBackend(), str(tmp_path))) == 2
    with jct.StepManager(tmp_path) as manager:
        manager.own()
        assert manager.steps == [2, 5]
    assert leftovers(LocalBackend(), str(tmp_path)) == []


def test_refused_deletion_is_reported(tmp_path: Path) -> None:
    run, listener = directories(tmp_path, ONE, TWO), RecordingRun()
    backend = RefusingBackend("rename", ONE, errno.EBUSY, 1)
    deleter = Deleter(backend, str(run), lambda: listener)
    deleter.delete([ONE, TWO])
    deleter.close()
    assert (names_in(run), listener.gone, listener.kept) == ([ONE], [TWO], [ONE])


def test_directory_that_cannot_be_renamed_is_removed_in_place(tmp_path: Path) -> None:
    """As in a container image: COMMIT goes first, and is gone for certain before any other file."""

    class Layered(RecordingBackend):
        def rename(self, source: str, target: str) -> None:
            if source.endswith(ONE):
                raise StorageError(errno.EXDEV, "cannot rename", source)
            super().rename(source, target)

    backend = Layered()
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend) as manager:
        saved(manager, 1)
        backend.done.clear()
        saved(manager, 2)
        found = [each for each in backend.done if each[0] == "remove" or each == ("sync", ONE)]
    assert names_in(tmp_path) == [TWO]
    assert found == [("remove", "COMMIT"), ("sync", ONE), ("remove", ONE)]


@pytest.mark.parametrize("refused", ["COMMIT", ONE])
def test_step_is_gone_in_place_once_it_has_no_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    class Layered(LocalBackend):
        def rename(self, source: str, target: str) -> None:
            if source.endswith(ONE):
                raise StorageError(errno.EXDEV, "cannot rename", source)
            super().rename(source, target)

        def remove(self, path: str) -> None:
            if path.endswith(f"{ONE}/COMMIT" if refused == "COMMIT" else ONE):
                raise StorageError(errno.EROFS, "refused", path)
            super().remove(path)

    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=Layered()) as manager:
        saved(manager, 1, 2, 3)
        assert manager.steps == ([1, 3] if refused == "COMMIT" else [3])
    assert caplog.text.count("WARNING") == 1
    assert (step_path(tmp_path, 1) / "COMMIT").exists() == (refused == "COMMIT")


def test_foreign_hidden_entries_are_left_alone(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1)
    others = [".my-results.deleting", ".deleting", "step-0000000007.deleting", ".step-7.deleting", ".step.x.deleting"]
    directories(run, *others, f".{TWO}.deleting", os.path.basename(next(attempt_paths(f"{TWO}.g3"))))
    (run / ".my-results.deleting" / "precious").write_text("precious\n")
    with jct.StepManager(run) as manager:
        manager.own()
    hidden = [name for name in sorted(os.listdir(run)) if "deleting" in name or ".tmp-" in name]
    assert hidden == sorted(others)
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
        if isinstance(operation, Rename) and final_name(operation.new_name):
            least = max(least, {ONE: 2, TWO: 4, THREE: 4, FOUR: 5}[final_name(operation.new_name) or ""])
        seen.add(least)
        for seed in range(3 if least else 0):
            image = crash_state(Image(), machine.log, moment, order, random.Random(seed))
            reader = opened(CrashDisk(Machine(image)), jct.StoreSettings(), None)
            assert token_of(reader.restore()) >= least, (moment, seed)
    assert seen == {0, 2, 4, 5}
