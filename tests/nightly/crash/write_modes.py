"""Promises of the write modes that sync less before a save is acknowledged, and their checks after a crash.

In both modes, the restored save is whole, and no older than the newest durable save; if a whole save exists, one is
restored. With "file" on a file system that keeps names in order, every listed save is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.run.entry import Entry, newest_generations, parse_step_name
from tests.nightly.crash.crash_disk import CrashDisk
from tests.nightly.crash.facts import Facts, state_of, token_of
from tests.nightly.crash.image import Image
from tests.nightly.crash.oracles import AFTERWARDS, hidden, left_of, replaced_in_doubt, retained_of, saved_anew
from tests.nightly.crash.problems import Problem
from tests.nightly.crash.programs import (
    LONGEST_S,
    RUN,
    SINGLE,
    World,
    can_be_saved,
    die,
    on,
    opened,
    remove_non_checkpoint,
)


def found_in_weaker_run(disk: CrashDisk, world: World, facts: Facts) -> list[Problem]:
    """Return the problems of a run directory for a process that starts after a crash."""
    manager = opened(disk, world.settings, facts.keep)
    try:
        return (
            _restored(manager, disk, facts)
            or _listed(opened(disk, world.settings, facts.keep), disk, world, facts)
            or _cleaned(manager, disk, facts, lambda: opened(disk, world.settings, facts.keep))
        )
    finally:
        die(disk, manager)


def _restored(manager: StepManager, disk: CrashDisk, facts: Facts) -> list[Problem]:
    try:
        token = token_of(manager.restore())
    except (StepNotFoundError, CorruptCheckpointError) as error:
        if whole := _whole(disk):
            return [Problem("exception", f"{', '.join(whole)} is whole, but: {error}")]
        newest = max(facts.durable, default=0)
        return [Problem("lost", f"save {newest} is known to be on the disk, but: {error}")] if newest else []
    if token not in {each.token for each in facts.promises}:
        return [Problem("wrong bytes", f"restored save {token}, which had not begun")]
    if not facts.may_be_restored(token):
        return [Problem("lost", f"restored save {token}; on the disk are known to be {sorted(facts.durable)}")]
    return []


def _step_names(image: Image) -> dict[str, int]:
    """Return the names of steps in the run directory, without unusable ones."""
    run = image.find(RUN)
    names = {} if run is None else image.folders[run]
    return {name: parsed[0] for name in names if (parsed := parse_step_name(name)) and names[name] not in image.lost}


def _whole(disk: CrashDisk) -> dict[str, int]:
    """Return the names of steps that can be loaded, and the tokens of their saves."""
    found = {}
    for name in _step_names(disk.machine.live):
        with on(disk):
            try:
                found[name] = token_of(checkpoint.load_checkpointables(f"{RUN}/{name}"))
            except CheckpointError:
                continue
    return found


def _listed(reader: StepManager, disk: CrashDisk, world: World, facts: Facts) -> list[Problem]:
    """Check that each listed step with a whole generation can be restored, and all where that is promised."""
    whole = _whole(disk)
    names = [entry.name for entry in reader._run.entries()]
    if is_all_whole(world) and not {*names} <= {*whole}:
        return [Problem("damaged", f"{sorted({*names} - {*whole})} of {names} are listed and not whole")]
    for step in reader.steps:
        try:
            token_of(reader.restore(step=step))
        except CorruptCheckpointError as error:
            if step in {parsed[0] for name in {*names} & {*whole} if (parsed := parse_step_name(name)) is not None}:
                return [Problem("exception", f"a generation of step {step} is whole, but: {error}")]
    last = {each.step: each.token for each in facts.promises}
    known = {step for step in facts.pins if last.get(step) in facts.durable}  # otherwise its last save may be lost
    gone = sorted(known - {*reader.steps, *reader.damaged})
    return [Problem("deleted", f"step {step} was pinned and on the disk, and is gone") for step in gone]


def _cleaned(manager: StepManager, disk: CrashDisk, facts: Facts, reader: Callable[[], StepManager]) -> list[Problem]:
    """Let the next owner save, and check that no leftovers remain and that its save is restored."""
    manager.own()
    line = newest_generations([each for each in manager._run._line() if not each.is_held])
    promise = facts.begin((manager.latest or 0) + 1, AFTERWARDS)
    manager.save(promise.step, state_of(promise.token))
    manager.wait(LONGEST_S)
    manager._run._deleter.wait(LONGEST_S)
    manager._run._scrubber.join()  # it may set an expired step aside, which then stays
    image = disk.machine.live
    names = image.folders[image.find(RUN) or 0]
    problems = left_of(name for name in hidden(names) if names[name] not in image.lost)
    problems = problems or _retained(line, promise.step, manager, facts, image)
    if not problems and (token := token_of(reader().restore())) != promise.token:
        return [Problem("lost", f"restored save {token}, but {promise.token} was acknowledged after the crash")]
    return problems


def _retained(line: Sequence[Entry], saved: int, manager: StepManager, facts: Facts, image: Image) -> list[Problem]:
    """Check the kept steps as in a fully synced run, except for uncertain entries, which stay or are no steps.

    A step stays too if the disk refused to sync the generation that replaces it, or if the scrubber has set it aside
    since `line` was the current lineage, before the last save.
    """
    run, names = manager._run, _step_names(image)
    stays = {entry.name for entry in run._entries if entry.is_held or entry.damaged is not None} | run._left
    stays |= replaced_in_doubt(run._entries)
    entries = [entry for entry in run._entries if entry.name in names and entry.name not in stays]
    pinned = {entry.step for entry in entries if entry.pinned}
    steps = [*(entry.step for entry in line), saved]
    keep = len(steps) if facts.keep is None else facts.keep
    there = [entry.step for entry in entries]
    stay = {entry.step for entry in line if entry.name in stays and entry.name in names} - {*there}
    return retained_of(there, {*steps[-keep:], *(pinned & {*steps})} - stay)


def found_in_weaker_single(disk: CrashDisk, world: World, facts: Facts) -> list[Problem]:
    """Return the problems of a single checkpoint, which may be missing but must be whole.

    A file or directory that is no checkpoint is not replaced, so it is removed first. An incomplete checkpoint under
    the side name is removed once another checkpoint is in place.
    """
    image = disk.machine.live
    with on(disk):
        try:
            token = token_of(checkpoint.load_checkpointables(SINGLE))
        except CheckpointError as error:
            if isinstance(error, CorruptCheckpointError) and is_all_whole(world):
                return [Problem("damaged", str(error))]
        else:
            if token not in {each.token for each in facts.promises}:
                return [Problem("wrong bytes", f"loaded save {token}, which had not begun")]
        if not can_be_saved(image):
            return []
        remove_non_checkpoint(disk)
        problems = [saved_anew(SINGLE, world.settings, facts, lambda: _sibling_names(image)) for _ in range(2)]
        return [each for each in problems[0] if each.kind != "left over"] or problems[1]


def is_all_whole(world: World) -> bool:
    """Return whether every found save is promised to be whole."""
    return world.settings.durability == "file" and world.order == "ordered"


def _sibling_names(image: Image) -> list[str]:
    """Return all names except those that the disk refuses to remove."""
    names = image.folders[image.find("/data") or 0]
    return [name for name, inode in names.items() if inode not in image.lost]
