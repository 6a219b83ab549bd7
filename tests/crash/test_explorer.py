"""Crash states of saves, retention, roll-backs and replacements keep every promise; a writer with a flaw is found out.

The whole campaign is `make crash-states`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps import lock, notes, retention
from jaxckpt_train.store import transaction
from tests.crash.crash_disk import CrashDisk, Machine
from tests.crash.explorer import SETTINGS, explore, small_sizes
from tests.crash.image import Sync
from tests.crash.programs import World
from tests.crash.states import Order
from tests.store.backend_contract import BackendContract

pytestmark = pytest.mark.timeout(300)

RIGHT, ENOUGH = 1500, 4000


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


class TestCrashDisk(BackendContract):
    """What stands for the disk here keeps the contract of all back ends."""

    direct: Any = "auto"

    @pytest.fixture
    def backend(self) -> CrashDisk:
        return CrashDisk(Machine())

    @pytest.fixture
    def root(self, backend: CrashDisk) -> str:
        backend.make_directory("/data", parents=True, sync=True)
        return "/data"

    def raw(self, backend: CrashDisk, path: str) -> bytes:
        inode = backend.machine.live.find(path)
        assert inode is not None
        return bytes(backend.machine.live.files[inode])

    def names(self, backend: CrashDisk, path: str) -> list[str]:
        inode = backend.machine.live.find(path)
        assert inode is not None
        return sorted(backend.machine.live.folders[inode])

    def make_older(self, backend: CrashDisk, path: str) -> None:
        backend.machine.now_s += 60


@pytest.mark.parametrize("program", ["run", "single"])
def test_every_crash_state_keeps_what_was_promised(program: str) -> None:
    found = explore(seed=0, states=RIGHT, program=program)
    assert found.violations == []
    assert found.distinct == RIGHT


class WithoutFileSync(CrashDisk):
    """Never syncs a file's bytes."""

    def do(self, operation: Any, path: str) -> None:
        if not (isinstance(operation, Sync) and operation.inode in self.machine.live.files):
            super().do(operation, path)


class WithoutDirectorySync(CrashDisk):
    """Never syncs the names in a directory."""

    def do(self, operation: Any, path: str) -> None:
        if not (isinstance(operation, Sync) and operation.inode in self.machine.live.folders):
            super().do(operation, path)


class WithoutParentSync(CrashDisk):
    """Never syncs the directory that a checkpoint appears in."""

    def sync(self, path: str) -> None:
        if path not in ("/data", "/data/run"):
            super().sync(path)


def found_out(program: str = "run", order: Order = "ordered", make_disk: Any = CrashDisk, **settings: Any) -> None:
    world = World(StoreSettings(**{**SETTINGS, **settings}), order, make_disk=make_disk, can_exchange=program == "run")
    assert explore(seed=0, states=ENOUGH, program=program, world=world, stop_at=1).violations


@pytest.mark.parametrize("program", ["run", "single"])
@pytest.mark.parametrize("flawed", [WithoutFileSync, WithoutDirectorySync, WithoutParentSync])
def test_a_disk_whose_syncs_do_nothing_is_found_out(program: str, flawed: Any) -> None:
    found_out(program, "any" if flawed is WithoutDirectorySync else "ordered", flawed)


@pytest.mark.parametrize("durability", ["file", "none"])
def test_saves_that_do_not_sync_are_found_out(durability: str) -> None:
    found_out(order="any", durability=durability)


class WithoutSegmentSync(CrashDisk):
    """Never syncs the bytes of arrays."""

    def do(self, operation: Any, path: str) -> None:
        if not (isinstance(operation, Sync) and path.endswith(".safetensors")):
            super().do(operation, path)


def test_loads_that_do_not_look_at_digests_are_found_out() -> None:
    world = World(StoreSettings(**SETTINGS, verify_on_load=False), make_disk=WithoutSegmentSync)
    found = explore(seed=1, states=ENOUGH, world=world, stop_at=100)
    assert any("is not that of save" in violation.problem for violation in found.violations)


def test_folders_of_checkpointables_that_are_not_synced_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    add_folder = transaction.Transaction.add_folder

    def forget(attempt: transaction.Transaction, name: str) -> str:
        path = add_folder(attempt, name)
        attempt._folders.clear()
        return path

    monkeypatch.setattr(transaction.Transaction, "add_folder", forget)
    found_out(order="any")


def test_a_deletion_that_does_not_sync_the_new_name_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "sync_directory", lambda *_: None)
    found_out(order="any")


def test_a_first_pin_that_is_not_synced_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "sync_directory", lambda *_: None)
    found_out(order="any")


def test_steps_that_nobody_deletes_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention.Deleter, "delete", lambda *_, **__: None)
    found_out()


def test_locks_of_the_dead_that_nobody_removes_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.OwnerLock, "clean", lambda _: None)
    found_out()


def test_an_exchange_in_steps_that_are_not_synced_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = CrashDisk.exchange

    class Unsynced(CrashDisk):
        def exchange(self, first: str, second: str, *, sync: bool) -> None:
            exchange(self, first, second, sync=False)

    found_out("single", "any", Unsynced)


def test_a_state_is_looked_at_once() -> None:
    found = explore(seed=3, states=200)
    assert found.distinct == 200 < found.states


def test_no_file_of_the_machine_is_touched(tmp_path: Path) -> None:
    explore(seed=1, states=20)
    assert not Path("/data/run").exists()
