"""Notes on committed steps: pins, metrics of later evaluations, and what is damaged; what they say, and the adding.

The lines of the notes of a run: each has a number and a digest of itself, so that none is lost in silence.

What restores have found out about steps, until the owner writes it down: which are damaged, which whole again.
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
_CUT = b"~"  # ends a line that a crash left, where a note ends with a brace
_ONE_NOTE = 1024  # bytes, about; a crash leaves fewer zeros than that
_SECTOR = 512  # bytes; a disk writes all of one, or nothing
_LINE = re.compile(rb"[^\n]+")
_ZEROS = re.compile(rb"\0+")
NOTES_NAME = "notes.jsonl"
MOST_BYTES = 64 << 20
"""More than 300,000 notes take; of a larger file, which each start would have to read, both ends are read."""


class DamageReports:
    """The last verdict on each save of a step.

    Attributes:
        compared: the saves of which the last restore has compared all bytes, or found wrong ones.
    """

    def __init__(self) -> None:
        self.compared: frozenset[tuple[str, datetime.datetime]] = frozenset()
        self._found: dict[tuple[str, datetime.datetime], tuple[Entry, str | None]] = {}
        self._guard = threading.RLock()

    def add(self, restored: Restored) -> None:
        """Take note of a restore: of steps that are proven to be damaged, and of one that is whole again."""
        entry = restored.entry
        with self._guard:
            self._found.pop(entry.identity, None)  # it may have been looked at while it was being copied here
            if restored.is_mended:
                self._found[entry.identity] = (entry, None)
            proven = [each for each in restored.skipped if each.is_proven]
            for each in proven:
                if each.entry.damaged is None:
                    self._found[each.entry.identity] = (each.entry, each.problem)
            whole = {entry.identity} if restored.is_verified else set()
            self.compared = frozenset({each.entry.identity for each in proven} | whole)

    def damaged(self, entry: Entry, problem: str) -> None:
        """Take note of a step that is proven to be damaged."""
        with self._guard:
            self._found[entry.identity] = (entry, problem)

    def write(self, write: Callable[[Entry, str | None], bool]) -> list[tuple[Entry, str]]:
        """Have all of them written down; those that are set aside now, and why.

        Args:
            write: writes one, and says whether it did. A disk that refuses costs no training: it is found out again.
        """
        set_aside = []
        for entry, problem in iter(self._take, None):
            try:
                is_written = write(entry, problem)
            except StorageError as error:
                _log.warning("step %d could not be set aside: %s", entry.step, error)
                continue
            if is_written and problem is not None:
                told = "stays for you to look at, or to remove, and is not listed any more"
                _log.warning("step %d is set aside as damaged: %s %s", entry.step, entry.name, told)
                set_aside.append((entry, problem))
        return set_aside

    def _take(self) -> tuple[Entry, str | None] | None:
        """One verdict, what is wrong or None for nothing, which is no longer here then; None: there is none."""
        with self._guard:
            if not self._found:
                return None
            entry, problem = self._found.pop(next(iter(self._found)))
        return entry, None if problem is None else _as_text(problem)


def _as_text(problem: str) -> str:
    """It names a path, which may be no text."""
    return problem.encode("utf-8", "backslashreplace").decode("utf-8")


def encode_note(note: Mapping[str, Any], number: int, *, after_cut: bool) -> bytes:
    """What is added to the file for one note, on a line of its own.

    Args:
        note: its fields.
        number: one more than that of the note before.
        after_cut: whether the file ends with a line that a crash has cut, which is ended first.
    """
    text = msgspec.json.encode({"number": number, **note})
    return (_CUT + b"\n" if after_cut else b"\n") + sealed(text) + b"\n"


def sealed(text: bytes) -> bytes:
    """A JSON object with its digest as its last key."""
    return text[:-1] + _SEAL + _digest(text) + _END


class NoteLines:
    """What the lines of a file of notes hold.

    Attributes:
        notes: all that could be read, in the order of the file.
        number: of the last note; as many there are, if none is missing.
        problem: why one may be missing that was acknowledged; None: none is, or it was settled by a later note.
        is_cut: whether the file ends within a line.
        is_there: whether there is a file.
    """

    def __init__(self, pieces: Sequence[tuple[int, bytes]], path: str) -> None:
        """Decode `pieces`, the whole file or both ends of it, each with the byte that it begins at."""
        self.notes: list[dict[str, Any]] = []
        self.number, self.is_cut, self.is_there = 0, False, bool(pieces)
        self.problem: str | None = None
        self._path = path
        self._unreadable: str | None = None
        for start, data in pieces:
            if start:
                self._doubt(f"{path}: too large to be read whole: what lies before byte {start} was left out")
            for found in _LINE.finditer(data):
                self._add(found[0], start + found.start(), data[found.end() : found.end() + 2])
        self._doubt(self._unreadable)

    def take_notes(self) -> list[dict[str, Any]]:
        """The notes, which are not kept here any longer."""
        notes, self.notes = self.notes, []
        return notes

    def missing_of(self, known: int) -> str | None:
        """What is wrong if there were so many notes already; None: nothing."""
        if self.number >= known:
            return None
        return f"{self._path}: expected {known} notes or more, as the manifest of a step says, found {self.number}"

    def _doubt(self, problem: str | None) -> None:
        self.problem = self.problem or problem

    def _add(self, line: bytes, at: int, after: bytes) -> None:
        note = _note_of(line)
        self.is_cut = note is None and not after
        if note is not None:
            self._add_note(note)
        elif not _is_cut(line, at, after):
            self._unreadable = self._unreadable or f"{self._path}: what lies at byte {at} is damaged: expected a note"

    def _add_note(self, note: dict[str, Any]) -> None:
        """The next number tells that no note was lost before it, whatever lies there."""
        number = _number_of(note)
        if isinstance(note.get("held"), list):  # of all that came before, known or not
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
    """The note in a line, also if the line break before or after it was changed; None: there is none."""
    if _SEAL not in line or b"\0" in line:  # perhaps a very long one, or one of very many
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
    """Whether a crash may have left this line, rather than damage.

    Args:
        line: what is no note.
        at: the byte of the file that it begins at.
        after: the two bytes that come next, fewer at the end of the file. A note ends with a line break, and an empty
            line comes before the next one.

    What never reached the disk of a note is missing or zero, up to its end or that of a sector. The next owner may have
    ended such a line, or tried to.
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
    """Adds notes, for the owner of a run and from any of its threads.

    What a note is numbered after is on the disk before it: a power cut takes the last one only.

    Attributes:
        number: of the last note that is on the disk for certain; the manifest of each save holds it.
    """

    def __init__(self, backend: Backend, directory: str, check: Callable[[], None] = lambda: None) -> None:
        self._backend, self._directory, self._path = backend, directory, f"{directory}/{NOTES_NAME}"
        self._check = check
        self._guard = threading.Lock()
        self._is_cut: bool | None = None  # whether the file ends with half a line; None: not known
        self.number = 0

    def settle(self, notes: Notes, entries: Sequence[Entry]) -> None:
        """Go on after these notes, read by the owner.

        If one may be missing, write down which steps there are now: those are held, and none that is saved later.
        """
        with self._guard, contextlib.suppress(StorageError):  # the next note tries it again
            self.number, self._is_cut = notes.known, None
            self._is_cut = self._go_on_after(notes.lines)
        if notes.problem is None:
            return
        _log.warning(
            "%s; the %d steps that are there now are not deleted, as they may be pinned: pin(step) what must stay, and "
            "pin(step, False) what may go",
            notes.problem,
            len(entries),
        )
        try:
            self.add({"held": [entry.name for entry in entries]})
        except StorageError as error:
            _log.warning("all steps that the next process finds are held, too: %s", error)

    def add(self, note: Mapping[str, Any]) -> None:
        """Add one note; when this returns it is on the disk, and whoever owns the run next will read it.

        Raises:
            StorageError: the file system refused.
            DirectoryLockedError: `check`, that the run is this process's own, raised it; the note may be there or not.
        """
        with self._guard:
            is_cut, self._is_cut = self._is_cut, None  # until it is known how this ends
            if is_cut is None:
                is_cut = self._go_on_after(_read(self._backend, self._directory)[0])
            self._check()  # who was made to wait may own it no more
            self._backend.append(self._path, encode_note(note, self.number + 1, after_cut=is_cut))
            self._backend.sync(self._path)
            sync_directory(self._backend, self._directory)  # it may be the first note
            self._check()  # while that took its time, another may have taken over, and read the notes without this one
            self.number, self._is_cut = self.number + 1, False

    def note_roll_back(self, roll_back: RollBack) -> None:
        """Write down what was left behind; the manifest of the save says so, too, so a refusal is no failure of it."""
        try:
            self.add({"sequence": roll_back.sequence, "left_behind": sorted(roll_back.names)})
        except (StorageError, DirectoryLockedError) as error:
            _log.warning("what a roll-back has left behind is told by one manifest only: %s", error)

    def _go_on_after(self, lines: NoteLines | None) -> bool:
        """Make durable what was read, so that the next number may follow it; whether half a line is at its end.

        Where nothing can be read, there may be; and if the number is not the next one, whoever reads it is told so.
        """
        if lines is None:
            return True
        if lines.is_there:
            self._backend.sync(self._path)
            sync_directory(self._backend, self._directory)
            self.number = max(self.number, lines.number)
        return lines.is_cut


class Notes:
    """What was noted of the steps of a run.

    Attributes:
        problem: why some of it may be missing, so that nobody knows which steps are pinned; None: all is there, or what
            was there then is held.
        roll_back: what was left behind by the last one that was noted.
        lines: how the file ends; None: it cannot be read.
        known: how many notes there are, as the manifests of later saves tell.
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
        """Take note that there were so many already when a step was saved."""
        self.known = known
        if self.lines is not None:
            self.problem = self.problem or self.lines.missing_of(known)

    def add(self, note: Mapping[str, Any]) -> None:
        """Take note of one more."""
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
        # A name may be given again, to another save.
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
        """Whether each save of this step is, also of one whose earlier saves are lost."""
        return step in self._pinned

    def added_to(self, entry: Entry) -> Entry:
        """The entry with what was noted of it."""
        of = (entry.name, entry.time.isoformat())
        metrics = {**(entry.metrics or {}), **self._metrics.get(entry.step, {}), **self._metrics.get(of, {})}
        # When a save was, only its manifest tells: one that cannot be read has what was said last of that name.
        is_pinned, damaged = self.is_pinned(entry.step), self._damaged.get(of if entry.tells_lineage else entry.name)
        is_held = not entry.is_certain or self.problem is not None or entry.name in self._held
        entry = dataclasses.replace(entry, is_held=is_held, is_unsynced=of in self._unsynced)
        return dataclasses.replace(entry, metrics=metrics or None, pinned=is_pinned, damaged=damaged)


def noted(entry: Entry, subject: Entry, note: Mapping[str, Any]) -> Entry:
    """The entry after a note of `subject`: a pin is of all generations of a step, all else of one."""
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
    """The lines of the notes, none if there is no file, and why a note may be missing."""
    try:
        lines = NoteLines(read_ends(backend, directory, NOTES_NAME, MOST_BYTES), f"{directory}/{NOTES_NAME}")
    except (StorageError, CorruptCheckpointError) as error:
        if getattr(error, "errno", None) != errno.ENOENT:
            return None, str(error)
        lines = NoteLines((), f"{directory}/{NOTES_NAME}")
    return lines, lines.problem
