"""The catalog of a run directory: which steps are committed, and what is known of them.

It also finds what interrupted saves and deletions left, recognises checkpoints of other tools, and refuses saves that
would conflict with existing steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Collection, Iterable, Set
from typing import Any, NamedTuple

import msgspec

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    SettingsError,
    StepNotFoundError,
    StorageError,
)
from jaxckpt_train.formats.orbax_names import orbax_steps
from jaxckpt_train.formats.step_folders import LEVANTER, certain_checkpoints, step_folders
from jaxckpt_train.run.entry import Entry, entry_from_manifest, in_order, owning_run, parse_step_name
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.store.backends.base import GONE, Backend
from jaxckpt_train.store.backends.base import Entry as Listed
from jaxckpt_train.store.committed import is_committed, is_gone, read_committed
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, NOT_JSON, decode_info
from jaxckpt_train.store.removal import final_name
from jaxckpt_train.store.timeouts import report_progress, time_limited

_MOST_NAMED = 5
_log = logging.getLogger("jaxckpt_train")
_DELETING = re.compile(r"\.(.+)\.deleting", re.DOTALL)  # the name of a step that an earlier version was deleting
_LINEAGE = ("created", "run", "sequence", "left_behind")


def refuse_checkpoint(backend: Backend, directory: str) -> None:
    """Raise SettingsError if the directory is a single checkpoint: retention of a run would delete it."""
    if is_committed(backend, directory) and (
        is_url(directory) or any(entry.name == MANIFEST_NAME for entry in backend.list(directory))
    ):
        raise SettingsError(
            f"{directory}: expected a run directory, found a single checkpoint: pass the directory of the run that "
            "this step belongs to. To start a new run from its state, pass an empty directory, and this one as "
            "`init_from` (or to `jaxckpt_train.load`)"
        )


class ForeignCheckpoints(NamedTuple):
    """Checkpoints of another tool in a directory."""

    what: str  # for messages
    newest: str  # the name of the newest
    is_readable: bool = True  # by this package


@time_limited
def foreign_checkpoints(backend: Backend, directory: str, *, flax: bool = True) -> ForeignCheckpoints | None:
    """Find the checkpoints of another tool; `flax`: also the files of `flax.training.checkpoints`."""
    entries = _listed(backend, directory)
    if steps := orbax_steps(backend, directory, entries):
        return ForeignCheckpoints(_last_ones("steps of Orbax", map(str, steps)), [*steps.values()][-1])
    folders = step_folders(backend, directory, entries)
    if folders is not None:
        what = _last_ones(f"steps of {folders.tool}", folders.names)
        return ForeignCheckpoints(what, folders.names[-1], is_readable=folders.tool != LEVANTER)
    names = certain_checkpoints(backend, directory, entries) if flax else []
    return ForeignCheckpoints(_last_ones("checkpoints of Flax", names), names[-1]) if names else None


def refuse_foreign(backend: Backend, directory: str, *, flax: bool = True) -> None:
    """Raise SettingsError if the directory has checkpoints of another tool; `flax` as for `foreign_checkpoints`."""
    found = foreign_checkpoints(backend, directory, flax=flax)
    if found is None:
        return
    advice = ", which this package does not read: choose another directory"
    if found.is_readable:
        advice = (
            ", from which a run does not continue by itself: choose another directory, and load a checkpoint by "
            f"jaxckpt_train.load, or start the new run from it (init_from={directory}/{found.newest})"
        )
    expected = "expected a run of this package or an empty directory"
    raise SettingsError(f"{directory}: {expected}, found {found.what}{advice}")


def _last_ones(what: str, names: Iterable[str]) -> str:
    return f"{what}, the last ones {', '.join([*names][-_MOST_NAMED:])}"


def _listed(backend: Backend, directory: str) -> list[Listed]:
    try:
        return list(backend.list(directory))
    except StorageError:
        return []  # the directory does not exist, or a save reports the problem


def step_not_found(
    directory: str, step: int | None, there: Collection[Entry], backend: Backend | None = None
) -> StepNotFoundError:
    """Make the error for a step that the run does not have; without entries, name checkpoints of other tools there."""
    steps = ", ".join(str(each) for each in sorted({entry.step for entry in there})) or "none"
    which = "" if step is None else f" {step}; committed: {steps}"
    others = None if backend is None or there else foreign_checkpoints(backend, directory)
    found = "" if others is None else f"; found {others.what}"
    if others is not None and others.is_readable:
        found += ", which jaxckpt_train.load can read"
    return StepNotFoundError(f"{directory}: has no committed step{which}{found}")


def leftovers(backend: Backend, directory: str) -> list[str]:
    """The names of the attempts at steps, and of the steps that are being deleted. They are never read."""
    if is_url(directory):
        record = FoundRecord(backend, directory)
        names = _step_names(backend, directory) if record.has_steps else set[str]()
        return sorted(names - {*(record.record.steps or ())})
    found = list[str]()
    for entry in backend.list(directory):
        of_earlier_version = _DELETING.fullmatch(entry.name)
        final = final_name(entry.name) if of_earlier_version is None else of_earlier_version[1]
        if final is not None and parse_step_name(final) is not None:
            found.append(entry.name)
    return found


class _Info(msgspec.Struct):
    """The part of a manifest that the catalog reads; the rest is skipped, not validated."""

    info: msgspec.Raw


def scan(backend: Backend, directory: str) -> list[Entry]:
    """All committed generations of all steps, in the order of the saves.

    Steps with a damaged or unreadable manifest are included: a restore warns and falls back to another step, and
    retention does not delete them.
    """
    return scan_with_record(backend, directory)[0]


@time_limited
def scan_with_record(backend: Backend, directory: str) -> tuple[list[Entry], FoundRecord]:
    """Like `scan`, with the record of the run."""
    if is_url(directory):
        return _scan_objects(backend, directory)
    names = _step_names(backend, directory)
    while True:
        record = FoundRecord(backend, directory)
        entries = _entries(backend, directory, names)
        missing = names - {entry.name for entry in entries if entry.has_lineage}
        now = _step_names(backend, directory) if missing else names
        if missing <= now:
            known = [each.record_number for each in in_order(entries) if each.has_lineage and each.is_certain]
            record.expect(max(known, default=0))  # the changes that the record had at the last save
            return in_order([record.applied_to(entry) for entry in entries]), record
        names = now  # the owner deleted a step during the scan, and may have saved another


def _scan_objects(backend: Backend, directory: str) -> tuple[list[Entry], FoundRecord]:
    """As `scan_with_record`: the record says which steps exist, unless it is lost."""
    record, uncertain = FoundRecord(backend, directory), set[str]()
    if not record.has_steps:
        found = {name: _committed_info(backend, f"{directory}/{name}") for name in _step_names(backend, directory)}
        uncertain = {name for name, each in found.items() if each is not None and not each[1]}
        record.rebuild({name: each[0] for name, each in found.items() if each is not None})
    entries = [dataclasses.replace(each, is_certain=each.name not in uncertain) for each in record.record.entries()]
    return in_order([record.applied_to(entry) for entry in entries]), record


@time_limited
def refuse_uncommitted(
    backend: Backend, directory: str, damaged: bool, allows_flax: bool = False, *, is_sure: bool = False
) -> None:
    """Raise CorruptCheckpointError if there are step directories, none of which can be restored.

    `is_sure`: the record says which steps exist, so that others are what a crash has left of saves.

    Raises SettingsError if the directory has steps of another tool.
    """
    names = [] if is_sure and not damaged else sorted(_step_names(backend, directory))
    refuse_foreign(backend, directory, flax=not (names or allows_flax))
    if names:
        why = "damaged or not committed" if damaged else "not committed (copied in part, or links?)"
        raise CorruptCheckpointError(
            f"{directory}: has {', '.join(names[:5])}, but each of its steps is {why}: copy them again, or move them "
            "away to start from scratch"
        )


def refuse_unknown_run(directory: str, found: FoundRecord, entries: Collection[Entry]) -> None:
    """Raise CorruptCheckpointError if neither the record nor a step says which steps of a fast tier are of this run."""
    if found.problem is not None and not found.record.run and owning_run([*entries]) is None:
        raise CorruptCheckpointError(
            f"{directory}: which steps of the fast tier belong to this run is not known: {found.problem}. Bring that "
            "file back from a copy, or move it away to start from scratch"
        )


def warn_about_uncommitted(backend: Backend, directory: str, warned: set[str]) -> None:
    """Warn once of each step directory without COMMIT. No save leaves one, so a part of it was lost."""
    if is_url(directory):  # where the record says what is a step
        return
    with contextlib.suppress(StorageError):  # the restore itself has succeeded
        for name in sorted(entry.name for entry in backend.list(directory) if entry.kind != "directory"):
            if parse_step_name(name) is not None and name not in warned:
                warned.add(name)
                _log.warning("%s/%s: ignored: expected a directory, found a file or a link", directory, name)
        without = {name for name in _step_names(backend, directory) - warned if is_gone(backend, f"{directory}/{name}")}
        for name in sorted(without & _step_names(backend, directory)):  # else it was deleted in the meantime
            warned.add(name)
            _log.warning("%s/%s: ignored: has no COMMIT; the step is damaged or copied in part", directory, name)


def _entries(backend: Backend, directory: str, names: Set[str]) -> list[Entry]:
    entries = []
    for name in sorted(names):
        report_progress()
        parsed, found = parse_step_name(name), _committed_info(backend, f"{directory}/{name}")
        if parsed is not None and found is not None:
            info, is_certain = found
            entries.append(dataclasses.replace(entry_from_manifest(name, *parsed, info), is_certain=is_certain))
    return entries


def _step_names(backend: Backend, directory: str) -> set[str]:
    try:
        names = [entry.name for entry in backend.list(directory) if entry.kind == "directory"]
    except StorageError as error:
        if error.errno in GONE:
            return set()
        raise
    return {name for name in names if parse_step_name(name) is not None}


def _committed_info(backend: Backend, directory: str) -> tuple[dict[str, Any], bool] | None:
    """The `info` section of a step's manifest, and whether it matches COMMIT; None: there is no COMMIT.

    Of a manifest that does not match, the lineage is used nevertheless: without it, a restore would try steps that a
    roll-back left behind.
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
