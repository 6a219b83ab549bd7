"""Notes of a run: damage never removes a pin silently, and a truncated line loses no other note."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxckpt_train.errors import DirectoryLockedError, StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.annotations import NOTES_NAME, NoteBook, NoteLines, Notes
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.image import Image
from tests.nightly.crash.states import crash_state
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import made_run, save_steps, step_path


def pinned(directory: Path) -> tuple[set[int], str | None]:
    notes = Notes(LocalBackend(), str(directory))
    return notes._pinned, notes.problem


def pin(directory: Path, *steps: int, backend: LocalBackend | None = None) -> None:
    """Pin steps as a new owner does."""
    book = NoteBook(backend or LocalBackend(), str(directory))
    for step in steps:
        book.add({"step": step, "name": f"step-{step:010d}", "pin": True})


@pytest.fixture
def two_pins(tmp_path: Path) -> bytes:
    pin(tmp_path, 100, 300)
    return (tmp_path / NOTES_NAME).read_bytes()


def flips(data: bytes) -> Iterator[bytes]:
    """Flip each bit in turn."""
    for at in range(len(data) * 8):
        yield data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def zeros(data: bytes) -> Iterator[bytes]:
    """Overwrite each range of some lengths with zeros."""
    for at in range(len(data)):
        for length in (1, 2, 7, 30, 120, len(data)):
            yield data[:at] + bytes(min(length, len(data) - at)) + data[at + length :]


def truncations(data: bytes) -> Iterator[bytes]:
    """Truncate to each size."""
    yield from (data[:end] for end in range(len(data)))


def wrong_lines(data: bytes) -> Iterator[bytes]:
    """Remove a line, repeat a line, and exchange two lines."""
    lines = [b"\n" + line for line in data.split(b"\n") if line]
    for one in range(len(lines)):
        yield b"\n".join([*lines[:one], *lines[one + 1 :], b""])
        yield b"\n".join([*lines[: one + 1], *lines[one:], b""])
        for other in range(one):
            order = [*lines]
            order[one], order[other] = order[other], order[one]
            yield b"\n".join([*order, b""])


DAMAGE = [flips, zeros, truncations, wrong_lines]


@pytest.mark.parametrize("damage", DAMAGE)
def test_pinned_step_survives_damaged_annotations(tmp_path: Path, damage: Callable[[bytes], Iterator[bytes]]) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        manager.attach_metrics(1, {"a": 0.5})
        manager.pin(2)
        save_steps(manager, 3)
    data, count = (run / NOTES_NAME).read_bytes(), 0

    def kept() -> dict[int, bool]:
        return {entry.step: entry.pinned or entry.is_held for entry in scan(LocalBackend(), str(run))}

    assert kept() == {1: True, 2: True, 3: False}
    for damaged in damage(data):
        count += 1
        (run / NOTES_NAME).write_bytes(damaged)
        found = kept()
        assert (found[1], found[2]) == (True, True), damaged
    assert count > 5
    os.unlink(run / NOTES_NAME)
    assert kept() == {1: True, 2: True, 3: True}


def test_damage_unlike_a_crash_is_detected(tmp_path: Path, two_pins: bytes) -> None:
    reported = count = 0
    for damage in (flips, zeros):
        for data in damage(two_pins):
            (tmp_path / NOTES_NAME).write_bytes(data)
            steps, problem = pinned(tmp_path)
            assert steps <= {100, 300}
            count, reported = count + 1, reported + (problem is not None)
            if problem is None and steps != {100, 300}:
                assert data.endswith(b"\0"), data
                assert two_pins.startswith(data.rstrip(b"\0")), data
    assert reported > count * 0.6


def test_truncated_last_line_is_ignored(tmp_path: Path, two_pins: bytes) -> None:
    first = len(two_pins) // 2
    for end in range(first + 1, len(two_pins)):
        (tmp_path / NOTES_NAME).write_bytes(two_pins[:end])
        steps, problem = pinned(tmp_path)
        assert problem is None
        assert {100} <= steps <= {100, 300}
        pin(tmp_path, 500)
        steps, problem = pinned(tmp_path)
        assert problem is None
        assert {100, 500} <= steps <= {100, 300, 500}


def test_note_truncated_at_brace_is_ignored(tmp_path: Path, two_pins: bytes) -> None:
    (tmp_path / NOTES_NAME).write_bytes(two_pins + b'\n{"number":3,"step":500,"metrics":{"a":0.5}')
    assert pinned(tmp_path) == ({100, 300}, None)
    pin(tmp_path, 700)
    assert pinned(tmp_path) == ({100, 300, 700}, None)


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_that_was_lost_later_is_damage(tmp_path: Path, block: int) -> None:
    pin(tmp_path, *range(100))
    data = bytearray((tmp_path / NOTES_NAME).read_bytes())
    data[4096 * block : 4096 * (block + 1)] = bytes(len(data[4096 * block : 4096 * (block + 1)]))
    (tmp_path / NOTES_NAME).write_bytes(data)
    steps, problem = pinned(tmp_path)
    assert len(steps) < 100
    assert problem is not None


def test_blocks_that_never_reached_disk_are_no_damage(tmp_path: Path, two_pins: bytes) -> None:
    (tmp_path / NOTES_NAME).write_bytes(two_pins + bytes(300))
    pin(tmp_path, 500)
    assert pinned(tmp_path) == ({100, 300, 500}, None)


class Full(LocalBackend):
    """A disk that has space for only `room` bytes of the next append."""

    room: int | None = None

    def append(self, path: str, data: bytes) -> None:
        room, self.room = self.room, None
        super().append(path, data[:room])
        if room is not None:
            raise StorageError(errno.ENOSPC, "no space left", path)


def test_partial_append_loses_that_note_only(tmp_path: Path) -> None:
    backend = Full()
    book = NoteBook(backend, str(tmp_path))
    book.add({"step": 1, "pin": True})
    whole = (tmp_path / NOTES_NAME).stat().st_size
    for room in range(whole + 1):
        backend.room = room
        with pytest.raises(StorageError, match="no space left"):
            book.add({"step": 2, "pin": True})
        book.add({"step": 100 + room, "pin": True})
        steps, problem = pinned(tmp_path)
        assert problem is None
        assert {1, *range(100, 101 + room)} <= steps


def test_refused_sync_skips_no_note_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend()
    book = NoteBook(backend, str(tmp_path))
    book.add({"step": 1, "pin": True})
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="refused"):
        patch.setattr(backend, "sync", functools.partial(fail, errno.EIO))
        book.add({"step": 2, "pin": True})
    assert book.number == 1, "the second note is not on the disk for certain"
    book.add({"step": 3, "pin": True})
    assert (book.number, pinned(tmp_path)) == (3, ({1, 2, 3}, None))


def test_unreadable_notes_are_appended_to(tmp_path: Path, two_pins: bytes) -> None:
    pin(tmp_path, 500, backend=RefusingBackend("open", NOTES_NAME, errno.EIO, times=1))
    data = (tmp_path / NOTES_NAME).read_bytes()
    assert data.startswith(two_pins)
    steps, problem = pinned(tmp_path)
    assert steps == {100, 300, 500}
    assert problem is not None, "the number of the new note was unknown"


def test_notes_of_two_threads_have_a_number_each(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:

        def attach() -> None:
            for number in range(30):
                manager.attach_metrics(2, {f"m{number}": number})

        thread = threading.Thread(target=attach)
        thread.start()
        for number in range(31):
            manager.pin(1, pinned=number % 2 == 0)
        thread.join()
    assert pinned(run) == ({1}, None)
    lines = NoteLines([(0, (run / NOTES_NAME).read_bytes())], NOTES_NAME)
    assert [note["number"] for note in lines.notes] == [*range(1, 62)]


def test_half_written_line_hides_no_other(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        size = (run / NOTES_NAME).stat().st_size
        manager.pin(2)
        save_steps(manager, 3)
        manager.attach_metrics(3, {"a": 1.0})
        data = (run / NOTES_NAME).read_bytes()
        (run / NOTES_NAME).write_bytes(data[:-20])
        entries = scan(LocalBackend(), str(run))
        assert [(entry.pinned, entry.is_held) for entry in entries] == [(True, False), (True, False), (False, False)]
        assert size < len(data) // 2


def test_next_owner_syncs_before_counting() -> None:
    """Each process is killed between a note and its sync; then the power fails at any moment."""
    machine, acknowledged = Machine(), [(0, 0)]
    CrashDisk(machine).make_directory("/data", parents=True, sync=True)
    for number in range(4):
        disk = CrashDisk(machine)
        book = NoteBook(disk, "/data")  # type: ignore[arg-type]  # a fake with the methods that are needed
        book.settle(Notes(disk, "/data"), [])  # type: ignore[arg-type]
        acknowledged.append((len(machine.log), book.number))
        book.add({"step": 2 * number, "pin": True})
        acknowledged.append((len(machine.log), book.number))
        disk.sync = functools.partial(fail, errno.EIO)  # type: ignore[method-assign]
        with pytest.raises(StorageError):
            book.add({"step": 2 * number + 1, "pin": True})
    for moment in range(len(machine.log) + 1):
        known = max(number for at, number in acknowledged if at <= moment)
        for seed in range(60):
            image = crash_state(Image(), machine.log, moment, "any", random.Random(seed))
            notes = Notes(CrashDisk(Machine(image)), "/data")  # type: ignore[arg-type]
            notes.expect(known)
            assert notes.problem is None, (moment, seed)
            assert notes._pinned >= {*range(known)}


def fail(code: int, path: str) -> None:
    raise StorageError(code, "refused", path)


@pytest.mark.parametrize("what", ["pin", "metrics"])
def test_late_annotation_is_not_reported_as_kept(tmp_path: Path, what: str) -> None:
    """The disk does not respond for a minute, also not to the heartbeat; then the append succeeds."""
    run = made_run(tmp_path, 1, 2)

    class Away(LocalBackend):
        def append(self, path: str, data: bytes) -> None:
            if path.endswith(NOTES_NAME) and not taken_over:
                (run / LOCK_NAME).rename(run / f"{LOCK_NAME}.dead-of-this-one")
                other.own()
                taken_over.append(run)
            super().append(path, data)

    taken_over = list[Path]()
    other = StepManager(run, preservation_policy=LatestN(1))
    first = StepManager(run, backend=Away())
    with pytest.raises(DirectoryLockedError, match="lock is held by"):
        first.pin(1) if what == "pin" else first.attach_metrics(1, {"acc": 0.5})
    assert taken_over
    assert [(entry.pinned, entry.metrics) for entry in first._run.entries()] == [(False, None)] * 2
    save_steps(other, 3)
    other.close()
    assert not step_path(run, 1).exists(), "it was not pinned when the other manager read the notes"
    first.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_lost_step_saved_again_stays_pinned(tmp_path: Path, is_pinned: bool) -> None:
    with StepManager(made_run(tmp_path, 1)) as steps:
        steps.own()
        steps.pin(1)
        steps.pin(1, is_pinned)
    for lost in step_path(tmp_path, 1).iterdir():  # a power cut may leave nothing but the name
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    with StepManager(tmp_path, preservation_policy=LatestN(1)) as steps:
        save_steps(steps, 1, 2)
        assert steps._run._deleter.wait(60)
        assert steps.steps == ([1, 2] if is_pinned else [2])
    assert StepManager(tmp_path).steps == ([1, 2] if is_pinned else [2])


def test_unpinned_step_saved_again_stays_unpinned(tmp_path: Path) -> None:
    with StepManager(made_run(tmp_path, 1)) as steps:
        steps.own()
        steps.pin(1)
    with StepManager(tmp_path, preservation_policy=LatestN(1)) as steps:
        steps.own()
        steps.pin(1, False)
        save_steps(steps, 1, overwrite=True)
        save_steps(steps, 2)
        assert steps._run._deleter.wait(60)
        assert steps.steps == [2]
