"""Write assignments: the parts of all processes cover each box once, with equal bytes."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.mesh_layout import Cuts, MeshLayout
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.pytree.partition import LEAST_PART_BYTES, HeldBox, JobPartition, WriteAssignment, cut
from jaxckpt_train.store.boxes import Box, box_elements, check_tiling
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, PartRecord
from jaxckpt_train.store.process_index import ProcessIndex, decode_index, encode_index, merge_indexes, part_index

AXES = ("data", "fsdp", "model")
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@given(shapes, st.integers(1, 9))
def test_a_cut_box_is_all_of_it_once(shape: tuple[int, ...], parts: int) -> None:
    box: Box = tuple((3, 3 + size) for size in shape)
    found = cut(box, parts)
    assert 1 <= len(found) <= parts
    counts = np.zeros([size + 3 for size in shape], np.int8)
    for part in found:
        counts[tuple(slice(start, stop) for start, stop in part)] += 1
    inside = tuple(slice(start, stop) for start, stop in box)
    assert (counts[inside] == 1).all()
    assert counts.sum() == math.prod(shape)


@given(st.lists(shapes, min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 64))
def test_all_processes_together_write_every_element_once(
    arrays: list[tuple[int, ...]], processes: int, least: int
) -> None:
    assignments = [WriteAssignment(number, least) for number in range(processes)]
    everyone = tuple(range(processes))
    for shape in arrays:
        box: Box = tuple((0, size) for size in shape)
        half = processes // 2 or 1
        layout = [HeldBox(box, everyone)] if len(shape) != 1 else [
            HeldBox(((0, shape[0] // 2),), everyone[:half]),
            HeldBox(((shape[0] // 2, shape[0]),), everyone[half:] or (0,)),
        ]  # fmt: skip
        counts = np.zeros(shape, np.int8)
        for each in assignments:
            for share in each.of(layout, 4):
                counts[tuple(slice(start, stop) for start, stop in share.box)] += 1
        assert (counts == 1).all()


@pytest.mark.parametrize("shape", [(1024, 1024, 64), (1021, 1031, 61), (3, 5_000_011), (4, 4, 2_000_003)])
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_replicas_share_a_large_array_evenly(shape: tuple[int, ...], processes: int) -> None:
    layout = [HeldBox(tuple((0, size) for size in shape), tuple(range(processes)))]
    written = [sum(box_elements(s.box) for s in WriteAssignment(n).of(layout, 4)) for n in range(processes)]
    assert sum(written) == math.prod(shape)
    assert max(written) <= 1.2 * math.prod(shape) / processes


def test_many_small_arrays_are_shared_whole_and_evenly() -> None:
    layout = [HeldBox(((0, 100),), (0, 1, 2, 3))]
    assignments = [WriteAssignment(number, least_bytes=1000) for number in range(4)]
    written, writers = [0] * 4, list[int]()
    for _ in range(1000):
        found = [len(each.of(layout, 4)) for each in assignments]
        assert sorted(found) == [0, 0, 0, 1]
        written = [total + count for total, count in zip(written, found, strict=True)]
        writers.append(found.index(1))
    assert written == [250] * 4
    assert writers[:10] == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]  # two make 800 bytes
    assert [sum(each.of_whole((0, 1, 2, 3), 8) for each in assignments) for _ in range(8)] == [1] * 8
    assert LEAST_PART_BYTES > 400


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_least_loaded_process_is_assigned_first(sizes: list[int], processes: int) -> None:
    loads, everyone = [(0, number) for number in range(processes)], tuple(range(processes))
    assignments = [WriteAssignment(number, least_bytes=0) for number in everyone]
    for size in sizes:
        load, least = min(loads)
        loads[least] = (load + size, least)
        assert [each.of_whole(everyone, size) for each in assignments] == [n == least for n in everyone]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[np.ndarray, list[Cuts]]:
    sizes = draw(st.tuples(*[st.integers(1, 4)] * 3))
    per_process = draw(st.sampled_from([n for n in (1, 2, 3, 4) if np.prod(sizes) % n == 0]))
    numbers = np.arange(np.prod(sizes)) // per_process
    if draw(st.booleans()):
        numbers = np.array(draw(st.permutations(numbers.tolist())))
    axes = draw(st.permutations(AXES))
    ends = sorted(draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
    cuts: list[Cuts] = [((), ()), (tuple(axes[: ends[0]]), tuple(axes[ends[0] : ends[1]]))]
    return numbers.reshape(sizes), cuts


@given(meshes(), st.integers(1, 3))
def test_processes_of_a_mesh_write_each_element_once(case: tuple[np.ndarray, list[Cuts]], times: int) -> None:
    numbers, all_cuts = case
    shape, processes = (64 * 27, 64 * 27), int(numbers.max()) + 1
    layouts = [MeshLayout(numbers, AXES, process) for process in range(processes)]
    assignments = [WriteAssignment(process, 1 << 16) for process in range(processes)]
    for cuts in all_cuts * times:
        boxes = []
        for layout, own in zip(layouts, assignments, strict=True):
            boxes += [share.box for share in own.of(layout.held(cuts, shape), 4)]
        check_tiling(boxes, shape, "array")


@pytest.mark.parametrize("spec", [(), (None, "fsdp"), ("model",), (("fsdp", "model"), "data")])
def test_local_shards_are_views_of_what_devices_hold(spec: tuple[object, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), AXES)
    values = np.arange(16 * 8 * 4, dtype=np.float32).reshape(16, 8, 4)
    leaf = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    for processes in (1, 2):
        parts = JobPartition(0, processes).of(leaf)
        check_tiling([part.box for part in parts], leaf.shape, "array")
        for part in parts:
            inside = tuple(itertools.starmap(slice, part.box))
            assert np.array_equal(np.asarray(part.held)[part.inner or ...], values[inside])


def test_indexes_that_do_not_make_whole_are_refused() -> None:
    part = PartRecord("state", "pytree", (ArrayRecord("w", (4,), "float32", ()),), (), b"null")  # type: ignore[arg-type]

    def index(*boxes: Box) -> ProcessIndex:
        chunks = tuple(ChunkRecord(box, 0, 4096, 4 * box_elements(box), "") for box in boxes)
        return decode_index(encode_index(ProcessIndex("", (part_index((), {0: chunks}),))))

    (merged,) = merge_indexes([part], [index(((0, 2),)), index(((2, 4),))])[1]
    assert [chunk.box for chunk in merged.arrays[0].chunks] == [((0, 2),), ((2, 4),)]
    for wrong in ([index(((0, 2),)), index()], [index(((0, 2),)), index(((1, 4),))]):
        with pytest.raises(CheckpointError):
            merge_indexes([part], wrong)
