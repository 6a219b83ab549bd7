"""Who cleans up after a process that died in a replacement removes nothing that the disk still needs."""

from __future__ import annotations

import contextlib
import random

import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.left_overs import remove_dead_attempts
from tests.crash.crash_disk import CrashDisk, Machine
from tests.crash.explorer import SETTINGS, small_sizes
from tests.crash.facts import state_of, token_of
from tests.crash.image import Image
from tests.crash.programs import SINGLE, on, process
from tests.crash.states import crash_state

STATES = 6
LONGEST = 60


def save(disk: CrashDisk, token: int) -> None:
    with on(disk):
        checkpoint.save_checkpointables(SINGLE, state_of(token), overwrite=True, settings=StoreSettings(**SETTINGS))


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_replacement_that_was_not_synced_is_synced_before_the_older_one_goes(can_exchange: bool) -> None:
    removed, chance = 0, random.Random(0)
    with small_sizes():
        for operations in range(1, LONGEST):
            machine = Machine(can_exchange=can_exchange)
            with process(1):
                save(CrashDisk(machine), 1)
                dying = CrashDisk(machine)
                dying.budget = operations
                with contextlib.suppress(StorageError):
                    save(dying, 2)
            before = len(machine.log)
            with process(2):
                remove_dead_attempts(CrashDisk(machine), SINGLE)
            removed += len(machine.log) > before
            for moment in range(before, len(machine.log) + 1):
                for _ in range(STATES):
                    image = crash_state(Image(), machine.log, moment, "any", chance)
                    with on(CrashDisk(Machine(image))):
                        assert token_of(checkpoint.load_checkpointables(SINGLE)) in (1, 2)
    assert removed > 10
