"""The plan of a load: aligned runs in file order that cover the requested bytes in whole blocks, and few others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import Box, box_elements, element_span, full_box, intersect
from jaxckpt_train.store.manifest import Manifest
from jaxckpt_train.store.read_plan import Run, Wanted, plan_reads
from tests.support.checkpoints import commit
from tests.support.memory_backend import MemoryBackend
from tests.support.strategies import boxes_in, shapes, tilings
from tests.support.strict_backend import BLOCK, PAGE, small_sizes


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


def saved(shape: tuple[int, ...], boxes: list[Box], count: int = 1) -> Manifest:
    arrays = {f"x{number}": np.zeros(shape, np.float64) for number in range(count)}
    return commit(MemoryBackend(), "/a/b", arrays, StoreSettings(), boxes=dict.fromkeys(arrays, boxes)).manifest


def check(manifest: Manifest, wanted: list[Wanted], runs: list[Run]) -> None:
    places = [(run.segment, run.start) for run in runs]
    assert places == sorted(places)
    for run in runs:
        assert (run.start % PAGE, run.stop % PAGE) == (0, 0)
        assert run.start <= run.reads[0].start
        assert run.reads[-1].stop == run.start + run.needed <= run.stop
        for read in run.reads:
            chunk = read.chunk
            assert read.start == chunk.offset + read.first_block * BLOCK
            assert (read.stop - chunk.offset) % BLOCK == 0 or read.stop == chunk.offset + chunk.length
            for use in read.uses:
                item = chunk.length // box_elements(chunk.box)
                first, last = element_span(use.common, chunk.box)
                assert read.start <= chunk.offset + first * item < chunk.offset + last * item <= read.stop
    if not any(want.passing for want in wanted):
        spans = sorted((run.segment, read.start, read.stop) for run in runs for read in run.reads)
        for (segment, _, stop), (next_segment, start, _) in itertools.pairwise(spans):
            assert segment < next_segment or stop <= start, "bytes are read twice"
    for number, want in enumerate(wanted):
        for index, box in enumerate(want.boxes):
            held = [use.common for run in runs for read in run.reads for use in read.uses
                    if (use.wanted, use.box) == (number, index)]  # fmt: skip
            assert all(intersect(part, box) == part for part in held)
            assert sum(map(box_elements, held)) == box_elements(box)


@given(st.data(), shapes(3, 40), st.sampled_from([1, 3 * PAGE, 1 << 30]))
def test_a_plan_serves_every_wanted_element_once(data: st.DataObject, shape: tuple[int, ...], band: int) -> None:
    manifest = saved(shape, data.draw(tilings(shape)), count=2)
    wanted = [
        Wanted(array, data.draw(st.lists(boxes_in(shape), unique=True, max_size=3)))
        for array in manifest.parts[0].arrays
    ]
    check(manifest, wanted, plan_reads(manifest, wanted, band))


def test_adjacent_reads_merge_and_distant_ones_do_not() -> None:
    manifest = saved((PAGE // 8,), [((0, PAGE // 8),)], count=8)
    arrays = manifest.parts[0].arrays
    whole = full_box(arrays[0].shape)
    (run,) = plan_reads(manifest, [Wanted(array, [whole]) for array in arrays], 1 << 30)
    assert len(run.reads) == 8
    assert run.is_destination
    first_and_last = [Wanted(array, [whole]) for array in (arrays[0], arrays[-1])]
    assert len(plan_reads(manifest, first_and_last, 1 << 30)) == 2
    first_and_third = [Wanted(array, [whole]) for array in (arrays[0], arrays[2])]
    assert len(plan_reads(manifest, first_and_third, 1 << 30)) == 1


def test_runs_are_limited_in_size() -> None:
    manifest = saved((PAGE // 8,), [((0, PAGE // 8),)], count=40)
    wanted = [Wanted(array, [full_box(array.shape)]) for array in manifest.parts[0].arrays]
    assert [run.needed for run in plan_reads(manifest, wanted, 1 << 30)] == [12 * PAGE] * 3 + [4 * PAGE]
    assert {run.needed for run in plan_reads(manifest, wanted, 2 * PAGE)} == {2 * PAGE}


def test_cut_chunk_is_read_in_bands() -> None:
    manifest = saved((64, 512), [((0, 64), (0, 512))])
    (array,) = manifest.parts[0].arrays
    wanted = [Wanted(array, [((0, 64), (0, 100)), ((0, 64), (100, 512))])]
    runs = plan_reads(manifest, wanted, 8 * PAGE)
    check(manifest, wanted, runs)
    assert [run.needed for run in runs] == [8 * PAGE] * 8
    assert not any(run.is_destination for run in runs)


def test_rows_that_end_within_blocks_are_read_once() -> None:
    manifest = saved((61, 700), [((0, 61), (0, 700))])
    (array,) = manifest.parts[0].arrays
    wanted = [Wanted(array, [((0, 61), (at, at + 100)) for at in range(0, 700, 100)])]
    runs = plan_reads(manifest, wanted, 8 * PAGE)
    check(manifest, wanted, runs)
    assert len(runs) > 8
    assert sum(run.needed for run in runs) == array.chunks[0].length


def test_copied_bytes_come_in_small_bands() -> None:
    manifest = saved((64, 512), [((0, 64), (0, 512))], count=2)
    columns = [Wanted(array, [((0, 64), (128, 256))]) for array in manifest.parts[0].arrays]
    runs = plan_reads(manifest, columns, 1 << 30)
    check(manifest, columns, runs)
    assert [run.needed for run in runs] == [8 * PAGE] * 16
    assert all(run.is_parts for run in runs)


def test_blocks_between_pieces_of_part_are_not_read() -> None:
    manifest = saved((4, 64, 512), [((0, 4), (0, 64), (0, 512))])
    (array,) = manifest.parts[0].arrays
    wanted = [Wanted(array, [((0, 4), (16, 32), (0, 512))])]  # a quarter of each layer
    runs = plan_reads(manifest, wanted, 1 << 30)
    check(manifest, wanted, runs)
    assert sum(run.needed for run in runs) == array.chunks[0].length // 4


def test_run_with_large_gaps_is_no_destination() -> None:
    manifest = saved((PAGE // 8,), [((0, PAGE // 8),)], count=12)
    whole = full_box(manifest.parts[0].arrays[0].shape)
    every_third = [Wanted(array, [whole]) for array in manifest.parts[0].arrays[::3]]
    (run,) = plan_reads(manifest, every_third, 1 << 30)
    assert not run.is_destination


def test_distant_pieces_skip_bytes_between() -> None:
    manifest = saved((64, 512), [((0, 64), (0, 512))])
    (array,) = manifest.parts[0].arrays
    rows = [((row, row + 1), (0, 512)) for row in (50, 0, 20)]
    runs = plan_reads(manifest, [Wanted(array, rows)], 1 << 30)
    check(manifest, [Wanted(array, rows)], runs)
    assert [run.needed for run in runs] == [PAGE] * 3


def test_unaligned_large_leaf_is_read_in_bands() -> None:
    arrays = {"a": np.zeros(3, np.uint8), "x": np.zeros((60, 1001), np.uint8)}
    manifest = commit(MemoryBackend(), "/a/b", arrays, StoreSettings()).manifest
    (array,) = [array for array in manifest.parts[0].arrays if array.name == "x"]
    assert array.chunks[0].offset % 64
    wanted = [Wanted(array, [full_box(array.shape)])]
    runs = plan_reads(manifest, wanted, 4 * PAGE)
    check(manifest, wanted, runs)
    assert len(runs) > 2
    assert all(run.needed <= 5 * PAGE for run in runs)  # a run begins with the page that holds its first byte


def test_large_passing_boxes_are_read_separately() -> None:
    manifest = saved((64, 512), [((0, 64), (0, 512))])
    (array,) = manifest.parts[0].arrays
    quarters = [((row, row + 16), (0, 512)) for row in range(0, 64, 16)]
    for passing, sizes in ((False, [64 * PAGE]), (True, [16 * PAGE] * 4)):
        wanted = [Wanted(array, quarters, passing)]
        runs = plan_reads(manifest, wanted, 20 * PAGE)
        check(manifest, wanted, runs)
        assert [run.needed for run in runs] == sizes
