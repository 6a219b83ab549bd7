"""Lines of notes: what crashes leave is not reported as damage, and damage is not mistaken for a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxckpt_train.errors import DirectoryLockedError
from jaxckpt_train.run.annotations import NOTES_NAME, NoteBook, NoteLines, encode_note, sealed
from jaxckpt_train.run.entry import RollBack, count_of
from jaxckpt_train.store.backends.memory import MemoryBackend

SECTOR = 512


def read(data: bytes) -> NoteLines:
    return NoteLines([(0, data)], "notes")


def added(data: bytes, step: int) -> bytes:
    """The file after the owner adds a note."""
    lines = read(data)
    return data + encode_note({"step": step, "pin": True}, lines.number + 1, after_cut=lines.is_cut)


def steps_of(data: bytes) -> list[int]:
    return [note["step"] for note in read(data).notes]


def torn(before: bytes, after: bytes) -> Iterator[bytes]:
    """What a power cut may leave of an append: truncated or zeroed from any byte on, or with a sector missing."""
    for end in range(len(before), len(after) + 1):
        yield after[:end]
        yield after[:end] + bytes(len(after) - end)
    for start in range(len(before) // SECTOR * SECTOR, len(after), SECTOR):
        first = max(start, len(before))
        yield after[:first] + bytes(min(len(after), start + SECTOR) - first) + after[start + SECTOR :]


@pytest.fixture(params=[0, SECTOR - 60])
def one_pin(request: pytest.FixtureRequest) -> bytes:
    """A note of step 1, at the start of the file or placed so that a sector ends within the next note."""
    before = b""
    if request.param:
        empty = len(encode_note({"pad": ""}, 1, after_cut=False))
        before = encode_note({"pad": "x" * (request.param - empty - len(added(b"", 1)))}, 1, after_cut=False)
    data = added(before, 1)
    assert len(data) == (request.param or len(added(b"", 1)))
    return data


def pins_of(data: bytes) -> list[int]:
    return [note["step"] for note in read(data).notes if "step" in note]


def test_two_torn_appends_hide_no_note(one_pin: bytes) -> None:
    count = 0
    for first in torn(one_pin, added(one_pin, 2)):
        assert read(first).problem is None
        assert pins_of(first) in ([1], [1, 2])
        for second in torn(first, added(first, 3)):
            count += 1
            whole = added(second, 4)
            assert (read(second).problem, read(whole).problem) == (None, None), (first, second)
            assert pins_of(whole)[0] == 1
            assert pins_of(whole)[-1] == 4
            assert [note["number"] for note in read(whole).notes] == [*range(1, read(whole).number + 1)]
    assert count > 10_000


def test_overwritten_line_is_reported_as_missing() -> None:
    data = b""
    for step in range(1, 6):
        data = added(data, step)
    length = len(data) // 5
    for lost in range(4):
        for place in (b"", b"\n", bytes(length), b"\n" + b"x" * length, b"~\n", b"\n" + bytes(30) + b"\n"):
            found = read(data[: lost * length] + place + data[(lost + 1) * length :])
            assert found.problem is not None, (lost, place)


def test_garbage_between_complete_lines_is_ignored() -> None:
    first, second = encode_note({"step": 1}, 1, after_cut=False), encode_note({"step": 2}, 2, after_cut=False)
    for rubbish in (b"x\n\n", bytes(2000), b"\n\n\n", b"\xff\n", b'{"step":7,"number":9}\n'):
        found = read(first + rubbish + second)
        assert (found.problem, steps_of(first + rubbish + second), found.number) == (None, [1, 2], 2)


def test_zeroed_bytes_within_last_note_are_damage() -> None:
    data = added(added(b"", 1), 2)
    start = len(added(b"", 1)) + 1
    for at in range(start, len(data) - 2):
        for length in (1, 30):
            damaged = data[:at] + bytes(min(length, len(data) - 1 - at)) + data[at + length :]
            assert len(damaged) <= len(data)
            if damaged.endswith(b"\n"):
                assert read(damaged).problem is not None, damaged


def test_more_zeros_than_note_has_bytes_are_damage() -> None:
    assert read(added(b"", 1) + bytes(900)).problem is None
    assert "damaged at byte 63" in str(read(added(b"", 1) + bytes(2000)).problem)


def test_json_without_checksum_is_not_a_note() -> None:
    for text in (b'{"step":1,"pin":true}', b'{"number":2,"step":1,"pin":true}', b'{"event":"save"}'):
        data = added(b"", 1) + b"\n" + text + b"\n"
        assert (steps_of(data), read(data).number) == ([1], 1)
        assert "damaged at byte" in str(read(data).problem)
        assert read(added(data, 2)).problem is None, "no number is missing"
        assert "damaged at byte" in str(read(data + encode_note({"step": 3}, 3, after_cut=False)).problem)


@pytest.mark.parametrize("text", [b"}", b"x}", b'{"step":2,}', b'["step",2}', b'{"step":"\xff"}', b"[" * 5000 + b"}"])
def test_invalid_json_with_checksum_is_not_a_note(text: bytes) -> None:
    data = added(b"", 1) + b"\n" + sealed(text) + b"\n"
    assert steps_of(data) == [1]
    assert "damaged at byte" in str(read(data + b"\n").problem)


def test_explicit_hold_settles_earlier_lines() -> None:
    data = added(added(b"", 1), 2)[10:]
    assert read(data).problem is not None
    settled = data + encode_note({"held": []}, 3, after_cut=False)
    assert (read(settled).problem, read(settled).number) == (None, 3)
    assert read(added(settled, 4)).problem is None
    assert read(added(added(settled, 4), 5).replace(b'"step":4', b'"step":7')).problem is not None


@pytest.mark.parametrize("value", [None, True, -1, 0.5, "3", [], 1 << 53, 10**400])
def test_invalid_counts_are_ignored(value: object) -> None:
    assert count_of(value) is None


@pytest.mark.parametrize("value", [None, True, 0, -1, 0.5, "3", [], 1 << 53])
def test_invalid_note_number_is_reported(value: object) -> None:
    data = encode_note({"step": 1, "number": value}, 1, after_cut=False)
    assert (steps_of(data), read(data).number) == ([1], 0)
    assert "expected note 1" in str(read(data).problem)


def test_missing_half_is_reported_until_settled() -> None:
    first, last = added(b"", 1), encode_note({"step": 9}, 9, after_cut=False)
    found = NoteLines([(0, first), (10**9, b"half a line\n" + last)], "notes")
    assert found.problem is not None
    assert "byte 1000000000 " in found.problem
    assert (len(found.notes), found.number) == (2, 9)
    last += encode_note({"held": ["a"]}, 10, after_cut=False)
    assert NoteLines([(0, first), (10**9, last)], "notes").problem is None


@pytest.mark.parametrize("line", [b"x\n", b"{\n", b'{"a":1}\n', b',"xxh3_64":"\n'])
def test_unsealed_lines_are_not_decoded(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start reads all lines, and a failed decoding takes seven times as long as the test of a line."""
    decode, decoded = msgspec.json.decode, list[bytes]()

    def noting(text: bytes, **more: Any) -> Any:
        decoded.append(text)
        return decode(text, **more)

    monkeypatch.setattr(msgspec.json, "decode", noting)
    found = read(added(b"", 1) + line * 1000)
    assert "damaged at byte" in str(found.problem)
    assert ([note["step"] for note in found.notes], len(decoded)) == ([1], 1)


def test_former_owner_adds_no_note() -> None:
    backend = MemoryBackend()
    backend.make_directory("/run", parents=True, sync=True)
    NoteBook(backend, "/run").add({"step": 1})
    before = backend.open("/run", NOTES_NAME, direct=False).size

    def refuse() -> None:
        raise DirectoryLockedError("held by another")

    late = NoteBook(backend, "/run", refuse)
    with pytest.raises(DirectoryLockedError):
        late.add({"step": 2})
    late.note_roll_back(RollBack(3, frozenset()))  # this only logs a warning
    assert backend.open("/run", NOTES_NAME, direct=False).size == before
