"""Staging: aligned memory, a fixed number of buffers, and waiting when all of them are lent."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxckpt_train.store.staging import StagingPool, aligned_buffer, shared_pool


@pytest.mark.parametrize("size", [1, 4096, 4097, 5 << 20])
def test_a_buffer_is_aligned_zero_and_writable(size: int) -> None:
    buffer = aligned_buffer(size)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (size,)
    assert buffer.ctypes.data % 4096 == 0
    assert not buffer.any()
    buffer[-1] = 7
    assert buffer[-1] == 7


def test_a_view_keeps_the_memory() -> None:
    view = aligned_buffer(1 << 20)[5:10]
    view[:] = 3
    assert view.tolist() == [3] * 5


def test_a_buffer_that_came_back_is_lent_again() -> None:
    pool = StagingPool(4096, 2)
    with pool.buffer() as first:
        pass
    with pool.buffer() as again:
        assert again is first
        with pool.buffer() as other:
            assert other is not first


def test_who_comes_too_late_waits_for_a_buffer() -> None:
    pool = StagingPool(4096, 1)
    order: list[str] = []

    def late() -> None:
        started.set()
        with pool.buffer():
            order.append("late")

    started = threading.Event()
    thread = threading.Thread(target=late)
    with pool.buffer():
        thread.start()
        started.wait()
        order.append("early")
    thread.join()
    assert order == ["early", "late"]


def test_a_buffer_comes_back_after_an_error() -> None:
    pool = StagingPool(4096, 1)
    with pytest.raises(ZeroDivisionError, match="division"), pool.buffer():
        1 / 0  # noqa: B018
    with pool.buffer() as buffer:
        assert len(buffer) == 4096


def test_the_pool_of_a_budget_is_shared_and_within_it() -> None:
    pool = shared_pool(10_000_000, 3)
    assert shared_pool(10_000_000, 3) is pool
    assert pool.buffer_bytes % 4096 == 0
    assert 10_000_000 - 3 * 4096 <= 3 * pool.buffer_bytes <= 10_000_000
    assert shared_pool(1, 3).buffer_bytes == 4096
