"""Notes on committed steps: pins, metrics of later evaluations, and what is damaged; each with a digest of its own."""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from jaxckpt_train.checkpoint_metadata import metrics_from_json
from jaxckpt_train.errors import StorageError
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.lineage import RollBack
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.plain_files import read_whole

NOTES_NAME = "notes.jsonl"
_SEAL = b',"xxh3_64":"'
_END = b'"}'
_ONE_NOTE = 1024  # bytes, about; what is lost of one that a crash cut is less than that
_log = logging.getLogger("jaxckpt_train")


def add_note(backend: Backend, directory: str, note: Mapping[str, Any]) -> None:
    """As `append_note`; when this returns it is on the disk."""
    append_note(backend, directory, note)
    backend.sync(f"{directory}/{NOTES_NAME}")
    sync_directory(backend, directory)  # it may be the first note


def settle(backend: Backend, directory: str, notes: Notes, entries: Sequence[Entry]) -> None:
    """If notes are damaged, write down which steps there are now: those are held, and none that is saved later."""
    if notes.problem is None:
        return
    _log.warning(
        "%s; the %d steps that are there now are not deleted, as they may be pinned: pin(step) what must stay, and "
        "pin(step, False) what may go",
        notes.problem,
        len(entries),
    )
    try:
        add_note(backend, directory, {"held": [entry.name for entry in entries]})
    except StorageError as error:
        _log.warning("all steps that the next process finds are held, too: %s", error)


def note_roll_back(backend: Backend, directory: str, roll_back: RollBack) -> None:
    """Write down what was left behind; the manifest of the save says so, too, so a refusal is no failure of it."""
    try:
        add_note(backend, directory, {"sequence": roll_back.sequence, "left_behind": sorted(roll_back.names)})
    except StorageError as error:
        _log.warning("what a roll-back has left behind is told by one manifest only: %s", error)


def append_note(backend: Backend, directory: str, note: Mapping[str, Any]) -> None:
    """Add one note, on a line of its own also if a crash has left half a line before it.

    Raises:
        StorageError: the file system refused.
    """
    backend.append(f"{directory}/{NOTES_NAME}", b"\n" + _sealed(msgspec.json.encode(note)) + b"\n")


class Notes:
    """What was noted of the steps of a run.

    Attributes:
        problem: why some of it may be missing, so that nobody knows which steps are pinned; None: all is there, or what
            was there then is held.
        roll_back: what was left behind by the last one that was noted.
    """

    def __init__(self, backend: Backend, directory: str) -> None:
        self._metrics: dict[object, dict[str, float]] = {}
        self._pinned: set[int] = set()
        self._damaged: dict[object, str | None] = {}
        self._held: set[str] = set()
        self.roll_back = RollBack()
        self.problem: str | None = None
        for note in _read(backend, directory):
            if isinstance(note, str):
                self.problem = self.problem or note
            else:
                self._add(note)

    def _add(self, note: Mapping[str, Any]) -> None:
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
        if isinstance(note.get("metrics"), dict):
            self._metrics.setdefault(of, {}).update(metrics_from_json(note["metrics"]))

    def _add_of_run(self, note: Mapping[str, Any]) -> None:
        left, held, sequence = note.get("left_behind"), note.get("held"), note.get("sequence")
        if isinstance(left, list) and isinstance(sequence, int):
            self.roll_back = RollBack(sequence, frozenset(name for name in left if isinstance(name, str)))
        if isinstance(held, list):
            self._held |= {name for name in held if isinstance(name, str)}
            self.problem = None  # of what came before

    def added_to(self, entry: Entry) -> Entry:
        """The entry with what was noted of it."""
        of = (entry.name, entry.time.isoformat())
        metrics = {**(entry.metrics or {}), **self._metrics.get(entry.step, {}), **self._metrics.get(of, {})}
        # When a save was, only its manifest tells: one that cannot be read has what was said last of that name.
        is_pinned, damaged = entry.step in self._pinned, self._damaged.get(of if entry.tells_lineage else entry.name)
        is_held = not entry.is_certain or self.problem is not None or entry.name in self._held
        return dataclasses.replace(entry, metrics=metrics or None, pinned=is_pinned, damaged=damaged, is_held=is_held)


def noted(entry: Entry, subject: Entry, note: Mapping[str, Any]) -> Entry:
    """The entry after a note of `subject`: a pin is of all generations of a step, all else of one."""
    if "pin" in note and entry.step == subject.step:
        is_held = entry.is_held and (note["pin"] or not entry.is_certain)
        return dataclasses.replace(entry, pinned=bool(note["pin"]), is_held=is_held)
    if "metrics" in note and entry.name == subject.name:
        return dataclasses.replace(entry, metrics={**(entry.metrics or {}), **metrics_from_json(note["metrics"])})
    if "damaged" in note and entry.name == subject.name:
        return dataclasses.replace(entry, damaged=note["damaged"])
    return entry


def _read(backend: Backend, directory: str) -> Iterator[dict[str, Any] | str]:
    """The notes, and as text what keeps others from being read. What a crash cut short was never acknowledged."""
    path = f"{directory}/{NOTES_NAME}"
    try:
        lines = read_whole(backend, directory, NOTES_NAME, limit=None).tobytes().split(b"\n")
    except StorageError as error:
        if error.errno != errno.ENOENT:
            yield str(error)
        return
    for number, line in enumerate(lines, 1):
        found = _note_of(line) if line else None
        if found is not None:
            yield found
        elif line and _is_cut(line, lines[number:]):
            _log.info("%s: line %d was cut short by a crash, and is left out", path, number)
        elif line:
            yield f"{path}: line {number} is damaged: expected the note that it was written as"


def _is_cut(line: bytes, after: list[bytes]) -> bool:
    """Whether a crash may have left this: a whole note ends with a line break, and an empty line comes before the next.

    What never reached the disk of a note may be zeros, but not as many as a block that was lost later.
    """
    return len(line) < _ONE_NOTE if b"\0" in line else not after or after[0] != b""


def _note_of(line: bytes) -> dict[str, Any] | None:
    """The note in a line, also if the line break before or after it was changed; None: there is none."""
    for text in (line, line[:-1], line[1:]):
        body, seal, end = text.rpartition(_SEAL)
        try:
            note = msgspec.json.decode(body + b"}" if seal else text, type=dict[str, Any])
        except NOT_JSON:
            continue
        if not seal or end == _digest(body + b"}") + _END:
            return note
    return None


def _sealed(text: bytes) -> bytes:
    return text[:-1] + _SEAL + _digest(text) + _END


def _digest(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()
