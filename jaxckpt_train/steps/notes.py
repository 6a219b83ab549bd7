"""Notes on committed steps: pins, metrics of later evaluations, and what is damaged; what they say, and the adding."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxckpt_train.errors import CorruptCheckpointError, DirectoryLockedError, StorageError
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.lineage import RollBack
from jaxckpt_train.steps.note_lines import NoteLines, encode_note
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.plain_files import read_ends
from jaxckpt_train.store.stored_metrics import metrics_from_json

NOTES_NAME = "notes.jsonl"
MOST_BYTES = 64 << 20
"""More than 300,000 notes take; of a larger file, which each start would have to read, both ends are read."""
_log = logging.getLogger("jaxckpt_train")


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
