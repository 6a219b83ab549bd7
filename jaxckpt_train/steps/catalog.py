"""The catalog: reads which steps of a run directory are committed, and what is known of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence, Set
from typing import Any

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError, StorageError
from jaxckpt_train.steps.entry import Entry, entry_from_manifest
from jaxckpt_train.steps.lineage import in_order
from jaxckpt_train.steps.notes import Notes
from jaxckpt_train.steps.refusals import refuse_flax_checkpoints, refuse_other_steps
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.backend import GONE, Backend
from jaxckpt_train.store.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, NOT_JSON, decode_info
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.transaction import is_gone, read_committed

_log = logging.getLogger("jaxckpt_train")


class _Info(msgspec.Struct):
    """The part of a manifest that the catalog reads; the rest is skipped, not validated."""

    info: msgspec.Raw


_LINEAGE = ("created", "run", "sequence", "left_behind")


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
    backend: Backend, directory: str, damaged: bool, progress: Progress | None = None, beside_flax: bool = False
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
    answer_of(directory, lambda moved: refuse_other_steps(backend, directory), progress)
    names = sorted(answer_of(directory, lambda moved: _step_names(backend, directory), progress))
    if names:
        why = "damaged or not committed" if damaged else "not committed (copied in part, or links?)"
        raise CorruptCheckpointError(
            f"{directory}: has {', '.join(names[:5])}, but each of its steps is {why}; copy them anew, or "
            "move them away to start from the beginning"
        )
    if not beside_flax:
        answer_of(directory, lambda moved: refuse_flax_checkpoints(backend, directory), progress)


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
