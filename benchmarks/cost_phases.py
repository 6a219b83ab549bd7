"""The phases of our saves and loads, timed one by one: the only place that calls internals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import msgspec
import numpy as np

from jaxckpt_train import StoreSettings
from jaxckpt_train.checkpointables.saving import CheckpointSave, PathTarget
from jaxckpt_train.checkpointables.staging import StagedPart
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.pytree.restore import TreeRestore
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.boxes import Box, box_from_index, full_box
from jaxckpt_train.store.committed import Committed, open_committed
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    ArrayRecord,
    ChunkRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    decode_manifest,
    encode_manifest,
)
from jaxckpt_train.store.read_plan import Wanted, plan_reads
from jaxckpt_train.store.reader import READS_PER_THREAD, read_boxes
from jaxckpt_train.store.segment import ArraySource, ChunkSource, plan_segments
from jaxckpt_train.store.threads import paused_collection

T = TypeVar("T")
Seconds = dict[str, float]

PART = "state"
CHUNKS_PER_ARRAY = 1000
CHUNK_ROWS, CHUNK_COLUMNS = 4, 4
DIGITS = 32


def save_in_phases(path: Path, tree: Any, chunks: int | None = None) -> Seconds:
    """Save a tree of arrays to the new directory `path`.

    Args:
        path: where.
        tree: as for `jaxckpt_train.save`.
        chunks: every array is cut into this number along its first dimension, as if as many devices held it.

    Returns:
        The seconds of `snapshot` (what the caller waits for), `plan` (which bytes go where), `write` (without the
        plan) and `commit` (the manifest, syncs, and the rename).
    """
    settings, backend, final = StoreSettings(), LocalBackend(), str(path.resolve())
    save = CheckpointSave(Coordinator(), final, backend, settings)
    save.stage({PART: tree})
    if chunks is not None:
        save.parts = [_cut(part, chunks) for part in save.parts]
    arrays = [array for part in save.parts if part.snapshot for array in part.snapshot.arrays]
    with paused_collection():  # as a save does
        plan_s, _ = _timed(lambda: list(plan_segments(arrays, settings.segment_bytes)))
    save.write_and_commit(PathTarget(backend, final, settings, {}))
    times = save.times
    return {
        "snapshot": times.snapshot_s + times.stage_s,
        "plan": plan_s,
        "write": max(0.0, times.write_s - plan_s),
        "commit": times.commit_s,
    }


def load_in_phases(path: Path, sharding: jax.sharding.Sharding | None = None) -> Seconds:
    """Read all arrays of a checkpoint into host memory.

    Args:
        path: where.
        sharding: each array is read as the boxes that this sharding cuts it into; None: as one box.

    Returns:
        The seconds of `open` (the manifest, validated), `tree` (the record of the tree), `plan` (which bytes to read)
        and `read` (without the plan).
    """
    settings, backend = StoreSettings(), LocalBackend()
    open_s, committed = _timed(lambda: open_committed(backend, str(path.resolve())))
    part = committed.manifest.part(PART)
    assert part is not None
    tree_s, _ = _timed(lambda: TreeRestore(backend, committed, part, settings))
    wanted = [Wanted(array, _boxes(array, sharding)) for array in part.arrays]
    with paused_collection():  # as a load does
        plan_s, _ = _timed(lambda: _plan_reads(committed, wanted, settings))
        read_s, _ = _timed(lambda: read_boxes(backend, committed, wanted, settings))
    return {"open": open_s, "tree": tree_s, "plan": plan_s, "read": max(0.0, read_s - plan_s)}


def make_manifest(chunks: int) -> Manifest:
    """A valid manifest of `chunks` chunks, a thousand for each array."""
    length = 4 * CHUNK_ROWS * CHUNK_COLUMNS
    arrays, header = [], 4096
    for first in range(0, chunks, CHUNKS_PER_ARRAY):
        count = min(CHUNKS_PER_ARRAY, chunks - first)
        records = tuple(
            ChunkRecord(_row_box(i), 0, header + (first + i) * length, length, f"{first + i:0{DIGITS}x}")
            for i in range(count)
        )
        name = f"params/layer_{first:09d}/kernel"
        arrays.append(ArrayRecord(name, (count * CHUNK_ROWS, CHUNK_COLUMNS), "float32", records))
    segment = SegmentRecord(f"{PART}/p00000-s000.safetensors", header + chunks * length, header, "0" * DIGITS)
    part = PartRecord(PART, "pytree", tuple(arrays), (), msgspec.Raw(b"null"))
    return Manifest(FORMAT, FORMAT_VERSION, "xxh3-128", BLOCK_BYTES, (segment,), (part,), {})


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    return encode_manifest(manifest)


def decode(data: bytes) -> Manifest:
    """The manifest of these bytes, validated."""
    return decode_manifest(data, "manifest.json")


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _cut(part: StagedPart, count: int) -> StagedPart:
    assert part.snapshot is not None
    arrays = [_cut_array(array, count) for array in part.snapshot.arrays]
    return dataclasses.replace(part, snapshot=dataclasses.replace(part.snapshot, arrays=arrays))


def _cut_array(array: ArraySource, count: int) -> ArraySource:
    (whole,) = array.chunks
    pieces, rest = np.split(whole.data, count), full_box(array.shape)[1:]
    rows = array.shape[0] // count
    chunks = tuple(ChunkSource(((i * rows, (i + 1) * rows), *rest), piece) for i, piece in enumerate(pieces))
    return array._replace(chunks=chunks)


def _row_box(number: int) -> Box:
    return (number * CHUNK_ROWS, (number + 1) * CHUNK_ROWS), (0, CHUNK_COLUMNS)


def _boxes(array: ArrayRecord, sharding: jax.sharding.Sharding | None) -> list[Box]:
    if sharding is None:
        return [full_box(array.shape)]
    indices = sharding.addressable_devices_indices_map(array.shape).values()
    return list(dict.fromkeys(box_from_index(index, array.shape) for index in indices))


def _plan_reads(committed: Committed, wanted: list[Wanted], settings: StoreSettings) -> Any:
    band_bytes = max(1, settings.read_budget_bytes // (2 * READS_PER_THREAD * settings.io_threads))
    return plan_reads(committed.manifest, wanted, band_bytes)
