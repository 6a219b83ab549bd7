"""The layout of segments: each chunk is placed once and aligned, and segments roll over at their size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.segment import (
    MAX_HEADER_BYTES,
    ArraySource,
    ChunkSource,
    SegmentLayout,
    chunk_name,
    plan_segments,
)


def source(name: str, size: int) -> ArraySource:
    data = np.zeros(size, np.uint8)
    return ArraySource(name, data.shape, data.dtype, [ChunkSource(full_box(data.shape), data)])


def check(layouts: Sequence[SegmentLayout], arrays: Sequence[ArraySource]) -> None:
    """Fail unless each chunk with bytes is in one segment, at the offset in the header of that segment."""
    placed = sorted(chunk.array for layout in layouts for chunk in layout.chunks)
    assert placed == [number for number, array in enumerate(arrays) if array.chunks[0].data.size]
    for layout in layouts:
        entries, end = json.loads(layout.head[8:]), len(layout.head)
        assert end % 4096 == 0
        assert int.from_bytes(layout.head[:8], "little") == end - 8
        assert list(entries) == [arrays[chunk.array].name for chunk in layout.chunks]
        for entry, chunk in zip(entries.values(), layout.chunks, strict=True):
            start, stop = entry["data_offsets"]
            assert (chunk.offset, chunk.length) == (len(layout.head) + start, stop - start) == (end, chunk.length)
            end += chunk.length
        assert end == layout.size


@given(st.lists(st.sampled_from([0, 1, 63, 64, 100, 640, 4096, 5000, 8192]), max_size=30), st.integers(1, 20000))
def test_segments_hold_everything_once_and_roll_over(sizes: list[int], segment_bytes: int) -> None:
    arrays = [source(f"leaf{number}", size) for number, size in enumerate(sizes)]
    layouts = list(plan_segments(arrays, segment_bytes))
    check(layouts, arrays)
    for layout in layouts:
        assert layout.size - len(layout.head) <= segment_bytes or len(layout.chunks) == 1
    for one, following in itertools.pairwise(layouts):
        first = following.chunks[0].length
        assert one.size - len(one.head) + first > segment_bytes, "it would have fitted"


@given(st.lists(st.sampled_from([1, 63, 64, 100, 640, 4096, 5000, 8192]), min_size=1, max_size=30))
def test_chunks_are_aligned_where_possible(sizes: list[int]) -> None:
    (layout,) = plan_segments([source(f"leaf{number}", size) for number, size in enumerate(sizes)], 1 << 30)
    for chunk in layout.chunks:
        if chunk.length % 4096 == 0:
            assert chunk.offset % 4096 == 0
        if chunk.length % 64 == 0:
            assert chunk.offset % 64 == 0


def test_a_header_never_comes_near_its_limit() -> None:
    name = "n" * 60_000
    arrays = [source(f"{name}{number}", 1) for number in range(400)]
    layouts = list(plan_segments(arrays, 1 << 30))
    check(layouts, arrays)
    assert len(layouts) > 1
    assert all(len(layout.head) <= MAX_HEADER_BYTES for layout in layouts)


def test_name_of_partial_chunk_includes_its_box() -> None:
    assert chunk_name("a/b", ((0, 4), (0, 6)), (4, 6)) == "a/b"
    assert chunk_name("a/b", ((0, 2), (3, 6)), (4, 6)) == "a/b@[0:2,3:6]"
    assert chunk_name("a/b", (), ()) == "a/b"


def test_nothing_to_store_makes_no_segment() -> None:
    assert list(plan_segments([source("empty", 0)], 1 << 20)) == []
    assert list(plan_segments([], 1 << 20)) == []
