"""The bytes of a segment's head: a valid safetensors header, padded so that the data starts at a multiple of 4096."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

ALIGNMENT = 4096
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 << 20
MAX_DIMENSIONS = 64


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
