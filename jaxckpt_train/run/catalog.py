"""The catalog: reads which steps of a run directory are committed, and what is known of them.

What interrupted saves and deletions leave in a run directory, and the names of steps that are being deleted.

Saves that a run refuses, since they would go beside what is there, or over it, unasked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from jaxckpt_train.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    FormatVersionError,
    SettingsError,
    StepNotFoundError,
    StorageError,
)
from jaxckpt_train.formats.flax import certain_checkpoints
from jaxckpt_train.formats.orbax_metadata import orbax_steps
from jaxckpt_train.formats.step_folders import LEVANTER, StepFolders, step_folders
from jaxckpt_train.run.annotations import Notes
from jaxckpt_train.run.entry import Entry, entry_from_manifest, in_order, parse_step_name
from jaxckpt_train.store.backends.base import GONE, Backend
from jaxckpt_train.store.backends.base import Entry as Listed
from jaxckpt_train.store.committed import is_committed, is_gone, read_committed
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, NOT_JSON, decode_info
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.removal import attempts
from jaxckpt_train.store.timeouts import call_with_timeout

_MOST_NAMED = 5
Seen = Mapping[str, datetime.datetime | None]
"""When each step of a run was saved, by the names of the directories; None where that could not be read."""
_DELETING = ".deleting"
_log = logging.getLogger("jaxckpt_train")
_LINEAGE = ("created", "run", "sequence", "left_behind")


def refuse_checkpoint(backend: Backend, directory: str) -> None:
    """Raise SettingsError if a checkpoint lies where a run is to be: retention of its own run would delete both."""
    if is_committed(backend, directory) and any(entry.name == MANIFEST_NAME for entry in backend.list(directory)):
        raise SettingsError(
            f"{directory}: is one checkpoint, and no directory of a run: give that of the run which it is a step of; "
            "to begin a new run with its state, give an empty one, and this as `init_from` (or to `jaxckpt_train.load`)"
        )


def refuse_other_steps(backend: Backend, directory: str) -> None:
    """Raise SettingsError if a run is to begin anew where Orbax, Levanter or TorchTitan has left its steps."""
    entries = _listed(backend, directory)
    steps = orbax_steps(backend, directory, entries)
    if steps:
        raise _not_gone_on_from(directory, _orbax_text(steps), list(steps.values())[-1])
    folders = step_folders(backend, directory, entries)
    if folders is not None and folders.tool == LEVANTER:
        raise SettingsError(
            f"{directory}: expected a run of this package or an empty directory, found {_folders_text(folders)}, which "
            "this package does not read: choose another directory"
        )
    if folders is not None:
        raise _not_gone_on_from(directory, _folders_text(folders), folders.names[-1])


def refuse_flax_checkpoints(backend: Backend, directory: str) -> None:
    """As `refuse_other_steps`, for the files of `flax.training.checkpoints`."""
    names = certain_checkpoints(backend, directory, _listed(backend, directory))
    if names:
        raise _not_gone_on_from(directory, _flax_text(names), names[-1])


def _not_gone_on_from(directory: str, found: str, newest: str) -> SettingsError:
    return SettingsError(
        f"{directory}: expected a run of this package or an empty directory, found {found}, which are not gone on "
        "from by themselves: load one by jaxckpt_train.load, or begin a new run with it "
        f"(init_from={directory}/{newest}), and choose another directory"
    )


def of_others(backend: Backend, directory: str, moved: Callable[[], None] = lambda: None) -> str:
    """What other tools have left where a run is looked for; empty: nothing that is known here."""
    entries = _listed(backend, directory)
    steps = orbax_steps(backend, directory, entries)
    if steps:
        return _orbax_text(steps)
    folders = step_folders(backend, directory, entries)
    if folders is not None:
        return _folders_text(folders)
    names = certain_checkpoints(backend, directory, entries)
    return _flax_text(names) if names else ""


def newest_of_orbax(backend: Backend, directory: str) -> int | None:
    """The newest step that Orbax has left where a run is looked for; None: there is none."""
    return next(reversed(orbax_steps(backend, directory, _listed(backend, directory))), None)


def _listed(backend: Backend, directory: str) -> list[Listed]:
    try:
        return list(backend.list(directory))
    except StorageError:
        return []  # there is none, or who saves there is told


def _orbax_text(steps: Mapping[int, str]) -> str:
    return f"steps of Orbax, the last ones {', '.join(map(str, list(steps)[-_MOST_NAMED:]))}"


def _folders_text(folders: StepFolders) -> str:
    return f"steps of {folders.tool}, the last ones {', '.join(folders.names[-_MOST_NAMED:])}"


def _flax_text(names: Sequence[str]) -> str:
    return f"checkpoints of Flax, the last ones {', '.join(names[-_MOST_NAMED:])}"


def refuse_again_or_below(directory: str, step: int, line: Sequence[Entry], restored: Entry | None) -> None:
    """Refuse a step that the run has already, or that would stand beside later ones.

    Args:
        directory: of the run.
        step: that is to be saved.
        line: the steps that the run goes on from.
        restored: the one that this process does, if it has saved none since. Older ones may have higher numbers, as
            where somebody has renamed them: they are left behind then.

    Raises:
        CheckpointExistsError: it is committed.
        SettingsError: it is below one that is.
    """
    steps = {entry.step for entry in line}
    if step in steps:
        raise CheckpointExistsError(
            f"{directory}: step {step} is committed already; pass overwrite=True to publish it anew"
        )
    latest = max(steps, default=step) if restored is None else restored.step
    if latest > step:
        raise SettingsError(
            f"{directory}: expected a step above {latest}, which the run has already, found {step}: restore() first, "
            "to go on from there (or restore(step=...), or overwrite=True, to leave later steps behind), or choose "
            "another directory"
        )


@contextlib.contextmanager
def advised_for_a_loop(directory: str, step: int, saved: int | None) -> Iterator[None]:
    """Within: a step that is refused as it is not above the last is told of with what a loop can do.

    It cannot overwrite, nor restore as it goes.

    Args:
        directory: of the run.
        step: that is to be saved.
        saved: the last one that the loop had saved.
    """
    try:
        yield
    except (CheckpointExistsError, SettingsError) as error:
        if saved is None or step > saved:
            raise
        raise type(error)(
            f"{directory}: expected a step above {saved}, which is saved already, found {step}: number updates over "
            "the whole training (ckpt.steps(...) does, or begin at ckpt.completed_steps after a resume). To go back to "
            "an earlier step and train on from there give it as `init_from` to a run in a new directory, or use "
            "jaxckpt_train.StepManager, by restore(step=...)"
        ) from error


def seen_of(entries: Sequence[Entry]) -> Seen:
    """What a process has seen of a run."""
    return {entry.name: entry.time if entry.is_certain else None for entry in entries}


def unseen_steps(entries: Sequence[Entry], seen: Seen) -> list[int]:
    """What others have saved since."""
    return sorted({entry.step for entry in entries if not _is_seen(entry, seen)})


def refuse_unseen(directory: str, restored: Entry | None, entries: Sequence[Entry], seen: Seen) -> None:
    """Raise CheckpointExistsError if others have saved since this process restored: it would leave that behind.

    Args:
        directory: of the run.
        restored: what this process goes on from; None: it begins from scratch.
        entries: all that there is now.
        seen: what there was when it looked.
    """
    unseen = unseen_steps(entries, seen)
    if unseen:
        steps = ", ".join(map(str, unseen))
        since = "found no step" if restored is None else f"restored step {restored.step}"
        raise CheckpointExistsError(
            f"{directory}: since this process {since}, another one has saved {steps}; restore again, to go on from "
            "there or, by restore(step=...), to leave that behind; or choose another directory"
        )


def _is_seen(entry: Entry, seen: Seen) -> bool:
    """Whether it was there: its name, and where both times could be read, the same save, as names are given again."""
    return entry.name in seen and (not entry.is_certain or seen[entry.name] in (None, entry.time))


def step_not_found(
    directory: str,
    step: int | None,
    there: Collection[Entry],
    backend: Backend | None = None,
    progress: ReadProgress | None = None,
) -> StepNotFoundError:
    """What to say where a run has no such step.

    Args:
        directory: of the run.
        step: which was asked for; None: any.
        there: what it has.
        backend: where to look for what other tools have left, if it has nothing; None: nowhere.
        progress: called with 0 while the disk is waited for.
    """
    steps = ", ".join(str(each) for each in sorted({entry.step for entry in there})) or "none"
    which = "" if step is None else f" {step}; committed are {steps}"
    others = ""
    if backend is not None and not there:
        others = call_with_timeout(directory, functools.partial(of_others, backend, directory), progress)
    found = f"; found {others}" if others else ""
    if others and LEVANTER not in others:
        found += ", which jaxckpt_train.load loads"
    return StepNotFoundError(f"{directory}: has no committed step{which}{found}")


def hidden_name(name: str) -> str:
    """The name of a directory while it is being deleted."""
    return name if name.endswith(_DELETING) else f".{name}{_DELETING}"


def shown_name(name: str) -> str:
    """The name that a directory had before it was being deleted; of all others, that which they have."""
    return name[1 : -len(_DELETING)] if name.startswith(".") and name.endswith(_DELETING) else name


def half_deleted(backend: Backend, directory: str) -> list[str]:
    """The step directories whose deletion was begun and not finished."""
    return _hidden_among(entry.name for entry in backend.list(directory))


def _hidden_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if shown_name(name) != name and parse_step_name(shown_name(name)) is not None]


def begun_deletions(
    backend: Backend,
    directory: str,
    committed: Collection[str],
    events: Iterable[Mapping[str, Any]],
    tell: Callable[[str], object],
) -> list[str]:
    """The step directories whose deletion was begun and not finished.

    One that could not be renamed has its own name, and what was its COMMIT has the hidden one.

    Args:
        backend: where.
        directory: of the run.
        committed: the names of its steps.
        events: of its history.
        tell: is called with the names of the steps of which these do not say so: their owner died in between. Not of
            one that is there: it has been saved anew, or brought back by a power cut.
    """
    there = [entry.name for entry in backend.list(directory)]
    hidden = _hidden_among(there)
    last = {str(event.get("name")): event["event"] for event in events if event.get("event") in ("save", "delete")}
    for name in map(shown_name, hidden):
        if last.get(name) != "delete" and name not in there:
            tell(name)
    in_place = [name for name in map(shown_name, hidden) if name in there and name not in committed]
    return in_place + [name for name in hidden if shown_name(name) not in in_place]


def remove_attempts(backend: Backend, directory: str) -> None:
    """Remove what interrupted saves left. What the disk does not let go does no harm: nobody reads it."""
    for attempt, final in attempts(backend, directory):
        if parse_step_name(final) is not None:
            _log.info("removing an interrupted attempt, %s", attempt)
            try:
                backend.remove(attempt)
            except StorageError as error:
                _log.warning("an interrupted attempt was not removed: %s", error)


class _Info(msgspec.Struct):
    """The part of a manifest that the catalog reads; the rest is skipped, not validated."""

    info: msgspec.Raw


def scan(backend: Backend, directory: str) -> list[Entry]:
    """All committed generations of all steps, in the order in which they were saved.

    A step whose manifest is damaged, or cannot be read, is listed too: a restore finds out and falls back, with a
    warning. Retention leaves it alone.
    """
    return scan_with_notes(backend, directory)[0]


def scan_with_notes(
    backend: Backend, directory: str, moved: Callable[[], None] = lambda: None
) -> tuple[list[Entry], Notes]:
    """As `scan`, with the notes that were read for it; `moved` is told of each step."""
    names = _step_names(backend, directory)
    while True:
        notes = Notes(backend, directory)
        entries = _entries(backend, directory, names, moved)
        missing = names - {entry.name for entry in entries if entry.tells_lineage}
        now = _step_names(backend, directory) if missing else names
        if missing <= now:
            notes.expect(_known_notes(entries))
            return in_order([notes.added_to(entry) for entry in entries]), notes
        names = now  # the owner deleted a step while it was looked at, and has saved another


def refuse_uncommitted(
    backend: Backend, directory: str, damaged: bool, progress: ReadProgress | None = None, beside_flax: bool = False
) -> None:
    """Raise CorruptCheckpointError if there are step directories, none of which can be restored.

    Args:
        backend, directory: where the run is.
        damaged: whether steps were set aside.
        progress: called with 0 while the disk is waited for.
        beside_flax: whether a run may begin beside checkpoints of Flax.

    Raises:
        SettingsError: there are steps of Orbax, Levanter or TorchTitan, or checkpoints of Flax.
    """
    call_with_timeout(directory, lambda moved: refuse_other_steps(backend, directory), progress)
    names = sorted(call_with_timeout(directory, lambda moved: _step_names(backend, directory), progress))
    if names:
        why = "damaged or not committed" if damaged else "not committed (copied in part, or links?)"
        raise CorruptCheckpointError(
            f"{directory}: has {', '.join(names[:5])}, but each of its steps is {why}; copy them anew, or "
            "move them away to start from the beginning"
        )
    if not beside_flax:
        call_with_timeout(directory, lambda moved: refuse_flax_checkpoints(backend, directory), progress)


def tell_of_uncommitted(backend: Backend, directory: str, told: set[str]) -> None:
    """Warn of step directories without COMMIT, once of each: no save leaves one, so somebody has lost a part of it."""
    with contextlib.suppress(StorageError):  # what was restored is restored
        for name in sorted(entry.name for entry in backend.list(directory) if entry.kind != "directory"):
            if parse_step_name(name) is not None and name not in told:
                told.add(name)
                _log.warning("%s/%s: is no directory, perhaps a link, so it is no step", directory, name)
        without = {name for name in _step_names(backend, directory) - told if is_gone(backend, f"{directory}/{name}")}
        for name in sorted(without & _step_names(backend, directory)):  # else it was deleted meanwhile
            told.add(name)
            _log.warning("%s/%s: has no COMMIT, so it is no step: copied in part, or damaged?", directory, name)


def _entries(backend: Backend, directory: str, names: Set[str], moved: Callable[[], None]) -> list[Entry]:
    entries = []
    for name in sorted(names):
        moved()
        parsed, found = parse_step_name(name), _committed_info(backend, f"{directory}/{name}")
        if parsed is not None and found is not None:
            info, is_certain = found
            entries.append(dataclasses.replace(entry_from_manifest(name, *parsed, info), is_certain=is_certain))
    return entries


def _known_notes(entries: Sequence[Entry]) -> int:
    """How many notes there were when the last step of this run was saved, as far as manifests are certain."""
    known = [entry.notes for entry in in_order(entries) if entry.tells_lineage and entry.is_certain]
    return max(known, default=0)


def _step_names(backend: Backend, directory: str) -> set[str]:
    try:
        names = [entry.name for entry in backend.list(directory) if entry.kind == "directory"]
    except StorageError as error:
        if error.errno in GONE:
            return set()
        raise
    return {name for name in names if parse_step_name(name) is not None}


def _committed_info(backend: Backend, directory: str) -> tuple[dict[str, Any], bool] | None:
    """What the manifest says of a step, and whether that is what was committed; None: there is no COMMIT.

    One that is not is asked for its place in the run all the same: without it, what a roll-back has left behind would
    be restored, and nobody would come to try it.
    """
    try:
        found = read_committed(backend, directory)
        return None if found is None else (_info_of(found[0], directory), True)
    except (StorageError, CorruptCheckpointError, FormatVersionError, *NOT_JSON):
        if is_gone(backend, directory):
            return None
    try:
        info = _info_of(memoryview(read_whole(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)), directory)
        return {name: info[name] for name in _LINEAGE if name in info}, False
    except (StorageError, CorruptCheckpointError, *NOT_JSON):
        return {}, False


def _info_of(manifest: bytes | bytearray | memoryview, subject: str) -> dict[str, Any]:
    return decode_info(msgspec.json.decode(manifest, type=_Info).info, subject)
