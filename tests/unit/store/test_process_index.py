"""Merged process indexes equal the index of a single process that wrote everything."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.store import process_index
from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, PartRecord, SegmentRecord
from jaxckpt_train.store.process_index import ProcessIndex, decode_index, encode_index, merge_indexes, part_index
from tests.support.strategies import shapes, tilings

LARGE = 1 << 40


def part_of(*shapes_of: tuple[int, ...], name: str = "state") -> PartRecord:
    arrays = tuple(ArrayRecord(f"a{number}", shape, "float32", ()) for number, shape in enumerate(shapes_of))
    return PartRecord(name, "pytree", arrays, (), msgspec.Raw(b"null"))


def chunk(box: Box, segment: int, offset: int = 4096) -> ChunkRecord:
    length = 4 * box_elements(box)
    return ChunkRecord(box, segment, offset, length, hashlib.sha256(repr(box).encode()).hexdigest() * (1 + length % 3))


class Written(NamedTuple):
    """What one process has written of one checkpointable; the chunks of each array by its number."""

    segments: tuple[SegmentRecord, ...]
    chunks: dict[int, list[ChunkRecord]]


def received(parts: Sequence[Written]) -> ProcessIndex:
    return decode_index(encode_index(ProcessIndex("alike", tuple([part_index(*part) for part in parts]))))


@st.composite
def written(draw: st.DrawFn) -> tuple[list[PartRecord], list[list[Written]]]:
    """Draw checkpointables with arrays of all kinds, and what each process has written of them."""
    processes = draw(st.integers(1, 5))
    parts, processes_parts = [], [list[Written]() for _ in range(processes)]
    for number in range(draw(st.integers(1, 3))):
        whole = draw(st.lists(shapes(3, 5) | st.just((0, 3)), max_size=5))
        parts.append(part_of(*whole, name=f"part{number}"))
        of_process = [dict[int, list[ChunkRecord]]() for _ in range(processes)]
        segments = [draw(st.integers(0, 3)) for _ in range(processes)]
        for array, shape in enumerate(whole):
            for box in () if 0 in shape else draw(tilings(shape, 8)):
                process = draw(st.integers(0, processes - 1))
                segments[process] = max(segments[process], 1)
                segment = draw(st.integers(0, segments[process] - 1))
                offset = draw(st.sampled_from([8, 4096, LARGE]))
                of_process[process].setdefault(array, []).append(chunk(box, segment, offset))
        for process, own in enumerate(of_process):
            files = tuple(SegmentRecord(f"x/p{process}-{n}", 9, 8, "d") for n in range(segments[process]))
            processes_parts[process].append(Written(files, own))
    return parts, processes_parts


def merged_chunk_by_chunk(parts: list[PartRecord], indexes: list[list[Written]]) -> object:
    """A simple reference implementation of `merge_indexes`."""
    segments: list[SegmentRecord] = []
    arrays: list[list[list[ChunkRecord]]] = []
    for number, part in enumerate(parts):
        arrays.append([[] for _ in part.arrays])
        for index in indexes:
            own, first = index[number], len(segments)
            segments.extend(own.segments)
            for array, chunks in own.chunks.items():
                arrays[-1][array] += [msgspec.structs.replace(each, segment=first + each.segment) for each in chunks]
    return segments, arrays


@given(written())
def test_merge_equals_a_chunk_by_chunk_merge(case: tuple[list[PartRecord], list[list[Written]]]) -> None:
    parts, indexes = case
    summaries = list(map(received, indexes))
    assert [index.alike for index in summaries] == ["alike"] * len(indexes)
    segments, merged = merge_indexes(parts, summaries)
    found = [[list(array.chunks) for array in part.arrays] for part in merged]
    assert (segments, found) == merged_chunk_by_chunk(parts, indexes)
    assert msgspec.json.encode(found) == msgspec.json.encode(merged_chunk_by_chunk(parts, indexes)[1])  # type: ignore[index]
    assert [msgspec.structs.replace(part, arrays=()) for part in merged] == [
        msgspec.structs.replace(part, arrays=()) for part in parts
    ]


@given(written().filter(lambda case: any(part.chunks for index in case[1] for part in index)), st.data())
def test_lost_duplicate_or_moved_chunk_is_found(
    case: tuple[list[PartRecord], list[list[Written]]], data: st.DataObject
) -> None:
    parts, indexes = case
    places = [
        (process, number, array, at)
        for process, index in enumerate(indexes)
        for number, part in enumerate(index)
        for array, chunks in part.chunks.items()
        for at in range(len(chunks))
    ]
    process, number, array, at = data.draw(st.sampled_from(places))
    chunks = indexes[process][number].chunks[array]
    how = data.draw(st.sampled_from(["lost", "twice", "elsewhere"]))
    if how == "lost":
        del chunks[at]
    elif how == "twice":
        chunks.append(chunks[at])
    else:
        box = chunks[at].box
        if not box:
            return
        chunks[at] = msgspec.structs.replace(chunks[at], box=((box[0][0] + 1, box[0][1] + 1), *box[1:]))
    with pytest.raises(CheckpointError, match=f"{parts[number].name}: array"):
        merge_indexes(parts, list(map(received, indexes)))


def test_identically_cut_arrays_are_each_checked() -> None:
    part = part_of((64, 2), (64, 2), (64, 2), (2, 64))
    rows = [((n, n + 1), (0, 2)) for n in range(64)]
    good = [[chunk(box, 0, 4096 + 8 * number) for number, box in enumerate(rows)] for _ in range(3)]
    columns = [chunk((side[1], side[0]), 0) for side in rows]
    files = (SegmentRecord("state/x", 9, 8, "d"),)

    def merged(*chunks: list[ChunkRecord]) -> list[ArrayRecord]:
        index = received([Written(files, dict(enumerate(chunks)))])
        return list(merge_indexes([part], [index])[1][0].arrays)

    assert [list(array.chunks) for array in merged(*good, columns)] == [*good, columns]
    with pytest.raises(CorruptCheckpointError, match="'a1': boxes cover 126 of 128"):
        merged(good[0], good[1][:-1], good[2], columns)
    with pytest.raises(CorruptCheckpointError, match="array 'a3'"):
        merged(*good, good[0])


@pytest.mark.parametrize("chunks_of_second", [0, 2])
def test_lost_or_duplicate_scalar_chunk_is_found(chunks_of_second: int) -> None:
    """The corners of any number of 0-d boxes are the same empty bytes."""
    one = chunk((), 0)
    files = (SegmentRecord("state/x", 9, 8, "d"),)
    index = received([Written(files, {0: [one], 1: [one] * chunks_of_second})])
    with pytest.raises(CorruptCheckpointError, match="array 'a1'"):
        merge_indexes([part_of((), ())], [index])


@pytest.mark.parametrize(("array", "box"), [(1, ((0, 4),)), (0, ((0, 2), (0, 2))), (0, ()), (7, ())])
def test_chunks_of_missing_arrays_are_refused(array: int, box: Box) -> None:
    index = received([Written((), {array: [chunk(box, 0)]})])
    with pytest.raises(CheckpointError, match="state"):
        merge_indexes([part_of((4,))], [index])


def test_too_many_chunks_are_refused_before_merging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part, files = part_of((64, 2)), (SegmentRecord("state/x", 9, 8, "d"),)
    rows = [chunk(((n, n + 1), (0, 2)), 0) for n in range(64)]
    index = received([Written(files, {0: rows})])
    size = len(msgspec.json.encode(merge_indexes([part], [index])[1][0].arrays[0].chunks))
    monkeypatch.setattr(process_index, "MAX_MANIFEST_BYTES", size)
    merge_indexes([part], [index])
    monkeypatch.setattr(process_index, "MAX_MANIFEST_BYTES", size // 2)
    monkeypatch.setattr(process_index, "MergedChunks", None)
    with pytest.raises(UnsupportedLeafError, match="64 chunks of 1 processes"):
        merge_indexes([part], [index])
