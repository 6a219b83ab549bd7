"""Where each chunk goes: cuts the chunks of a checkpointable into segments before a byte is written."""

from __future__ import annotations

import dataclasses
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
    """One chunk to write: its box, and the array that holds it (any strides; made row-major when its turn comes)."""

    box: Box
    data: np.ndarray | ArrayToCome


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
    jobs = [(number, chunk) for number, array in enumerate(arrays) for chunk in array.chunks if chunk.data.size]
    jobs.sort(key=lambda job: _alignment_class(job[1].data.nbytes))
    pending: list[tuple[int, ChunkSource]] = []
    data_bytes = head_bytes = 0
    for number, chunk in jobs:
        share = header_share_bytes(arrays[number].name, 3 * len(chunk.box) + 1)
        if pending and (data_bytes + chunk.data.nbytes > segment_bytes or head_bytes + share > MAX_HEADER_BYTES // 2):
            yield _segment(arrays, pending)
            pending, data_bytes, head_bytes = [], 0, 0
        pending.append((number, chunk))
        data_bytes += chunk.data.nbytes
        head_bytes += share
    if pending:
        yield _segment(arrays, pending)


def chunk_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """How a segment names a chunk: the leaf path, and `@[0:128,256:512]` unless it is the whole array."""
    if box == full_box(shape):
        return name
    return f"{name}@[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def _segment(arrays: Sequence[ArraySource], jobs: Sequence[tuple[int, ChunkSource]]) -> SegmentLayout:
    tensors, at = [], 0
    for number, chunk in jobs:
        array = arrays[number]
        dtype, shape = safetensors_form(array.dtype, box_shape(chunk.box))
        name = chunk_name(array.name, chunk.box, array.shape)
        tensors.append(Tensor(name, dtype, shape, at, at + chunk.data.nbytes))
        at += chunk.data.nbytes
    head = encode_header(tensors)
    placed = [
        PlacedChunk(number, chunk, len(head) + tensor.start, tensor.stop - tensor.start)
        for (number, chunk), tensor in zip(jobs, tensors, strict=True)
    ]
    return SegmentLayout(head, placed, len(head) + at)


def _alignment_class(size: int) -> int:
    return 0 if size % 4096 == 0 else 1 if size % 64 == 0 else 2
