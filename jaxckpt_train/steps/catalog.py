"""The catalog: reads which steps of a run directory are committed, and what is known of them."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Set
from typing import Any

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.steps.entry import Entry, entry_from_manifest
from jaxckpt_train.steps.history import NOTES_NAME, metrics_from_json, read_lines
from jaxckpt_train.steps.lineage import in_order
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, NOT_JSON
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.store.transaction import is_committed


class _Info(msgspec.Struct):
    """The part of a manifest that the catalog reads; the rest is skipped, not validated."""

    info: dict[str, Any]


def scan(backend: Backend, directory: str) -> list[Entry]:
    """All committed generations of all steps, in the order in which they were saved.

    A step whose manifest cannot be read is listed too: a restore finds out and falls back, with a warning.
    """
    names = _step_names(backend, directory)
    while True:
        entries = _entries(backend, directory, names)
        missing = names - {entry.name for entry in entries if entry.tells_lineage}
        now = _step_names(backend, directory) if missing else names
        if missing <= now:
            return in_order(entries)
        names = now  # the owner deleted a step while it was looked at, and has saved another


def _entries(backend: Backend, directory: str, names: Set[str]) -> list[Entry]:
    notes = _Notes(backend, directory)
    entries = []
    for name in sorted(names):
        parsed = parse_step_name(name)
        if parsed is not None and is_committed(backend, f"{directory}/{name}"):
            info = _read_info(backend, f"{directory}/{name}")
            entries.append(notes.added_to(entry_from_manifest(name, *parsed, info)))
    return entries


def _step_names(backend: Backend, directory: str) -> set[str]:
    try:
        names = [entry.name for entry in backend.list(directory) if entry.kind == "directory"]
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return set()
        raise
    return {name for name in names if parse_step_name(name) is not None}


class _Notes:
    """What was said of steps after they were committed: pins, metrics of later evaluations, and what is damaged."""

    def __init__(self, backend: Backend, directory: str) -> None:
        self._metrics: dict[object, dict[str, float]] = {}
        self._pinned: set[int] = set()
        self._damaged: dict[object, str | None] = {}
        for note in read_lines(backend, directory, NOTES_NAME):
            step = note.get("step")
            if not isinstance(step, int):
                continue
            if note.get("pin") is True:
                self._pinned.add(step)
            elif note.get("pin") is False:
                self._pinned.discard(step)
            name, saved = note.get("name"), note.get("saved")
            # A name may be given again, to another save.
            of = (name, saved) if isinstance(name, str) and isinstance(saved, str) else step
            if "damaged" in note and isinstance(name, str):
                self._damaged[of] = self._damaged[name] = note["damaged"] if isinstance(note["damaged"], str) else None
            if isinstance(note.get("metrics"), dict):
                self._metrics.setdefault(of, {}).update(metrics_from_json(note["metrics"]))

    def added_to(self, entry: Entry) -> Entry:
        of = (entry.name, entry.time.isoformat())
        metrics = {**(entry.metrics or {}), **self._metrics.get(entry.step, {}), **self._metrics.get(of, {})}
        # When a save was, only its manifest tells: one that cannot be read has what was said last of that name.
        is_pinned, damaged = entry.step in self._pinned, self._damaged.get(of if entry.tells_lineage else entry.name)
        return dataclasses.replace(entry, metrics=metrics or None, pinned=is_pinned, damaged=damaged)


def _read_info(backend: Backend, directory: str) -> dict[str, Any]:
    try:
        data = read_whole(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES).tobytes()
        return msgspec.json.decode(data, type=_Info).info
    except (StorageError, CorruptCheckpointError, *NOT_JSON):
        return {}
