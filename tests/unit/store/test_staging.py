"""Staging memory: aligned buffers from a fixed budget; requests wait when all of it is lent."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.store import buffers
from jaxckpt_train.store.buffers import HUGE_PAGE_BYTES, Arena, aligned_buffer
from jaxckpt_train.store.writer import StagingPool, shared_pool

PAGE = 4096
MIB = 1 << 20
ROLLUP = Path("/proc/self/smaps_rollup")
needs_proc = pytest.mark.skipif(not ROLLUP.exists(), reason="the kernel does not report the memory of a process")


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


def address(buffer: np.ndarray) -> int:
    return buffer.ctypes.data


def test_returned_memory_is_lent_again() -> None:
    pool = StagingPool(4 * PAGE)
    with pool.buffer(PAGE) as first:
        begin = address(first)
    with pool.buffer(2 * PAGE) as again, pool.buffer(2 * PAGE) as other:
        assert (address(again), address(other)) == (begin, begin + 2 * PAGE)


def test_a_gap_between_two_buffers_is_used() -> None:
    pool = StagingPool(5 * PAGE)
    with contextlib.ExitStack() as middle, pool.buffer(PAGE) as low:
        middle.enter_context(pool.buffer(2 * PAGE))
        with pool.buffer(PAGE):
            middle.close()
            with pool.buffer(2 * PAGE) as between, pool.buffer(PAGE) as last:
                assert [address(each) - address(low) for each in (between, last)] == [PAGE, 4 * PAGE]


def test_late_request_waits_for_memory() -> None:
    pool = StagingPool(2 * PAGE)
    order: list[str] = []

    def late() -> None:
        started.set()
        with pool.buffer(2 * PAGE):
            order.append("late")

    started = threading.Event()
    thread = threading.Thread(target=late)
    with pool.buffer(PAGE):
        thread.start()
        started.wait()
        order.append("early")
    thread.join()
    assert order == ["early", "late"]


def test_small_request_does_not_overtake_waiting_large_one() -> None:
    pool = StagingPool(2 * PAGE)
    order: list[str] = []

    def borrow(size: int, name: str) -> None:
        with pool.buffer(size):
            order.append(name)

    with pool.buffer(PAGE):
        large = threading.Thread(target=borrow, args=(2 * PAGE, "large"))
        large.start()
        while len(pool._waiting) < 1:
            threading.Event().wait(0.001)
        small = threading.Thread(target=borrow, args=(PAGE, "small"))
        small.start()
        while len(pool._waiting) < 2:
            threading.Event().wait(0.001)
        assert order == []
    large.join()
    small.join()
    assert order == ["large", "small"]


def test_memory_comes_back_after_an_error() -> None:
    pool = StagingPool(PAGE)
    with pytest.raises(ZeroDivisionError, match="division"), pool.buffer(1):
        1 / 0  # noqa: B018
    with pool.buffer(PAGE) as buffer:
        assert len(buffer) == PAGE


def test_concurrent_buffers_are_disjoint_and_within_budget() -> None:
    pool, budget = StagingPool(16 * PAGE), 16 * PAGE
    lent: set[tuple[int, int]] = set()
    lock = threading.Lock()
    places: list[int] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(200):
            size = int(random.integers(1, 7 * PAGE))
            with pool.buffer(size) as buffer:
                mine = (address(buffer), address(buffer) + pages_of(size))
                with lock:
                    assert all(mine[1] <= low or high <= mine[0] for low, high in lent)
                    lent.add(mine)
                    places.extend(mine)
                buffer[:] = seed
                assert len(buffer) == size
                assert (buffer == seed).all()
                with lock:
                    lent.remove(mine)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert all(place % PAGE == 0 for place in places)
    assert max(places) - min(places) <= budget


def test_pool_is_shared_per_budget() -> None:
    pool = shared_pool(10_000_000)
    assert shared_pool(10_000_000) is pool
    assert 10_000_000 - PAGE < pool.budget_bytes <= 10_000_000
    assert pool.budget_bytes % PAGE == 0
    assert shared_pool(1).budget_bytes == PAGE


def pages_of(size: int) -> int:
    return -(-size // PAGE) * PAGE


@given(st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=12), st.data())
def test_arrays_of_arena_are_aligned_disjoint_and_writable(sizes: list[int], data: st.DataObject) -> None:
    """Including arrays that no longer fit, which get memory of their own."""
    arena = Arena(data.draw(st.integers(0, sum(map(pages_of, sizes)) // PAGE)) * PAGE)
    arrays = [arena.take(size) for size in sizes]
    for number, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        assert (array.dtype, array.shape, array.ctypes.data % PAGE) == (np.uint8, (size,), 0)
        assert not array.any()
        array[:] = number + 1
    assert [array.tobytes() for array in arrays] == [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    places = sorted((array.ctypes.data, array.ctypes.data + pages_of(len(array))) for array in arrays)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))


def test_full_arena_falls_back_to_new_memory() -> None:
    arena = Arena(5 * PAGE)
    first, large, second, last, beyond = (arena.take(size) for size in (1, 5 * PAGE, PAGE + 1, 2 * PAGE, 1))
    begin = first.ctypes.data
    assert [second.ctypes.data - begin, last.ctypes.data - begin] == [PAGE, 3 * PAGE]
    assert not begin <= large.ctypes.data < begin + 5 * PAGE
    assert not begin <= beyond.ctypes.data < begin + 5 * PAGE
    assert beyond.tobytes() == b"\0"


def test_arena_respects_a_larger_page_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees whole pages of its own size: another array in the same page would read as zero."""
    monkeypatch.setattr(buffers, "PAGE_BYTES", 16 * PAGE)
    arena = Arena(3 * 16 * PAGE)
    first, second = arena.take(17 * PAGE), arena.take(1)
    assert second.ctypes.data - first.ctypes.data == 32 * PAGE
    assert Arena.room_for(1) == 16 * PAGE


def test_refused_allocation_names_its_size() -> None:
    with pytest.raises(MemoryError, match="refused 9007199254740992 bytes"):
        aligned_buffer(1 << 53)
    with (
        pytest.raises(SettingsError, match="staging_bytes: the system refused 9007199254740992 bytes"),
        StagingPool(1 << 53).buffer(1),
    ):
        pass


def area_of(arena: Arena) -> np.ndarray:
    assert arena._area is not None
    return np.frombuffer(arena._area, np.uint8)


def test_pages_return_after_last_view() -> None:
    arena = Arena(8 * PAGE)
    arrays: list[Any] = [arena.take(size) for size in (2 * PAGE, 3 * PAGE - 5, 2 * PAGE)]
    for number, array in enumerate(arrays):
        array[:] = number + 1
    area_of(arena)[5 * PAGE - 5 : 5 * PAGE] = 9  # between two arrays
    view = memoryview(arrays[1][10:20].view(np.uint16).reshape(1, 5))
    before, arrays[1] = area_of(arena).copy(), None
    gc.collect()
    assert area_of(arena).tobytes() == before.tobytes()
    assert bytes(view) == b"\2" * 10
    del view
    gc.collect()
    after = area_of(arena)
    assert not after[2 * PAGE : 5 * PAGE].any()
    assert after[: 2 * PAGE].tobytes() == before[: 2 * PAGE].tobytes() == b"\1" * 2 * PAGE
    assert after[5 * PAGE :].tobytes() == before[5 * PAGE :].tobytes()
    assert arrays[2].tobytes() == b"\3" * 2 * PAGE


def test_arrays_stay_when_their_arena_is_dropped() -> None:
    arena = Arena(4 * PAGE)
    one, other = arena.take(PAGE), arena.take(2 * PAGE)
    one[:], other[:] = 1, 2
    del arena, one
    gc.collect()
    assert other.tobytes() == b"\2" * 2 * PAGE


def reported_kib(path: Path, name: str) -> int:
    (line,) = [line for line in path.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


@needs_proc
def test_dropped_array_returns_memory_to_system() -> None:
    arena = Arena(96 * MIB)
    small, large = arena.take(32 * MIB), arena.take(64 * MIB)
    untouched = reported_kib(ROLLUP, "Anonymous")
    small[:], large[:] = 1, 2
    full = reported_kib(ROLLUP, "Anonymous")
    assert full - untouched > 90 << 10
    del large
    assert 60 << 10 < full - reported_kib(ROLLUP, "Anonymous") < 68 << 10
    assert (small == 1).all()


@needs_proc
@pytest.mark.parametrize("take", [aligned_buffer, lambda size: Arena(size).take(size)])
def test_memory_is_private_to_the_process(take: Any) -> None:
    """Shared memory gets no huge pages, and counts against the limit of /dev/shm in a container."""
    status = Path("/proc/self/status")
    before = {name: reported_kib(status, name) for name in ("RssAnon", "RssShmem")}
    buffer = take(32 * MIB)
    buffer[:] = 1
    grown = {name: reported_kib(status, name) - kib for name, kib in before.items()}
    assert grown["RssAnon"] > 30 << 10
    assert grown["RssShmem"] < 1 << 10


def mapping_of(address: int) -> dict[str, str]:
    """Return the entry of /proc/self/smaps for the mapping that contains an address."""
    found, inside = dict[str, str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:
            start, stop = (int(number, 16) for number in name.split()[0].split("-"))
            if found:
                return found
            inside = start <= address < stop
        elif inside:
            found[name] = value
    return found  # the last mapping


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize("take", [aligned_buffer, lambda size: Arena(size).take(size)], ids=["buffer", "arena"])
def test_large_memory_asks_for_huge_pages(take: Any) -> None:
    memory = take(3 * HUGE_PAGE_BYTES)
    assert "hg" in mapping_of(memory.ctypes.data)["VmFlags"].split()
