"""The run record: pins, metrics attached later, damage, and what a roll-back left behind.

It is one small record that the owner of the run replaces as a whole. The directory listing says which steps exist; the
record only annotates them. A lost or damaged record is rebuilt, and then no step is deleted until the user agrees.

On object stores the record also says which steps exist: a step is committed by the replacement of the record that names
it. A new owner replaces the record before it does anything else, so whatever a former owner still tries fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import CorruptCheckpointError, DirectoryLockedError, FormatVersionError, StorageError
from jaxckpt_train.run.entry import (
    RECORDED_FIELDS,
    Entry,
    RollBack,
    branch_last,
    count_of,
    entry_from_manifest,
    left_behind,
    newest_generations,
    parse_step_name,
)
from jaxckpt_train.run.history import metrics_to_json
from jaxckpt_train.run.retention import BestLink
from jaxckpt_train.store.backends.base import GONE, Backend, StoredRecord, sync_directory
from jaxckpt_train.store.committed import RECORD_NAME
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import NOT_JSON, metrics_from_json
from jaxckpt_train.store.threads import free_in_child

_log = logging.getLogger("jaxckpt_train")
NOTES_NAME = "notes.jsonl"  # where earlier versions kept what the record has
_FORMAT = 1
_TRIES = 5
_MAX_NOTES_BYTES = 64 << 20


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """A change to what the record says of one step. A pin applies to all saves of the step, the rest to one save."""

    pin: bool | None = None
    metrics: Mapping[str, float | str] = {}  # metrics to add, as `metrics_to_json` returns them
    damaged: str | msgspec.UnsetType | None = msgspec.UNSET  # why the save is set aside; None: it is intact again
    is_unsynced: bool = False  # the storage has refused to sync the save


class SaveFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the record says of one save, in addition to its manifest; see `Annotation`."""

    saved: str  # the time of the save, because the directory name of a deleted save may be reused
    metrics: dict[str, float | str] = {}
    damaged: str | None = None
    is_unsynced: bool = False

    def with_annotation(self, change: Annotation) -> SaveFacts:
        """The facts after a change."""
        return SaveFacts(
            self.saved,
            {**self.metrics, **change.metrics},
            self.damaged if change.damaged is msgspec.UNSET else change.damaged,
            self.is_unsynced or change.is_unsynced,
        )


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a run record."""

    format: int = _FORMAT
    number: int = 0  # of changes since the run started; manifests state it, so that an older record is recognised
    writer: str = ""  # the process that wrote this version
    pins: frozenset[int] = frozenset()
    kept: frozenset[str] = frozenset()  # saves that are not deleted, because a lost record may have had pins for them
    saves: dict[str, SaveFacts] = {}  # by directory name
    # On object stores: the committed steps, with what `entry_from_manifest` reads. None: the directory lists them.
    steps: dict[str, dict[str, Any]] | None = None
    links: dict[str, str] = {}  # on object stores: the links to steps, with the names of these
    roll_back: RollBack = RollBack()
    run: str = ""  # the id of the run, if one of its jobs had a fast tier, whose steps state it

    def entries(self) -> list[Entry]:
        """The committed steps on an object store, as their manifests describe them."""
        parsed = {name: parse_step_name(name) for name in self.steps or {}}
        found = [entry_from_manifest(name, *each, (self.steps or {})[name]) for name, each in parsed.items() if each]
        return [dataclasses.replace(entry, is_durable=True) for entry in found]

    def annotated(self, entry: Entry, change: Annotation) -> RunRecord:
        """The record after a change of what it says of a step."""
        record = self if change.pin is None else self.with_pin(entry.step, change.pin)
        facts = self._facts(entry) or SaveFacts(entry.time.isoformat())
        changed = facts.with_annotation(change)
        return record if changed == facts else record.with_facts(entry.name, changed)

    def with_pin(self, step: int, pin: bool) -> RunRecord:
        """The record after a step is pinned or released."""
        pins = self.pins | {step} if pin else self.pins - {step}
        released = () if pin else [name for name in self.kept if (parse_step_name(name) or (None,))[0] == step]
        return msgspec.structs.replace(self, pins=pins, kept=self.kept.difference(released))

    def with_facts(self, name: str, facts: SaveFacts) -> RunRecord:
        """The record with other facts about the save in this directory."""
        return msgspec.structs.replace(self, saves={**self.saves, name: facts})

    def without_saves(self, names: frozenset[str]) -> RunRecord:
        """The record without the facts of deleted saves."""
        saves = {name: facts for name, facts in self.saves.items() if name not in names}
        steps = None if self.steps is None else {name: info for name, info in self.steps.items() if name not in names}
        links = {link: name for link, name in self.links.items() if name not in names}
        return msgspec.structs.replace(self, saves=saves, steps=steps, links=links, kept=self.kept - names)

    def with_step(self, name: str, info: Mapping[str, Any]) -> RunRecord:
        """The record with a committed step more."""
        return msgspec.structs.replace(self, steps={**(self.steps or {}), name: recorded_info(info)})

    def with_link(self, link: BestLink) -> RunRecord:
        """The record with a link to the best of its steps, or without it if no step has the metric."""
        entries = [self.applied_to(entry) for entry in self.entries()]
        line = branch_last([each for each in entries if each.damaged is None], left_behind(entries, self.roll_back))
        target = link.target(newest_generations(line))
        others = {name: step for name, step in self.links.items() if name != link.name}
        return msgspec.structs.replace(self, links=others if target is None else {**others, link.name: target})

    def applied_to(self, entry: Entry, is_complete: bool = True) -> Entry:
        """The entry with what the record says of it. If the record is not complete, the step may be pinned."""
        facts = self._facts(entry) or SaveFacts("")
        return dataclasses.replace(
            entry,
            metrics={**(entry.metrics or {}), **metrics_from_json(facts.metrics)} or None,
            pinned=entry.step in self.pins,
            damaged=facts.damaged,
            is_unsynced=entry.is_unsynced or facts.is_unsynced,
            is_held=not entry.is_certain or not is_complete or entry.name in self.kept,
        )

    def _facts(self, entry: Entry) -> SaveFacts | None:
        """The facts of this save. Only a manifest has the time of the save: without one, the name has to suffice."""
        found = self.saves.get(entry.name)
        return found if found and (found.saved == entry.time.isoformat() or not entry.has_lineage) else None


def recorded_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest's information that the record keeps."""
    return {name: info[name] for name in RECORDED_FIELDS if name in info}


class _Format(msgspec.Struct):
    format: Any = _FORMAT


class _Sealed(msgspec.Struct):
    xxh3_64: str
    record: msgspec.Raw


def encode_record(record: RunRecord) -> bytes:
    """Encode a record with a digest of its content."""
    return seal_record(msgspec.json.encode(record, order="deterministic"))


def seal_record(content: bytes) -> bytes:
    """Add the digest to the JSON of a record."""
    return msgspec.json.encode(_Sealed(xxhash.xxh3_64_hexdigest(content), msgspec.Raw(content))) + b"\n"


def decode_record(data: bytes, path: str) -> RunRecord:
    """Decode a record; raise CorruptCheckpointError, or FormatVersionError if a newer version wrote it."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        raw = bytes(sealed.record)
        if xxhash.xxh3_64_hexdigest(raw) != sealed.xxh3_64:
            raise CorruptCheckpointError(f"{path}: damaged: its digest is not that of its content")
        version = msgspec.json.decode(raw, type=_Format).format
        if version != _FORMAT:
            raise FormatVersionError(
                f"{path}: expected a run record of format {_FORMAT}, found {version!r}: use a newer jaxckpt_train"
            )
        return msgspec.json.decode(raw, type=RunRecord)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected a run record, found other content: {error}") from error


class FoundRecord:
    """The record of a run as it was read, or as it was rebuilt; `problem` says why some of it may be missing."""

    def __init__(self, backend: Backend, directory: str) -> None:
        self._path = f"{directory}/{RECORD_NAME}"
        self.record, self.has_notes = RunRecord(), False  # has_notes: of an earlier version, instead of a record
        self.version: int | None = None
        self.problem: str | None = None
        try:
            stored = backend.read_record(self._path)
            if stored is not None:
                self.version, self.problem = stored.version, stored.problem
                if stored.problem is None:
                    self.record = decode_record(stored.data, self._path)
            elif not is_url(directory) and (notes := _read_notes(backend, directory)) is not None:
                self.has_notes = True
                self.record, self.problem = _from_notes(notes, f"{directory}/{NOTES_NAME}")
        except (StorageError, CorruptCheckpointError) as error:
            if isinstance(error, StorageError) and is_url(directory):
                raise  # an object store is asked again; a disk may have lost a part
            self.problem = str(error)

    @property
    def has_steps(self) -> bool:
        """Whether the record says which steps exist."""
        return self.record.steps is not None and self.problem is None

    def rebuild(self, steps: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the steps from a listing of an object store, since the record does not have them."""
        if steps:
            self.problem = self.problem or f"{self._path}: missing, although the run has {len(steps)} steps"
        known = {name: recorded_info(info) for name, info in steps.items()}
        self.record = msgspec.structs.replace(self.record, steps=known)

    def expect(self, number: int) -> None:
        """Check the number of the record against that in the manifest of a later save."""
        found = self.record.number
        if found < number:
            self.problem = self.problem or (
                f"{self._path}: expected at least {number} changes, as the manifest of a step states, found {found}"
            )
            self.record = msgspec.structs.replace(self.record, number=number)

    def applied_to(self, entry: Entry) -> Entry:
        """The entry with what the record says of it."""
        return self.record.applied_to(entry, self.problem is None)


def _read_notes(backend: Backend, directory: str) -> bytes | None:
    """The notes of an earlier version of this package; None: there are none."""
    try:
        return read_whole(backend, directory, NOTES_NAME, _MAX_NOTES_BYTES).tobytes()
    except StorageError as error:
        if error.errno in GONE:
            return None
        raise


_SEAL = b',"xxh3_64":"'


def _from_notes(data: bytes, path: str) -> tuple[RunRecord, str | None]:
    """Convert notes, one per line, each with a number and a digest; also return why one may be missing."""
    record, problem, is_unknown = RunRecord(), None, False
    for line in data.split(b"\n"):
        note = _note_in(line)
        if note is None:
            is_unknown = line.strip(b"\0~") != b"" and not line.endswith(b"~")  # "~" ends what a crash had cut
            continue
        number, kept = count_of(note.get("number")) or 0, note.get("held")
        if isinstance(kept, list):
            record, problem = msgspec.structs.replace(record, kept=record.kept | _names(kept)), None
        elif number != record.number + 1:
            problem = problem or f"{path}: expected note {record.number + 1}, found note {number}"
        record, is_unknown = msgspec.structs.replace(_with_note(record, note), number=max(record.number, number)), False
    if is_unknown:
        problem = problem or f"{path}: expected a note, found a damaged last line"
    return record, problem


def _note_in(line: bytes) -> dict[str, Any] | None:
    body, seal, end = line.rpartition(_SEAL)
    if not seal or end != xxhash.xxh3_64_hexdigest(body + b"}").encode() + b'"}':
        return None
    try:
        return msgspec.json.decode(body + b"}", type=dict[str, Any])
    except NOT_JSON:
        return None


def _with_note(record: RunRecord, note: Mapping[str, Any]) -> RunRecord:
    left, sequence = note.get("left_behind"), note.get("sequence")
    if isinstance(left, list) and isinstance(sequence, int):
        return msgspec.structs.replace(record, roll_back=RollBack(sequence, _names(left)))
    step, name, saved, pin, damaged = (note.get(key) for key in ("step", "name", "saved", "pin", "damaged"))
    if isinstance(step, int) and isinstance(pin, bool):
        record = record.with_pin(step, pin)
    if not isinstance(name, str) or not isinstance(saved, str):
        return record
    facts = record.saves.get(name)
    if facts is None or facts.saved != saved:
        facts = SaveFacts(saved)
    change = Annotation(
        metrics=metrics_to_json(metrics_from_json(note.get("metrics"))),
        damaged=msgspec.UNSET if "damaged" not in note else damaged if isinstance(damaged, str) else None,
        is_unsynced=note.get("unsynced") is True,
    )
    return record.with_facts(name, facts.with_annotation(change))


def _names(values: Sequence[object]) -> frozenset[str]:
    return frozenset(name for name in values if isinstance(name, str))


class RecordKeeper:
    """Changes the record of a run, for its owner and from any thread.

    A process that lost the run to another owner cannot change it: the version that it has seen is replaced by then. On
    an object store each change also moves `link`, so that no reader sees it without its step.
    """

    def __init__(
        self, backend: Backend, directory: str, check_owner: Callable[[], None], link: BestLink | None = None
    ) -> None:
        self._backend, self._directory, self._check_owner = backend, directory, check_owner
        self._link = link if is_url(directory) else None
        self._path, self._writer = f"{directory}/{RECORD_NAME}", uuid.uuid4().hex
        self._version: int | None = None
        self._is_remote = is_url(directory)
        self._deleted = set[str]()  # changed without the guard, which is held while the storage works
        self._guard = threading.RLock()
        free_in_child(self)
        self.record = RunRecord()

    def take(self, found: FoundRecord, entries: Sequence[Entry]) -> bool:
        """Continue after the record that a new owner has read. If it is incomplete, keep all current steps.

        Returns False on an object store if another process has changed the record since: read it again.
        """
        with self._guard:
            if self._is_remote:
                return self._take_over(found, entries)
            self._take(found, entries)
        return True

    def _take_over(self, found: FoundRecord, entries: Sequence[Entry]) -> bool:
        """Replace the record, so that no former owner can change it any more."""
        record = found.record if found.problem is None else self._keeping_all(found, entries)
        record = msgspec.structs.replace(
            record, steps=record.steps or {}, number=record.number + 1, writer=self._writer
        )
        record = record if self._link is None else record.with_link(self._link)
        version = self._backend.swap_record(self._path, encode_record(record), found.version)
        if version is None:
            return False
        self.record, self._version = record, version
        return True

    def _take(self, found: FoundRecord, entries: Sequence[Entry]) -> None:
        self.record, self._version = found.record, found.version
        if found.problem is None and not found.has_notes:
            if found.version is not None:
                with contextlib.suppress(StorageError):  # the next change tries again
                    sync_directory(self._backend, self._path)  # the last owner may have died before its own sync
                self._set_notes_aside()
            return
        if found.problem is not None:
            self.record = self._keeping_all(found, entries)
        try:
            self._write(self.record)
        except StorageError as error:  # the next change tries again
            _log.warning("%s: cannot be written: %s", self._path, error)
        else:
            self._set_notes_aside()

    def _keeping_all(self, found: FoundRecord, entries: Sequence[Entry]) -> RunRecord:
        """An incomplete record after which no current step is deleted."""
        _log.warning(
            "%s; the current %d steps may be pinned and are therefore not deleted: call pin(step) to keep a step, and "
            "pin(step, False) to allow its deletion",
            found.problem,
            len(entries),
        )
        kept = found.record.kept.union(entry.name for entry in entries)
        return msgspec.structs.replace(found.record, kept=kept)

    def add_step(self, name: str, info: Mapping[str, Any]) -> None:
        """Commit a step on an object store."""
        with self._guard:
            self._write(self.record.with_step(name, info))

    def drop_steps(self, names: Sequence[str]) -> None:
        """Remove steps from the record of a run on an object store, before their objects are removed."""
        with self._guard:
            self._deleted.update(names)
            try:
                self._write(self.record)
            except BaseException:
                self._deleted.difference_update(names)  # they are listed again, and the next write has them
                raise

    def _set_notes_aside(self) -> None:
        """Rename the notes of an earlier version, which are not read any more, and may have more than was readable."""
        notes = f"{self._directory}/{NOTES_NAME}"
        with contextlib.suppress(StorageError):  # usually there are none
            self._backend.rename(notes, f"{notes}.converted-{self.record.number}")

    def annotate(self, entry: Entry, change: Annotation) -> None:
        """Record a change of one step, durably. If the storage refuses, the change may be recorded or not."""
        with self._guard:
            self._write(self.record.annotated(entry, change))

    def roll_back(self, roll_back: RollBack) -> None:
        """Record what was left behind. The manifest of the save says it too, so a refusal is only a warning."""
        with self._guard:
            try:
                self._write(msgspec.structs.replace(self.record, roll_back=roll_back))
            except (StorageError, DirectoryLockedError) as error:
                _log.warning(
                    "cannot record which steps a roll-back left behind; only the manifest of the new step has them: %s",
                    error,
                )

    def name_run(self, run: str) -> None:
        """Record the id of the run, which also counts its owners."""
        with self._guard:
            self._write(msgspec.structs.replace(self.record, run=run))

    def forget(self, name: str) -> None:
        """Drop the facts of a deleted save with the next change."""
        self._deleted.add(name)

    def reuse(self, name: str) -> None:
        """Keep the facts of this name, which a new save has now."""
        self._deleted.discard(name)

    def _write(self, record: RunRecord) -> None:
        """Replace the record. Another version than the last one that was seen comes from an earlier write.

        That write was reported as failed: by this process after an error, or by a former owner that had lost the run.
        """
        number, deleted = self.record.number + 1, frozenset(self._deleted)
        record = msgspec.structs.replace(record.without_saves(deleted), number=number, writer=self._writer)
        record = record if self._link is None else record.with_link(self._link)
        for _ in range(_TRIES):
            if not self._is_remote:
                self._check_owner()
            version = self._backend.swap_record(self._path, encode_record(record), self._version)
            if not self._is_remote:  # where a new owner has replaced the record before
                self._check_owner()  # a new owner may have read the record without this change
            if version is not None:
                self.record, self._version = record, version
                self._deleted -= deleted
                return
            stored = self._backend.read_record(self._path)
            if self._is_remote:
                self._refuse_former_owner(stored)
            self._version = None if stored is None else stored.version
        raise DirectoryLockedError(f"{self._path}: another process keeps changing it, although this one owns the run")

    def _refuse_former_owner(self, stored: StoredRecord | None) -> None:
        """Raise DirectoryLockedError if another process has replaced the record: it owns the run."""
        writer = "nobody: it was removed"
        with contextlib.suppress(CorruptCheckpointError, FormatVersionError):
            if stored is not None:
                writer = decode_record(stored.data, self._path).writer
                if writer == self._writer:  # by an earlier try of this process that seemed to fail
                    return
        raise DirectoryLockedError(
            f"{self._directory}: this job owned it, but the record is from {writer}, another owner: this job was "
            "considered dead (was this machine asleep, or the storage unreachable, for a minute?). It saves nothing "
            "more, because the other one may have continued from its last step: start it again to continue from the "
            "current state"
        )
