"""Warm memory is lent again and again, and never to two at a time."""

from __future__ import annotations

from jaxckpt_train.store.buffers import BufferPool
from jaxckpt_train.store.segment import ALIGNMENT


def test_what_was_used_last_is_lent_first() -> None:
    memory = BufferPool()
    with memory.borrow(5000) as first, memory.borrow(5000) as second:
        places = [first.ctypes.data, second.ctypes.data]
        first[:], second[:] = 1, 2
        assert set(first.tolist()) == {1}
    with memory.borrow(4000) as again:  # the second came back before the first
        assert again.ctypes.data == places[0]
        assert set(again.tolist()) == {1}
        with memory.borrow(10) as other:
            assert other.ctypes.data == places[1]


def test_larger_request_is_fresh_and_page_aligned() -> None:
    memory = BufferPool()
    with memory.borrow(100) as small:
        small[:] = 7
    with memory.borrow(3 * ALIGNMENT + 1) as large:
        assert len(large) == 3 * ALIGNMENT + 1
        assert large.ctypes.data % ALIGNMENT == 0
        assert not large.any()


def test_memory_in_which_an_error_was_met_is_not_lent_again() -> None:
    memory = BufferPool()
    kept = []
    try:
        with memory.borrow(100) as lost:
            kept.append(lost)
            raise ValueError
    except ValueError:
        pass
    with memory.borrow(100) as other:
        other[:] = 9
    assert not kept[0].any()
