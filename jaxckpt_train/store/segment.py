"""Segment files: the layout of the chunks, the safetensors header at the start, and the dtypes that can be stored.

The header is padded so that the data starts at a multiple of 4096 bytes. The module also limits the shapes that an
array can have, and the recorded shardings, which are free-form JSON for information only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import msgspec
import numpy as np

from jaxckpt_train.errors import FormatVersionError
from jaxckpt_train.store.boxes import Box, box_shape, full_box

_NUMPY = ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128").split()
_ML_DTYPES = (
    "bfloat16 complex32 bcomplex32 int1 int2 int4 uint1 uint2 uint4 float4_e2m1fn float6_e2m3fn float6_e3m2fn "
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu"
).split()
DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in _NUMPY} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES if hasattr(ml_dtypes, name)
}
_INEXACT = frozenset(name for name in DTYPES if "float" in name or "complex" in name)
# Only dtypes whose layout is exactly numpy's and that safetensors' own numpy reader accepts: a single float8 tensor
# makes it refuse the whole file. Everything else is stored as U8.
_SAFETENSORS = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip
MAX_SHARDINGS_BYTES = 64 << 10
ALIGNMENT = 4096
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 << 20
MAX_DIMENSIONS = 64
LIMIT = 1 << 62
# An array without elements whose other dimensions multiply to more bytes: numpy refuses it, and JAX aborts the process.
_LARGEST_EMPTY = (1 << 63) - 1


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype of either byte order; cached, because numpy computes it anew, which is slow."""
    return dtype.newbyteorder("=").name


@functools.cache
def is_inexact(dtype: np.dtype) -> bool:
    """Whether it is a float or complex dtype of either byte order; numpy and JAX do not know this of all dtypes."""
    return dtype_name(dtype) in _INEXACT


@functools.cache
def is_storable(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype, of either byte order, can be stored."""
    return dtype_name(dtype) in DTYPES and dtype.fields is None


def dtype_named(name: str, subject: str) -> np.dtype:
    """The little-endian numpy dtype with this name.

    Raises FormatVersionError: this installation does not know the dtype; the message starts with `subject`.
    """
    if name not in DTYPES:
        advice = "; a newer ml_dtypes may have it" if name.startswith(("float", "int", "uint")) else ""
        raise FormatVersionError(f"{subject}: unknown dtype {name!r}{advice}")
    return DTYPES[name]


def safetensors_form(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype name and shape of such an array in safetensors; U8 if it has no name there."""
    stored = _SAFETENSORS.get(dtype_name(dtype))
    if stored is not None:
        return stored, shape
    return ("U8", shape) if dtype.itemsize == 1 else ("U8", (*shape, dtype.itemsize))


class Shardings:
    """The distinct shardings of one checkpointable; each is stored once in memory."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}
        self._room = MAX_SHARDINGS_BYTES

    def storable(self, sharding: object) -> object:
        """The sharding to store; None if the limit on distinct shardings is reached."""
        try:
            return None if sharding is None else self.shared(sharding)
        except msgspec.ValidationError:
            return None

    def shared(self, sharding: object) -> object:
        """The first sharding that equals this one. Raises msgspec.ValidationError: there are too many others."""
        text = msgspec.json.encode(sharding)
        if text not in self._known:
            if len(text) > self._room:
                raise msgspec.ValidationError(f"more than {MAX_SHARDINGS_BYTES:,} bytes of distinct shardings")
            self._known[text] = sharding
            self._room -= len(text)
        return self._known[text]


def decode_sharding(raw: msgspec.Raw) -> Any:
    """Decode a sharding of untrusted size. Raises msgspec.MsgspecError: it is too large, or not JSON."""
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
    """The header of a segment: its length (u64, little-endian), JSON, and spaces up to a multiple of 4096.

    `metadata` is safetensors' free-form text; segments of this library have none.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for tensor in tensors:
        entries[tensor.name] = _entry(tensor)
    text = msgspec.json.encode(entries)
    total = _padded(LENGTH_BYTES + len(text))
    return (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(total - LENGTH_BYTES)


def header_share_bytes(name: str, dimensions: int) -> int:
    """An upper bound of the bytes that one tensor adds to the header."""
    return len(name) * (6 if name.isascii() else 24) + 100 + 21 * dimensions


def is_head_of(head: memoryview, tensors: Iterable[Tensor]) -> bool:
    """Whether hostile bytes encode these tensors with distinct names; they are compared, not parsed."""
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
    """The size of an array in bytes; None if no array can have this shape."""
    if len(shape) > MAX_DIMENSIONS or (shape and not (min(shape) >= 0 and max(shape) < LIMIT)):
        return None
    total = math.prod(shape) * itemsize
    if total == 0 and math.prod(size for size in shape if size) * itemsize > _LARGEST_EMPTY:
        return None
    return total if total < LIMIT else None


class LazyArray(Protocol):
    """An array that is not in host memory yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    size: int
    nbytes: int

    def fetch(self) -> np.ndarray:
        """Copy it to host memory. Called once, from any thread; the result is dropped once it is written."""


class ChunkSource(NamedTuple):
    """One chunk to write: its box and its data, with any strides; it is made row-major when it is written."""

    box: Box
    data: np.ndarray | memoryview | LazyArray


class StableChunkSource(ChunkSource):
    """A chunk in stable memory, which no other code can write to during the save, so that it needs no copy."""

    __slots__ = ()


def flat_bytes(source: ChunkSource) -> np.ndarray | None:
    """The flat bytes of a chunk without a copy; None if it is not in host memory, row-major and little-endian."""
    data = source.data
    if isinstance(data, memoryview):
        return np.frombuffer(data, np.uint8) if data.c_contiguous else None
    if isinstance(data, np.ndarray) and data.flags.c_contiguous and data.dtype.isnative:
        return data.reshape(-1).view(np.uint8)
    return None


def fetched_bytes(source: ChunkSource) -> np.ndarray:
    """The flat bytes of a chunk, row-major and little-endian; fetched or converted."""
    data: Any = source.data
    here = data.fetch() if hasattr(data, "fetch") else np.asarray(data)
    flat = np.ascontiguousarray(here, here.dtype.newbyteorder("=")).reshape(-1).view(np.uint8)
    if len(flat) != data.nbytes:
        raise ValueError(f"the device returned {len(flat)} bytes, expected {data.nbytes}")
    return flat


class ArraySource(NamedTuple):
    """One array to write: name, global shape, dtype, chunks whose boxes tile it, and the sharding to record."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: Sequence[ChunkSource]
    sharding: object = None


class PlacedChunk(NamedTuple):
    """A chunk with its position: the index of its array, the offset in the file, and the length."""

    array: int
    source: ChunkSource
    offset: int
    length: int


_Job = tuple[int, ChunkSource, int]
"""The index of the array, its chunk, and the chunk's size in bytes."""


@dataclasses.dataclass(frozen=True)
class SegmentLayout:
    """One segment to write: its header and its chunks in file order. The file has `size` bytes."""

    head: bytes
    chunks: Sequence[PlacedChunk]
    size: int


def plan_segments(arrays: Sequence[ArraySource], segment_bytes: int) -> Iterator[SegmentLayout]:
    """Distribute all chunks over segments of at most `segment_bytes` of data; a larger chunk gets its own segment.

    Chunks whose size is a multiple of 4096 come first, then multiples of 64, then the rest. So as many as possible are
    aligned: to pages for direct I/O, to 64 bytes for JAX on the CPU.
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
    """The rank of a chunk of this size in the file order: 0 comes first; chunks of one class keep their order."""
    return 0 if size % 4096 == 0 else 1 if size % 64 == 0 else 2


def chunk_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """The name of a chunk in a segment: the leaf path, and `@[0:128,256:512]` unless it is the whole array."""
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
