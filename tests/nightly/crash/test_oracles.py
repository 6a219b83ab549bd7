"""Steps that the next owner keeps in doubt are no violation; steps kept without a reason are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.run.record import RECORD_NAME, Annotation
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.manifest import MANIFEST_NAME
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, _check, small_sizes
from tests.nightly.crash.facts import Facts, state_of
from tests.nightly.crash.image import Image, Sync
from tests.nightly.crash.programs import RUN, World, opened, process
from tests.nightly.crash.states import durable_state

LONGEST_S = 60.0


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


class RefusesRecord(CrashDisk):
    """Refuse the first sync of the run record, or of a file in it."""

    def do(self, operation: Any, path: str) -> None:
        if isinstance(operation, Sync) and f"/{RECORD_NAME}" in path and self.refuse_in is None:
            self.refuse_in = 1
        super().do(operation, path)


def saved(machine: Machine, manager: Any, facts: Facts, step: int, **options: Any) -> None:
    promise = facts.begin(step, len(machine.log))
    manager.save(step, state_of(promise.token), **options)
    manager.wait(LONGEST_S)
    facts.acknowledge(promise, len(machine.log))


def test_refused_record_holds_no_steps() -> None:
    machine, facts, world = Machine(), Facts(keep=1), World(StoreSettings(**SETTINGS), "any")
    with process(1):
        manager = opened(RefusesRecord(machine), world.settings, 1)
        saved(machine, manager, facts, 1)
        with pytest.raises(StorageError):
            manager.pin(1)
        manager.close()
    with process(2):
        manager = opened(CrashDisk(machine), world.settings, 1)
        manager.restore()
        saved(machine, manager, facts, 2)
        manager.close()
    image = durable_state(Image(), machine.log, len(machine.log), "any")
    assert _check("run", image, facts.until(len(machine.log)), world, (3, 1)) == []


def test_step_with_unreadable_later_generation_stays() -> None:
    machine, facts = Machine(), Facts(keep=1)
    world = World(StoreSettings(**SETTINGS, durability="file"), "any")
    with process(1):
        manager = opened(CrashDisk(machine), StoreSettings(**SETTINGS), 1)
        saved(machine, manager, facts, 1)
        image = durable_state(Image(), machine.log, len(machine.log), "any")
        manager.close()
    facts.durable[1] = 0
    run = image.find(RUN)
    assert run is not None
    later = 1 + max([*image.folders, *image.files])
    image.folders[run]["step-0000000001.g1"] = later
    image.lost[later] = True
    assert _check("run-file", image, facts.until(len(machine.log)), world, (2, 1)) == []


def test_step_saved_after_unreadable_generation_that_was_not_synced_counts() -> None:
    machine, facts = Machine(), Facts(keep=2)
    world = World(StoreSettings(**SETTINGS, durability="none"), "any")
    with process(1):
        manager = opened(CrashDisk(machine), world.settings, 2)
        for step in (1, 2):
            saved(machine, manager, facts, step)
        manager._run.annotate(manager._run.entries()[-1], Annotation(is_unsynced=True))
        manager.close()
    image = machine.live
    manifest = image.find(f"{RUN}/step-0000000002/{MANIFEST_NAME}")
    assert manifest is not None
    image.lost[manifest] = False
    assert _check("run-none", image, facts.until(len(machine.log)), world, (2, 1)) == []
