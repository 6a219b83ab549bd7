"""Checks by a process that starts after a crash: of a run, and of a single checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.run.entry import Entry, newest_generations, parse_step_name
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.committed import is_committed
from tests.nightly.crash.crash_disk import CrashDisk
from tests.nightly.crash.facts import Facts, state_of, token_of
from tests.nightly.crash.problems import Problem
from tests.nightly.crash.programs import LONGEST_S, RUN, SINGLE, World, die, on, opened

AFTERWARDS = 1 << 62  # the time of operations made by a check


def found_in_run(disk: CrashDisk, world: World, facts: Facts) -> list[Problem]:
    """Return the problems of a run directory that a process finds after a crash."""
    manager = opened(disk, world.settings, facts.keep)

    def names() -> list[str]:
        found = [entry.name for entry in disk.list(RUN)]
        return [name for name in found if not (disk.deletes_in_place and _is_cut(disk, name))]

    try:
        return problems_in_run(manager, facts, names, lambda: opened(disk, world.settings, facts.keep))
    finally:
        die(disk, manager)


def _is_cut(disk: CrashDisk, name: str) -> bool:
    """Return whether this is a step that a crash interrupted while it was deleted in place."""
    return parse_step_name(name) is not None and not is_committed(disk, f"{RUN}/{name}")


def problems_in_run(
    manager: StepManager, facts: Facts, names: Callable[[], list[str]], reader: Callable[[], StepManager]
) -> list[Problem]:
    """Return the problems of a process that restores, reads every step and saves, and of a later reader.

    Args:
        manager: the manager of the process.
        facts: the promises made before it started.
        names: a function that lists the run directory.
        reader: a function that opens the run again.
    """
    problems = _seen(manager, facts, reader) or _cleaned(manager, facts, names)
    return problems or _seen(reader(), facts, reader)


def _seen(manager: StepManager, facts: Facts, reader: Callable[[], StepManager]) -> list[Problem]:
    """Return the problems of a reader: the newest step, the kept and pinned steps, and damaged listed steps."""
    acknowledged = [each.token for each in facts.acknowledged()]
    known = {each.token for each in facts.promises}
    try:
        token = token_of(manager.restore())
    except StepNotFoundError as error:
        return [Problem("lost", f"save {acknowledged[-1]} was acknowledged, but: {error}")] if acknowledged else []
    except CorruptCheckpointError as error:
        last = f"save {acknowledged[-1]} was acknowledged, but: " if acknowledged else ""
        return [Problem("lost" if acknowledged else "damaged", f"{last}{error}")]
    facts.restored = token
    if token not in known:
        return [Problem("wrong bytes", f"restored save {token}, which had not begun; {sorted(known)} had")]
    if acknowledged and token < acknowledged[-1]:
        return [Problem("lost", f"restored save {token}, older than the acknowledged {acknowledged[-1]}")]
    return _kept(manager, token, facts, reader())


def _kept(manager: StepManager, newest: int, facts: Facts, other: StepManager) -> list[Problem]:
    """Check the other steps with another manager, so that the first continues from the newest."""
    found = {manager.restored_step or 0: newest}
    for step in manager.steps:
        if step != manager.restored_step:
            try:
                found[step] = token_of(other.restore(step=step))
            except CorruptCheckpointError as error:
                return [Problem("damaged", f"step {step} is listed, but: {error}")]
    problems = []
    for step, oldest in facts.must_be_there(newest).items():
        if step not in found:
            problems.append(Problem("deleted", f"step {step} is gone; there are {manager.steps}"))
        elif found[step] < oldest:
            text = f"step {step} is of save {found[step]}, older than the acknowledged {oldest}"
            problems.append(Problem("lost", text))
    pinned = {entry.step for entry in manager._run.entries() if entry.pinned}
    lost = [step for step in facts.pins if step in found and step not in pinned]
    return problems + [Problem("not pinned", f"step {step} is no longer pinned") for step in lost]


def left_of(names: Iterable[str]) -> list[Problem]:
    """Return a problem if unused names were not removed."""
    shown = ", ".join(sorted(names))
    return [Problem("left over", shown)] if shown else []


def _cleaned(manager: StepManager, facts: Facts, names: Callable[[], list[str]]) -> list[Problem]:
    """Let the next owner save, and check that leftovers and expired steps are gone."""
    line = [entry.step for entry in newest_generations(manager._run._line())]
    promise = facts.begin((manager.latest or 0) + 1, AFTERWARDS, facts.restored)
    manager.save(promise.step, state_of(promise.token))
    manager.wait(LONGEST_S)
    facts.acknowledge(promise, AFTERWARDS)
    manager._run._deleter.wait(LONGEST_S)
    return left_of(hidden(names())) + _retained([*line, promise.step], manager, facts, names)


def hidden(names: Iterable[str]) -> list[str]:
    """Return hidden names that no run keeps."""
    return [name for name in names if name.startswith(".") and name != LOCK_NAME]


def _retained(line: list[int], manager: StepManager, facts: Facts, names: Callable[[], list[str]]) -> list[Problem]:
    """Check that the directory holds one generation of each kept or pinned step, and of no other step.

    A generation stays, too, if the disk refused to sync the one that replaces it.

    Args:
        line: the steps of the current lineage, in order, ending with the step just saved.
    """
    aside = {*manager._run._left, *(entry.name for entry in manager._run.damaged())}
    aside |= replaced_in_doubt(manager._run.entries())
    there = [parsed[0] for name in names() if (parsed := parse_step_name(name)) is not None and name not in aside]
    pinned = {entry.step for entry in manager._run.entries() if entry.pinned}
    keep = len(line) if facts.keep is None else facts.keep
    return retained_of(there, {*line[-keep:], *(pinned & {*line})})


def replaced_in_doubt(entries: Sequence[Entry]) -> set[str]:
    """Return the names of the generations for which the disk has a later one that it refused to sync.

    The last save of the run is of this process, so that none is later.
    """
    doubtful = [entry for entry in entries if entry.is_unsynced and entry.damaged is None]
    earlier = sorted(entries, key=lambda entry: entry.order)[:-1]
    return {entry.name for entry in earlier if any(_may_be_later(each, entry) for each in doubtful)}


def _may_be_later(entry: Entry, other: Entry) -> bool:
    """Return whether an entry may be a later generation of the same step; a held one has a sequence that is guessed."""
    if entry.step != other.step or entry is other:
        return False
    return entry.is_held or (entry.sequence, entry.generation) > (other.sequence, other.generation)


def retained_of(there: Sequence[int], expected: Collection[int]) -> list[Problem]:
    """Return the problems of the present steps, given the steps that must be there once each."""
    text = f"there are steps {sorted(there)}, and {sorted(expected)} are to be kept"
    if not {*expected} <= {*there}:
        return [Problem("deleted", text)]
    return [Problem("not deleted", text)] if sorted(there) != sorted(expected) else []


def found_single(disk: CrashDisk, world: World, facts: Facts) -> list[Problem]:
    """Return the problems of a single checkpoint after a crash."""
    with on(disk):
        return problems_of_single(SINGLE, world.settings, facts, lambda: [entry.name for entry in disk.list("/data")])


def problems_of_single(
    path: str, settings: StoreSettings, facts: Facts, names: Callable[[], list[str]]
) -> list[Problem]:
    """Return the problems of a process that loads it and saves it again; `names` lists its parent directory."""
    acknowledged = [each.token for each in facts.acknowledged()]
    try:
        token = token_of(checkpoint.load_checkpointables(path))
    except (NotACheckpointError, CorruptCheckpointError) as error:
        if acknowledged:
            return [Problem("lost", f"save {acknowledged[-1]} was acknowledged, but: {error}")]
        if isinstance(error, CorruptCheckpointError):
            return [Problem("damaged", str(error))]
    else:
        if acknowledged and token < acknowledged[-1]:
            return [Problem("lost", f"loaded save {token}, older than the acknowledged {acknowledged[-1]}")]
    return saved_anew(path, settings, facts, names)


def saved_anew(path: str, settings: StoreSettings, facts: Facts, names: Callable[[], list[str]]) -> list[Problem]:
    """Return the problems after it is saved again."""
    promise = facts.begin(0, AFTERWARDS)
    checkpoint.save_checkpointables(path, state_of(promise.token), overwrite=True, settings=settings)
    facts.acknowledge(promise, AFTERWARDS)
    if token_of(checkpoint.load_checkpointables(path)) != promise.token:
        return [Problem("lost", "the next save is not what is loaded")]
    return left_of({*names()} - {os.path.basename(path)})
