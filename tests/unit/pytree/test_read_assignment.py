"""Read assignments: every block to one process, equal bytes for each, in long runs; all parts are assembled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.pytree import shared_reads
from jaxckpt_train.pytree.redistribution import (
    Assembly,
    ShardReader,
    SharedArray,
    Stream,
    assign_reads,
    pack,
    row_bytes,
)
from jaxckpt_train.pytree.shared_reads import job_bytes
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import Box, box_shape, full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.manifest import FORMAT, FORMAT_VERSION, ArrayRecord, ChunkRecord, Manifest
from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT
from jaxckpt_train.store.segment import DTYPES
from tests.support.checkpoints import commit
from tests.support.strategies import boxes_in, shapes, tilings
from tests.support.strict_backend import BLOCK, PAGE, StrictBackend, small_sizes

SETTINGS = StoreSettings(read_budget_bytes=1 << 20, io_threads=1)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


@st.composite
def saves(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, list[Box]]]:
    found, boxes = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape, dtype = draw(shapes(3, 40)), DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        raw = np.random.default_rng(number).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
        found[f"x{number}"] = raw.view(dtype).reshape(shape)
        boxes[f"x{number}"] = draw(tilings(shape))
    return found, boxes


def shared(backend: Any, arrays: dict[str, np.ndarray], boxes: dict[str, list[Box]], processes: int) -> Any:
    committed = commit(backend, "/a/b", arrays, StoreSettings(), boxes=boxes)
    records = committed.manifest.parts[0].arrays
    return committed, records, assign_reads(records, processes, BLOCK, lambda _: range(processes))


@given(saves(), st.integers(1, 5))
def test_each_block_has_one_reader_with_equal_loads(
    save: tuple[dict[str, np.ndarray], dict[str, list[Box]]], processes: int
) -> None:
    _, records, streams = shared(StrictBackend(), *save, processes)
    spans = sorted(
        (piece.chunk.segment, piece.chunk.offset + piece.start, piece.chunk.offset + piece.stop)
        for stream in streams
        for piece in stream.pieces
    )
    whole = sum(chunk.length for record in records for chunk in record.chunks)
    assert sum(stop - start for _, start, stop in spans) == whole == sum(stream.bytes for stream in streams)
    for (segment, _, stop), (other, start, _) in itertools.pairwise(spans):
        assert segment < other or stop <= start
    for stream in streams:
        assert abs(stream.bytes - whole / processes) <= 2 * BLOCK
        for piece in stream.pieces:
            assert piece.start % BLOCK == 0
            assert piece.stop % BLOCK == 0 or piece.stop == piece.chunk.length
            assert piece.at % VIEW_ALIGNMENT == 0


def record(number: int, offset: int, length: int) -> ArrayRecord:
    chunk = ChunkRecord(((0, length),), 0, offset, length, "")
    return ArrayRecord(f"x{number}", (length,), "uint8", (chunk,))


def test_assigned_reads_are_long_runs() -> None:
    block = 4 << 20
    large = [record(number, number * 40 * block, 40 * block) for number in range(3)]
    for stream in assign_reads(large, 4, block, lambda _: range(4)):
        assert [piece.stop - piece.start for piece in stream.pieces] == [10 * block] * 3
    small = [record(number, number * 2048, 2048) for number in range(1000)]
    for stream in assign_reads(small, 4, block, lambda _: range(4)):
        numbers = [piece.wanted for piece in stream.pieces]
        assert numbers == list(range(numbers[0], numbers[0] + 250))


def test_given_order_assigns_parts_to_processes() -> None:
    block = 4 << 20
    streams = assign_reads([record(0, 0, 40 * block)], 4, block, lambda _: [2, 0, 3, 1])
    assert [stream.pieces[0].start // (10 * block) for stream in streams] == [1, 3, 0, 2]


@given(saves(), st.integers(1, 4), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_gathered_windows_make_the_saved_arrays(
    save: tuple[dict[str, np.ndarray], dict[str, list[Box]]], processes: int, pages: int, data: st.DataObject
) -> None:
    backend = StrictBackend()
    committed, records, streams = shared(backend, *save, processes)
    boxes = [sorted({data.draw(boxes_in(array.shape)), full_box(array.shape)}) for array in records]
    assembly, window = assembly_of(records, boxes), pages * VIEW_ALIGNMENT * 3
    feeds = feeds_of(backend, committed, records, streams)
    for start in range(0, max(stream.end for stream in streams), window):
        for feed, stream in zip(feeds, streams, strict=True):
            filled = np.zeros(window, np.uint8)
            feed.fill(filled, start, start + window)
            for cut in stream.within(start, start + window):
                assembly.add_cut(cut, filled)
    check(assembly, records, boxes, save[0])


@given(saves(), st.integers(2, 4), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_exchanged_rows_make_the_saved_arrays(
    save: tuple[dict[str, np.ndarray], dict[str, list[Box]]], processes: int, pages: int, data: st.DataObject
) -> None:
    backend = StrictBackend()
    committed, records, streams = shared(backend, *save, processes)
    boxes = [sorted({data.draw(boxes_in(array.shape)) for _ in range(2)}) for array in records]
    assembly, window = assembly_of(records, boxes), pages * PAGE
    feeds = feeds_of(backend, committed, records, streams)
    for start in range(0, max(stream.end for stream in streams), window):
        for feed, stream in zip(feeds, streams, strict=True):
            filled = np.zeros(window, np.uint8)
            feed.fill(filled, start, start + window)
            cuts = list(stream.within(start, start + window))
            dtypes = [DTYPES[array.dtype] for array in records]
            row = np.zeros(
                sum(row_bytes(cut, dtypes[cut.wanted].itemsize, boxes[cut.wanted]) for cut in cuts), np.uint8
            )
            at = 0
            for cut in cuts:
                at = pack(cut, filled, dtypes[cut.wanted], boxes[cut.wanted], row, at)
            assert at == len(row)
            at = 0
            for cut in cuts:
                at = assembly.add_row(cut, row, at)
    check(assembly, records, boxes, save[0])


def assembly_of(records: Sequence[ArrayRecord], boxes: list[list[Box]]) -> Assembly:
    shared = [
        SharedArray(number, array, (tuple(own),), range(len(own)))
        for number, (array, own) in enumerate(zip(records, boxes, strict=True))
    ]
    return Assembly(shared, 0)


def feeds_of(
    backend: Any, committed: Committed, records: Sequence[ArrayRecord], streams: Sequence[Stream]
) -> list[ShardReader]:
    return [ShardReader(backend, committed, records, stream, SETTINGS, None) for stream in streams]


def check(
    assembly: Assembly, records: Sequence[ArrayRecord], boxes: list[list[Box]], saved: dict[str, np.ndarray]
) -> None:
    found = {(read.wanted, read.box): read.data for read in assembly.completed}
    assert len(found) == len(assembly.completed) == sum(map(len, boxes))
    for (wanted, number), part in found.items():
        box = boxes[wanted][number]
        assert part.shape == box_shape(box)
        assert part.ctypes.data % VIEW_ALIGNMENT == 0
        expected = saved[records[wanted].name][(*(slice(*side) for side in box), ...)]
        assert part.tobytes() == expected.tobytes()


def manifest() -> Manifest:
    return Manifest(FORMAT, FORMAT_VERSION, "xxh3-128", BLOCK, (), (), {})


def test_blocks_shared_by_boxes_are_counted_once() -> None:
    array = ArrayRecord("x", (64, 64), "float32", (ChunkRecord(((0, 64), (0, 64)), 0, 0, 64 * 64 * 4, ""),))
    columns = tuple(((0, 64), (start, start + 8)) for start in range(0, 64, 8))
    whole = math.prod(array.shape) * 4
    assert job_bytes(manifest(), array, (columns, columns)) == 2 * whole
    assert job_bytes(manifest(), array, (columns[:4], columns[4:])) == 2 * whole
    rows = tuple(((start, start + 16), (0, 64)) for start in range(0, 64, 16))
    assert job_bytes(manifest(), array, tuple((row,) for row in rows)) == whole
    assert job_bytes(manifest(), array, ((rows[0],), (), (rows[1],))) == whole // 2


@pytest.mark.parametrize("stored_by", [96, 512])
def test_reads_of_large_jobs_are_estimated(stored_by: int) -> None:
    """A chunk is needed by several processes, or a box is in two or three chunks; boxes share digest blocks."""
    rows, processes = 384 * 64, 384
    size = rows // stored_by
    chunks = tuple(
        ChunkRecord(((n * size, (n + 1) * size), (0, 40)), 0, n * size * 160, size * 160, "") for n in range(stored_by)
    )
    array = ArrayRecord("x", (rows, 40), "float32", chunks)
    needs = tuple((((n * 64, (n + 1) * 64), (0, 40)),) for n in range(processes))
    exact = sum(job_bytes(manifest(), array, (boxes,)) for boxes in needs)
    assert job_bytes(manifest(), array, needs) == pytest.approx(exact, rel=0.05)
    assert job_bytes(manifest(), array, needs * 2) == pytest.approx(2 * exact, rel=0.05)


def test_processes_that_need_whole_chunks_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [((n * 64, (n + 1) * 64), (0, 40)) for n in range(384)]
    chunks = tuple(ChunkRecord(box, 0, n * 64 * 160, 64 * 160, "") for n, box in enumerate(boxes))
    array = ArrayRecord("x", (384 * 64, 40), "float32", chunks)
    needs = tuple((box,) for box in boxes)
    planned = job_bytes(manifest(), array, tuple(((*box[:1], (0, 39)),) for box in boxes))
    monkeypatch.setattr(shared_reads, "plan_reads", None)
    assert job_bytes(manifest(), array, needs) == planned == 384 * 64 * 160
    assert job_bytes(manifest(), array, needs * 2) == 2 * planned
