"""The read budget holds for slow threads, and small results do not keep the memory of large reads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import buffers
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import read_boxes
from tests.support.checkpoints import commit
from tests.support.strict_backend import PAGE, StrictBackend, small_sizes
from tests.support.watched_reads import LEAF_PAGES, Watch, leaf, passing, saved

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


@pytest.mark.parametrize("slow", ["disk", "consumer"])
def test_slow_thread_does_not_lift_the_limit(
    slow: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile another thread waits for memory much longer than the limit for idle threads."""
    monkeypatch.setattr(buffers, "STALL_S", 0.005)
    backend = StrictBackend()
    committed, wanted = saved(backend, 6)
    waited, once = threading.Semaphore(0), iter(range(1))
    monkeypatch.setattr(buffers, "gc", SimpleNamespace(collect=lambda generation: waited.release()))

    def be_slow() -> None:
        for _ in once:  # only once, in one thread
            for _ in range(2 * buffers.STALLS):
                assert waited.acquire(timeout=30)

    backend.before_read = be_slow if slow == "disk" else lambda: None
    watch, chosen = Watch(monkeypatch), StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=2)
    with passing(backend, committed, wanted, chosen) as reading:
        for number, _, data in reading:
            if slow == "consumer":
                be_slow()
            assert data.tobytes() == leaf(number).tobytes()
            del data
    assert watch.most == chosen.read_budget_bytes
    assert not caplog.records


def kept_by(array: Any) -> np.ndarray:
    """Return the memory that this array keeps alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_sparse_leaves_keep_only_their_own_memory() -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend, 40, PAGE)
    found = read_boxes(backend, committed, wanted[::3], StoreSettings())
    assert [one.tobytes() for (one,) in found] == [leaf(number, PAGE).tobytes() for number in range(0, 40, 3)]
    assert len(backend.reads) < len(found), "one run reads several leaves"
    kept = {id(memory): memory.nbytes for (one,) in found for memory in [kept_by(one)]}
    assert sum(kept.values()) <= 2 * len(found) * PAGE


def test_large_leaf_near_gap_keeps_only_its_memory() -> None:
    backend = StrictBackend()
    arrays = {"a": np.full(8 * PAGE, 1, np.uint8), "b": np.zeros(3 * PAGE, np.uint8), "c": np.full(PAGE, 2, np.uint8)}
    committed = commit(backend, "/runs/a", arrays, StoreSettings())
    wanted = [Wanted(one, [full_box(one.shape)]) for one in committed.manifest.parts[0].arrays if one.name != "b"]
    (large,), (small,) = read_boxes(backend, committed, wanted, StoreSettings())
    assert len({offset for _, offset, _ in backend.reads}) == 1, "one run"
    assert (large.tobytes(), small.tobytes()) == (b"\1" * 8 * PAGE, b"\2" * PAGE)
    kept = {id(memory): memory.nbytes for memory in (kept_by(large), kept_by(small))}
    assert sum(kept.values()) <= 11 * PAGE


def mixed(backend: StrictBackend, whole_pages: int, cut_pages: int, pairs: int) -> tuple[Committed, list[Wanted]]:
    """Save pairs of leaves: one that is read as it is stored, and one that is assembled from two chunks."""
    arrays = {}
    for number in range(pairs):
        arrays[f"x{number}a"] = leaf(2 * number, whole_pages * PAGE)
        arrays[f"x{number}b"] = leaf(2 * number + 1, cut_pages * PAGE)
    half = cut_pages * PAGE // 2
    halves = {name: [((0, half),), ((half, 2 * half),)] for name in arrays if name.endswith("b")}
    committed = commit(backend, "/runs/a", arrays, StoreSettings(), boxes=halves)
    return committed, [Wanted(array, [full_box(array.shape)]) for array in committed.manifest.parts[0].arrays]


@pytest.mark.parametrize(("whole_pages", "cut_pages"), [(3, 2), (9, 7), (1, 6), (6, 1), (40, 30)])
def test_leaves_among_cut_ones_keep_only_their_memory(whole_pages: int, cut_pages: int) -> None:
    backend = StrictBackend()
    committed, wanted = mixed(backend, whole_pages, cut_pages, 6)
    found = read_boxes(backend, committed, wanted, StoreSettings())
    for want, (array,) in zip(wanted, found, strict=True):
        number = 2 * int(want.array.name[1:-1]) + want.array.name.endswith("b")
        assert array.tobytes() == leaf(number, array.nbytes).tobytes()
    kept = {id(memory): memory.nbytes for (one,) in found for memory in [kept_by(one)]}
    asked = sum(one.nbytes for (one,) in found)
    assert asked <= sum(kept.values()) <= 1.07 * asked + len(found) * PAGE // 2


@pytest.mark.parametrize(("count", "pages", "budget_pages"), [(24, 10, 50), (1, 60, 24)])
def test_unaligned_leaf_is_not_held_twice(
    count: int, pages: int, budget_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small leaf is moved, which counts in advance; a large one is read in bands of a quarter of the budget."""
    backend = StrictBackend()
    arrays = {"a": leaf(0, 3), **{f"x{number}": leaf(number, pages * PAGE + 1) for number in range(1, count + 1)}}
    committed = commit(backend, "/runs/a", arrays, StoreSettings())
    wanted = [Wanted(array, [full_box(array.shape)]) for array in committed.manifest.parts[0].arrays]
    assert all(want.array.chunks[0].offset % 64 for want in wanted[1:])
    budget = budget_pages * PAGE
    is_large = pages * PAGE > budget // 4
    watch = Watch(monkeypatch)
    with passing(backend, committed, wanted, StoreSettings(read_budget_bytes=budget, io_threads=1)) as reading:
        for number, _, data in reading:
            assert data.tobytes() == arrays[wanted[number].array.name].tobytes()
            assert data.ctypes.data % 64 == 0
            del data
    assert budget // 3 < watch.most <= budget + ((pages + 1) * PAGE if is_large else 0)


def test_small_leaf_near_cut_leaf_keeps_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are read in one run with temporary memory; a view would keep all of it."""
    backend = StrictBackend()
    arrays = {"a": np.full(PAGE, 7, np.uint8), "b": np.arange(8 * PAGE, dtype=np.uint8).reshape(8, PAGE)}
    committed = commit(backend, "/runs/a", arrays, StoreSettings())
    small, cut = committed.manifest.parts[0].arrays
    halves = [((0, 8), (0, PAGE // 2)), ((0, 8), (PAGE // 2, PAGE))]
    watch = Watch(monkeypatch)
    (one,), _ = read_boxes(
        backend, committed, [Wanted(small, [full_box((PAGE,))]), Wanted(cut, halves)], StoreSettings()
    )
    assert one.tobytes() == bytes([7]) * PAGE
    assert len(backend.reads) < 8, "one run"
    del _
    gc.collect()
    assert watch.now <= 10 * PAGE
    assert kept_by(one).nbytes <= 2 * PAGE
