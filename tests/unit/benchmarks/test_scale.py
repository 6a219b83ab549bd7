"""Simulated jobs: plans are correct, and the work of one process does not depend on the number of processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest

from benchmarks import scale_indexes
from benchmarks.counted_values import CountedValues
from benchmarks.scale import QUICK, of_each, of_process_0, of_reader
from benchmarks.scale_case import Planned, asked, give, index_of, manifest_of, plan, run_case
from benchmarks.scale_layouts import LAYOUTS, LENGTH, planned_state, shapes
from benchmarks.scale_storage import save_together
from jaxckpt_train.distributed.coordinator import ManyProcesses
from jaxckpt_train.distributed.rendezvous import PACK
from jaxckpt_train.store.boxes import check_tiling
from jaxckpt_train.store.manifest import decode_manifest
from jaxckpt_train.store.process_index import encode_index
from jaxckpt_train.store.threads import paused_collection

ARRAYS = 2 * len(shapes(LENGTH))


def all_plans(layout: str, processes: int, arrays: int = ARRAYS) -> list[Planned]:
    state = planned_state(layout, processes, arrays)
    return [plan(state, process) for process in range(processes)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("processes", [8, 64, 160])
def test_every_byte_is_written_once_and_evenly(layout: str, processes: int) -> None:
    state, plans = planned_state(layout, processes, ARRAYS), all_plans(layout, processes)
    for number, array in enumerate(state.arrays):
        check_tiling([box for planned in plans for box in planned.boxes[number]], array.shape, array.name)
    written = [planned.bytes for planned in plans]
    assert max(written) - min(written) <= 2 << 20  # arrays smaller than two parts are not split


@pytest.mark.parametrize("layout", LAYOUTS)
def test_manifest_of_all_processes_is_valid(layout: str) -> None:
    state, plans = planned_state(layout, 64, ARRAYS), all_plans(layout, 64)
    data = manifest_of(state, [encode_index(index_of(planned, n)) for n, planned in enumerate(plans)])
    manifest = decode_manifest(data, "manifest")
    for array, expected in zip(manifest.parts[0].arrays, range(ARRAYS), strict=True):
        boxes = [box for planned in plans for box in planned.boxes[expected]]
        assert [chunk.box for chunk in array.chunks] == boxes
    writers = [int(manifest.segments[chunk.segment].file[7:12]) for chunk in manifest.parts[0].arrays[0].chunks]
    assert writers == [n for n, planned in enumerate(plans) for _ in planned.boxes[0]]


def calls_of(act: Callable[[], object]) -> int:
    """Return how many functions are called, built-in ones included."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with paused_collection():  # as in a save
        sys.setprofile(note)
        try:
            act()
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.parametrize("layout", ["fsdp", "fsdp-tp"])
def test_plan_calls_are_independent_of_process_count(layout: str) -> None:
    counts = {}
    for processes in (64, 64_000):
        state = planned_state(layout, processes, 10 * ARRAYS)
        plan(state, 1)
        counts[processes] = calls_of(functools.partial(plan, state, 1))
    assert counts[64_000] <= counts[64]


def test_replica_plan_calls_follow_parts_not_processes() -> None:
    counts = {}
    for processes in (1000, 64_000):
        state = planned_state("replicated", processes, ARRAYS)
        counts[processes] = calls_of(functools.partial(plan, state, processes - 1))
    assert counts[64_000] <= 1.01 * counts[1000]  # the state of 64,000 processes has about 3,000 parts


def test_index_costs_are_independent_of_process_count() -> None:
    found = {}
    for processes in (64, 1000):
        values = CountedValues(waits=False)
        view = values.of(1)
        value = encode_index(index_of(plan(planned_state("fsdp", processes, 10 * ARRAYS), 1), 1))
        give(ManyProcesses(view, 1, processes), view, value)
        found[processes] = (len(value), asked(view.asked))
    (size_64, asked_64), (size_1000, asked_1000) = found[64], found[1000]
    assert asked_64["operations"] == asked_1000["operations"] == 4  # the value, its announcement, the count, the result
    assert abs(size_1000 - size_64) <= 0.05 * size_64  # the writers of small arrays differ
    assert abs((asked_1000["sent_bytes"] - size_1000) - (asked_64["sent_bytes"] - size_64)) <= 4


@pytest.mark.parametrize("processes", [PACK // 2, PACK, 2 * PACK, 4 * PACK])
def test_primary_receives_each_index_once(processes: int) -> None:
    figures = run_case("fsdp", processes, 100, samples=2)
    packs = -(-processes // PACK)
    assert figures["process_0_operations"] == 5 + 2 * packs  # wake-up and attendance; each pack; publish and forget
    assert figures["process_0_received_bytes"] <= processes * (figures["index_bytes"] + 150)
    assert figures["chunks"] >= 80
    assert figures["files_read"] <= processes


def test_tables_have_every_case() -> None:
    figures = [{"layout": layout, **run_case(layout, 8, 10, samples=2)} for layout, _, _ in QUICK]
    for text in (of_each(figures), of_process_0(figures), of_reader(figures)):
        lines = text.splitlines()
        assert len(lines) == 2 + len(QUICK)
        assert len({line.count("|") for line in lines}) == 1


def test_storage_calls_are_independent_of_process_count() -> None:
    few, many = save_together(3, 20), save_together(48, 20)
    for saved in (few, many):
        assert all(each == {"list": 1, "create": 1, "synced": 1} for each in saved.storage[1:])
        assert saved.listed == [1] * len(saved.storage)
        for asked_by in saved.values[1:]:
            assert asked_by.operations["increment"] == 2
    assert few.storage[0] == many.storage[0]
    assert few.storage[0].total() <= 12
    assert len(many.committed.manifest.segments) == 48
    assert all(len(array.chunks) == 48 for array in many.committed.manifest.parts[0].arrays)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp-tp"])
def test_reader_needs_few_index_bytes_whatever_the_number_of_processes(layout: str) -> None:
    for processes in (64, 640):
        figures = scale_indexes.run_case(layout, processes, 200)
        assert figures["index_files_read"] <= 2
        assert figures["index_bytes_read"] <= 3 * figures["index_bytes_needed"]
        assert figures["process_0_received_bytes"] <= processes * 1000
