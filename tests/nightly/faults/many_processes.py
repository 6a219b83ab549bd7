"""Let processes own, read, pin, delete and be killed on one directory.

`python -m tests.nightly.faults.many_processes`

All are real, forked processes, and their clocks jump. There is one owner at a time; a reader gets the newest step
acknowledged before, or a newer one, whole, although steps are deleted meanwhile; a pinned step stays.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import logging
import mmap
import os
import random
import signal
import struct
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from jaxckpt_train.errors import DirectoryLockedError, StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.lock import OwnerLock
from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.known_states import KEPT, SETTINGS, checkpointables_of, token_in
from tests.support.forking import LONGEST_S, Tell, ended, started

PROCESSES, ACTIONS = 4, 12
LONGEST_ROUND_S = 1.5
SHARED = struct.Struct("=qqq")
NAMES = ("newest", "owner", "pinned")  # the newest acknowledged step, the process that owns, the pinned step


@dataclasses.dataclass
class Found:
    """The result of a campaign: rounds, actions by kind, and problems."""

    rounds: int = 0
    actions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


def put(shared: mmap.mmap, name: str, value: int) -> None:
    """Change only one of the numbers, because other processes may change the others."""
    struct.pack_into("=q", shared, 8 * NAMES.index(name), value)


def is_alive(number: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Process:
    """A process that acts on the directory at random."""

    def __init__(self, directory: Path, shared: mmap.mmap, seed: str, tell: Tell) -> None:
        self._directory, self._shared, self._chance, self._tell = directory, shared, random.Random(seed), tell

    def live(self) -> None:
        """Make a few random actions."""
        for _ in range(ACTIONS):
            self._chance.choice((self._own, self._read, self._read))()

    def _clock(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=self._chance.uniform(-400, 400))

    def _manager(self) -> StepManager:
        return StepManager(
            self._directory, preservation_policy=LatestN(KEPT), settings=SETTINGS, clock=self._clock, stall_timeout_s=60
        )

    def _put(self, **changes: int) -> None:
        for name, value in changes.items():
            put(self._shared, name, value)

    def _own(self) -> None:
        manager = self._manager()
        try:
            manager.own()
        except DirectoryLockedError:
            self._tell("refused", None)
            return
        newest, owner, pinned = SHARED.unpack_from(self._shared)
        if owner and is_alive(owner):
            self._tell("problem", f"process {os.getpid()} and {owner} own at once")
        self._put(owner=os.getpid())
        self._tell("owned", None)
        with contextlib.suppress(StepNotFoundError):
            manager.restore()
        step = manager.latest or 0
        if step < newest or (pinned and pinned not in manager.steps):
            self._tell("problem", f"{manager.steps}, but {newest} was acknowledged, and {pinned} pinned")
        for _ in range(self._chance.randint(1, 5)):
            step += 1
            manager.save(step, checkpointables_of(step))
            manager.wait(LONGEST_S)
            self._put(newest=step)
            if self._chance.random() < 0.2:
                self._pin(manager, step)
        self._put(owner=0)  # before another process can own
        manager.close()
        self._tell("closed", None)

    def _pin(self, manager: StepManager, step: int) -> None:
        pinned = SHARED.unpack_from(self._shared)[2]
        self._put(pinned=0)
        if pinned:
            manager.pin(pinned, pinned=False)
        manager.pin(step)
        self._put(pinned=step)

    def _read(self) -> None:
        newest = SHARED.unpack_from(self._shared)[0]
        try:
            step = token_in(self._manager().restore())
        except StepNotFoundError:
            step = 0
        if step < newest:
            self._tell("problem", f"read step {step}, but {newest} was acknowledged")
        self._tell("read", step)


def one_round(found: Found, directory: Path, shared: mmap.mmap, seed: str) -> None:
    """Run some processes at once, and kill some of them."""
    chance = random.Random(seed)
    children = [
        started(lambda tell, n=number: Process(directory, shared, f"{seed} {n}", tell).live())  # type: ignore[misc]
        for number in range(PROCESSES)
    ]
    for child in children:
        if chance.random() < 0.4:
            time.sleep(chance.uniform(0, LONGEST_ROUND_S / PROCESSES))
            os.kill(child.process, signal.SIGKILL)
    for child in children:
        lines, status = ended(child)
        for what, value in lines:
            found.actions[what] += 1
            if what in ("problem", "raised"):
                found.problems.append(f"{seed}: {value}")
        if status not in (0, 1, -signal.SIGKILL):
            found.problems.append(f"{seed}: a process ended with {status}")
    found.rounds += 1


def campaign(rounds: int, seed: int, folder: Path) -> Found:
    """Run `rounds`; twenty of them share a directory."""
    found = Found()
    for number in range(rounds):
        if number % 20 == 0:
            shared = mmap.mmap(-1, mmap.PAGESIZE)
        one_round(found, folder / f"run{number // 20}", shared, f"seed {seed}, round {number}")
    return found


def no_lock(patch: pytest.MonkeyPatch) -> None:
    """Disable the lock, as a control."""
    patch.setattr(OwnerLock, "acquire", lambda self: None)
    patch.setattr(OwnerLock, "check", lambda self: None)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    chosen, started = parser.parse_args(), time.monotonic()
    warnings.simplefilter("ignore")
    logging.getLogger("jaxckpt_train").disabled = True
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(chosen.rounds, chosen.seed, Path(folder))
    print(f"{found.rounds} rounds of {PROCESSES} processes: {dict(found.actions)}")
    leave_with(found.problems, started, chosen.seed)


if __name__ == "__main__":
    main()
