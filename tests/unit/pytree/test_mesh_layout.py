"""Mesh layouts computed from geometry: equal to JAX's index maps, and each element is written once."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt_train.pytree.partition import (
    HeldBox,
    JobPartition,
    MeshLayout,
    ProcessSet,
    WriteAssignment,
    as_holders,
    cuts_of,
)
from jaxckpt_train.store.boxes import box_from_index, check_tiling

AXES = ("data", "fsdp", "model")
SPECS = [
    (),
    (None, "fsdp"),
    ("model",),
    (("fsdp", "model"), "data"),
    (("model", "data"), None, "fsdp"),
    ("data", "model"),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("order", ["as they are", "mixed"])
def test_a_device_holds_what_jax_says(spec: tuple[object, ...], order: str) -> None:
    devices = np.array(jax.devices()[:8])
    if order == "mixed":
        devices = np.random.default_rng(0).permutation(devices)
    mesh, shape = Mesh(devices.reshape(2, 2, 2), AXES), (16, 8, 4)
    expected = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(shape)
    cuts = cuts_of(spec, len(shape), dict(mesh.shape))
    assert cuts is not None
    for process_devices in (1, 2, 4):
        numbers = np.array([device.id // process_devices for device in mesh.devices.flat]).reshape(mesh.devices.shape)
        holders: dict[object, set[int]] = {}
        for device, index in expected.items():
            holders.setdefault(box_from_index(index, shape), set()).add(device.id // process_devices)
        for process in range(8 // process_devices):
            layout = MeshLayout(numbers, AXES, process)
            assert layout.divides(cuts, shape)
            for place in layout.places:
                assert layout.box(place, cuts, shape) == box_from_index(expected[mesh.devices[place]], shape)
            mine = sorted((box, tuple(sorted(who))) for box, who in holders.items() if process in who)
            assert [(box, tuple(who)) for box, who in layout.held(cuts, shape)] == mine


@st.composite
def meshes(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[tuple[str, ...], ...]]]:
    sizes = draw(st.tuples(*[st.integers(1, 4)] * 3))
    per_process = draw(st.sampled_from([n for n in (1, 2, 3, 4) if np.prod(sizes) % n == 0]))
    numbers = np.arange(np.prod(sizes)) // per_process
    if draw(st.booleans()):
        numbers = np.array(draw(st.permutations(numbers.tolist())))
    axes = draw(st.permutations(AXES))
    ends = sorted(draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
    cuts = [((), ()), (tuple(axes[: ends[0]]), tuple(axes[ends[0] : ends[1]]))]
    return numbers.reshape(sizes), cuts


@given(meshes(), st.integers(1, 3))
def test_all_processes_write_each_element_once(
    case: tuple[np.ndarray, list[tuple[tuple[str, ...], ...]]], times: int
) -> None:
    numbers, all_cuts = case
    shape, processes = (64 * 27, 64 * 27), int(numbers.max()) + 1
    layouts = [MeshLayout(numbers, AXES, process) for process in range(processes)]
    assignments = [WriteAssignment(process, 1 << 16) for process in range(processes)]
    for cuts in all_cuts * times:
        boxes = []
        for layout, own in zip(layouts, assignments, strict=True):
            boxes += [share.box for share in own.of(layout.held(cuts, shape), 4)]
        check_tiling(boxes, shape, "array")


def test_irregular_specs_are_left_to_jax() -> None:
    sizes = {"data": 2, "fsdp": 4}
    assert cuts_of(("fsdp", None), 3, sizes) == (("fsdp",), (), ())
    assert cuts_of((("data", "fsdp"),), 1, sizes) == (("data", "fsdp"),)
    for spec, dimensions in ((("fsdp", "fsdp"), 2), (("fsdp",), 0), ((PartitionSpec.UNCONSTRAINED,), 1), (("x",), 1)):
        assert cuts_of(spec, dimensions, sizes) is None
    layout = MeshLayout(np.arange(8).reshape(2, 4), ("data", "fsdp"), 0)
    assert layout.divides((("fsdp",),), (8,))
    assert not layout.divides((("fsdp",),), (9,))
    assert not layout.divides((("data", "fsdp"),), (12,))
    assert layout.held((("fsdp",),), (0,)) == []


@pytest.mark.parametrize("numbers", [[3], [0, 1, 2], [5, 9, 13], [0, 1, 3], [2, 7], [0, 4, 5, 9]])
def test_holders_are_the_same_in_both_forms(numbers: list[int]) -> None:
    holders = as_holders(numbers)
    assert list(holders) == numbers
    assert [number in holders for number in range(15)] == [number in numbers for number in range(15)]
    assert as_holders(list(numbers)) == holders
    assert hash(as_holders(list(numbers))) == hash(holders)
    assert isinstance(holders, range) == (numbers not in ([3], [0, 1, 3], [0, 4, 5, 9]))


def test_irregular_holders_are_hashed_once() -> None:
    """Each array of a save looks them up; all numbers of 100,000 processes would take half a millisecond each time."""
    hashed = []

    class Number(int):
        def __hash__(self) -> int:
            hashed.append(self)
            return int.__hash__(self)

    holders = ProcessSet(map(Number, (0, 1, 3)))
    assert type(as_holders([0, 1, 3])) is ProcessSet
    assert {holders, holders} == {(0, 1, 3)}
    assert hashed == [0, 1, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=40), st.integers(1, 9))
def test_least_loaded_process_is_assigned_first(sizes: list[tuple[int, int]], processes: int) -> None:
    plain = [(0, number) for number in range(processes)]
    groups = [range(processes), ProcessSet(range(processes))]
    assignments = [[WriteAssignment(number) for number in range(processes)] for _ in groups]
    for size, _ in sizes:
        load, least = min(plain)
        plain[least] = (load + size, least)
        for group, several in zip(groups, assignments, strict=True):
            assert [each.of_whole(group, size) for each in several] == [n == least for n in range(processes)]


@pytest.mark.parametrize("spec", SPECS)
def test_geometry_and_devices_give_equal_partitions(spec: tuple[object, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), AXES)
    leaf = jax.device_put(
        np.arange(16 * 8 * 4, dtype=np.float32).reshape(16, 8, 4), NamedSharding(mesh, PartitionSpec(*spec))
    )
    partition = JobPartition(0, 1)
    geometry = partition._by_geometry(leaf.sharding, leaf.shape)
    device = partition._by_device(leaf.sharding, leaf.shape)
    assert geometry is not None
    assert geometry.boxes == device.boxes
    assert list(geometry.held) == list(device.held)
    for part in partition.of(leaf):
        inside = tuple(itertools.starmap(slice, part.box))
        assert np.array_equal(np.asarray(part.held)[part.inner or ...], np.asarray(leaf)[inside])
    assert all(isinstance(each, HeldBox) for each in geometry.held)
