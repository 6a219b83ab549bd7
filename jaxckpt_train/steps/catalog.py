"""The catalog: reads which steps of a run directory are committed, and what is known of them."""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Set
from typing import Any

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError, StorageError
from jaxckpt_train.steps.entry import Entry, entry_from_manifest
from jaxckpt_train.steps.lineage import in_order
from jaxckpt_train.steps.notes import Notes
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.manifest import NOT_JSON, decode_info
from jaxckpt_train.store.transaction import is_gone, read_committed

_log = logging.getLogger("jaxckpt_train")


class _Info(msgspec.Struct):
    """The part of a manifest that the catalog reads; the rest is skipped, not validated."""

    info: msgspec.Raw


_UNKNOWN: dict[str, Any] = {}


def scan(backend: Backend, directory: str) -> list[Entry]:
    """All committed generations of all steps, in the order in which they were saved.

    A step whose manifest is damaged, or cannot be read, is listed too: a restore finds out and falls back, with a
    warning. Retention leaves it alone.
    """
    names = _step_names(backend, directory)
    while True:
        entries = _entries(backend, directory, names)
        missing = names - {entry.name for entry in entries if entry.tells_lineage}
        now = _step_names(backend, directory) if missing else names
        if missing <= now:
            return in_order(entries)
        names = now  # the owner deleted a step while it was looked at, and has saved another


def tell_of_uncommitted(backend: Backend, directory: str, told: set[str]) -> None:
    """Warn of step directories without COMMIT, once of each: no save leaves one, so somebody has lost a part of it."""
    for name in sorted(_step_names(backend, directory) - told):
        if is_gone(backend, f"{directory}/{name}"):
            told.add(name)
            _log.warning("%s/%s: has no COMMIT, so it is no step: copied in part, or damaged?", directory, name)


def _entries(backend: Backend, directory: str, names: Set[str]) -> list[Entry]:
    notes = Notes(backend, directory)
    if notes.problem is not None:
        _log.warning(
            "%s; of the steps that are there now none is deleted, as it may be pinned: pin anew what must stay, and "
            "remove what is damaged there",
            notes.problem,
        )
    entries = []
    for name in sorted(names):
        parsed, info = parse_step_name(name), _committed_info(backend, f"{directory}/{name}")
        if parsed is not None and info is not None:
            entry = notes.added_to(entry_from_manifest(name, *parsed, info))
            entries.append(dataclasses.replace(entry, is_held=info is _UNKNOWN or notes.problem is not None))
    return entries


def _step_names(backend: Backend, directory: str) -> set[str]:
    try:
        names = [entry.name for entry in backend.list(directory) if entry.kind == "directory"]
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return set()
        raise
    return {name for name in names if parse_step_name(name) is not None}


def _committed_info(backend: Backend, directory: str) -> dict[str, Any] | None:
    """What the manifest says of a step; nothing if it cannot be read, or is not what was committed; None: no COMMIT."""
    try:
        found = read_committed(backend, directory)
        if found is None:
            return None
        return decode_info(msgspec.json.decode(found[0], type=_Info).info, directory)
    except (StorageError, CorruptCheckpointError, FormatVersionError, *NOT_JSON):
        return None if is_gone(backend, directory) else _UNKNOWN
