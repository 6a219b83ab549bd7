"""Where each chunk goes: cuts the chunks of a checkpointable into segments before a byte is written.

Which shapes an array can have: those that a manifest holds, and that numpy and JAX can count with.

The bytes of a segment's head: a valid safetensors header, padded so that the data starts at a multiple of 4096.

The shardings that arrays had: free-form JSON for people, of which a manifest holds little that is distinct.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from jaxckpt_train.store.boxes import Box, box_shape, full_box
from jaxckpt_train.store.dtypes import safetensors_form

MAX_SHARDINGS_BYTES = 64 << 10
ALIGNMENT = 4096
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 << 20
MAX_DIMENSIONS = 64
LIMIT = 1 << 62
_LARGEST_EMPTY = (1 << 63) - 1  # numpy makes no array, JAX ends the process, where all but the zeros come to more bytes


class Shardings:
    """Those of one checkpointable, each kept once, however many arrays have it."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}
        self._room = MAX_SHARDINGS_BYTES

    def storable(self, sharding: object) -> object:
        """The sharding as it is to be stored: None if there is no room for one more."""
        try:
            return None if sharding is None else self.shared(sharding)
        except msgspec.ValidationError:
            return None

    def shared(self, sharding: object) -> object:
        """The first one that is equal to this.

        Raises:
            msgspec.ValidationError: there is no room for one more.
        """
        text = msgspec.json.encode(sharding)
        if text not in self._known:
            if len(text) > self._room:
                raise msgspec.ValidationError(f"more than {MAX_SHARDINGS_BYTES:,} bytes of distinct shardings")
            self._known[text] = sharding
            self._room -= len(text)
        return self._known[text]


def decode_sharding(raw: msgspec.Raw) -> Any:
    """One that may be of any size, looked at before it is made.

    Raises:
        msgspec.MsgspecError: it is too large, or no JSON.
    """
    if memoryview(raw).nbytes > MAX_SHARDINGS_BYTES:
        raise msgspec.ValidationError(f"more than {MAX_SHARDINGS_BYTES:,} bytes of distinct shardings")
    return msgspec.json.decode(raw)


class Tensor(NamedTuple):
    """One tensor of a segment: its safetensors dtype name, its shape, and [start, stop) within the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def encode_header(tensors: Sequence[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a segment: length (u64, little-endian), JSON, spaces up to a multiple of 4096.

    `metadata` is what safetensors has for free-form text; segments of ours have none.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for tensor in tensors:
        entries[tensor.name] = _entry(tensor)
    text = msgspec.json.encode(entries)
    total = _padded(LENGTH_BYTES + len(text))
    return (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(total - LENGTH_BYTES)


def header_share_bytes(name: str, dimensions: int) -> int:
    """An upper bound of what one tensor adds to the header."""
    return len(name) * (6 if name.isascii() else 24) + 100 + 21 * dimensions


def is_head_of(head: memoryview, tensors: Iterable[Tensor]) -> bool:
    """Whether these are the bytes that `encode_header` makes of these tensors, whose names are distinct.

    Nothing is parsed, so that whatever else stands there costs nothing.
    """
    names, at = set[str](), LENGTH_BYTES
    for tensor in tensors:
        piece = (b"," if names else b"{") + msgspec.json.encode({tensor.name: _entry(tensor)})[1:-1]
        if tensor.name in names or head[at : at + len(piece)] != piece:
            return False
        names.add(tensor.name)
        at += len(piece)
    piece = b"}" if names else b"{}"
    total = _padded(at + len(piece))
    end = (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little"), piece.ljust(total - at)
    return len(head) == total and (bytes(head[:LENGTH_BYTES]), bytes(head[at:])) == end


def _entry(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (tensor.start, tensor.stop)}


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def array_bytes(shape: Sequence[int], itemsize: int) -> int | None:
    """How many bytes an array of this shape has; None: there can be none such."""
    if len(shape) > MAX_DIMENSIONS or (shape and not (min(shape) >= 0 and max(shape) < LIMIT)):
        return None
    total = math.prod(shape) * itemsize
    if total == 0 and math.prod(size for size in shape if size) * itemsize > _LARGEST_EMPTY:
        return None
    return total if total < LIMIT else None


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
