"""The manifest: the typed record of everything in a checkpoint, stored as JSON; its names, limits and checks.

`manifest_decoding.py` decodes and validates it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError, UnsupportedLeafError
from jaxckpt_train.store.boxes import Box

HEX_DIGITS = {"xxh3-128": 32, "sha256": 64, "blake3": 64}
FORMAT = "jaxckpt"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "COMMIT"
RESERVED_NAMES = frozenset({MANIFEST_NAME, COMMIT_NAME})
MAX_MANIFEST_BYTES = 1 << 30
MAX_COMMIT_BYTES = 4096
MAX_ARRAYS = 500_000
MAX_PARTS = 1_000
MAX_INFO_BYTES = 1 << 20
# The errors of decoding data that is not JSON, or not of the expected type.
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 4096  # every block size is a multiple of this
MAX_BLOCK_BYTES = 64 << 20  # the memory that verifying one block may take
WHOLE_CHUNKS = 1 << 60  # the block size of other tools' checkpoints, whose chunks are best read whole
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
MANY = 16  # from this number on, chunks are checked together with numpy


def metrics_from_json(metrics: object) -> dict[str, float]:
    """Metrics from a file; anything but a mapping counts as no metrics, and values that are not numbers are dropped."""
    found = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return found


# gc=False: these records contain no cycles, and hundreds of thousands of them would slow the garbage collector down.
class ChunkRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The bytes of one box: `length` bytes at `offset` of file number `segment`, with the digests of its blocks."""

    box: Box
    segment: int
    offset: int
    length: int
    digests: str


class ArrayRecord(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One array: name in its checkpointable, global shape, dtype, chunks, and its sharding (for information only)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkRecord, ...]
    sharding: Any = None


class SegmentRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One segment file: its path below the checkpoint, size, and the size and digest of its head."""

    file: str
    bytes: int
    header_bytes: int
    header_digest: str


class FileRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One plain file: its path below the checkpoint, size, and the digests of its blocks."""

    file: str
    bytes: int
    digests: str


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpointable: its name and kind, arrays and files, and what its handler recorded in addition."""

    name: str
    kind: str
    arrays: tuple[ArrayRecord, ...]
    files: tuple[FileRecord, ...]
    detail: msgspec.Raw


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in a checkpoint. `info` is free-form JSON about the run; it never decides how data is read."""

    format: str
    format_version: int
    digest: str
    block_bytes: int
    segments: tuple[SegmentRecord, ...]
    parts: tuple[PartRecord, ...]
    info: dict[str, Any]

    def part(self, name: str) -> PartRecord | None:
        """The checkpointable with this name, or None."""
        return next((part for part in self.parts if part.name == name), None)


class _Version(msgspec.Struct):
    format: str
    format_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises UnsupportedLeafError: there are more checkpointables than a load accepts."""
    if len(manifest.parts) > MAX_PARTS:
        raise UnsupportedLeafError(f"expected at most {MAX_PARTS:,} checkpointables, found {len(manifest.parts):,}")
    return msgspec.json.encode(manifest)


def shown(found: object, letters: int = 200) -> str:
    """The text of a value or error for a message, shortened to `letters` characters."""
    text = str(found) if isinstance(found, Exception) else repr(found[:letters] if isinstance(found, str) else found)
    return text if len(text) <= letters + 2 else f"{text[:letters]}..."


def check_version(data: bytes | bytearray, subject: str) -> None:
    """Refuse data of another format or of a newer version, before anything else is decoded.

    Raises CorruptCheckpointError: it is not JSON of this format; FormatVersionError: it is of a newer version.
    """
    try:
        head = msgspec.json.decode(data, type=_Version)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: not valid: {shown(error)}") from error
    if head.format != FORMAT:
        raise CorruptCheckpointError(f"{subject}: format is {shown(head.format)}, expected {FORMAT!r}")
    if head.format_version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{subject}: format version {head.format_version}, but this jaxckpt_train reads up to {FORMAT_VERSION}; "
            "upgrade: pip install -U jaxckpt-train"
        )
    if head.format_version < 1:
        raise CorruptCheckpointError(f"{subject}: format version {head.format_version} does not exist")


def decode_info(raw: msgspec.Raw, subject: str) -> dict[str, Any]:
    """Decode the `info` of a manifest.

    Raises CorruptCheckpointError: it is not a JSON object, or larger than any save makes it.
    """
    size = memoryview(raw).nbytes
    if size > MAX_INFO_BYTES:
        raise CorruptCheckpointError(f"{subject}: info of {size:,} bytes, expected at most {MAX_INFO_BYTES:,}")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: not valid: info: {shown(error)}") from error


def encode_value(value: Any, *, is_strict: bool = False) -> bytes:
    """Encode plain data as JSON. Raises UnsupportedLeafError: decoding would not give the same value."""
    try:
        data = msgspec.json.encode(value)
        same = msgspec.json.decode(data) == value
        if not same and not is_strict:  # NaN differs from itself; NaN and infinities have become null
            data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
            same = repr(json.loads(data)) == repr(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedLeafError(f"not JSON: {error}") from error
    if not same:
        numbers = ", nan" if is_strict else ""
        raise UnsupportedLeafError(f"would not come back from JSON unchanged (a tuple{numbers}, or a non-text key?)")
    return data


def decode_value(data: Any) -> Any:
    """Decode JSON of this library or of another Python tool. Raises NOT_JSON: it is not JSON."""
    try:
        return msgspec.json.decode(data)
    except NOT_JSON as error:
        found = _by_python(bytes(data))
        if found is None:
            raise error from None
        return found[0]


def decode_untrusted(data: bytes, kind: Any = Any) -> Any:
    """Decode another Python tool's JSON for a manifest; NaN and infinities become text such as "nan".

    Raises NOT_JSON: it is not JSON, or not of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_JSON as error:
        found = _by_python(data, parse_float=_number_or_text, parse_constant=_number_or_text)
        if found is None:
            raise error from None
        return msgspec.convert(found[0], kind)


def _by_python(data: bytes, **options: Any) -> tuple[Any] | None:
    """Return the result of Python's decoder, in a tuple; None if it fails too, or if the text is not valid Unicode."""
    try:
        found = json.loads(data.decode(), **options)
        msgspec.json.encode(found)
    except (ValueError, RecursionError):
        return None
    return (found,)


def _number_or_text(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else str(number)


def is_plain_name(name: str) -> bool:
    """Whether a file or checkpointable may have this name: letters, digits, `_`, `-`, `.`, not hidden, not a path."""
    return _PLAIN_NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def plain_name_rule() -> str:
    """The description of a plain name, for a message."""
    reserved = ", ".join(sorted(RESERVED_NAMES))
    return f"letters, digits, '_', '-' and '.', not '.' or '-' first, at most 200 of them, none of {reserved}"


def block_count(length: int, block_bytes: int) -> int:
    """How many digest blocks this number of bytes has."""
    return -(-length // block_bytes)


class SegmentRoom:
    """Checks the positions of many chunks in their segments at once.

    The methods return True only for valid chunks. If they return False, a caller checks one chunk at a time to find the
    problem.
    """

    def __init__(self, segments: Sequence[SegmentRecord], width: int, block_bytes: int) -> None:
        self._heads = np.array([segment.header_bytes for segment in segments], np.int64)
        self._ends = np.array([segment.bytes for segment in segments], np.int64)
        self._width, self._block_bytes = width, block_bytes

    def surely_holds(self, chunks: Sequence[ChunkRecord], corners: np.ndarray, item_bytes: int) -> bool:
        """Whether each chunk has the size of its box, is within its segment, and has one digest per block."""
        columns = _columns(chunks)
        if columns is None:
            return False
        segments, offsets, lengths, digits = columns
        expected = np.prod(corners[:, :, 1] - corners[:, :, 0], axis=1) * item_bytes
        if (lengths != expected).any() or segments.min() < 0 or segments.max() >= len(self._ends):
            return False
        starts_well = offsets >= self._heads[segments]
        ends_well = offsets <= self._ends[segments] - lengths  # a sum could overflow
        return bool((starts_well & ends_well & (digits == -(-lengths // self._block_bytes) * self._width)).all())

    def are_full(self, arrays: Sequence[ArrayRecord]) -> bool:
        """Whether all chunks, which are within their segments, fill the data section of each segment exactly."""
        columns = _columns([chunk for array in arrays for chunk in array.chunks])
        if columns is None or not len(self._ends):
            return columns is None and not len(self._ends)
        segments, offsets, lengths, _ = columns
        order = np.lexsort((offsets, segments))
        segments, starts = segments[order], offsets[order]
        stops = starts + lengths[order]
        first = np.flatnonzero(np.diff(segments, prepend=-1))
        if not np.array_equal(segments[first], np.arange(len(self._ends))):
            return False
        expected = np.append(0, stops[:-1])
        expected[first] = self._heads
        last = np.append(first[1:], len(segments)) - 1
        return np.array_equal(starts, expected) and np.array_equal(stops[last], self._ends)


def _columns(chunks: Sequence[ChunkRecord]) -> Sequence[np.ndarray] | None:
    """Segments, offsets, lengths and digest lengths; None if there are no chunks, or numbers beyond 64 bits."""
    if not chunks:
        return None
    try:
        return (
            np.array([chunk.segment for chunk in chunks], np.int64),
            np.array([chunk.offset for chunk in chunks], np.int64),
            np.array([chunk.length for chunk in chunks], np.int64),
            np.array([len(chunk.digests) for chunk in chunks], np.int64),
        )
    except OverflowError:
        return None
