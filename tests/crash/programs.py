"""What is done to a disk before it crashes: the lives of processes that save, restore, pin, roll back and die."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError, NotACheckpointError, StepNotFoundError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps import lock
from jaxckpt_train.steps.lineage import newest_generations
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.preservation_policies import LatestN
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store import machine as machine_module
from jaxckpt_train.store.machine import ProcessIdentity
from tests.crash.crash_disk import CrashDisk, Machine
from tests.crash.facts import Facts, state_of, token_of
from tests.crash.states import Order

RUN = "/data/run"
SINGLE = "/data/one"
LONGEST_S = 60.0
AFTERWARDS = 1 << 62  # of what is done when one looks


@dataclasses.dataclass(frozen=True)
class World:
    """What programs run in: the settings of every save, what the file system promises, and what it can do.

    Attributes:
        make_disk: gives a process its view of the machine's disk.
    """

    settings: StoreSettings
    order: Order = "ordered"
    can_exchange: bool = True
    make_disk: Callable[[Machine], CrashDisk] = CrashDisk


@contextlib.contextmanager
def process(number: int, boot: int = 0) -> Iterator[None]:
    """Be another process of the same machine, which was started anew so often; all others that ever were are dead.

    Those of before cannot be asked, but have been silent for long enough.
    """
    me = ProcessIdentity("here", number, str(number), f"boot {boot}", "all")

    def is_dead(other: ProcessIdentity) -> bool | None:
        return other != me if other.boot == me.boot else None  # of before a power cut nobody can tell

    with pytest.MonkeyPatch.context() as patch:
        for module in (machine_module, lock):
            patch.setattr(module, "this_process", lambda: me)
            patch.setattr(module, "is_dead", is_dead)
        if boot:
            patch.setattr(lock, "SILENCE_S", 0.0)
        yield


def opened(disk: CrashDisk, settings: StoreSettings, keep: int | None) -> StepManager:
    """The run on this disk."""
    policy = None if keep is None else LatestN(keep)
    return StepManager(RUN, settings=settings, preservation_policy=policy, backend=disk)  # type: ignore[arg-type]


def die(disk: CrashDisk, manager: StepManager) -> None:
    """End a process as SIGKILL does: nothing of what it still does reaches the disk."""
    disk.power = False
    with contextlib.suppress(CheckpointError, OSError):
        manager.close()
    manager._run._lock._stop.open()


@contextlib.contextmanager
def unless_refused(disk: CrashDisk) -> Iterator[None]:
    """What the disk refuses costs what met it, and the process goes on."""
    before = disk.has_refused
    try:
        yield
    except CheckpointError:
        if before or not (disk.has_refused and disk.power):
            raise


class RunLife:
    """One process that saves steps to a run directory, sees what it finds there first, and ends or dies."""

    def __init__(self, machine: Machine, facts: Facts, world: World, chance: random.Random) -> None:
        self._machine, self._facts, self._world, self._chance = machine, facts, world, chance
        self._disk = world.make_disk(machine)
        self._disk.budget = chance.randint(1, 120) if chance.random() < 0.4 else None
        self._disk.refuse_in = chance.randint(1, 120) if chance.random() < 0.3 else None
        self._manager = opened(self._disk, world.settings, facts.keep)

    def live(self) -> None:
        """Restore, do a few things, and end."""
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
        with contextlib.suppress(StepNotFoundError):
            token_of(self._manager.restore())

    def _save(self) -> None:
        latest = self._manager.latest
        self._save_step((latest or 0) + 1)

    def _overwrite(self) -> None:
        latest = self._manager.latest
        if latest is not None:
            self._save_step(latest, overwrite=True)

    def _save_step(self, step: int, **options: Any) -> None:
        promise = self._facts.begin(step, self._now())
        self._manager.save(step, state_of(promise.token), **options)
        self._manager.wait(LONGEST_S)
        self._facts.acknowledge(promise, self._now())
        if self._chance.random() < 0.5:
            self._manager._run._deleter.wait(LONGEST_S)

    def _pin(self) -> None:
        steps = self._manager.steps
        if steps:
            step = self._chance.choice(steps)
            self._manager.pin(step)
            self._facts.pins.setdefault(step, self._now())

    def _go_back(self) -> None:
        steps = self._manager.steps
        if steps and self._chance.random() < 0.3:
            self._facts.rolled_back = True
            token_of(self._manager.restore(step=self._chance.choice(steps)))
            self._save()


class SingleLife:
    """One process that saves a single checkpoint again and again under one name, and ends or dies."""

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
                    promise = self._facts.begin(0, len(self._machine.log))
                    with unless_refused(self._disk):
                        checkpoint.save_checkpointables(
                            SINGLE, state_of(promise.token), overwrite=True, settings=self._world.settings
                        )
                        self._facts.acknowledge(promise, len(self._machine.log))
        except (CheckpointError, OSError):
            if self._disk.power:
                raise
        finally:
            self._disk.power = False


@contextlib.contextmanager
def on(disk: CrashDisk) -> Iterator[None]:
    """Let functions on single checkpoints work on this disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_BACKEND", disk)
        yield


def found_in_run(disk: CrashDisk, settings: StoreSettings, facts: Facts) -> list[str]:
    """What is wrong with a run directory after a crash, for a process that comes then."""
    manager = opened(disk, settings, facts.keep)

    def names() -> list[str]:
        return [entry.name for entry in disk.list(RUN)]

    try:
        old = [name for name in names() if ".dead-" in name] if disk.machine.live.find(RUN) is not None else []
        problems = problems_in_run(manager, facts, names, lambda: opened(disk, settings, facts.keep))
        left = sorted({*old} & {*names()})
        return problems or ([f"locks of the long dead are left over: {', '.join(left)}"] if left else [])
    finally:
        die(disk, manager)


def problems_in_run(
    manager: StepManager, facts: Facts, names: Callable[[], list[str]], reader: Callable[[], StepManager]
) -> list[str]:
    """What is wrong for a process that restores, looks at every step and saves, and for who reads after it.

    Args:
        manager: of the process.
        facts: what was promised before it came.
        names: lists the run directory.
        reader: opens the run anew.
    """
    problems = _seen(manager, facts, reader) or _cleaned(manager, facts, names)
    return problems or _seen(reader(), facts, reader)


def _seen(manager: StepManager, facts: Facts, reader: Callable[[], StepManager]) -> list[str]:
    """What is wrong with what a reader sees: the newest, what policy and pins keep, and all that is listed whole."""
    acknowledged = [each.token for each in facts.acknowledged()]
    known = {each.token for each in facts.promises}
    try:
        token = token_of(manager.restore())
    except StepNotFoundError as error:
        return [f"save {acknowledged[-1]} was acknowledged, but: {error}"] if acknowledged else []
    if token not in known:
        return [f"restored save {token}, which had not begun; {sorted(known)} had"]
    if acknowledged and token < acknowledged[-1]:
        return [f"restored save {token}, older than the acknowledged {acknowledged[-1]}"]
    return _kept(manager, token, facts, reader())


def _kept(manager: StepManager, newest: int, facts: Facts, other: StepManager) -> list[str]:
    """The other steps are restored by another manager, so that the first goes on from the newest."""
    found = {step: token_of(other.restore(step=step)) for step in manager.steps if step != manager.restored_step}
    found[manager.restored_step or 0] = newest
    problems = []
    for step, oldest in facts.must_be_there(newest).items():
        if step not in found:
            problems.append(f"step {step} is gone; there are {manager.steps}")
        elif found[step] < oldest:
            problems.append(f"step {step} is of save {found[step]}, older than the acknowledged {oldest}")
    pinned = {entry.step for entry in manager._run.entries() if entry.pinned}
    return problems + [
        f"step {step} is not pinned any more" for step in facts.pins if step in found and step not in pinned
    ]


def _cleaned(manager: StepManager, facts: Facts, names: Callable[[], list[str]]) -> list[str]:
    """The next owner saves, and leaves nothing of what the dead ones left or what nobody keeps."""
    line = [entry.step for entry in newest_generations(manager._run._line())]
    promise = facts.begin((manager.latest or 0) + 1, AFTERWARDS)
    manager.save(promise.step, state_of(promise.token))
    manager.wait(LONGEST_S)
    facts.acknowledge(promise, AFTERWARDS)
    manager._run._deleter.wait(LONGEST_S)
    left = [name for name in names() if name.startswith(".") and name != ".owner" and ".dead-" not in name]
    problems = [f"left over: {', '.join(left)}"] if left else []
    return problems + _retained([*line, promise.step], manager, facts, names)


def _retained(line: list[int], manager: StepManager, facts: Facts, names: Callable[[], list[str]]) -> list[str]:
    """Whether the directory holds one generation of each step that policy and pins keep, and of no other step.

    Args:
        line: the steps that the run went on from, and the one that it saved, in that order.
    """
    aside = {*manager._run._left, *(entry.name for entry in manager._run.damaged())}
    there = [parsed[0] for name in names() if (parsed := parse_step_name(name)) is not None and name not in aside]
    pinned = {entry.step for entry in manager._run.entries() if entry.pinned}
    keep = len(line) if facts.keep is None else facts.keep
    expected = sorted({*line[-keep:], *(pinned & {*line})})
    return [] if sorted(there) == expected else [f"there are steps {sorted(there)}, and {expected} are to be kept"]


def found_single(disk: CrashDisk, settings: StoreSettings, facts: Facts) -> list[str]:
    """What is wrong with a single checkpoint after a crash."""
    with on(disk):
        return problems_of_single(SINGLE, settings, facts, lambda: [entry.name for entry in disk.list("/data")])


def problems_of_single(path: str, settings: StoreSettings, facts: Facts, names: Callable[[], list[str]]) -> list[str]:
    """What is wrong for a process that loads it and saves it anew; `names` lists the directory that it lies in."""
    acknowledged = [each.token for each in facts.acknowledged()]
    try:
        token = token_of(checkpoint.load_checkpointables(path))
    except NotACheckpointError as error:
        if acknowledged:
            return [f"save {acknowledged[-1]} was acknowledged, but: {error}"]
    else:
        if acknowledged and token < acknowledged[-1]:
            return [f"loaded save {token}, older than the acknowledged {acknowledged[-1]}"]
    promise = facts.begin(0, AFTERWARDS)
    checkpoint.save_checkpointables(path, state_of(promise.token), overwrite=True, settings=settings)
    facts.acknowledge(promise, AFTERWARDS)
    if token_of(checkpoint.load_checkpointables(path)) != promise.token:
        return ["the next save is not what is loaded"]
    found = names()
    return [] if found == [os.path.basename(path)] else [f"left over: {', '.join(found)}"]
