"""Deletions and notes that depend on unsynced saves wait until these saves are durable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxckpt_train.run.retention import Deleter
from jaxckpt_train.settings import StoreSettings
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, small_sizes
from tests.nightly.crash.facts import state_of
from tests.nightly.crash.image import Image
from tests.nightly.crash.programs import die, opened, process
from tests.nightly.crash.states import durable_state

LONGEST_S = 60.0
WEAK = ("file", "none")
ORDERS = ("ordered", "any")


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_sizes():
        yield


def mode(durability: Any) -> StoreSettings:
    return StoreSettings(**SETTINGS, durability=durability)


def after_the_cut(machine: Machine, order: Any) -> Any:
    """Return a reader after a power failure that leaves only durable content."""
    image = durable_state(Image(), machine.log, len(machine.log), order)
    return opened(CrashDisk(Machine(image)), mode("full"), 2)


def token(restored: dict[str, Any]) -> int:
    position: int = restored["data"].value["position"]
    return position


def saved(manager: Any, step: int, number: int, **more: Any) -> None:
    manager.save(step, state_of(number), **more)
    manager.wait(LONGEST_S)
    assert manager._run._deleter.wait(LONGEST_S)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("durability", WEAK)
def test_roll_back_hides_nothing_before_durable_save(
    durability: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    with process(1):
        disk = CrashDisk(machine)
        manager = opened(disk, mode("full"), 2)
        for step in (1, 2):
            saved(manager, step, step)
        manager.pin(1)
        die(disk, manager)
    with process(2):
        disk = CrashDisk(machine)
        manager = opened(disk, mode(durability), 2)
        manager.restore()
        for step in (3, 4):  # 4 is synced before 2 is deleted
            saved(manager, step, step)
        manager.restore(step=3)
        monkeypatch.setattr(Deleter, "delete", lambda *_, **__: None)  # the power fails before the deletion
        saved(manager, 4, 5)
        die(disk, manager)
    with process(3, 1):
        assert token(after_the_cut(machine, order).restore()) in (4, 5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("durability", WEAK)
def test_pinned_generation_stays_until_replacement_is_durable(
    durability: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    with process(1):
        disk = CrashDisk(machine)
        manager = opened(disk, mode("full"), 1)
        saved(manager, 1, 1)
        manager.pin(1)
        die(disk, manager)
    with process(2), monkeypatch.context() as patch:
        patch.setattr(Deleter, "delete", lambda *_, **__: None)
        disk = CrashDisk(machine)
        manager = opened(disk, mode(durability), 1)
        saved(manager, 1, 2, overwrite=True)
        die(disk, manager)
    with process(3):
        disk = CrashDisk(machine)
        manager = opened(disk, mode(durability), 1)
        saved(manager, 2, 3)
        die(disk, manager)
    with process(4, 1):
        assert token(after_the_cut(machine, order).restore(step=1)) in (1, 2)
