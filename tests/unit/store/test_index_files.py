"""Index files: what a reader finds in them equals what one manifest of all processes would say."""

from __future__ import annotations

import contextlib
import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, FormatVersionError
from jaxckpt_train.store import index_files as module
from jaxckpt_train.store.boxes import Box, box_elements, full_box, intersect
from jaxckpt_train.store.committed import completed, index_files
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord, decode_manifest, encode_manifest
from tests.nightly.faults.wrong_indexes import KINDS, refused
from tests.support.indexed import Indexed, PlannedJob, Written, planned_jobs
from tests.support.strategies import boxes_in


@given(planned_jobs(), st.sampled_from([1, 32]), st.data())
def test_reader_finds_what_was_written(job: PlannedJob, fanout: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "FANOUT", fanout)  # tables of tables
        backend, committed = Indexed.of(job).commit()
    whole = completed(backend, committed).manifest
    for place, part in enumerate(job.parts):
        for number, array in enumerate(whole.parts[place].arrays):
            assert sorted(chunk.box for chunk in array.chunks) == sorted(job.boxes(place, number))
        wanted = {}
        for array in part.arrays:
            if 0 not in array.shape:
                wanted[array.name] = data.draw(st.lists(boxes_in(array.shape), min_size=1, max_size=2))
        indexes = index_files(backend, committed)
        if indexes is None:
            continue
        entries = indexes.covering(part.name, wanted)
        needed = {
            process
            for process, written in enumerate(job.written)
            for number, boxes in written[place].items()
            for box in boxes
            if box != full_box(part.arrays[number].shape)
            if any(intersect(box, each) is not None for each in wanted[part.arrays[number].name])
        }
        assert needed <= {entry.process for entry in entries}
        found = indexes.manifest_with(part.name, wanted, indexes.read_all(entries))
        chunks = {chunk.digests: chunk for array in whole.parts[place].arrays for chunk in array.chunks}
        for array in found.parts[place].arrays:
            for chunk in array.chunks:
                expected = chunks[chunk.digests]
                assert (chunk.box, chunk.offset, chunk.length) == (expected.box, expected.offset, expected.length)
                assert found.segments[chunk.segment].file == whole.segments[expected.segment].file
            for box in wanted.get(array.name, ()):
                shared = [intersect(box, chunk.box) for chunk in array.chunks]
                assert sum(box_elements(common) for common in shared if common is not None) == box_elements(box)


def cut_job(processes: int = 4) -> PlannedJob:
    """An array of 8 rows, cut over the processes, and a whole one of process 0."""
    return job_of(
        processes, [{0: [((8 // processes * n, 8 // processes * (n + 1)), (0, 3))]} for n in range(processes)]
    )


def job_of(processes: int, written: list[Written]) -> PlannedJob:
    arrays = (ArrayRecord("cut", (8, 3), "float32", ()), ArrayRecord("whole", (5,), "float32", ()))
    part = PartRecord("state", "pytree", arrays, (), msgspec.Raw(b"null"))
    written[0][1] = [((0, 5),)]
    return PlannedJob([part], [[each] for each in written[:processes]])


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 4), (0, 3)), ((4, 7), (0, 3))],
        [((0, 5), (0, 3)), ((4, 8), (0, 3))],
        [((0, 4), (0, 3)), ((0, 4), (0, 3))],
        [((0, 4), (0, 3)), ((4, 8), (0, 2))],
    ],
    ids=["gap", "overlap", "twice", "corner"],
)
def test_parts_that_do_not_tile_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(CheckpointError):
        Indexed.of(job_of(2, [{0: [box]} for box in boxes])).commit()


def test_other_groups_of_arrays_are_refused() -> None:
    written = Indexed.of(cut_job())
    other = written.summaries()[1]
    written.messages[1] = msgspec.structs.replace(
        written.messages[1], summary=msgspec.structs.replace(other, groups=bytes(16))
    )
    with pytest.raises(CheckpointError, match="process 1"):
        written.commit()


def test_reader_opens_only_files_that_cover_its_boxes() -> None:
    backend, committed = Indexed.of(cut_job(8)).commit()
    indexes = index_files(backend, committed)
    assert indexes is not None
    assert [each.process for each in indexes.covering("state", {"cut": [((2, 3), (0, 3))]})] == [2]
    assert [each.process for each in indexes.covering("state", {"cut": [((2, 4), (1, 2)), ((7, 8), (0, 1))]})] == [
        2,
        3,
        7,
    ]
    assert indexes.covering("state", {"whole": [((0, 5),)]}) == []
    assert [each.process for each in indexes.all()] == list(range(8))


@pytest.mark.parametrize("length", [(1 << 30) + 2, 1 << 40, 3])
def test_neighbours_on_an_axis_of_any_length(length: int) -> None:
    step = length // 3
    written: list[Written] = [{0: [((n * step, (n + 1) * step if n < 2 else length),)]} for n in range(3)]
    part = PartRecord("state", "pytree", (ArrayRecord("a", (length,), "int8", ()),), (), msgspec.Raw(b"null"))
    backend, committed = Indexed.of(PlannedJob([part], [[each] for each in written]), item_bytes=1).commit()
    indexes = index_files(backend, committed)
    assert indexes is not None
    found = [each.process for each in indexes.covering("state", {"a": [((step, 2 * step),)]})]
    assert 1 in found
    assert length > 1 << 30 or found == [1]
    assert completed(backend, committed).manifest.index is None


@pytest.mark.parametrize(("version", "has_index"), [(1, True), (2, False), (3, True)])
def test_version_says_whether_there_are_index_files(version: int, has_index: bool) -> None:
    _, committed = Indexed.of(cut_job()).commit()
    manifest = committed.manifest if has_index else completed(*Indexed.of(cut_job()).commit()).manifest
    data = encode_manifest(msgspec.structs.replace(manifest, format_version=version))
    with pytest.raises(FormatVersionError if version == 3 else CorruptCheckpointError):
        decode_manifest(data, "manifest")


def test_digest_of_the_root_that_is_none_is_refused() -> None:
    backend, committed = Indexed.of(cut_job()).commit()
    record = committed.manifest.index
    assert record is not None
    other = msgspec.structs.replace(committed.manifest, index=msgspec.structs.replace(record, digest="x" * 32))
    with pytest.raises(CorruptCheckpointError):
        completed(backend, dataclasses.replace(committed, manifest=other))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_index_is_refused(kind: str) -> None:
    for seed in range(10):
        assert refused(kind, seed)


@pytest.mark.parametrize(("check", "kind"), [("check_tiling", "hole"), ("check_tiling", "overlap")])
def test_controls_accept_a_wrong_index(check: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, check, lambda *_: None)
    assert not all(refused(kind, seed) for seed in range(10))


@pytest.mark.parametrize("what", ["index file", "table"])
def test_what_is_listed_twice_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a small file could make a reader read another one without end."""
    if what == "table":
        monkeypatch.setattr(module, "FANOUT", 1)
    written = Indexed.of(cut_job(8))
    encoded = module._Listed.encoded

    def twice(listed: module._Listed, *, lists_tables: bool) -> bytes:
        if lists_tables or what == "index file":
            listed = listed._replace(numbers=np.full_like(listed.numbers, listed.numbers[0]))
        return encoded(listed, lists_tables=lists_tables)

    monkeypatch.setattr(module._Listed, "encoded", twice)
    backend, committed = written.commit()
    indexes = index_files(backend, committed)
    assert indexes is not None
    with pytest.raises(CorruptCheckpointError):
        indexes.covering("state", {"cut": [((0, 8), (0, 3))]})


@given(planned_jobs(), st.data())
def test_hostile_index_raises_only_our_errors(job: PlannedJob, data: st.DataObject) -> None:
    """Its digest is right, but any of its bytes may be wrong."""
    written = Indexed.of(job)
    if not written.files:
        return
    process = data.draw(st.sampled_from(sorted(written.files)))
    content = bytearray(written.files[process])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    written.replace_file(process, bytes(content))
    with contextlib.suppress(CorruptCheckpointError):
        completed(*written.commit())
