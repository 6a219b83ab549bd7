"""Where each chunk goes: cuts the chunks of a checkpointable into segments before a byte is written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxckpt_train.store.boxes import Box, box_shape, full_box
from jaxckpt_train.store.dtypes import safetensors_form
from jaxckpt_train.store.segment import MAX_HEADER_BYTES, Tensor, encode_header, header_share_bytes


class ArrayToCome(Protocol):
    """An array that is not in host memory yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    nbytes: int

    def fetch(self) -> np.ndarray:
        """Bring it there. Called once, from any thread; the result is dropped once it is written."""


class ChunkSource(NamedTuple):
    """One chunk to write: its box, and what holds it (any strides; made row-major when its turn comes)."""

    box: Box
    data: np.ndarray | memoryview | ArrayToCome


class OwnChunkSource(ChunkSource):
    """A chunk whose memory nobody else can write to while it is saved, so that it may be written from where it is."""

    __slots__ = ()


class ArraySource(NamedTuple):
    """One array to write: name, global shape, dtype, the sharding to record, and chunks whose boxes tile it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: Sequence[ChunkSource]
    sharding: object = None


class PlacedChunk(NamedTuple):
    """A chunk with its place: number of the array in its checkpointable, offset in the file, and length."""

    array: int
    source: ChunkSource
    offset: int
    length: int


_Job = tuple[int, ChunkSource, int]
"""Number of the array, its chunk, and how many bytes that is."""


@dataclasses.dataclass(frozen=True)
class SegmentLayout:
    """One segment to write: its head and its chunks in file order. The file is `size` bytes."""

    head: bytes
    chunks: Sequence[PlacedChunk]
    size: int


def plan_segments(arrays: Sequence[ArraySource], segment_bytes: int) -> Iterator[SegmentLayout]:
    """Cut all chunks into segments of at most `segment_bytes` of data, unless one chunk alone is larger.

    Chunks whose size is a multiple of 4096 come first, then multiples of 64, then the rest, so that as many as
    possible lie aligned: a page apart for direct I/O, 64 bytes apart for JAX on the CPU.
    """
    classes: tuple[list[_Job], ...] = ([], [], [])
    for number, array in enumerate(arrays):
        for chunk in array.chunks:
            size = chunk.data.nbytes
            if size:
                classes[alignment_class(size)].append((number, chunk, size))
    pending: list[_Job] = []
    data_bytes = head_bytes = 0
    for job in itertools.chain(*classes):
        number, chunk, size = job
        share = header_share_bytes(arrays[number].name, 3 * len(chunk.box) + 1)
        if pending and (data_bytes + size > segment_bytes or head_bytes + share > MAX_HEADER_BYTES // 2):
            yield _segment(arrays, pending)
            pending, data_bytes, head_bytes = [], 0, 0
        pending.append(job)
        data_bytes += size
        head_bytes += share
    if pending:
        yield _segment(arrays, pending)


def alignment_class(size: int) -> int:
    """Which chunks come first in the files: those of class 0, then 1, then 2; in a class all are in the order given."""
    return 0 if size % 4096 == 0 else 1 if size % 64 == 0 else 2


def chunk_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """How a segment names a chunk: the leaf path, and `@[0:128,256:512]` unless it is the whole array."""
    if box == full_box(shape):
        return name
    return f"{name}@[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def _segment(arrays: Sequence[ArraySource], jobs: Sequence[_Job]) -> SegmentLayout:
    tensors, at = [], 0
    for number, chunk, size in jobs:
        name, whole, data_type = arrays[number][:3]
        shape = box_shape(chunk.box)
        if shape != whole:
            name = chunk_name(name, chunk.box, whole)
        dtype, stored_shape = safetensors_form(data_type, shape)
        tensors.append(Tensor(name, dtype, stored_shape, at, at + size))
        at += size
    head = encode_header(tensors)
    skip = len(head)
    placed = [
        PlacedChunk(number, chunk, skip + tensor.start, size)
        for (number, chunk, size), tensor in zip(jobs, tensors, strict=True)
    ]
    return SegmentLayout(head, placed, skip + at)
