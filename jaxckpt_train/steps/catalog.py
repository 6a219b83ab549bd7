"""The catalog: which steps of a run directory are committed, with what policies need to know of them."""

from __future__ import annotations

import dataclasses
import datetime
import errno
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.steps.history import NOTES_NAME, metrics_from_json, read_lines
from jaxckpt_train.steps.policy_context import CheckpointInfo
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from jaxckpt_train.store.transaction import is_committed, read_whole

_LONG_AGO = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class _Info(msgspec.Struct):
    """The part of a manifest that the catalog reads; the rest is skipped, not validated."""

    info: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One committed generation of a step.

    Attributes:
        name: of its directory.
        sequence: the how-manieth save of the run it was; orders steps by when they were saved, also after a roll-back.
    """

    name: str
    step: int
    generation: int
    sequence: int
    time: datetime.datetime
    metrics: Mapping[str, float] | None
    temporary: bool
    pinned: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Later saves are greater."""
        return (self.sequence, self.step, self.generation)

    def info(self) -> CheckpointInfo:
        """The entry as policies see it."""
        return CheckpointInfo(self.step, self.time, self.metrics, self.pinned, self.temporary)


def scan(backend: Backend, directory: str) -> list[Entry]:
    """All committed generations of all steps, in the order in which they were saved.

    A step whose manifest cannot be read is listed too: a restore finds out and falls back, with a warning.
    """
    try:
        names = [entry.name for entry in backend.list(directory) if entry.kind == "directory"]
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return []
        raise
    metrics, pinned = _notes(backend, directory)
    entries = []
    for name in names:
        parsed = parse_step_name(name)
        if parsed is None or not is_committed(backend, f"{directory}/{name}"):
            continue
        step, generation = parsed
        info = _read_info(backend, f"{directory}/{name}")
        known = metrics_from_json(info.get("metrics")) | metrics.get(step, {})
        entries.append(
            Entry(
                name,
                step,
                generation,
                sequence=_whole(info.get("sequence")),
                time=_time(info.get("created")),
                metrics=known or None,
                temporary=info.get("temporary") is True,
                pinned=step in pinned,
            )
        )
    return sorted(_placed(entries), key=lambda entry: entry.order)


def _placed(entries: list[Entry]) -> list[Entry]:
    """A step whose manifest is damaged does not say when it was saved: it is placed by its number."""
    placed = []
    for entry in entries:
        if entry.sequence < 0:
            before = [other.sequence for other in entries if other.step <= entry.step]
            entry = dataclasses.replace(entry, sequence=max(before))
        placed.append(entry)
    return placed


def newest_generations(entries: list[Entry]) -> list[Entry]:
    """Of every step only its highest generation, in the order in which they were saved."""
    highest: dict[int, Entry] = {}
    for entry in entries:
        if entry.step not in highest or entry.generation > highest[entry.step].generation:
            highest[entry.step] = entry
    return sorted(highest.values(), key=lambda entry: entry.order)


def _notes(backend: Backend, directory: str) -> tuple[dict[int, dict[str, float]], set[int]]:
    metrics: dict[int, dict[str, float]] = {}
    pinned: set[int] = set()
    for note in read_lines(backend, directory, NOTES_NAME):
        step = note.get("step")
        if not isinstance(step, int):
            continue
        if note.get("pin") is True:
            pinned.add(step)
        elif note.get("pin") is False:
            pinned.discard(step)
        if isinstance(note.get("metrics"), dict):
            metrics.setdefault(step, {}).update(metrics_from_json(note["metrics"]))
    return metrics, pinned


def _read_info(backend: Backend, directory: str) -> dict[str, Any]:
    try:
        data = read_whole(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES).tobytes()
        return msgspec.json.decode(data, type=_Info).info
    except (StorageError, CorruptCheckpointError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _time(value: object) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(str(value))
    except ValueError:
        return _LONG_AGO
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
