"""Notes on committed steps: pins, metrics attached later, and damage.

Notes are the lines of `notes.jsonl` in the run directory. Each line has a number and a digest, so that a lost note is
detected. `NoteBook` appends notes for the owner, and `Notes` reads them. `DamageReports` collects what restores find
out about damaged steps until the owner writes it down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from jaxckpt_train.errors import CorruptCheckpointError, DirectoryLockedError, StorageError
from jaxckpt_train.run.entry import Entry, Restored, RollBack, count_of, parse_step_name
from jaxckpt_train.store.backends.base import Backend, sync_directory
from jaxckpt_train.store.files import read_ends
from jaxckpt_train.store.manifest import NOT_JSON, metrics_from_json

_log = logging.getLogger("jaxckpt_train")
_SEAL = b',"xxh3_64":"'
_END = b'"}'
_CUT = b"~"  # ends a line that a crash cut; a complete note ends with a brace
_ONE_NOTE = 1024  # bytes, approximately; a crash leaves fewer zeros than that
_SECTOR = 512  # bytes; a disk writes a sector completely or not at all
_LINE = re.compile(rb"[^\n]+")
_ZEROS = re.compile(rb"\0+")
NOTES_NAME = "notes.jsonl"
MOST_BYTES = 64 << 20
"""Enough for more than 300,000 notes. Of a larger file, only the beginning and the end are read."""


class DamageReports:
    """The latest finding about each save: damaged, or intact again.

    Attributes:
        compared: the saves that the last restore verified completely or found damaged.
    """

    def __init__(self) -> None:
        self.compared: frozenset[tuple[str, datetime.datetime]] = frozenset()
        self._found: dict[tuple[str, datetime.datetime], tuple[Entry, str | None]] = {}
        self._guard = threading.RLock()

    def add(self, restored: Restored) -> None:
        """Add the findings of a restore: damaged steps that it skipped, and a step that is intact again."""
        entry = restored.entry
        with self._guard:
            self._found.pop(entry.identity, None)  # an earlier finding may date from an incomplete copy of the step
            if restored.is_mended:
                self._found[entry.identity] = (entry, None)
            proven = [each for each in restored.skipped if each.is_proven]
            for each in proven:
                if each.entry.damaged is None:
                    self._found[each.entry.identity] = (each.entry, each.problem)
            whole = {entry.identity} if restored.is_verified else set()
            self.compared = frozenset({each.entry.identity for each in proven} | whole)

    def damaged(self, entry: Entry, problem: str) -> None:
        """Add a step that is proven to be damaged."""
        with self._guard:
            self._found[entry.identity] = (entry, problem)

    def write(self, write: Callable[[Entry, str | None], bool]) -> list[tuple[Entry, str]]:
        """Write all findings, and return the steps that are set aside now, with the reasons.

        Args:
            write: writes one finding, and returns whether it did. If the disk refuses, the finding is dropped with a
                warning: a later restore finds the damage again.
        """
        set_aside = []
        for entry, problem in iter(self._take, None):
            try:
                is_written = write(entry, problem)
            except StorageError as error:
                _log.warning("step %d could not be set aside: %s", entry.step, error)
                continue
            if is_written and problem is not None:
                _log.warning(
                    "step %d is set aside as damaged: %s is kept on disk but no longer listed", entry.step, entry.name
                )
                set_aside.append((entry, problem))
        return set_aside

    def _take(self) -> tuple[Entry, str | None] | None:
        """Remove and return one finding: the entry and the problem, None if it is intact. None if nothing is left."""
        with self._guard:
            if not self._found:
                return None
            entry, problem = self._found.pop(next(iter(self._found)))
        return entry, None if problem is None else _as_text(problem)


def _as_text(problem: str) -> str:
    """Escape what is not valid Unicode, such as parts of a path."""
    return problem.encode("utf-8", "backslashreplace").decode("utf-8")


def encode_note(note: Mapping[str, Any], number: int, *, after_cut: bool) -> bytes:
    """Encode one note as its own line.

    Args:
        note: its fields.
        number: the number of the note before, plus one.
        after_cut: whether the file ends with a line that a crash cut, which has to be ended first.
    """
    text = msgspec.json.encode({"number": number, **note})
    return (_CUT + b"\n" if after_cut else b"\n") + sealed(text) + b"\n"


def sealed(text: bytes) -> bytes:
    """Add a digest to a JSON object, as its last key."""
    return text[:-1] + _SEAL + _digest(text) + _END


class NoteLines:
    """The lines of a file of notes.

    Attributes:
        notes: all readable notes, in the order of the file.
        number: the number of the last note, which is the count of notes if none is missing.
        problem: why an acknowledged note may be missing; None: none is, or a later note settled it.
        is_cut: whether the file ends within a line.
        is_there: whether the file exists.
    """

    def __init__(self, pieces: Sequence[tuple[int, bytes]], path: str) -> None:
        """Decode `pieces`: the whole file, or its beginning and end; each with its byte offset."""
        self.notes: list[dict[str, Any]] = []
        self.number, self.is_cut, self.is_there = 0, False, bool(pieces)
        self.problem: str | None = None
        self._path = path
        self._unreadable: str | None = None
        for start, data in pieces:
            if start:
                self._doubt(f"{path}: too large to read completely: the part before byte {start} was left out")
            for found in _LINE.finditer(data):
                self._add(found[0], start + found.start(), data[found.end() : found.end() + 2])
        self._doubt(self._unreadable)

    def take_notes(self) -> list[dict[str, Any]]:
        """Return the notes and drop them from this object."""
        notes, self.notes = self.notes, []
        return notes

    def missing_of(self, known: int) -> str | None:
        """Return what is wrong if fewer than `known` notes were found; None: nothing."""
        if self.number >= known:
            return None
        return f"{self._path}: expected at least {known} notes, as the manifest of a step states, found {self.number}"

    def _doubt(self, problem: str | None) -> None:
        self.problem = self.problem or problem

    def _add(self, line: bytes, at: int, after: bytes) -> None:
        note = _note_of(line)
        self.is_cut = note is None and not after
        if note is not None:
            self._add_note(note)
        elif not _is_cut(line, at, after):
            self._unreadable = self._unreadable or f"{self._path}: damaged at byte {at}: expected a note"

    def _add_note(self, note: dict[str, Any]) -> None:
        """Add a note. If it has the next number, no note was lost before it, whatever the bytes between contain."""
        number = _number_of(note)
        if isinstance(note.get("held"), list):  # it settles all earlier doubts
            self.number, self.problem = number or self.number + 1, None
        else:
            if number != self.number + 1:
                hole = f"{self._path}: expected note {self.number + 1}, found note {number or 'without a number'}"
                self._doubt(self._unreadable or hole)
            self.number = max(self.number, number or 0)
        self._unreadable = None
        self.notes.append(note)


def _number_of(note: Mapping[str, Any]) -> int | None:
    return count_of(note.get("number")) or None


def _note_of(line: bytes) -> dict[str, Any] | None:
    """Decode the note in a line, also if the line break before or after it was altered; None: no note."""
    if _SEAL not in line or b"\0" in line:  # a quick check: the line may be very long, or there may be many
        return None
    for part in (slice(None), slice(-1), slice(1, None)):
        text = line[part]
        body, seal, end = text.rpartition(_SEAL)
        if not (seal and end.endswith(_END) and end == _digest(body + b"}") + _END):
            continue
        try:
            return msgspec.json.decode(body + b"}", type=dict[str, Any])
        except NOT_JSON:
            continue
    return None


def _is_cut(line: bytes, at: int, after: bytes) -> bool:
    """Whether a crash, rather than damage, may have left this line.

    The part of a note that never reached the disk is missing or zero, up to the end of the note or of a sector. The
    next owner may have ended such a line, or tried to.

    Args:
        line: a line that is not a note.
        at: its byte offset in the file.
        after: the two bytes after it, fewer at the end of the file. A note ends with a line break, and an empty line
            precedes the next one.
    """
    has_no_end = line.endswith(_CUT) or after not in (b"\n", b"\n\n")
    if b"\0" not in line:
        return has_no_end
    may_end = (b"", _CUT) if has_no_end else (_CUT,)
    if len(line) >= _ONE_NOTE:
        return False
    ends = [found.end() for found in _ZEROS.finditer(line)]
    return all((at + end) % _SECTOR == 0 or line[end : end + 1] in may_end for end in ends)


def _digest(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()


class NoteBook:
    """Appends notes, from any thread of the run's owner.

    Each note is written after the previous one is on the disk, so a power cut can lose only the last one.

    Attributes:
        number: the number of the last note that is certainly on the disk; the manifest of each save records it.
    """

    def __init__(self, backend: Backend, directory: str, check: Callable[[], None] | None = None) -> None:
        self._backend, self._directory, self._path = backend, directory, f"{directory}/{NOTES_NAME}"
        self._check = check
        self._guard = threading.Lock()
        self._is_cut: bool | None = None  # whether the file ends within a line; None: unknown
        self.number = 0

    def settle(self, notes: Notes, entries: Sequence[Entry]) -> None:
        """Continue after the notes that the owner has read.

        If a note may be missing, add one that lists all current steps: retention keeps those, but no later ones.
        """
        with self._guard, contextlib.suppress(StorageError):  # the next `add` tries again
            self.number, self._is_cut = notes.known, None
            self._is_cut = self._go_on_after(notes.lines)
        if notes.problem is None:
            return
        _log.warning(
            "%s; the current %d steps may be pinned and are therefore not deleted: call pin(step) to keep a step, and "
            "pin(step, False) to allow its deletion",
            notes.problem,
            len(entries),
        )
        try:
            self.add({"held": [entry.name for entry in entries]})
        except StorageError as error:
            _log.warning("all steps that the next process finds will be kept, too: %s", error)

    def add(self, note: Mapping[str, Any]) -> None:
        """Add one note. When this returns, the note is on the disk, and the next owner will read it.

        Raises:
            StorageError: the file system refused.
            DirectoryLockedError: the run belongs to another process now. The note may have been written or not.
        """
        with self._guard:
            is_cut, self._is_cut = self._is_cut, None  # unknown until the append has succeeded
            if is_cut is None:
                is_cut = self._go_on_after(_read(self._backend, self._directory)[0])
            self._check_owner()  # the run may have been taken over while this thread waited for the guard
            self._backend.append(self._path, encode_note(note, self.number + 1, after_cut=is_cut))
            self._backend.sync(self._path)
            sync_directory(self._backend, self._directory)  # it may be the first note
            self._check_owner()  # another process may have taken over meanwhile, and read the notes without this one
            self.number, self._is_cut = self.number + 1, False

    def _check_owner(self) -> None:
        if self._check is not None:
            self._check()

    def note_roll_back(self, roll_back: RollBack) -> None:
        """Note what was left behind. The manifest of the save says it too, so a refusal is only a warning."""
        try:
            self.add({"sequence": roll_back.sequence, "left_behind": sorted(roll_back.names)})
        except (StorageError, DirectoryLockedError) as error:
            _log.warning(
                "cannot note which steps a roll-back left behind; only the manifest of the new step records them: %s",
                error,
            )

    def _go_on_after(self, lines: NoteLines | None) -> bool:
        """Sync the notes that were read, so that the next one may follow; return whether a cut line ends the file.

        An unreadable file is treated as cut. If the next number is wrong then, a reader detects it.
        """
        if lines is None:
            return True
        if lines.is_there:
            self._backend.sync(self._path)
            sync_directory(self._backend, self._directory)
            self.number = max(self.number, lines.number)
        return lines.is_cut


class Notes:
    """The content of all notes of a run.

    Attributes:
        problem: why a note may be missing, so that it is unknown which steps are pinned. None: all notes are present,
            or a later note lists the steps to keep.
        roll_back: the last roll-back that was noted.
        lines: the lines of the file; None: it could not be read.
        known: how many notes there are according to the manifests of later saves.
    """

    def __init__(self, backend: Backend, directory: str) -> None:
        self._metrics: dict[object, dict[str, float]] = {}
        self._pinned: set[int] = set()
        self._damaged: dict[object, str | None] = {}
        self._held: set[str] = set()
        self._unsynced: set[object] = set()
        self.roll_back = RollBack()
        self.lines, self.problem = _read(backend, directory)
        self.known = 0
        for note in self.lines.take_notes() if self.lines else ():
            self.add(note)

    def expect(self, known: int) -> None:
        """Record that a manifest states `known` notes, and set `problem` if there are fewer."""
        self.known = known
        if self.lines is not None:
            self.problem = self.problem or self.lines.missing_of(known)

    def add(self, note: Mapping[str, Any]) -> None:
        """Apply one note."""
        self._add_of_run(note)
        step = note.get("step")
        if not isinstance(step, int):
            return
        if note.get("pin") is True:
            self._pinned.add(step)
        elif note.get("pin") is False:
            self._pinned.discard(step)
            self._held = {name for name in self._held if (parse_step_name(name) or (None,))[0] != step}
        name, saved = note.get("name"), note.get("saved")
        # The name of a deleted step may be reused for another save.
        of = (name, saved) if isinstance(name, str) and isinstance(saved, str) else step
        if "damaged" in note and isinstance(name, str):
            self._damaged[of] = self._damaged[name] = note["damaged"] if isinstance(note["damaged"], str) else None
        if note.get("unsynced") is True:
            self._unsynced.add(of)
        if isinstance(note.get("metrics"), dict):
            self._metrics.setdefault(of, {}).update(metrics_from_json(note["metrics"]))

    def _add_of_run(self, note: Mapping[str, Any]) -> None:
        left, held, sequence = note.get("left_behind"), note.get("held"), note.get("sequence")
        if isinstance(left, list) and isinstance(sequence, int):
            self.roll_back = RollBack(sequence, frozenset(name for name in left if isinstance(name, str)))
        if isinstance(held, list):
            self._held |= {name for name in held if isinstance(name, str)}

    def is_pinned(self, step: int) -> bool:
        """Whether the step is pinned. A pin applies to every save of the step."""
        return step in self._pinned

    def added_to(self, entry: Entry) -> Entry:
        """Return the entry with its notes applied."""
        of = (entry.name, entry.time.isoformat())
        metrics = {**(entry.metrics or {}), **self._metrics.get(entry.step, {}), **self._metrics.get(of, {})}
        # Only the manifest has the time of a save. If it is unreadable, the latest damage note for the name applies.
        is_pinned, damaged = self.is_pinned(entry.step), self._damaged.get(of if entry.has_lineage else entry.name)
        is_held = not entry.is_certain or self.problem is not None or entry.name in self._held
        entry = dataclasses.replace(entry, is_held=is_held, is_unsynced=of in self._unsynced)
        return dataclasses.replace(entry, metrics=metrics or None, pinned=is_pinned, damaged=damaged)


def noted(entry: Entry, subject: Entry, note: Mapping[str, Any]) -> Entry:
    """Return the entry after a note about `subject`. A pin applies to all generations, other notes to one."""
    if "pin" in note and entry.step == subject.step:
        is_held = entry.is_held and (note["pin"] or not entry.is_certain)
        return dataclasses.replace(entry, pinned=bool(note["pin"]), is_held=is_held)
    if "metrics" in note and entry.name == subject.name:
        return dataclasses.replace(entry, metrics={**(entry.metrics or {}), **metrics_from_json(note["metrics"])})
    if "unsynced" in note and entry.name == subject.name:
        return dataclasses.replace(entry, is_unsynced=True)
    if "damaged" in note and entry.name == subject.name:
        return dataclasses.replace(entry, damaged=note["damaged"])
    return entry


def _read(backend: Backend, directory: str) -> tuple[NoteLines | None, str | None]:
    """Read the notes. Returns no lines if there is no file, None if it is unreadable, and why a note may be missing."""
    try:
        lines = NoteLines(read_ends(backend, directory, NOTES_NAME, MOST_BYTES), f"{directory}/{NOTES_NAME}")
    except (StorageError, CorruptCheckpointError) as error:
        if getattr(error, "errno", None) != errno.ENOENT:
            return None, str(error)
        lines = NoteLines((), f"{directory}/{NOTES_NAME}")
    return lines, lines.problem
