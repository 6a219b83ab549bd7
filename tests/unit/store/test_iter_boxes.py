"""`iter_boxes` yields the right bytes within its memory budget, and never hangs."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import buffers, reader
from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import iter_boxes, read_boxes
from tests.support.checkpoints import commit
from tests.support.strategies import arrays, tilings
from tests.support.strict_backend import PAGE, StrictBackend, small_sizes
from tests.support.watched_reads import LEAF_PAGES, Watch, leaf, marked, passing, saved

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, list[Box]], dict[str, list[Box]], StoreSettings]:
    found = {f"leaf{number}": draw(arrays()) for number in range(draw(st.integers(1, 4)))}
    cuts = {name: draw(tilings(array.shape)) for name, array in found.items() if array.size}
    boxes = {
        name: draw(tilings(array.shape)) if array.size else [full_box(array.shape)] for name, array in found.items()
    }
    chosen = StoreSettings(
        read_budget_bytes=draw(st.sampled_from([1, 4 * PAGE, 64 * PAGE])), io_threads=draw(st.integers(1, 3))
    )
    return found, cuts, boxes, chosen


@settings(max_examples=150)
@given(loads(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_iterated_boxes_equal_a_read_at_once(load: Any, passes: list[bool]) -> None:
    found, cuts, boxes, chosen = load
    backend = StrictBackend()
    committed = commit(backend, "/runs/a", found, StoreSettings(segment_bytes=5000), boxes=cuts)
    wanted = [Wanted(array, boxes[array.name]) for array in committed.manifest.parts[0].arrays]
    expected = read_boxes(backend, committed, wanted, chosen)
    left = {(n, index) for n, want in enumerate(wanted) for index in range(len(want.boxes))}
    mixed = [want._replace(passing=passing) for want, passing in zip(wanted, passes, strict=False)]
    with contextlib.closing(iter_boxes(backend, committed, mixed, chosen)) as reading:
        for number, index, data in reading:
            left.remove((number, index))
            array = found[wanted[number].array.name]
            box = boxes[wanted[number].array.name][index]
            cut = array[(*(slice(*side) for side in box), ...)]
            assert (data.dtype, data.shape) == (array.dtype.newbyteorder("="), cut.shape)
            little = cut.astype(cut.dtype.newbyteorder("<"), order="C")
            assert data.tobytes() == little.tobytes() == expected[number][index].tobytes()
            assert data.flags.writeable
            assert data.flags.c_contiguous
            assert data.size == 0 or data.ctypes.data % 64 == 0
            del data, cut, little
    assert not left
    assert backend.open_files == 0


@pytest.mark.parametrize("budget_pages", [1, LEAF_PAGES, 2 * LEAF_PAGES + 1, 5 * LEAF_PAGES])
@pytest.mark.parametrize("threads", [1, 3])
def test_passing_boxes_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch, budget_pages: int, threads: int) -> None:
    """Except for a single request larger than the whole budget, which waits until no other memory is lent."""
    backend = StrictBackend()
    committed, wanted = saved(backend)
    chosen = StoreSettings(read_budget_bytes=budget_pages * PAGE, io_threads=threads)
    watch, expected = Watch(monkeypatch), {number: leaf(number).tobytes() for number in range(20)}
    with passing(backend, committed, wanted, chosen) as reading:
        for number, _, data in reading:
            assert data.tobytes() == expected.pop(number)  # slower than a read from memory, so the threads read ahead
            assert watch.now <= max(chosen.read_budget_bytes, watch.largest)
            del data
    assert not expected
    assert watch.taken == 20
    assert 0 < watch.most <= max(chosen.read_budget_bytes, LEAF_PAGES * PAGE)
    assert watch.now == 0


def test_box_held_by_the_consumer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend)
    watch, budget = Watch(monkeypatch), 3 * LEAF_PAGES * PAGE
    with passing(backend, committed, wanted, StoreSettings(read_budget_bytes=budget)) as reading:
        held: list[np.ndarray] = []
        for number, _, data in reading:
            held = [*held[-1:], data[100:200]]  # hold a view of each of two boxes
            del data
            assert held[-1].tobytes() == leaf(number)[100:200].tobytes()
        assert 2 * LEAF_PAGES * PAGE <= watch.now <= watch.most <= budget
        held.clear()
        assert watch.now == 0


def test_boxes_share_memory_of_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend)
    rows = [((at, at + 4 * PAGE),) for at in range(0, LEAF_PAGES * PAGE, 4 * PAGE)]
    wanted = [Wanted(want.array, rows) for want in wanted]
    watch, chosen = Watch(monkeypatch), StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=2)
    left = {(number, box) for number in range(20) for box in range(4)}
    with passing(backend, committed, wanted, chosen) as reading:
        for number, box, data in reading:
            left.remove((number, box))
            assert data.tobytes() == leaf(number)[slice(*rows[box][0])].tobytes()
            del data
    assert not left
    assert watch.most <= chosen.read_budget_bytes
    assert watch.now == 0


@pytest.mark.parametrize(("kept_every", "budget_pages"), [(1, 1), (2, 2 * LEAF_PAGES)], ids=["all", "half"])
def test_kept_boxes_do_not_count_against_budget(kept_every: int, budget_pages: int) -> None:
    """Without `passing`, results stay in host memory: a load larger than its budget must not wait for them."""
    backend = StrictBackend()
    committed, wanted = saved(backend, 40)
    mixed = [want._replace(passing=number % kept_every != 0) for number, want in enumerate(wanted)]
    chosen = StoreSettings(read_budget_bytes=budget_pages * PAGE, io_threads=kept_every)
    kept = {}
    with contextlib.closing(iter_boxes(backend, committed, mixed, chosen)) as reading:
        for number, _, data in reading:
            if number % kept_every == 0:
                kept[number] = data
            assert data.tobytes() == leaf(number).tobytes()
            del data
    expected = {number: leaf(number).tobytes() for number in range(0, 40, kept_every)}
    assert {number: data.tobytes() for number, data in kept.items()} == expected


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_consumer_that_stops_early_ends_the_reading(
    monkeypatch: pytest.MonkeyPatch, after: int, passes: bool
) -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend, 200)
    watch, chosen = Watch(monkeypatch), StoreSettings(read_budget_bytes=2 * LEAF_PAGES * PAGE, io_threads=1)
    with contextlib.closing(iter_boxes(backend, committed, marked(wanted, passes), chosen)) as reading:
        for number, (_, _, data) in enumerate(reading):
            del data
            if number == after:
                break
    assert backend.open_files == 0
    if passes:
        assert len(backend.reads) < 200 * LEAF_PAGES // 4
        assert watch.now == 0
    again = read_boxes(backend, committed, wanted[:1], chosen)  # the threads are free again
    assert again[0][0].tobytes() == leaf(0).tobytes()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_of_the_consumer_ends_the_reading(error: type[BaseException]) -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend, 100)
    chosen = StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=1)
    with pytest.raises(error), passing(backend, committed, wanted, chosen) as reading:
        for _, _, data in reading:
            del data
            raise error
    assert backend.open_files == 0


@pytest.mark.parametrize("budget_pages", [1, 3 * LEAF_PAGES, 1000])
@pytest.mark.parametrize("passes", [False, True])
def test_damaged_block_is_raised_and_ends_reading(passes: bool, budget_pages: int) -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend)
    chunk = wanted[9].array.chunks[0]
    path = f"/runs/a/{committed.manifest.segments[chunk.segment].file}"
    backend._nodes[path].data[chunk.offset + 7 * PAGE + 5] ^= 1  # type: ignore[union-attr]
    chosen = StoreSettings(read_budget_bytes=budget_pages * PAGE, io_threads=2)
    reading = iter_boxes(backend, committed, marked(wanted, passes), chosen)
    raises = pytest.raises(CorruptCheckpointError, match="leaf 'x9'")
    with raises as caught, contextlib.closing(reading):
        for number, _, data in reading:
            assert number != 9
            assert data.tobytes() == leaf(number).tobytes()
            del data
    assert f"bytes {chunk.offset + 7 * PAGE} to {chunk.offset + 8 * PAGE} " in str(caught.value)
    assert backend.open_files == 0
    healthy = read_boxes(backend, committed, [wanted[8]], chosen)  # while the error and its memory are still held
    assert healthy[0][0].tobytes() == leaf(8).tobytes()


def test_consumer_may_stop_while_holding_a_box() -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend, 100)
    chosen = StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=1)
    with passing(backend, committed, wanted, chosen) as reading:
        held = next(reading)
    assert held.data.size == LEAF_PAGES * PAGE
    assert backend.open_files == 0


def test_consumer_error_with_a_held_box_ends_reading() -> None:
    backend = StrictBackend()
    committed, wanted = saved(backend, 100)
    chosen = StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=1)
    with pytest.raises(ZeroDivisionError), passing(backend, committed, wanted, chosen) as reading:
        for _, _, data in reading:
            assert data.size / 0
    assert backend.open_files == 0


@pytest.mark.parametrize("what", ["unaligned leaves", "columns"])
def test_copies_for_the_consumer_count_too(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer is slower than the disk."""
    backend = StrictBackend()
    shape = (LEAF_PAGES * PAGE + 1,) if what == "unaligned leaves" else (LEAF_PAGES, PAGE)
    committed = commit(backend, "/runs/a", {f"x{n}": np.full(shape, n, np.uint8) for n in range(40)}, StoreSettings())
    boxes = [full_box(shape)] if len(shape) == 1 else [((0, 16), (at, at + 1024)) for at in range(0, PAGE, 1024)]
    wanted = [Wanted(array, boxes) for array in committed.manifest.parts[0].arrays]
    watch, chosen = Watch(monkeypatch), StoreSettings(read_budget_bytes=3 * LEAF_PAGES * PAGE, io_threads=2)
    with passing(backend, committed, wanted, chosen) as reading:
        for _, _, data in reading:
            hashlib.sha256(bytes(1 << 23))
            del data
    # A run and the copies of its unaligned leaves are in memory at the same time.
    in_progress = reader.READS_PER_THREAD * chosen.io_threads * (LEAF_PAGES + 1) * PAGE
    assert watch.most <= chosen.read_budget_bytes + in_progress


def test_memory_freed_only_by_gc_does_not_hang() -> None:
    """JAX holds the host memory of finished transfers until its next call or the next collection."""
    backend = StrictBackend()
    committed, wanted = saved(backend, 12)
    finished: list[np.ndarray] = []

    def collect(phase: str, info: object) -> None:
        if phase == "start":
            finished.clear()

    gc.callbacks.append(collect)
    try:
        chosen = StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=1)
        left = set(range(12))
        with passing(backend, committed, wanted, chosen) as reading:
            for number, _, data in reading:
                left.remove(number)
                finished.append(data)
                del data
    finally:
        gc.callbacks.remove(collect)
    assert not left


def test_consumer_that_keeps_passing_boxes_gets_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(buffers, "STALLS", 2)
    backend = StrictBackend()
    committed, wanted = saved(backend, 12)
    chosen = StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=1)
    with passing(backend, committed, wanted, chosen) as reading:
        kept = {number: data for number, _, data in reading}
    assert {number: data.tobytes() for number, data in kept.items()} == {n: leaf(n).tobytes() for n in range(12)}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"{LEAF_PAGES * PAGE} bytes of host memory")


@pytest.mark.parametrize("passes", [False, True])
def test_refused_memory_is_raised_without_hanging(monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    def refuse(size: int) -> np.ndarray:
        raise MemoryError(f"{size} bytes of memory were refused")

    backend = StrictBackend()
    committed, wanted = saved(backend)
    columns = [want._replace(boxes=[((3, 3 + 3 * PAGE),), ((3 + 8 * PAGE, 3 + 11 * PAGE),)]) for want in wanted]
    for module in (reader, buffers):
        monkeypatch.setattr(module, "aligned_buffer", refuse)
    chosen = StoreSettings(read_budget_bytes=LEAF_PAGES * PAGE, io_threads=2)
    with (
        pytest.raises(MemoryError, match="were refused"),
        contextlib.closing(iter_boxes(backend, committed, marked(columns, passes), chosen)) as boxes,
    ):
        list(boxes)
    assert backend.open_files == 0
