"""Programs that run before a crash: processes that save, restore, pin, roll back and die."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run import lock
from jaxckpt_train.run.entry import parse_step_name
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import process_identity
from jaxckpt_train.store.backends.local import side_name
from jaxckpt_train.store.committed import is_committed
from jaxckpt_train.store.process_identity import ProcessIdentity
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.facts import Facts, state_of, token_of
from tests.nightly.crash.image import Image, Operation, Sync
from tests.nightly.crash.states import Order, durable_state

RUN = "/data/run"
SINGLE = "/data/one"
LONGEST_S = 60.0
FULLY = 0.15  # the share of processes with full durability in runs of a weaker mode


@dataclasses.dataclass(frozen=True)
class World:
    """The environment of programs: settings of saves, guarantees of the file system, and its abilities.

    Attributes:
        make_disk: creates the disk that a process sees.
    """

    settings: StoreSettings
    order: Order = "ordered"
    can_exchange: bool = True
    make_disk: Callable[[Machine], CrashDisk] = CrashDisk


@contextlib.contextmanager
def process(number: int, boot: int = 0) -> Iterator[None]:
    """Act as another process of the same machine after a number of reboots; all other processes are dead.

    Processes of an earlier boot cannot be checked, but have been silent for long enough.
    """
    me = ProcessIdentity("here", number, str(number), f"boot {boot}", "all")

    def is_dead(other: ProcessIdentity) -> bool | None:
        return other != me if other.boot == me.boot else None  # unknown for a process of an earlier boot

    with pytest.MonkeyPatch.context() as patch:
        for module in (process_identity, lock):
            patch.setattr(module, "this_process", lambda: me)
            patch.setattr(module, "is_dead", is_dead)
        if boot:
            patch.setattr(lock, "SILENCE_S", 0.0)
        yield


def opened(disk: CrashDisk, settings: StoreSettings, keep: int | None) -> StepManager:
    """Open the run on this disk."""
    policy = None if keep is None else LatestN(keep)
    return StepManager(
        RUN,
        settings=settings,
        preservation_policy=policy,
        frozen=("never", "rarely"),
        backend=disk,  # type: ignore[arg-type]
    )


def die(disk: CrashDisk, manager: StepManager) -> None:
    """End a process as SIGKILL does: its further operations do not reach the disk."""
    disk.power = False
    with contextlib.suppress(CheckpointError, OSError):
        manager.close()
    manager._run._lock._stop.open()


@contextlib.contextmanager
def unless_refused(disk: CrashDisk) -> Iterator[None]:
    """Suppress the error of a refused operation, so that the process continues."""
    before = disk.has_refused
    try:
        yield
    except CheckpointError:
        if before or not (disk.has_refused and disk.power):
            raise


def digest_at(image: Image, path: str) -> bytes:
    """Return the digest of the tree at a path."""
    inode = image.find(path)
    return b"" if inode is None else image.digest(inode=inode)


def note_durable(facts: Facts, start: Image, log: Sequence[Operation], order: Order) -> None:
    """Record from which moment each acknowledged save was durable, according to the syncs in the log."""
    token_of_content = {content: token for token, content in facts.contents.items()}
    synced = [index for index, each in enumerate(log, 1) if isinstance(each, Sync)]
    for moment in (
        0,
        *(index for index in synced if index + 1 not in synced),
    ):  # only the last of consecutive ones
        image = durable_state(start, log, moment, order)
        run = image.find(RUN)
        for name in image.folders.get(-1 if run is None else run, {}):
            token = token_of_content.get(digest_at(image, f"{RUN}/{name}"))
            if token is not None and parse_step_name(name) is not None:
                facts.durable.setdefault(token, moment)


class RunLife:
    """One process that restores a run, saves steps to it, and ends or dies."""

    def __init__(self, machine: Machine, facts: Facts, world: World, chance: random.Random) -> None:
        self._machine, self._facts, self._world, self._chance = machine, facts, world, chance
        self._disk, self._settings = world.make_disk(machine), world.settings
        if world.settings.durability != "full" and chance.random() < FULLY:
            self._settings = dataclasses.replace(world.settings, durability="full")
        self._tip = self._step = 0  # the token and the step of the predecessor of the next save
        self._disk.budget = chance.randint(1, 120) if chance.random() < 0.4 else None
        self._disk.refuse_in = chance.randint(1, 120) if chance.random() < 0.3 else None
        self._manager = opened(self._disk, self._settings, facts.keep)

    def live(self) -> None:
        """Restore, make a few operations, and end."""
        try:
            self._resume()
            for _ in range(self._chance.randint(1, 4)):
                with unless_refused(self._disk):
                    actions = (self._save, self._save, self._save, self._overwrite, self._pin, self._go_back)
                    self._chance.choice(actions)()
            if self._chance.random() < 0.5:
                self._manager.close()
        except (CheckpointError, OSError):
            if self._disk.power:
                raise
        finally:
            die(self._disk, self._manager)

    def _now(self) -> int:
        return len(self._machine.log)

    def _resume(self) -> None:
        self._step = self._manager.latest or 0  # also of a step that cannot be restored
        with contextlib.suppress(StepNotFoundError), self._unless_damaged():
            self._go_on_from()
            if not self._machine.log:  # content found right after a start is durable
                self._facts.durable.setdefault(self._tip, 0)

    @contextlib.contextmanager
    def _unless_damaged(self) -> Iterator[None]:
        """Suppress errors about unsynced steps, which may be damaged and set aside by the owner of the run."""
        try:
            yield
        except (CorruptCheckpointError, StepNotFoundError):
            if self._world.settings.durability == "full":
                raise

    def _go_on_from(self, step: int | None = None) -> None:
        self._tip = token_of(self._manager.restore(step=step))
        self._step = self._manager.restored_step or 0

    def _save(self) -> None:
        self._save_step(self._step + 1)

    def _overwrite(self) -> None:
        if self._step:
            self._save_step(self._step, overwrite=True)

    def _save_step(self, step: int, **options: Any) -> None:
        promise = self._facts.begin(step, self._now(), self._tip)
        self._tip, self._step = promise.token, step
        self._manager.save(step, state_of(promise.token), **options)
        self._manager.wait(LONGEST_S)
        self._facts.acknowledge(promise, self._now())
        self._facts.contents[promise.token] = digest_at(self._machine.live, self._manager.path(step))
        if self._settings.durability == "full":
            self._facts.durable.setdefault(promise.token, self._now())
        if self._chance.random() < 0.5:
            self._manager._run._deleter.wait(LONGEST_S)

    def _pin(self) -> None:
        steps = self._manager.steps
        if steps:
            step = self._chance.choice(steps)
            with self._unless_damaged():
                self._manager.pin(step)
                self._facts.pins.setdefault(step, self._now())

    def _go_back(self) -> None:
        steps = self._manager.steps
        if steps and self._chance.random() < 0.3:
            self._facts.rolled_back = True
            with self._unless_damaged():
                self._go_on_from(self._chance.choice(steps))
                self._save()


class SingleLife:
    """One process that repeatedly saves a single checkpoint under one name, and ends or dies."""

    def __init__(self, machine: Machine, facts: Facts, world: World, chance: random.Random) -> None:
        self._machine, self._facts, self._world, self._chance = machine, facts, world, chance
        self._disk = world.make_disk(machine)
        self._disk.budget = chance.randint(1, 80) if chance.random() < 0.4 else None
        self._disk.refuse_in = chance.randint(1, 80) if chance.random() < 0.3 else None

    def live(self) -> None:
        """Save a few times."""
        try:
            with on(self._disk):
                for _ in range(self._chance.randint(1, 3)):
                    if not can_be_saved(self._machine.live):
                        break
                    promise = self._facts.begin(0, len(self._machine.log))
                    with unless_refused(self._disk):
                        if self._world.settings.durability != "full":
                            remove_non_checkpoint(self._disk)
                        checkpoint.save_checkpointables(
                            SINGLE, state_of(promise.token), overwrite=True, settings=self._world.settings
                        )
                        self._facts.acknowledge(promise, len(self._machine.log))
        except (CheckpointError, OSError):
            if self._disk.power:
                raise
        finally:
            self._disk.power = False


def can_be_saved(image: Image) -> bool:
    """Return whether the names of the single checkpoint are usable."""
    return not any(image.find(path) in image.lost for path in (SINGLE, side_name(SINGLE)))


def remove_non_checkpoint(disk: CrashDisk) -> None:
    """Remove a file or directory that has the name of the checkpoint but is none; no save replaces it."""
    if not is_committed(disk, SINGLE):
        disk.remove(SINGLE)


@contextlib.contextmanager
def on(disk: CrashDisk) -> Iterator[None]:
    """Let functions for single checkpoints use this disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "backend_for", lambda _: disk)
        yield
