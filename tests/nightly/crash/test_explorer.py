"""Crash states of saves, retention, roll-backs and replacements keep every promise; a writer with a flaw is found out.

The whole campaign is `make crash-states`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.run import annotations as notes
from jaxckpt_train.run import directory as taking
from jaxckpt_train.run import lock, retention
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import transaction
from jaxckpt_train.store import transaction as final_name
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import PROGRAMS, SETTINGS, explore, small_sizes
from tests.nightly.crash.image import Sync
from tests.nightly.crash.problems import Kind
from tests.nightly.crash.programs import RunLife, World
from tests.nightly.crash.states import Order
from tests.support.backend_contract import BackendContract

pytestmark = pytest.mark.timeout(300)

RIGHT, RIGHT_OF_MODES, ENOUGH = 400, 250, 4000


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

    def backdate(self, backend: CrashDisk, path: str) -> None:
        backend.machine.now_s += 60


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_crash_state_keeps_what_was_promised(program: str) -> None:
    states = RIGHT if PROGRAMS[program].durability == "full" else RIGHT_OF_MODES
    found = explore(seed=0, states=states, program=program)
    assert found.violations == []
    assert found.distinct == states


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


class WithoutSegmentSync(CrashDisk):
    """Never syncs the bytes of arrays."""

    def do(self, operation: Any, path: str) -> None:
        if not (isinstance(operation, Sync) and path.endswith(".safetensors")):
            super().do(operation, path)


def found_out(
    kind: Kind,
    program: str = "run",
    order: Order = "ordered",
    make_disk: Any = CrashDisk,
    *,
    can_exchange: bool | None = None,
    seed: int = 0,
    **settings: Any,
) -> None:
    """The flaw breaks the promise that it must break; what else it breaks is told, too, and no error comes through."""
    settings = {**SETTINGS, "durability": PROGRAMS[program].durability, **settings}
    if can_exchange is None:
        can_exchange = PROGRAMS[program].life is RunLife
    world = World(StoreSettings(**settings), order, make_disk=make_disk, can_exchange=can_exchange)
    found = explore(seed=seed, states=ENOUGH, program=program, world=world, stop_at=(kind,))
    kinds = {violation.problem.kind for violation in found.violations}
    assert kind in kinds, found.violations
    assert "exception" not in kinds or kind == "exception", found.violations


@pytest.mark.parametrize("program", ["run", "single"])
@pytest.mark.parametrize("flawed", [WithoutFileSync, WithoutDirectorySync, WithoutParentSync])
def test_disk_whose_syncs_do_nothing_is_found_out(program: str, flawed: Any) -> None:
    found_out("lost", program, "any" if flawed is WithoutDirectorySync else "ordered", flawed)


@pytest.mark.parametrize("durability", ["file", "none"])
@pytest.mark.parametrize("program", ["run", "single"])
def test_saves_that_do_not_sync_are_found_out(durability: str, program: str) -> None:
    found_out("lost", program, order="any", durability=durability)


@pytest.mark.parametrize("program", ["run", "run-none"])
def test_loads_that_do_not_look_at_digests_are_found_out(program: str) -> None:
    found_out("wrong bytes", program, make_disk=WithoutSegmentSync, seed=9, verify_on_load=False)


def test_folders_of_checkpointables_that_are_not_synced_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    add_folder = transaction.Transaction.add_folder

    def forget(attempt: transaction.Transaction, name: str) -> str:
        path = add_folder(attempt, name)
        attempt._folders.clear()
        return path

    monkeypatch.setattr(transaction.Transaction, "add_folder", forget)
    found_out("lost", order="any")


def test_a_deletion_that_does_not_sync_the_new_name_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "sync_directory", lambda *_: None)
    found_out("damaged", order="any", seed=5)


def test_first_pin_that_is_not_synced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "sync_directory", lambda *_: None)
    found_out("not pinned", order="any")


@pytest.mark.parametrize("program", ["run", "run-none"])
def test_steps_that_nobody_deletes_are_found_out(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention.Deleter, "delete", lambda *_, **__: None)
    found_out("not deleted", program)


@pytest.mark.parametrize("program", ["run", "run-file"])
def test_retention_that_deletes_too_much_is_found_out(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_newest(newest: list[Entry], *_: object) -> set[int]:
        return {entry.step for entry in newest[:-1]}

    monkeypatch.setattr(retention, "_steps_to_delete", all_but_the_newest)
    found_out("deleted", program)


def test_locks_of_dead_that_nobody_removes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.OwnerLock, "clean", lambda _: None)
    found_out("left over")


@pytest.mark.parametrize("program", ["run", "run-file"])
def test_attempts_of_dead_that_nobody_removes_are_found(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "remove_attempts", lambda *_: None)
    found_out("left over", program)


def test_leftovers_of_single_checkpoint_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_name, "remove_dead_attempts", lambda *_: None)
    found_out("left over", "single", can_exchange=True)  # else what is left stands in the way of the next exchange


def test_an_exchange_in_steps_that_are_not_synced_is_found_out() -> None:
    exchange = CrashDisk.exchange

    class Unsynced(CrashDisk):
        def exchange(self, first: str, second: str, *, sync: bool) -> None:
            exchange(self, first, second, sync=False)

    found_out("lost", "single", "any", Unsynced, seed=9)


@pytest.mark.parametrize(("program", "order"), [("run-file", "any"), ("run-none", "any"), ("run-none", "ordered")])
def test_older_steps_that_go_before_the_newest_is_synced_are_found_out(
    program: str, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention.Deleter, "make_durable", lambda *_: True)
    found_out("lost", program, order)


def test_a_mode_that_is_to_sync_files_and_does_not_is_found_out() -> None:
    found_out("damaged", "run-file", "ordered", WithoutFileSync)


@pytest.mark.parametrize("program", ["run-file", "run-none"])
def test_restore_that_does_not_fall_back_is_found(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newest_of = RunDirectory.candidates
    monkeypatch.setattr(RunDirectory, "candidates", lambda *args, **options: newest_of(*args, **options)[:1])
    found_out("exception", program, "any")


def test_a_state_is_looked_at_once() -> None:
    found = explore(seed=3, states=200)
    assert found.distinct == 200 < found.states


def test_no_file_of_the_machine_is_touched(tmp_path: Path) -> None:
    explore(seed=1, states=20)
    assert not Path("/data/run").exists()
