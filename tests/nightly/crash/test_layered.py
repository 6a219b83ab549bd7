"""Crash states on a disk that cannot rename existing checkpoints, like those in a lower layer of overlayfs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import StoreSettings
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, explore, small_sizes
from tests.nightly.crash.programs import World
from tests.nightly.crash.states import Order

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


class LayeredDisk(CrashDisk):
    """Refuse to rename directories that existed at the start, except temporary ones of saves."""

    deletes_in_place = True

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._lower = {*machine.live.folders}

    def _refuse_lower(self, path: str) -> None:
        if self.machine.live.find(path) in self._lower and not os.path.basename(path).startswith("."):
            raise StorageError(errno.EXDEV, "cannot rename it: Invalid cross-device link", path)

    def rename(self, source: str, target: str) -> None:
        self._refuse_lower(source)
        super().rename(source, target)

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        self._refuse_lower(first)
        self._refuse_lower(second)
        super().exchange(first, second, sync=sync)


def layered(order: Order) -> World:
    return World(StoreSettings(**SETTINGS, durability="full"), order, make_disk=LayeredDisk)


@pytest.mark.parametrize("order", ["ordered", "any"])
@pytest.mark.parametrize("program", ["run", "single"])
def test_every_crash_state_keeps_the_promises(program: str, order: Order) -> None:
    found = explore(seed=0, states=250, program=program, world=layered(order))
    assert found.violations == []
    assert found.distinct == 250
