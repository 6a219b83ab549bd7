"""One planned job whose processes write index files: the work of process 0, and of a process that loads."""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.mesh_layout import MeshLayout
from benchmarks.process_figures import ResidentMeter
from benchmarks.scale_case import BAND_BYTES, HEAD_BYTES, exchanged, main, plan, timed
from benchmarks.scale_layouts import ITEM_BYTES, TENSOR, PlannedState, planned_state
from jaxckpt_train.pytree.partition import HeldBox, WriteAssignment
from jaxckpt_train.store.boxes import Box, box_elements, full_box
from jaxckpt_train.store.committed import Committed, index_files
from jaxckpt_train.store.index_files import encode_index_file, encode_tables, index_name
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    INDEXED_VERSION,
    ArrayRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    decode_manifest,
    encode_manifest,
)
from jaxckpt_train.store.process_index import (
    ChunkColumns,
    PartIndex,
    ProcessIndex,
    decode_index,
    encode_index,
    merge_indexes,
    packed,
    part_index,
)
from jaxckpt_train.store.read_plan import Wanted, plan_reads

SEED = bytes(range(32))
SAMPLES = 5
DIGEST_BYTES = 16
MANY = 1000
"""From this number of processes on, two real processes plan them."""
PART = "state"


class Value(NamedTuple):
    """What a process sends to process 0, and its index file, if a reader needs it."""

    message: bytes
    file: bytes


class Writers:
    """Which process writes which part of a planned state: as `scale_case.plan`, but quick for many processes."""

    def __init__(self, state: PlannedState) -> None:
        self._state, everyone = state, tuple(range(state.mesh.size))
        assignment, self._uncut = WriteAssignment(0), dict[int, dict[int, list[Box]]]()
        for number, array in enumerate(state.arrays):
            if not any(array.cuts):
                for writer, part in assignment.of_all([HeldBox(full_box(array.shape), everyone)], ITEM_BYTES):
                    self._uncut.setdefault(writer, {}).setdefault(number, []).append(part.box)

        self._writers = [self._of_cut_arrays(place) for place in range(TENSOR)]

    def boxes(self, process: int) -> list[list[Box]]:
        """Of each array, the boxes that this process writes."""
        uncut, held = self._uncut.get(process, {}), self._held(process)
        is_writer = self._writers[process % TENSOR]
        return [
            [held[array.cuts, array.shape][0].box] * is_writer[number] if any(array.cuts) else uncut.get(number, [])
            for number, array in enumerate(self._state.arrays)
        ]

    def _held(self, process: int) -> dict[Any, list[HeldBox]]:
        """What a process holds of the cut arrays, by their kind."""
        layout = MeshLayout(self._state.mesh, self._state.axes, process)
        kinds = {(each.cuts, each.shape) for each in self._state.arrays if any(each.cuts)}
        return {kind: layout.held(*kind) for kind in kinds}

    def _of_cut_arrays(self, place: int) -> list[bool]:
        """Which cut arrays a process at this place of its group writes: the same in all groups."""
        assignment, held = WriteAssignment(place), self._held(place)
        return [
            any(array.cuts) and bool(assignment.of(held[array.cuts, array.shape], ITEM_BYTES))
            for array in self._state.arrays
        ]


def records_of(state: PlannedState) -> PartRecord:
    """The record of a state, without chunks."""
    mesh = dict(zip(state.axes, state.mesh.shape, strict=True))
    arrays = []
    for array in state.arrays:
        spec = [list(axes) if axes else None for axes in array.cuts]
        arrays.append(ArrayRecord(array.name, array.shape, "float32", (), {"mesh": mesh, "spec": spec}))
    return PartRecord(PART, "pytree", tuple(arrays), (), msgspec.Raw(b"null"))


def value_of(state: PlannedState, writers: Writers, record: PartRecord, kept: Collection[int], process: int) -> Value:
    """What a process writes and sends; its digests are made up."""
    boxes, prefix = writers.boxes(process), f"{PART}/p{process:05d}-s"
    whole = [n for n, own in enumerate(boxes) if own and own[0] == full_box(record.arrays[n].shape)]
    divided = [n for n in range(len(boxes)) if boxes[n] and n not in whole]
    indexes = [index_of_boxes(prefix, some, boxes, process) for some in (whole, divided)]
    summary, file = encode_index_file([record], [indexes[1]], SEED, "xxh3-128")
    return Value(encode_index(ProcessIndex("0" * 32, (indexes[0],), 0, summary)), file if process in kept else b"")


def index_of_boxes(prefix: str, numbers: Sequence[int], boxes: Sequence[Sequence[Box]], process: int) -> PartIndex:
    """A segment with the first box of each of some arrays."""
    if not numbers:
        return part_index()
    lengths = np.array([ITEM_BYTES * box_elements(boxes[number][0]) for number in numbers], np.int64)
    blocks = np.cumsum(-(-lengths // BLOCK_BYTES))
    chance = np.random.default_rng(process)
    ends = HEAD_BYTES + np.cumsum(lengths)
    columns = ChunkColumns(
        packed(numbers),
        packed(list(itertools.chain.from_iterable(side for number in numbers for side in boxes[number][0]))),
        packed(np.zeros(len(numbers), np.int64)),
        packed(ends - lengths),
        packed(lengths),
        packed(blocks * DIGEST_BYTES),
        chance.bytes(int(blocks[-1]) * DIGEST_BYTES),
    )
    segment = SegmentRecord(f"{prefix}{min(numbers):03d}.safetensors", int(ends[-1]), HEAD_BYTES, "0" * 32)
    return PartIndex((segment,), columns)


class Kept:
    """The files that a reader may ask for: those of processes that hold the same shards of some arrays."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def open(self, directory: str, name: str, *, direct: Any) -> KeptFile:
        """As the contract of the backends says. Raises KeyError: the reader was not expected to need this file."""
        return KeptFile(self._files[name])


class KeptFile:
    """A file in memory."""

    alignment = 1

    def __init__(self, data: bytes) -> None:
        self._data, self.size, self.modified_ns = data, len(data), 0

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As the contract of the backends says."""
        data[:] = np.frombuffer(self._data, np.uint8)[offset : offset + len(data)]

    def close(self) -> None:
        """Nothing is open."""


def run_case(layout: str, processes: int, arrays: int) -> dict[str, Any]:
    """All figures of one planned job."""
    state = planned_state(layout, processes, arrays)
    writers, record = Writers(state), records_of(state)
    readers = sorted({round(number * (processes - 1) / (SAMPLES - 1)) for number in range(SAMPLES)})
    for process in readers[:2]:
        assert writers.boxes(process) == plan(state, process).boxes
    near = {other for process in readers for other in range(process - TENSOR, process + TENSOR + 1)}
    values = all_values(state, writers, record, near)
    files = {index_name(PART, process): each.file for process, each in enumerate(values) if each.file}
    written: list[bytes] = []

    def merge(messages: Sequence[bytes]) -> bytes:
        indexes = [decode_index(message) for message in messages]
        segments, parts = merge_indexes([record], indexes)
        found = encode_tables(parts, [each.summary for each in indexes if each.summary], SEED, "xxh3-128")
        assert found is not None
        form = (FORMAT, INDEXED_VERSION, "xxh3-128", BLOCK_BYTES)
        data = encode_manifest(Manifest(*form, tuple(segments), tuple(parts), {}, found[0]))
        hashlib.sha256(data).digest()
        written.extend([data, found[1]])
        files[found[0].file] = found[1]
        return b"done"

    figures: dict[str, Any] = {"processes": processes, "arrays": arrays}
    figures |= exchanged([value.message for value in values], merge)
    figures |= {"manifest_bytes": len(written[0]), "tables_bytes": len(written[1])}
    of_each = [read(written[0], files, state, process) for process in readers]
    return figures | {name: max(each[name] for each in of_each) for name in of_each[0]}


def all_values(state: PlannedState, writers: Writers, record: PartRecord, kept: Collection[int]) -> list[Value]:
    """What all processes send, computed by two real processes."""
    make, numbers = functools.partial(value_of, state, writers, record, kept), range(state.mesh.size)
    if state.mesh.size < MANY:
        return [make(process) for process in numbers]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(make, numbers, chunksize=500)


def read(data: bytes, files: Mapping[str, bytes], state: PlannedState, process: int) -> dict[str, float]:
    """What a process does that loads what it has saved, before it reads any array."""
    layout, meter = MeshLayout(state.mesh, state.axes, process), ResidentMeter()
    names = {array.name: [held.box for held in layout.held(array.cuts, array.shape)] for array in state.arrays}

    def find() -> tuple[int, int, int]:
        committed = Committed("/run/step", decode_manifest(data, "manifest"), "")
        indexes = index_files(Kept(files), committed)
        assert indexes is not None
        arrays = committed.manifest.parts[0].arrays
        wanted = {array.name: names[array.name] for array in arrays if not array.chunks}
        entries = indexes.covering(PART, wanted)
        manifest = indexes.manifest_with(PART, wanted, indexes.read_all(entries))
        reads = [Wanted(array, names[array.name]) for array in manifest.parts[0].arrays]
        plan_reads(manifest, reads, BAND_BYTES)
        return indexes.bytes_read, sum(entry.size for entry in entries), len(entries)

    started = time.perf_counter()
    (read_bytes, needed_bytes, count), seconds = timed(find)
    return {
        "reader_cpu_s": seconds,
        "reader_s": time.perf_counter() - started,
        "reader_peak_bytes": meter.read().peak - meter.read().before,
        "index_bytes_read": read_bytes,
        "index_bytes_needed": needed_bytes,
        "index_files_read": count,
    }


if __name__ == "__main__":
    main(run_case, __doc__)
