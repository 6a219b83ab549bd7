"""Crash states of saves, retention, roll-backs and replacements keep all promises; flawed writers are detected.

`make crash-states` runs the whole campaign.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.run import directory, lock, retention
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import removal, transaction
from jaxckpt_train.store.backends import records
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import PROGRAMS, SETTINGS, explore, small_sizes
from tests.nightly.crash.image import Sync
from tests.nightly.crash.problems import Kind
from tests.nightly.crash.programs import RunLife, World
from tests.nightly.crash.states import Order
from tests.support.backend_contract import BackendContract

pytestmark = pytest.mark.timeout(300)

STATES, STATES_OF_WEAK_MODES, MAX_STATES = 400, 250, 4000


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


class TestCrashDisk(BackendContract):
    """The simulated disk keeps the contract of all backends."""

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
def test_every_crash_state_keeps_the_promises(program: str) -> None:
    states = STATES if PROGRAMS[program].durability == "full" else STATES_OF_WEAK_MODES
    found = explore(seed=0, states=states, program=program)
    assert found.violations == []
    assert found.distinct == states


class WithoutFileSync(CrashDisk):
    """Never sync the bytes of files."""

    def do(self, operation: Any, path: str) -> None:
        if not (isinstance(operation, Sync) and operation.inode in self.machine.live.files):
            super().do(operation, path)


class WithoutDirectorySync(CrashDisk):
    """Never sync the names in a directory."""

    def do(self, operation: Any, path: str) -> None:
        if not (isinstance(operation, Sync) and operation.inode in self.machine.live.folders):
            super().do(operation, path)


class WithoutParentSync(CrashDisk):
    """Never sync the parent directory of a checkpoint."""

    def sync(self, path: str) -> None:
        if path not in ("/data", "/data/run"):
            super().sync(path)


class WithoutSegmentSync(CrashDisk):
    """Never sync the bytes of arrays."""

    def do(self, operation: Any, path: str) -> None:
        if not (isinstance(operation, Sync) and path.endswith(".safetensors")):
            super().do(operation, path)


def assert_detected(
    kind: Kind,
    program: str = "run",
    order: Order = "ordered",
    make_disk: Any = CrashDisk,
    *,
    can_exchange: bool | None = None,
    seed: int = 0,
    **settings: Any,
) -> None:
    """Fail unless the flaw breaks this promise; it may break others, but must not raise an error."""
    settings = {**SETTINGS, "durability": PROGRAMS[program].durability, **settings}
    if can_exchange is None:
        can_exchange = PROGRAMS[program].life is RunLife
    world = World(StoreSettings(**settings), order, make_disk=make_disk, can_exchange=can_exchange)
    found = explore(seed=seed, states=MAX_STATES, program=program, world=world, stop_at=(kind,))
    kinds = {violation.problem.kind for violation in found.violations}
    assert kind in kinds, found.violations
    assert "exception" not in kinds or kind == "exception", found.violations


@pytest.mark.parametrize("program", ["run", "single"])
@pytest.mark.parametrize("flawed", [WithoutFileSync, WithoutDirectorySync, WithoutParentSync])
def test_disk_whose_syncs_do_nothing_is_detected(program: str, flawed: Any) -> None:
    assert_detected("lost", program, "any" if flawed is WithoutDirectorySync else "ordered", flawed)


@pytest.mark.parametrize("durability", ["file", "none"])
@pytest.mark.parametrize("program", ["run", "single"])
def test_saves_that_do_not_sync_are_detected(durability: str, program: str) -> None:
    assert_detected("lost", program, order="any", durability=durability)


@pytest.mark.parametrize("program", ["run", "run-none"])
def test_loads_without_verification_are_detected(program: str) -> None:
    assert_detected("wrong bytes", program, make_disk=WithoutSegmentSync, seed=0, verify_on_load=False)


def test_unsynced_folders_of_checkpointables_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    add_folder = transaction.Transaction.add_folder

    def forget(attempt: transaction.Transaction, name: str) -> str:
        path = add_folder(attempt, name)
        attempt._folders.clear()
        return path

    monkeypatch.setattr(transaction.Transaction, "add_folder", forget)
    assert_detected("lost", order="any")


def test_deletion_without_sync_of_name_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "sync_directory", lambda *_: None)
    assert_detected("damaged", order="any", seed=5)


def test_unsynced_first_pin_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "sync_directory", lambda *_: None)
    assert_detected("not pinned", order="any")


@pytest.mark.parametrize("program", ["run", "run-none"])
def test_steps_that_are_never_deleted_are_detected(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention.Deleter, "delete", lambda *_, **__: None)
    assert_detected("not deleted", program)


@pytest.mark.parametrize("program", ["run", "run-file"])
def test_retention_that_deletes_too_much_is_detected(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_newest(newest: list[Entry], *_: object) -> set[int]:
        return {entry.step for entry in newest[:-1]}

    monkeypatch.setattr(retention, "_steps_to_delete", all_but_the_newest)
    assert_detected("deleted", program)


def test_leftover_locks_of_dead_processes_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.OwnerLock, "clean", lambda _: None)
    assert_detected("left over")


@pytest.mark.parametrize("program", ["run", "run-file"])
def test_leftover_attempts_of_dead_processes_are_detected(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "leftovers", lambda *_: [])
    assert_detected("left over", program)


def test_leftovers_of_single_checkpoint_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "remove_dead_attempts", lambda *_: None)
    assert_detected("left over", "single", can_exchange=True)  # otherwise the leftover blocks the next exchange


def test_unsynced_steps_of_exchange_are_detected() -> None:
    exchange = CrashDisk.exchange

    class Unsynced(CrashDisk):
        def exchange(self, first: str, second: str, *, sync: bool) -> None:
            exchange(self, first, second, sync=False)

    assert_detected("lost", "single", "any", Unsynced, seed=9)


@pytest.mark.parametrize(("program", "order"), [("run-file", "any"), ("run-none", "any"), ("run-none", "ordered")])
def test_deletion_before_newest_is_synced_is_detected(
    program: str, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "make_durable", lambda *_: None)
    assert_detected("lost", program, order)


def test_file_mode_without_file_sync_is_detected() -> None:
    assert_detected("damaged", "run-file", "ordered", WithoutFileSync)


@pytest.mark.parametrize("program", ["run-file", "run-none"])
def test_restore_without_fallback_is_detected(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newest_of = RunDirectory.candidates
    monkeypatch.setattr(RunDirectory, "candidates", lambda *args, **options: newest_of(*args, **options)[:1])
    assert_detected("exception", program, "any")


@pytest.mark.parametrize(("seed", "program"), [(7010005, "run-none"), (7090008, "run")])
def test_generation_that_stays_is_not_taken_for_deleted(seed: int, program: str) -> None:
    """The disk refuses to sync the generation that replaces a step, so the older one stays."""
    assert explore(seed=seed, states=400, program=program).violations == []


def test_each_state_is_checked_once() -> None:
    found = explore(seed=3, states=200)
    assert found.distinct == 200 < found.states


def test_no_file_of_this_machine_is_touched(tmp_path: Path) -> None:
    explore(seed=1, states=20)
    assert not Path("/data/run").exists()
