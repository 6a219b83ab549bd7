"""Cleanup after a process that died in a replacement removes nothing before its replacement is durable."""

from __future__ import annotations

import contextlib
import random

import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import removal
from jaxckpt_train.store.removal import remove_dead_attempts
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, small_sizes
from tests.nightly.crash.facts import state_of, token_of
from tests.nightly.crash.image import Image
from tests.nightly.crash.programs import SINGLE, on, process
from tests.nightly.crash.states import crash_state

STATES = 4
LONGEST = 60


def save(disk: CrashDisk, token: int) -> None:
    with on(disk):
        checkpoint.save_checkpointables(SINGLE, state_of(token), overwrite=True, settings=StoreSettings(**SETTINGS))


def losses(can_exchange: bool) -> tuple[int, list[str]]:
    """Let the process of a replacement die at each operation, another clean up, and the power fail at each moment.

    Returns:
        How often something was removed, and the states that could not be loaded.
    """
    removed, chance, lost = 0, random.Random(0), []
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
                    try:
                        assert token_of(checkpoint.load_checkpointables(SINGLE)) in (1, 2)
                    except (NotACheckpointError, CorruptCheckpointError) as error:
                        lost.append(f"{operations} operations, then {moment - before}: {error}")
    return removed, lost


@pytest.mark.parametrize("can_exchange", [True, False])
def test_unsynced_replacement_is_synced_before_cleanup(can_exchange: bool) -> None:
    with small_sizes():
        removed, lost = losses(can_exchange)
    assert lost == []
    assert removed > 10


@pytest.mark.parametrize("can_exchange", [True, False])
def test_cleanup_before_sync_is_detected(can_exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "sync_directory", lambda *_: None)
    with small_sizes():
        assert losses(can_exchange)[1]
