"""Colocated memory: others see what a process wrote before its message, and a closed process leaves no memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxckpt_train.distributed import shared_memory
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.distributed.shared_memory import (
    Channel,
    ColocatedMemory,
    Mailbox,
    SharedMemory,
    find_colocated_processes,
)
from tests.support.interrupts import interrupt_at
from tests.support.open_memory import left_open

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system"),
    pytest.mark.timeout(120),
]

SIZE = 50_000


def joined(count: int) -> list[ColocatedMemory]:
    made = [ColocatedMemory(SIZE) for _ in range(count)]
    for number, each in enumerate(made):
        each.join([memory.address for memory in made], number)
    for each in made:
        each.hide()
    return made


@pytest.fixture
def three() -> Iterator[list[ColocatedMemory]]:
    made = joined(3)
    yield made
    for each in made:
        each.close()


def test_announced_values_belong_to_their_sender(three: list[ColocatedMemory]) -> None:
    first, second, third = three
    second.announce(5, 2)
    assert first.given == [0, 0, 0]  # not received yet
    first.wait()
    assert first.given == [0, 5, 0]
    assert min(first.taken) == 0
    third.announce(1 << 40, 3)
    first.announce(7, 4)
    first.wait()
    assert first.given == [7, 5, 1 << 40]
    assert min(first.taken) == 2
    second.announce(6, 8)
    second.announce(9, 9)
    first.wait()
    assert first.given[1] == 9
    assert min(first.taken) == 3
    second.wait()
    assert second.given == [7, 9, 1 << 40]
    assert min(second.taken) == 3


def test_a_wait_ends_when_it_is_woken(three: list[ColocatedMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLICE_S", 45)
    began = time.monotonic()
    thread = threading.Thread(target=three[1].wake)
    thread.start()
    three[1].wait()
    thread.join()
    three[0].announce(3, 0)
    for _ in range(5000):  # more than there is room for
        three[1].wake()
    monkeypatch.setattr(shared_memory, "SLICE_S", 0)
    for _ in range(5):
        three[1].wait()
    assert time.monotonic() - began < 30
    assert three[1].given == [3, 0, 0]
    monkeypatch.setattr(shared_memory, "SLICE_S", 0.2)
    began = time.monotonic()
    three[1].wait()
    assert time.monotonic() - began > 0.19


def test_waking_closed_memory_does_nothing(tmp_path: Path) -> None:
    (memory,) = joined(1)
    bell = memory._wake_channel._descriptor
    assert bell is not None
    memory.close()
    with open(tmp_path / "file", "wb") as file:
        os.dup2(file.fileno(), bell)
        memory.wake()
        os.close(bell)
    assert (tmp_path / "file").read_bytes() == b""


def test_closed_member_gets_nothing(three: list[ColocatedMemory]) -> None:
    gone = three.pop()
    gone.close()
    three[0].announce(1, 1)
    three[1].wait()
    assert three[1].given[0] == 1


def test_hidden_memory_stays_only_with_earlier_readers() -> None:
    hidden, early, late = ColocatedMemory(SIZE), ColocatedMemory(SIZE), ColocatedMemory(SIZE)
    early.join([early.address, hidden.address], 0)
    hidden.hide()
    with pytest.raises(OSError):  # noqa: PT011  # of several kinds
        late.join([late.address, hidden.address], 0)
    own = hidden._own.data
    own[:] = 7
    hidden.close()
    del hidden, own
    gc.collect()
    assert np.array_equal(early.data[1], np.full(SIZE, 7, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        early.data[1][0] = 1
    for each in (early, late):
        each.hide()
        each.close()


def test_closed_members_leave_no_memory() -> None:
    before = left_open()
    made = joined(3)
    assert left_open()[0] >= before[0] + 3 * 5
    assert left_open()[1] == before[1] + 3 * 3
    for each in made:
        each.close()
    del made, each
    assert left_open() == before


def test_full_channel_delivers_latest_value_later() -> None:
    one, other = memories = joined(2)
    for given in range(5000):
        one.announce(given, 0)
    assert one.has_unnotified()
    while other.given[0] < 4999:
        one.wake()
        one.wait()
        other.wait()
    assert not one.has_unnotified()
    for memory in memories:
        memory.close()


def test_interrupt_at_any_point_leaves_no_memory() -> None:
    makers = [
        find_colocated_processes,
        ColocatedMemory.__init__,
        ColocatedMemory.close,
        Channel.__init__,
        Mailbox.__init__,
        SharedMemory.__init__,
    ]
    before, number, was_interrupted = left_open(), 0, True
    while was_interrupted:
        number, was_interrupted = number + 1, False
        try:
            with interrupt_at(number, *makers):
                memory = find_colocated_processes(Coordinator(), 4096).memory
                assert memory is not None
                memory.close()
        except KeyboardInterrupt:
            was_interrupted = True
        memory = None
        assert left_open() == before
    assert number > 20
