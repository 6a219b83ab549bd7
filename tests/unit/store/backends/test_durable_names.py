"""Durability of names in directories that are links, were made by a dead process, or failed to sync once."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, small_sizes
from tests.nightly.crash.facts import state_of, token_of
from tests.nightly.crash.image import Exchange, Image, Rename
from tests.nightly.crash.programs import RUN, SINGLE, die, on, opened, process
from tests.nightly.crash.states import Order, crash_state

STATES = 60


class RefusingDisk(CrashDisk):
    """Refuse the first sync of the parent directory after a rename or an exchange."""

    def __init__(self, machine: Machine, instead: Callable[[], None] = lambda: None) -> None:
        super().__init__(machine)
        self._instead, self._first, self.refused = instead, len(machine.log), False

    def sync(self, path: str) -> None:
        changed = any(isinstance(each, (Rename, Exchange)) for each in self.machine.log[self._first :])
        if path in ("/data", RUN) and changed and not self.refused:
            self.refused = True
            self._instead()
            raise StorageError(errno.EIO, "cannot sync", path)
        super().sync(path)


def save(disk: CrashDisk, token: int) -> None:
    with on(disk), small_sizes():
        checkpoint.save_checkpointables(SINGLE, state_of(token), overwrite=True, settings=StoreSettings(**SETTINGS))


def loaded(machine: Machine, image: Image | None = None) -> int:
    with on(CrashDisk(machine if image is None else Machine(image, can_exchange=machine.can_exchange))):
        return token_of(checkpoint.load_checkpointables(SINGLE))


@pytest.mark.parametrize("where", ["link/c", "link/new/c", "link"])
def test_linked_directory_is_saved_to(tmp_path: Path, where: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    if where == "link":
        with jct.StepManager(tmp_path / where, preservation_policy=jct.LatestN(1)) as manager:
            for step in (1, 2):
                manager.save(step, {"state": {"w": np.full(3, step)}})
        assert jct.StepManager(tmp_path / "real").steps == [2]
    else:
        for value in (1, 2):
            jct.save(tmp_path / where, {"w": np.full(3, value)}, overwrite=True)
        assert jct.load(tmp_path / "real" / where.removeprefix("link/"))["w"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("order", ["ordered", "any"])
def test_directory_that_dead_process_made_is_made_durable(order: Order) -> None:
    machine = Machine()
    with process(1):
        dying = CrashDisk(machine)
        dying.budget = 1
        with contextlib.suppress(StorageError):
            save(dying, 1)
    with process(2):
        save(CrashDisk(machine), 2)
    for seed in range(STATES):
        image = crash_state(Image(), machine.log, len(machine.log), order, random.Random(seed))
        assert loaded(machine, image) == 2


def test_all_names_on_the_way_are_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    synced: list[str] = []
    sync = LocalBackend.sync
    monkeypatch.setattr(LocalBackend, "sync", lambda self, path: (synced.append(path), sync(self, path))[1])
    for _ in range(2):
        LocalBackend().make_directory(str(tmp_path / "a" / "b" / "c"), parents=True, sync=True)
    assert synced[:3] == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)]
    assert len(synced) == len(set(synced))
    os.rmdir(tmp_path / "a" / "b" / "c")
    LocalBackend().make_directory(str(tmp_path / "a" / "b" / "c"), parents=True, sync=False)
    assert len(synced) == len(set(synced))


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("order", ["ordered", "any"])
def test_undone_replacement_loses_nothing(can_exchange: bool, order: Order) -> None:
    machine = Machine(can_exchange=can_exchange)
    with process(1):
        save(CrashDisk(machine), 1)
        before = len(machine.log)
        with pytest.raises(StorageError, match="cannot sync"):
            save(RefusingDisk(machine), 2)
        assert loaded(machine) == 1
    for moment in range(before, len(machine.log) + 1):
        for seed in range(8):
            image = crash_state(Image(), machine.log, moment, order, random.Random(seed))
            assert loaded(machine, image) in (1, 2)


@pytest.mark.parametrize("is_first", [True, False])
def test_undo_of_a_save_keeps_a_newer_one(is_first: bool) -> None:
    machine = Machine()
    with process(1):
        if not is_first:
            save(CrashDisk(machine), 1)
        with pytest.raises(StorageError, match="cannot sync"):
            save(RefusingDisk(machine, lambda: save(CrashDisk(machine), 3)), 2)
        assert loaded(machine) == 3


def test_undone_step_is_absent_or_whole() -> None:
    machine = Machine()
    with small_sizes(), process(1):
        disk = RefusingDisk(machine)
        manager = opened(disk, StoreSettings(**SETTINGS), None)
        manager.own()
        manager.save(1, state_of(1))
        with pytest.raises(StorageError, match="cannot sync"):
            manager.wait(60)
        die(disk, manager)
    for seed in range(4 * STATES):
        image = crash_state(Image(), machine.log, len(machine.log), "any", random.Random(seed))
        reader = opened(CrashDisk(Machine(image)), StoreSettings(), None)
        reader.check_fresh()
        assert [token_of(reader.restore(step=step)) for step in reader.steps] in ([], [1])


def test_commit_of_dead_process_is_durable() -> None:
    machine = Machine()
    with small_sizes():
        with process(1):
            disk = CrashDisk(machine)
            manager = opened(disk, StoreSettings(**SETTINGS), None)
            manager.save(1, state_of(1))
            manager.wait(60)
            sync = disk.sync

            def dying(path: str) -> None:
                renamed = [each for each in machine.log if isinstance(each, Rename)]
                if path == RUN and renamed[-1].new_name.endswith("2"):
                    disk.power = False
                sync(path)

            disk.sync = dying  # type: ignore[method-assign]
            manager.save(2, state_of(2))
            with contextlib.suppress(CheckpointError):
                manager.wait(60)
            die(disk, manager)
        with process(2):
            manager = opened(CrashDisk(machine), StoreSettings(**SETTINGS), None)
            manager.own()
            assert manager.is_committed(2)
            manager.close()
    for seed in range(STATES):
        image = crash_state(Image(), machine.log, len(machine.log), "any", random.Random(seed))
        assert opened(CrashDisk(Machine(image)), StoreSettings(), None).steps == [1, 2]


def test_pin_protects_its_step_during_a_save() -> None:
    """A save commits and retention runs while the pin is being written."""
    machine = Machine()
    with small_sizes(), process(1):
        disk = CrashDisk(machine)
        manager = opened(disk, StoreSettings(**SETTINGS), 2)
        for step in (1, 2):
            manager.save(step, state_of(step))
            manager.wait(60)
        sync, saved = disk.sync, list[int]()

        def saving(path: str) -> None:
            if path.endswith("record") and manager.steps == [1, 2] and not saved:
                saved.append(3)
                manager.save(3, state_of(3))
                manager.wait(60)
                manager._run._deleter.wait(60)
            sync(path)

        disk.sync = saving  # type: ignore[method-assign]
        manager.pin(1)
        assert saved == [3]
        manager.save(4, state_of(4))
        manager.wait(60)
        manager._run._deleter.wait(60)
        assert manager.steps == [1, 3, 4]
        assert [entry.step for entry in manager._run.entries() if entry.pinned] == [1]
        manager.close()
