"""One planned job in one process: the work of each of its processes in turn, and that of process 0."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from benchmarks.counted_values import Asked, CountedValues, ValuesOfProcess, WaitsForever
from benchmarks.mesh_layout import MeshLayout, PlannedSharding
from benchmarks.process_figures import ResidentMeter
from benchmarks.scale_layouts import ITEM_BYTES, LAYOUTS, PlannedState, planned_state
from jaxckpt_train.distributed.coordinator import ManyProcesses
from jaxckpt_train.pytree.partition import WriteAssignment, held_boxes
from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    ArrayRecord,
    ChunkRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    block_count,
    decode_manifest,
    encode_manifest,
)
from jaxckpt_train.store.process_index import ProcessIndex, decode_index, encode_index, merge_indexes, part_index
from jaxckpt_train.store.read_plan import Wanted, plan_reads

BAND_BYTES = 64 << 20
HEAD_BYTES = 4096
MOST_CHUNKS = 9_000_000  # one manifest holds about 12 million
MOST_PLANNING_S = 60.0  # of all processes together, which the simulation runs in turn
T = TypeVar("T")


@dataclass(frozen=True)
class Planned:
    """What one process writes: of each array the boxes, and how many bytes that is in all."""

    boxes: list[list[Box]]
    bytes: int

    @property
    def chunks(self) -> int:
        """How many."""
        return sum(map(len, self.boxes))


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and seconds of CPU of this process."""
    started = time.process_time()
    return act(), time.process_time() - started


def plan(state: PlannedState, process: int) -> Planned:
    """As a process finds out what it writes of a state."""
    layout, shares = MeshLayout(state.mesh, state.axes, process), WriteAssignment(process)
    held = {form: layout.held(*form) for form in {(array.cuts, array.shape) for array in state.arrays}}
    boxes = [[share.box for share in shares.of(held[array.cuts, array.shape], ITEM_BYTES)] for array in state.arrays]
    return Planned(boxes, ITEM_BYTES * sum(box_elements(box) for own in boxes for box in own))


def layouts_seconds(state: PlannedState) -> float:
    """How long a process goes through the devices of all distinct shardings and shapes, once."""
    seconds = 0.0
    for cuts, shape in {(array.cuts, array.shape) for array in state.arrays}:
        sharding: Any = PlannedSharding(state.mesh, state.axes, cuts, shape)
        seconds += timed(functools.partial(held_boxes, sharding, shape, operator.attrgetter("process_index")))[1]
    return seconds


def index_of(planned: Planned, process: int) -> ProcessIndex:
    """What a process says of what it has written; its digests are made up."""
    chunks, offset = dict[int, list[ChunkRecord]](), HEAD_BYTES
    for number, boxes in enumerate(planned.boxes):
        own = []
        for box in boxes:
            length = ITEM_BYTES * box_elements(box)
            digest = f"{(process << 40) + offset:032x}"
            own.append(ChunkRecord(box, 0, offset, length, digest * block_count(length, BLOCK_BYTES)))
            offset += length
        if own:
            chunks[number] = own
    file = SegmentRecord(f"state/p{process:05d}-s000.safetensors", offset, HEAD_BYTES, "0" * 32)
    return ProcessIndex("0" * 32, (part_index((file,) if chunks else (), chunks),))


def run_case(layout: str, processes: int, arrays: int, samples: int = 5) -> dict[str, float | int]:
    """All figures of one planned job."""
    state = planned_state(layout, processes, arrays)
    few = sorted({round(n * (processes - 1) / (samples - 1)) for n in range(samples)})
    for process in few[-1:]:
        plan(state, process)  # what is made once in a process
    figures: dict[str, float | int] = {"processes": processes, "arrays": arrays}
    planned, seconds = zip(*[timed(lambda process=process: plan(state, process)) for process in few], strict=True)  # type: ignore[misc]
    figures |= {"layouts_s": layouts_seconds(state), "plan_s": min(seconds)}
    figures |= {"chunks": max(each.chunks for each in planned)}
    figures |= {"bytes_min": min(each.bytes for each in planned), "bytes_max": max(each.bytes for each in planned)}
    encoded, seconds = zip(
        *[timed(lambda both=both: encode_index(index_of(*both))) for both in zip(planned, few, strict=True)],
        strict=True,
    )  # type: ignore[misc]
    figures |= {"encode_index_s": min(seconds), "index_bytes": max(map(len, encoded))}
    is_merged = figures["chunks"] * processes <= MOST_CHUNKS and figures["plan_s"] * processes <= MOST_PLANNING_S
    values = [
        encode_index(index_of(plan(state, process), process)) if is_merged else encoded[process % len(encoded)]
        for process in range(processes)
    ]
    figures |= meet(values, state, is_merged=is_merged)
    return figures


def meet(values: Sequence[bytes], state: PlannedState, *, is_merged: bool) -> dict[str, float | int]:
    """All processes give their index; process 0 makes a manifest of them, which a process reads again."""
    manifest: list[bytes] = []

    def merge(values: Sequence[bytes]) -> bytes:
        if is_merged:
            manifest.append(manifest_of(state, values))
        return b"done"

    figures = exchanged(values, merge)
    if not manifest:
        return figures
    figures["manifest_bytes"] = len(manifest[0])
    if len(manifest[0]) <= MAX_MANIFEST_BYTES:
        figures |= read(manifest.pop(), state)
    return figures


def exchanged(values: Sequence[bytes], merge: Callable[[Sequence[bytes]], bytes]) -> dict[str, float | int]:
    """What it takes process 0 to receive the values of all processes and to merge them."""
    all_values = CountedValues(waits=False)
    views = [all_values.of(process) for process in range(len(values))]
    jobs = [ManyProcesses(view, process, len(values)) for process, view in enumerate(views)]
    for view, job, value in zip(views[1:], jobs[1:], values[1:], strict=True):
        give(job, view, value)
    meter = ResidentMeter()
    _, seconds = timed(lambda: jobs[0].exchange("saving", lambda: values[0], merge))
    peak = meter.read()
    figures = {"process_0_s": seconds, "process_0_peak_bytes": peak.peak - peak.before, "process_0_bytes": peak.peak}
    figures |= {f"each_{name}": count for name, count in asked(views[1].asked).items()}
    return figures | {f"process_0_{name}": count for name, count in asked(views[0].asked).items()}


def give(job: ManyProcesses, view: ValuesOfProcess, value: bytes) -> None:
    """A process gives its value, and would wait for what comes of it."""
    try:
        job.exchange("saving", lambda: value)
    except WaitsForever:
        return
    raise AssertionError(f"process {job.process} heard of a result that nobody has made; it asked {view.asked}")


def asked(found: Asked) -> dict[str, int]:
    """How much was asked of the key-value store."""
    return {
        "operations": found.operations.total(),
        "sent_bytes": found.sent_bytes,
        "received_bytes": found.received_bytes,
    }


def manifest_of(state: PlannedState, values: Sequence[bytes]) -> bytes:
    """The manifest that process 0 makes of the values of all processes."""
    indexes = [decode_index(value) for value in values]
    records = tuple(ArrayRecord(array.name, array.shape, "float32", ()) for array in state.arrays)
    empty = PartRecord("state", "pytree", records, (), msgspec.Raw(b"null"))
    segments, parts = merge_indexes([empty], indexes)
    data = encode_manifest(Manifest(FORMAT, FORMAT_VERSION, "xxh3-128", BLOCK_BYTES, tuple(segments), tuple(parts), {}))
    hashlib.sha256(data).digest()
    return data


def read(data: bytes, state: PlannedState) -> dict[str, float | int]:
    """What a process does that loads what it has saved, before it reads any array."""
    meter = ResidentMeter()
    manifest, seconds = timed(lambda: decode_manifest(data, "manifest"))
    layout = MeshLayout(state.mesh, state.axes, 0)
    arrays = manifest.parts[0].arrays
    wanted = [
        Wanted(record, [held.box for held in layout.held(array.cuts, array.shape)])
        for record, array in zip(arrays, state.arrays, strict=True)
    ]
    runs, plan_s = timed(lambda: plan_reads(manifest, wanted, BAND_BYTES))
    peak = meter.read()
    return {
        "decode_s": seconds,
        "read_plan_s": plan_s,
        "reader_peak_bytes": peak.peak - peak.before,
        "files_read": len({run.segment for run in runs}),
    }


def main(run: Callable[[str, int, int], Mapping[str, Any]] = run_case, description: str | None = __doc__) -> None:
    """Print the figures of one case as JSON."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("processes", type=int)
    parser.add_argument("arrays", type=int)
    options = parser.parse_args()
    print(json.dumps(run(options.layout, options.processes, options.arrays)))


if __name__ == "__main__":
    main()
