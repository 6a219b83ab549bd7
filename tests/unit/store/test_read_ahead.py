"""Reading boxes ahead: order, memory budget, groups of small boxes, and errors."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from jaxckpt_train.errors import CheckpointTimeoutError, CorruptCheckpointError
from jaxckpt_train.store.copy import AT_ONCE, TOGETHER, BoxAhead, LazyBox, ReadAhead

MIB = 1 << 20


@dataclasses.dataclass
class FakeBox:
    """A box that reports the begin of its read, waits until it may end, and returns its number."""

    number: int
    nbytes: int = 4 * MIB
    may_end: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.dtype, self.began = np.dtype(np.uint8), threading.Event()
        self.shape, self.size = (self.nbytes,), self.nbytes

    def read_with(self, others: list[FakeBox]) -> list[np.ndarray]:
        found = [np.empty(each.nbytes, np.uint8) for each in (self, *others)]
        for each, target in zip((self, *others), found, strict=True):
            each.read_into(target)
        return found

    def read_into(self, target: np.ndarray) -> None:
        self.began.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        target[:] = self.number % 251


def ahead_of(
    boxes: list[FakeBox], budget: int = 64 * MIB, at_once: int = AT_ONCE, decoding: int = 0
) -> tuple[ReadAhead, list[BoxAhead]]:
    ahead = ReadAhead(budget, "run", at_once, decoding)
    return ahead, ahead.of(cast("list[LazyBox]", boxes))


def immediate_boxes(count: int, **options: int) -> list[FakeBox]:
    """Return boxes whose reads end immediately."""
    boxes = [FakeBox(number, **options) for number in range(count)]
    for box in boxes:
        box.may_end.set()
    return boxes


def on_four_threads(take: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=take, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def begun(boxes: list[FakeBox]) -> list[int]:
    return [box.number for box in boxes if box.began.is_set()]


def test_boxes_may_be_fetched_in_any_order() -> None:
    boxes = immediate_boxes(20)
    with ahead_of(boxes)[0] as ahead:
        coming = ahead.of(cast("list[LazyBox]", boxes))
        for number in np.random.default_rng(0).permutation(20):
            assert np.array_equal(coming[number].fetch(), np.full(4 * MIB, number, np.uint8))


def test_concurrent_fetches_get_their_own_box() -> None:
    boxes = immediate_boxes(40, nbytes=MIB)
    ahead, coming = ahead_of(boxes, budget=4 * MIB)
    wrong: list[int] = []

    def take(first: int) -> None:
        for number in range(first, 40, 4):
            if not np.array_equal(coming[number].fetch(), np.full(MIB, number, np.uint8)):
                wrong.append(number)

    with ahead:
        on_four_threads(take)
    assert not wrong
    assert begun(boxes) == list(range(40))


@pytest.mark.parametrize("at_once", [1, AT_ONCE, 5])
def test_next_boxes_are_read_while_first_is_used(at_once: int) -> None:
    boxes = immediate_boxes(10)
    ahead, coming = ahead_of(boxes, at_once=at_once)
    with ahead:
        first = coming[0].fetch()
        for number in range(1, 1 + at_once):
            assert boxes[number].began.wait(60)
        assert begun(boxes) == list(range(1 + at_once))
        assert first[0] == 0


def test_read_ahead_respects_budget_of_held_boxes() -> None:
    boxes = immediate_boxes(10)
    ahead, coming = ahead_of(boxes, budget=8 * MIB)
    with ahead:
        held = [coming[0].fetch()]
        held.append(coming[1].fetch())  # read ahead: both use the whole budget
        assert begun(boxes) == [0, 1]
        held.append(coming[2].fetch())  # exceeds the budget, because the caller needs it now
        assert begun(boxes) == [0, 1, 2]
        held.clear()
        coming[3].fetch()
        assert boxes[4].began.wait(60)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(24 * MIB - 1, [0]), (24 * MIB, [0, 1]), (36 * MIB - 1, [0, 1]), (36 * MIB, [0, 1, 2])],
)
def test_decoding_memory_counts_against_budget(budget: int, expected: list[int]) -> None:
    boxes = immediate_boxes(10)
    for box in boxes:
        box.may_end.clear()  # a finished read would make room for the next one
    ahead, coming = ahead_of(boxes, budget, decoding=2)
    with ahead:
        first = threading.Thread(target=coming[0].fetch)
        first.start()
        for number in expected:
            assert boxes[number].began.wait(60)
        assert begun(boxes) == expected
        for box in boxes:
            box.may_end.set()
        first.join(60)
        assert [each.fetch()[0] for each in coming[1:]] == list(range(1, 10))


def test_decoding_memory_is_freed_after_the_read() -> None:
    boxes = immediate_boxes(10)
    ahead, coming = ahead_of(boxes, 24 * MIB, decoding=2)
    with ahead:
        held = [coming[0].fetch(), coming[1].fetch()]
        assert boxes[2].began.wait(60)
        assert begun(boxes) == [0, 1, 2]
        held.append(coming[2].fetch())
        assert boxes[3].began.wait(60)
        held.append(coming[3].fetch())  # 16 MiB are held; another read would need 28
        assert begun(boxes) == [0, 1, 2, 3]


def test_a_box_larger_than_the_budget_is_read() -> None:
    boxes = immediate_boxes(3)
    ahead, coming = ahead_of(boxes, budget=MIB)
    with ahead:
        assert [each.fetch()[0] for each in coming] == [0, 1, 2]


def test_returned_memory_is_used_again() -> None:
    ahead, coming = ahead_of(immediate_boxes(12), budget=12 * MIB)
    with ahead:
        places = {each.fetch().ctypes.data for each in coming}
    assert len(places) <= 3


def test_small_boxes_are_read_in_groups_on_demand() -> None:
    boxes = immediate_boxes(12, nbytes=MIB - 1)
    ahead, coming = ahead_of(boxes)
    with ahead:
        assert coming[3].fetch()[-1] == 3
        assert begun(boxes) == [3, 4, 5, 6, 7]  # the first boxes that make 4 MiB in total
        assert coming[0].fetch()[0] == 0
        assert begun(boxes) == [*range(8), 8, 9]
        for number in (9, 1, 11, 2, *range(4, 9), 10):
            assert np.array_equal(coming[number].fetch(), np.full(MIB - 1, number, np.uint8))


def test_group_of_small_boxes_is_limited() -> None:
    boxes = immediate_boxes(TOGETHER + 2, nbytes=8)
    ahead, coming = ahead_of(boxes)
    with ahead:
        coming[0].fetch()
        assert begun(boxes) == list(range(TOGETHER))


def test_small_boxes_do_not_wait_for_large_ones() -> None:
    boxes = [FakeBox(number, 8 if number % 2 else 4 * MIB) for number in range(8)]
    for box in boxes[1::2]:
        box.may_end.set()
    ahead, coming = ahead_of(boxes)
    with ahead:
        assert [each.fetch()[0] for each in coming[1::2]] == [1, 3, 5, 7]
        for box in boxes[::2]:
            box.may_end.set()
        assert [each.fetch()[0] for each in coming[::2]] == [0, 2, 4, 6]


def test_concurrent_small_fetches_get_their_own_box() -> None:
    boxes = immediate_boxes(3000, nbytes=32)
    ahead, coming = ahead_of(boxes)
    right: list[int] = []

    def take(first: int) -> None:
        right.extend(n for n in range(first, 3000, 4) if (coming[n].fetch() == n % 251).all())

    with ahead:
        on_four_threads(take)
    assert sorted(right) == list(range(3000))


def test_group_of_small_boxes_does_not_wrap_around() -> None:
    boxes = immediate_boxes(12, nbytes=900_000)
    ahead, coming = ahead_of(boxes)
    with ahead:
        coming[10].fetch()
        assert begun(boxes) == [10, 11]
        coming[0].fetch()
        assert begun(boxes) == [0, 1, 2, 3, 4, 10, 11]


def test_failed_group_is_not_read_again() -> None:
    boxes = immediate_boxes(4, nbytes=8)
    boxes[2].error = CorruptCheckpointError("damaged")
    ahead, coming = ahead_of(boxes)
    with ahead:
        for number in (0, 3, 1):
            with pytest.raises(CorruptCheckpointError, match="damaged"):
                coming[number].fetch()
            for box in boxes:
                box.began.clear()
        assert begun(boxes) == []


def test_smaller_sort_keys_are_read_first() -> None:
    boxes = immediate_boxes(10)
    ahead, coming = ahead_of(boxes)
    with ahead:
        ahead.order(lambda box: -cast("FakeBox", box.box).number)
        coming[9].fetch()
        assert boxes[8].began.wait(60)
        assert not boxes[0].began.is_set()


def test_error_is_raised_where_its_box_is_wanted() -> None:
    boxes = immediate_boxes(4)
    boxes[1].error = CorruptCheckpointError("damaged")
    ahead, coming = ahead_of(boxes)
    with ahead:
        assert coming[0].fetch()[0] == 0
        assert boxes[1].began.wait(60)
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            coming[1].fetch()
        assert coming[2].fetch()[0] == 2


@pytest.mark.parametrize("nbytes", [8, 4 * MIB], ids=["small", "large"])
@pytest.mark.parametrize("number", [0, 1], ids=["fetched", "read ahead"])
def test_give_up_ends_waiting_fetches(nbytes: int, number: int) -> None:
    boxes = immediate_boxes(4, nbytes=nbytes)
    boxes[number].may_end.clear()
    ahead, coming = ahead_of(boxes)
    errors: list[BaseException] = []

    def take() -> None:
        for each in coming:
            try:
                each.fetch()
            except BaseException as error:  # noqa: BLE001  # asserted below
                errors.append(error)
                return

    with ahead:
        thread = threading.Thread(target=take)
        thread.start()
        assert boxes[number].began.wait(60)
        ahead.give_up()
        thread.join(10)
        assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, CheckpointTimeoutError)
    assert "run: a read was abandoned" in str(error)
    boxes[number].may_end.set()


def test_closing_waits_for_no_read() -> None:
    boxes = immediate_boxes(4)
    boxes[1].may_end.clear()
    ahead, coming = ahead_of(boxes)
    with ahead:
        coming[0].fetch()
        assert boxes[1].began.wait(60)
    boxes[1].may_end.set()  # this read had begun; no read after it may begin
    assert begun(boxes)[-1] < 3
