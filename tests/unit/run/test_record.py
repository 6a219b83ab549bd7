"""The run record: what is acknowledged is kept, damage never removes a pin silently, and old notes are converted."""

from __future__ import annotations

import errno
import functools
import itertools
import math
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from jaxckpt_train.errors import DirectoryLockedError, FormatVersionError, StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.catalog import scan, scan_with_record
from jaxckpt_train.run.entry import RollBack
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.run.record import (
    NOTES_NAME,
    RECORD_NAME,
    Annotation,
    FoundRecord,
    RecordKeeper,
    RunRecord,
    SaveFacts,
    decode_record,
    encode_record,
)
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.image import Image
from tests.nightly.crash.states import crash_state
from tests.support.locks import remove_lock
from tests.support.paths import GOLDEN
from tests.support.runs import entry_of, made_run, record_file, save_steps, step_path


def held_pins(backend: LocalBackend | CrashDisk, directory: str) -> RecordKeeper:
    keeper = RecordKeeper(backend, directory, lambda: None)  # type: ignore[arg-type]
    keeper.take(FoundRecord(backend, directory), [])  # type: ignore[arg-type]
    return keeper


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


@pytest.mark.parametrize("damage", [flips, zeros, truncations])
def test_pinned_step_survives_damaged_record(tmp_path: Path, damage: Callable[[bytes], Iterator[bytes]]) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run) as manager:
        manager.pin(1)
        manager.attach_metrics(1, {"a": 0.5})
        manager.pin(2)
        save_steps(manager, 3)
    file = record_file(run)
    data, count = file.read_bytes(), 0

    def kept() -> dict[int, bool]:
        return {entry.step: entry.pinned or entry.is_held for entry in scan(LocalBackend(), str(run))}

    assert kept() == {1: True, 2: True, 3: False}
    for damaged in damage(data):
        count += 1
        file.write_bytes(damaged)
        found = FoundRecord(LocalBackend(), str(run))
        assert found.problem is not None or found.record.pins == {1, 2}, damaged
    assert count > 5
    shutil.rmtree(run / RECORD_NAME)
    assert kept() == {1: True, 2: True, 3: True}


def test_record_of_newer_format_is_refused(tmp_path: Path) -> None:
    data = encode_record(RunRecord(format=2))
    with pytest.raises(FormatVersionError):
        decode_record(data, "record")


def test_failed_write_is_replaced_by_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync fails after the new version has its name: the change is not acknowledged, and the next one counts."""
    backend = LocalBackend()
    keeper = held_pins(backend, str(tmp_path))
    keeper.annotate(entry_of(1), Annotation(pin=True))
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="refused"):
        patch.setattr(backend, "sync", functools.partial(fail, errno.EIO))
        keeper.annotate(entry_of(2), Annotation(pin=True))
    assert keeper.record.number == 1
    keeper.annotate(entry_of(3), Annotation(pin=True))
    found = FoundRecord(backend, str(tmp_path))
    assert (found.record.pins, found.record.number, found.problem) == ({1, 3}, 2, None)


def test_changes_of_two_threads_are_all_kept(tmp_path: Path) -> None:
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
    entries, found = scan_with_record(LocalBackend(), str(run))
    assert (found.record.pins, found.record.number, found.problem) == ({1}, 61, None)
    assert entries[1].metrics == {f"m{number}": number for number in range(30)}


def test_acknowledged_changes_survive_power_cuts() -> None:
    """Each process is killed between a change and its sync; then the power fails at any moment."""
    machine, acknowledged = Machine(), [(0, 0)]
    CrashDisk(machine).make_directory("/data", parents=True, sync=True)
    for number in range(4):
        disk = CrashDisk(machine)
        keeper = held_pins(disk, "/data")
        keeper.annotate(entry_of(2 * number), Annotation(pin=True))
        acknowledged.append((len(machine.log), 2 * number))
        disk.sync = functools.partial(fail, errno.EIO)  # type: ignore[method-assign]
        with pytest.raises(StorageError):
            keeper.annotate(entry_of(2 * number + 1), Annotation(pin=True))
    for moment in range(len(machine.log) + 1):
        known = [step for at, step in acknowledged[1:] if at <= moment]
        for seed in range(60):
            image = crash_state(Image(), machine.log, moment, "any", random.Random(seed))
            found = FoundRecord(CrashDisk(Machine(image)), "/data")  # type: ignore[arg-type]
            assert found.problem is None, (moment, seed)
            assert found.record.pins >= {*known}


def fail(code: int, path: str) -> None:
    raise StorageError(code, "refused", path)


@pytest.mark.parametrize("what", ["pin", "metrics"])
def test_late_annotation_is_not_reported_as_kept(tmp_path: Path, what: str) -> None:
    """The disk does not respond for a minute, also not to the heartbeat; then the write succeeds."""
    run = made_run(tmp_path, 1, 2)

    class Away(LocalBackend):
        def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
            if not taken_over and not path.endswith(LOCK_NAME):
                taken_over.append(run)
                remove_lock(run)
                other.own()
            return super().swap_record(path, data, version)

    taken_over = list[Path]()
    other = StepManager(run, preservation_policy=LatestN(1))
    first = StepManager(run, backend=Away())
    with pytest.raises(DirectoryLockedError):
        first.pin(1) if what == "pin" else first.attach_metrics(1, {"acc": 0.5})
    assert taken_over
    assert [(entry.pinned, entry.metrics) for entry in first._run.entries()] == [(False, None)] * 2
    save_steps(other, 3)
    other.attach_metrics(3, {"acc": 1.0})  # replaces the version that the former owner has written
    other.close()
    assert not step_path(run, 1).exists(), "it was not pinned when the other manager read the record"
    assert [(entry.step, entry.pinned, entry.metrics) for entry in scan(LocalBackend(), str(run))] == [
        (3, False, {"acc": 1.0})
    ]
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


def test_facts_of_deleted_saves_are_dropped(tmp_path: Path) -> None:
    with StepManager(tmp_path, preservation_policy=LatestN(1)) as steps:
        for step in (1, 2, 3):
            save_steps(steps, step)
            steps.attach_metrics(step, {"loss": step})
            assert steps._run._deleter.wait(60)
        steps.attach_metrics(3, {"acc": 1.0})
    assert list(FoundRecord(LocalBackend(), str(tmp_path)).record.saves) == ["step-0000000003"]


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run of an earlier version, with a file of notes: pins, metrics, a damaged step and two roll-backs."""
    return Path(shutil.copytree(GOLDEN / "run_with_notes", tmp_path / "old"))


def seen(run: Path) -> list[tuple[object, ...]]:
    """All that the record says of each step; asserts that nothing is missing."""
    entries, found = scan_with_record(LocalBackend(), str(run))
    assert found.problem is None
    assert found.record.roll_back == RollBack(6, frozenset(f"step-000000000{step}" for step in (4, 5, 8)))
    return [
        (each.step, each.pinned, each.is_held, each.damaged is not None, str(each.metrics or {})) for each in entries
    ]


OLD_RUN = [
    (1, True, False, False, "{}"),
    (2, False, False, False, "{}"),
    (3, False, False, False, str({"acc": 0.5, "loss": math.nan})),
    (4, False, False, False, "{}"),
    (5, False, False, True, "{}"),
    (8, False, False, False, "{}"),
    (9, False, False, False, str({"acc": 0.75})),
]


def test_notes_are_read_without_change(old_run: Path) -> None:
    before = sorted(os.listdir(old_run))
    assert seen(old_run) == OLD_RUN
    assert StepManager(old_run).steps == [1, 2, 3, 4, 8, 9]
    assert sorted(os.listdir(old_run)) == before


def test_owner_converts_notes_once(old_run: Path) -> None:
    for _ in range(2):
        with StepManager(old_run) as manager:
            manager.own()
        assert not (old_run / NOTES_NAME).exists()
        assert seen(old_run) == OLD_RUN
    with StepManager(old_run, preservation_policy=LatestN(1)) as manager:
        assert manager.restored_step is None
        manager.restore()
        save_steps(manager, 10)
    assert {entry.step for entry in scan(LocalBackend(), str(old_run))} >= {1, 5, 10}
    assert not step_path(old_run, 2).exists()


def test_kill_after_conversion_keeps_record(old_run: Path) -> None:
    """The record is durable before the notes are removed; what is left of them is ignored afterwards."""
    notes = (old_run / NOTES_NAME).read_bytes()
    with StepManager(old_run) as manager:
        manager.pin(2)
    (old_run / NOTES_NAME).write_bytes(notes)
    changed = [(step, pinned or step == 2, *others) for step, pinned, *others in OLD_RUN]
    assert seen(old_run) == changed
    with StepManager(old_run) as manager:
        manager.own()
    assert (seen(old_run), (old_run / NOTES_NAME).exists()) == (changed, False)


def test_damaged_notes_are_kept_as_they_were(old_run: Path) -> None:
    damaged = (old_run / NOTES_NAME).read_bytes().replace(b'"pin":true', b'"pin":tru3')
    (old_run / NOTES_NAME).write_bytes(damaged)
    with StepManager(old_run) as manager:
        manager.own()
    (aside,) = old_run.glob(f"{NOTES_NAME}.converted-*")
    assert aside.read_bytes() == damaged
    assert all(entry.is_held for entry in scan(LocalBackend(), str(old_run)))


def test_lost_record_of_converted_run_is_noticed(old_run: Path) -> None:
    with StepManager(old_run) as manager:
        manager.own()
    shutil.rmtree(old_run / RECORD_NAME)
    assert all(entry.is_held for entry in scan(LocalBackend(), str(old_run)))


@pytest.mark.parametrize("damage", [flips, zeros, truncations])
def test_damaged_notes_lose_no_pin_silently(old_run: Path, damage: Callable[[bytes], Iterator[bytes]]) -> None:
    notes = (old_run / NOTES_NAME).read_bytes()
    changed = FoundRecord(LocalBackend(), str(old_run)).record.number
    for damaged in itertools.islice(damage(notes), 0, None, 17):
        (old_run / NOTES_NAME).write_bytes(damaged)
        found = FoundRecord(LocalBackend(), str(old_run))
        found.expect(changed - 2)  # as the manifest of the last step states
        assert found.problem is not None or 1 in found.record.pins, damaged


def test_garbage_is_no_record() -> None:
    facts = SaveFacts("2026-01-01T00:00:00+00:00", {"loss": "nan"}, damaged="bits")
    record = RunRecord(number=3, pins=frozenset({2}), saves={"step-0000000002": facts})
    data = encode_record(record)
    assert decode_record(data, "record") == record
    for other in (
        b"",
        b"{}",
        b"[]",
        data[:-3],
        data.replace(b'"number":3', b'"number":4'),
        msgspec.json.encode(record),
    ):
        with pytest.raises(Exception, match="record"):
            decode_record(other, "record")
