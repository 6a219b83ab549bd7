"""The buffer pool reuses pool and never lends one buffer to two borrowers."""

from __future__ import annotations

from jaxckpt_train.store.buffers import BufferPool
from jaxckpt_train.store.segment import ALIGNMENT


def test_last_used_buffer_is_lent_first() -> None:
    pool = BufferPool()
    with pool.borrow(5000) as first, pool.borrow(5000) as second:
        places = [first.ctypes.data, second.ctypes.data]
        first[:], second[:] = 1, 2
        assert set(first.tolist()) == {1}
    with pool.borrow(4000) as again:  # the second was returned before the first
        assert again.ctypes.data == places[0]
        assert set(again.tolist()) == {1}
        with pool.borrow(10) as other:
            assert other.ctypes.data == places[1]


def test_larger_request_is_fresh_and_page_aligned() -> None:
    pool = BufferPool()
    with pool.borrow(100) as small:
        small[:] = 7
    with pool.borrow(3 * ALIGNMENT + 1) as large:
        assert len(large) == 3 * ALIGNMENT + 1
        assert large.ctypes.data % ALIGNMENT == 0
        assert not large.any()


def test_buffer_is_not_reused_after_an_error() -> None:
    pool = BufferPool()
    kept = []
    try:
        with pool.borrow(100) as lost:
            kept.append(lost)
            raise ValueError
    except ValueError:
        pass
    with pool.borrow(100) as other:
        other[:] = 9
    assert not kept[0].any()
