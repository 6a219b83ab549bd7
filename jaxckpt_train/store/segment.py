"""The bytes of a segment's head: a valid safetensors header, padded so that the data starts at a multiple of 4096."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store.dtypes import SAFETENSORS_ITEM_BYTES

ALIGNMENT = 4096
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 << 20
MAX_DIMENSIONS = 64
METADATA_KEY = "__metadata__"


class Tensor(NamedTuple):
    """One tensor of a segment: its safetensors dtype name, its shape, and [start, stop) within the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A decoded segment head: where the data section begins in the file, its tensors, and the free-form metadata."""

    data_start: int
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]


def encode_header(tensors: Sequence[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a segment: length (u64, little-endian), JSON, spaces up to a multiple of 4096."""
    entries: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.stop),
        }
    text = msgspec.json.encode(entries)
    total = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    return (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(total - LENGTH_BYTES)


def header_share_bytes(name: str, dimensions: int) -> int:
    """An upper bound of what one tensor adds to the header."""
    return len(name) * (6 if name.isascii() else 24) + 100 + 21 * dimensions


def header_length(prefix: bytes, file_bytes: int, subject: str) -> int:
    """How many bytes the whole head takes, from the first 8 bytes of a file; checked before anything is allocated.

    Raises:
        CorruptCheckpointError: the length is impossible.
    """
    if len(prefix) < LENGTH_BYTES:
        raise CorruptCheckpointError(f"{subject}: {file_bytes} bytes are too few for a segment")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or LENGTH_BYTES + length > file_bytes:
        raise CorruptCheckpointError(f"{subject}: header says {length} bytes, in a file of {file_bytes}")
    return LENGTH_BYTES + length


def decode_header(head: bytes, file_bytes: int, subject: str, most_objects: int | None = None) -> Header:
    """Decode and check a segment head read from a file of `file_bytes`.

    Args:
        head: all bytes up to the data.
        file_bytes: of the file.
        subject: of messages.
        most_objects: JSON objects, and braces in names, that there may be: a header of a million tensors that nobody
            asked for is refused before it takes memory. None: any number.

    Raises:
        CorruptCheckpointError: it is no safetensors header, or its tensors do not fill the data section exactly.
    """
    if most_objects is not None and head.count(b"{") > most_objects:
        raise CorruptCheckpointError(f"{subject}: the header has more tensors than the manifest")
    entries = _strict_json(head[LENGTH_BYTES:], subject)
    metadata = entries.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpointError(f"{subject}: {METADATA_KEY} is not a map of text to text")
    tensors = sorted(
        (_tensor(name, entry, subject) for name, entry in entries.items()), key=lambda t: (t.start, t.stop)
    )
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            raise CorruptCheckpointError(f"{subject}: tensor {tensor.name!r} starts at {tensor.start}, expected {end}")
        end = tensor.stop
    if len(head) + end != file_bytes:
        raise CorruptCheckpointError(f"{subject}: tensors end at byte {len(head) + end} of {file_bytes}")
    return Header(len(head), tuple(tensors), metadata)


def _strict_json(text: bytes, subject: str) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise CorruptCheckpointError(f"{subject}: a key appears twice in the header")
        return found

    def constant(name: str) -> NoReturn:
        raise CorruptCheckpointError(f"{subject}: {name} in the header")

    if not text.startswith(b"{"):
        raise CorruptCheckpointError(f"{subject}: the header does not start with '{{'")
    try:
        value = json.loads(text.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{subject}: the header is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{subject}: the header is not a map")
    return value


def _tensor(name: str, entry: object, subject: str) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptCheckpointError(f"{subject}: tensor {name!r} lacks dtype, shape or data_offsets, or has more")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (_sizes(shape) and len(shape) <= MAX_DIMENSIONS and _sizes(offsets) and len(offsets) == 2):
        raise CorruptCheckpointError(f"{subject}: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    item = SAFETENSORS_ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None or offsets[1] - offsets[0] != item * math.prod(shape):
        raise CorruptCheckpointError(
            f"{subject}: tensor {name!r}: {dtype!r}{shape} does not fit data_offsets {offsets}"
        )
    return Tensor(name, dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
