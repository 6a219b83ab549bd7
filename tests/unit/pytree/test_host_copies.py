"""Copies in kept memory: the same bytes; the memory is reused only when no copy needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt_train.pytree import copies as copies_module
from jaxckpt_train.pytree.copies import copy_all
from tests.support.same_trees import raw

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    copies_module._kept.clear()
    yield
    copies_module._kept.clear()


def sources() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    large = rng.integers(0, 1 << 32, 5 * MIB + 3, np.uint64)  # more than one piece, and no multiple of it
    return [
        large,
        large.reshape(-1)[: 4 * MIB].reshape(2 * MIB, 2).T,  # not row-major
        np.asarray(3.5),
        np.zeros((0, 3), np.float32),
        np.arange(7, dtype=np.float32).astype(jnp.bfloat16),
        *(np.full(n, n % 251, np.uint8) for n in range(300)),
    ]


def test_copies_are_equal_aligned_writable_and_separate() -> None:
    arrays = sources()
    copies = copy_all(arrays)
    before = [raw(array) for array in arrays]
    assert [raw(copy) for copy in copies] == before
    assert [(copy.shape, copy.dtype) for copy in copies] == [(array.shape, array.dtype) for array in arrays]
    spans = sorted((copy.ctypes.data, copy.ctypes.data + copy.nbytes) for copy in copies if copy.nbytes)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for copy in copies:
        copy[...] = 0
    assert [raw(array) for array in arrays] == before


def test_memory_is_reused_after_last_copy_is_gone() -> None:
    first = copy_all([np.ones(MIB, np.uint8), np.ones(MIB, np.uint8)])
    place = first[0].ctypes.data
    last = first.pop()
    del first
    second = copy_all([np.zeros(2 * MIB, np.uint8)])
    assert second[0].ctypes.data != place
    assert (last == 1).all()
    del last
    assert copy_all([np.zeros(2 * MIB, np.uint8)])[0].ctypes.data == place


def test_too_small_area_is_replaced() -> None:
    for size in (1, 4 * MIB, 2 * MIB):
        del_me = copy_all([np.ones(size, np.uint8)])
        assert raw(del_me[0]) == b"\1" * size
        del del_me
        assert len(copies_module._kept) == 1
    assert len(copies_module._kept[0]) == 4 * MIB


def test_an_empty_state_has_no_copies() -> None:
    assert copy_all([]) == []


def test_two_trees_of_save_both_reuse_memory() -> None:
    """In any order of copies and releases, the small tree must not take the memory of the large one."""
    places = set()
    for turn in range(6):
        order = [8 * MIB, 100] if turn % 2 else [100, 8 * MIB]
        copies = [copy_all([np.full(size, turn, np.uint8)])[0] for size in order]
        assert [raw(copy) for copy in copies] == [bytes([turn]) * size for size in order]
        places.add(copies[order.index(8 * MIB)].ctypes.data)
        copies.reverse() if turn % 3 else None
        while copies:
            copies.pop()
    assert len(places) <= 2, "allocated at most twice: the second tree of the first turn found no kept area"
    assert len(copies_module._kept) == 2
    assert sorted(map(len, copies_module._kept))[1] == 8 * MIB


class _Contested(list[Any]):
    """Kept areas that another thread takes as soon as they were looked at."""

    def __iter__(self) -> Iterator[Any]:
        seen = list(super().__iter__())
        self.clear()
        return iter(seen)


def test_an_empty_array_may_be_the_first() -> None:
    arrays = [np.zeros((0, 3), np.float32), np.arange(5)]
    assert [raw(copy) for copy in copy_all(arrays)] == [raw(array) for array in arrays]


def test_memory_taken_by_another_thread_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_kept", _Contested())
    first = copy_all([np.ones(MIB, np.uint8)])
    first.clear()
    assert len(copies_module._kept) == 1
    held = copy_all([np.full(MIB, 3, np.uint8)])
    assert held[0].tobytes() == bytes([3]) * MIB
