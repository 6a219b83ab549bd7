"""The possible and the durable contents of a disk after a crash."""

from __future__ import annotations

import errno
import random
from collections import Counter

import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import Durability, StoreSettings
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, small_sizes
from tests.nightly.crash.facts import Facts, Promise
from tests.nightly.crash.image import FailedSync, Image, Link, Operation, Rename, Sync, Write
from tests.nightly.crash.programs import RunLife, World, note_durable, process
from tests.nightly.crash.states import BLOCK, Order, crash_state

STATES, LIVES = 200, 30


def content_after(log: list[Operation]) -> set[bytes]:
    """Return the possible contents of file 1."""
    images = [crash_state(Image(), log, len(log), "ordered", random.Random(seed)) for seed in range(STATES)]
    return {bytes(image.files[1]) for image in images}


@pytest.mark.parametrize("is_directory", [True, False])
def test_unsynced_name_is_gone_empty_or_refused(is_directory: bool) -> None:
    log: list[Operation] = [Link(0, "old", 1, is_directory), Rename(0, "old", 0, "new", 1)]
    found = Counter[str]()
    for seed in range(STATES):
        image = crash_state(Image(), log, len(log), "any", random.Random(seed))
        disk = CrashDisk(Machine(image))
        listed = {entry.name: entry.kind for entry in disk.list("/")}
        assert listed.keys() <= {"old", "new"}
        if image.lost:
            assert listed == {"new": "directory" if is_directory else "other"}
            found["refused"] += 1
            for call in (lambda d: d.list("/new"), lambda d: d.open("", "new", direct=False), lambda d: d.sync("/new")):
                with pytest.raises(StorageError) as refused:
                    call(disk)
                assert refused.value.errno == errno.EUCLEAN
            for change in (lambda d: d.remove("/new"), lambda d: d.rename("/new", "/other")):
                with pytest.raises(StorageError, match="Structure needs cleaning"):
                    change(disk)
        else:
            found["empty" if listed else "gone"] += 1
            for name in listed:
                disk.remove(f"/{name}")
    assert found.keys() == {"gone", "empty", "refused"}


def test_synced_directory_survives_under_any_name() -> None:
    log = [Link(0, "old", 1, is_directory=True), Link(1, "file", 2, is_directory=False), Sync(1), Sync(2)]
    log.append(Rename(0, "old", 0, "new", 1))
    for seed in range(STATES):
        image = crash_state(Image(), log, len(log), "any", random.Random(seed))
        assert not image.lost
        assert all(image.folders[inode] == {"file": 2} for inode in image.folders[0].values())


def test_sync_after_a_failure_writes_only_later_changes() -> None:
    made = [Link(0, "file", 1, is_directory=False), Sync(0)]
    failed = [*made, Write(1, 0, b"a" * BLOCK), FailedSync(1), Sync(1)]
    assert len(content_after(failed)) > 2
    other = [*failed, Write(1, BLOCK, b"b" * 10), Sync(1)]
    assert {each[BLOCK:] for each in content_after(other)} == {b"b" * 10}
    assert len({each[:BLOCK] for each in content_after(other)}) > 2
    again = [*failed, Write(1, 5, b"b"), Sync(1)]
    assert content_after(again) == {b"a" * 5 + b"b" + b"a" * (BLOCK - 6)}


def lives(durability: Durability, order: Order) -> list[Facts]:
    """Return the promises of several runs of one process, with durability derived from the log alone."""
    found = []
    for seed in range(LIVES):
        machine, facts = Machine(), Facts(keep=1)
        world = World(StoreSettings(**SETTINGS, durability=durability), order)
        with process(1):
            RunLife(machine, facts, world, random.Random(seed)).live()
        facts.durable.clear()
        note_durable(facts, Image(), machine.log, order)
        found.append(facts)
    return found


@pytest.mark.parametrize("order", ["ordered", "any"])
def test_synced_saves_are_known_to_be_durable(order: Order) -> None:
    with small_sizes():
        found = [(facts.durable, each) for facts in lives("full", order) for each in facts.acknowledged()]
    assert len(found) > LIVES
    for durable, promise in found:
        assert promise.acknowledged is not None
        assert durable[promise.token] <= promise.acknowledged


@pytest.mark.parametrize("order", ["ordered", "any"])
@pytest.mark.parametrize("durability", ["file", "none"])
def test_unsynced_saves_are_durable_after_a_deletion(durability: Durability, order: Order) -> None:
    with small_sizes():
        found = [each.token in facts.durable for facts in lives(durability, order) for each in facts.acknowledged()]
    assert 5 < sum(found) < len(found)


@pytest.mark.parametrize(
    ("restored", "is_right"), [(0, False), (1, False), (2, True), (3, False), (4, True), (5, False), (6, True)]
)
def test_no_save_older_than_durable_is_restored(restored: int, is_right: bool) -> None:
    """Saves 1 to 4 in sequence, of which 2 and 4 are durable; 5 has not begun; 6 follows 2."""
    saves = [
        Promise(1, 1, 0),
        Promise(2, 2, 0, 0, 1),
        Promise(3, 3, 0, 0, 2),
        Promise(4, 4, 0, 0, 3),
        Promise(6, 3, 0, 0, 2),
    ]
    assert Facts(promises=saves, durable={2: 0, 4: 0}).may_be_restored(restored) == is_right


def test_required_content_of_pinned_step_follows_the_lineage() -> None:
    """Step 3 was saved by 3, and by 5 after a roll-back to 2; 6 follows 4, which 5 had abandoned."""
    saves = [
        Promise(1, 1, 0, 0),
        Promise(2, 2, 0, 0, 1),
        Promise(3, 3, 0, 0, 2),
        Promise(4, 4, 0, 0, 3),
        Promise(5, 3, 0, 0, 2),
        Promise(6, 5, 0, 0, 4),
        Promise(7, 4, 0, 0, 2),
    ]
    gone_back = Facts(promises=saves, pins={3: 0}, rolled_back=True)
    assert gone_back.must_be_there(5) == {3: 5}
    assert gone_back.must_be_there(6) == {3: 3}
    assert gone_back.must_be_there(7) == {3: 0}, "any save of it, because the lineage has none"
    assert Facts(promises=saves[:4], pins={3: 0}, keep=1).must_be_there(4) == {4: 4, 3: 3}
