"""Checkpoints with index files, made from boxes: what each process of a job would write, without data."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from jaxckpt_train.store.boxes import Box, box_elements, full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.index_files import divided_index, encode_index_file, encode_tables, index_name
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    FORMAT,
    INDEXED_VERSION,
    ArrayRecord,
    ChunkRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    block_count,
    decode_manifest,
    digest_function,
    encode_manifest,
)
from jaxckpt_train.store.process_index import IndexSummary, PartIndex, ProcessIndex, merge_indexes
from tests.support.memory_backend import MemoryBackend
from tests.support.strategies import shapes, tilings

SEED, DIGEST, DIRECTORY, HEAD = bytes(range(32)), "xxh3-128", "/run/step", 4096
Written = dict[int, list[Box]]
"""The boxes that a process writes of one checkpointable, by the number of the array."""


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """The checkpointables of a job, without chunks, and what each process writes of each of them."""

    parts: Sequence[PartRecord]
    written: Sequence[Sequence[Written]]

    def boxes(self, part: int, array: int) -> list[Box]:
        """All boxes of an array."""
        return [box for process in self.written for box in process[part].get(array, [])]


@st.composite
def planned_jobs(draw: st.DrawFn, most_processes: int = 6) -> PlannedJob:
    """A job with arrays of all kinds: whole, cut, without elements; of several shardings and checkpointables."""
    processes = draw(st.integers(1, most_processes))
    parts, written = list[PartRecord](), [list[Written]() for _ in range(processes)]
    for part in range(draw(st.integers(1, 2))):
        arrays = []
        for process in written:
            process.append({})
        for number in range(draw(st.integers(1, 5))):
            shape = draw(shapes(3, 6) | st.just((0, 3)))
            sharding = draw(st.sampled_from([None, {"mesh": {"x": 2}, "spec": ["x"]}, {"mesh": {"x": 2}, "spec": []}]))
            arrays.append(ArrayRecord(f"a{number}", shape, "float32", (), sharding))
            for box in () if 0 in shape else draw(tilings(shape, 8)):
                process = draw(st.integers(0, processes - 1))
                written[process][part].setdefault(number, []).append(box)
        parts.append(PartRecord(f"part{part}", "pytree", tuple(arrays), (), msgspec.Raw(b"null")))
    return PlannedJob(parts, written)


def part_index_of(
    part: PartRecord, written: Written, process: int, salt: int = 0, item_bytes: int = 4
) -> tuple[PartIndex, PartIndex]:
    """The index of whole arrays and of parts of arrays; `salt` changes the digests."""
    ends, chunks = dict[bool, int](), dict[int, list[ChunkRecord]]()
    order = sorted({box == full_box(part.arrays[number].shape) for number, boxes in written.items() for box in boxes})
    for number, boxes in written.items():
        for box in boxes:
            is_whole, length = box == full_box(part.arrays[number].shape), item_bytes * box_elements(box)
            offset = ends.setdefault(is_whole, HEAD)
            digest = hashlib.sha256(repr((number, box, salt)).encode()).hexdigest()[:32] * block_count(
                length, BLOCK_BYTES
            )
            chunks.setdefault(number, []).append(ChunkRecord(box, order.index(is_whole), offset, length, digest))
            ends[is_whole] += length
    segments = [
        SegmentRecord(f"{part.name}/p{process:05d}-s{place:03d}.safetensors", ends[is_whole], HEAD, "0" * 32)
        for place, is_whole in enumerate(order)
    ]
    return divided_index(segments, chunks, part.arrays)


@dataclasses.dataclass
class Indexed:
    """What the processes of a job have written: their messages, and their index files."""

    job: PlannedJob
    messages: list[ProcessIndex]
    files: dict[int, bytes]

    @classmethod
    def of(cls, job: PlannedJob, salt: int = 0, item_bytes: int = 4) -> Indexed:
        """As the processes write it."""
        found = cls(job, [], {})
        for process, written in enumerate(job.written):
            pairs = [
                part_index_of(part, own, process, salt, item_bytes)
                for part, own in zip(job.parts, written, strict=True)
            ]
            whole, divided = zip(*pairs, strict=True)
            summary, data = encode_index_file(job.parts, divided, SEED, DIGEST)
            found.messages.append(ProcessIndex("", whole, 0, summary))
            if data:
                found.files[process] = data
        return found

    def replace_file(self, process: int, content: bytes) -> None:
        """Let a process write another index file, of which it says everything else as before."""
        self.files[process], message = content, self.messages[process]
        assert message.summary is not None
        digest = bytes.fromhex(digest_function(DIGEST)(content))
        summary = msgspec.structs.replace(message.summary, size=len(content), digest=digest)
        self.messages[process] = msgspec.structs.replace(message, summary=summary)

    def summaries(self) -> list[IndexSummary]:
        """The summaries of all processes."""
        return [each.summary for each in self.messages if each.summary is not None]

    def commit(self) -> tuple[MemoryBackend, Committed]:
        """As process 0 does it. Raises CheckpointError: the chunks do not tile the arrays."""
        segments, parts = merge_indexes(self.job.parts, self.messages)
        found = encode_tables(parts, self.summaries(), SEED, DIGEST)
        backend: Any = MemoryBackend()
        for part in parts:
            backend.make_directory(f"{DIRECTORY}/{part.name}", parents=True, sync=False)
        form = (FORMAT, INDEXED_VERSION if found else 1, DIGEST, BLOCK_BYTES, tuple(segments), tuple(parts), {})
        data = encode_manifest(Manifest(*form, found[0] if found else None))
        for process, content in self.files.items():
            put(backend, index_name(parts[0].name, process), content)
        if found is not None:
            put(backend, found[0].file, found[1])
        return backend, Committed(DIRECTORY, decode_manifest(data, "manifest"), "")


def put(backend: Any, name: str, content: bytes) -> None:
    """Write a file of the checkpoint, or replace it."""
    path = f"{DIRECTORY}/{name}"
    if backend.kind(path) is not None:
        backend.remove(path)
    sink = backend.create(path, direct=False)
    sink.write_at(0, np.frombuffer(content, np.uint8))
    sink.finish(len(content), sync=False)
