"""The lines of the notes of a run: each has a number and a digest of itself, so that none is lost in silence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from jaxckpt_train.store.manifest import NOT_JSON

_SEAL = b',"xxh3_64":"'
_END = b'"}'
_CUT = b"~"  # ends a line that a crash left, where a note ends with a brace
_ONE_NOTE = 1024  # bytes, about; a crash leaves fewer zeros than that
_SECTOR = 512  # bytes; a disk writes all of one, or nothing
_MOST_NOTES = 1 << 53
_LINE = re.compile(rb"[^\n]+")
_ZEROS = re.compile(rb"\0+")


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


def count_of(value: object) -> int | None:
    """A number of notes, as files tell it; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MOST_NOTES else None


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
