"""The manifest: the record of everything in a checkpoint, as typed JSON that is validated before it is believed."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError
from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.digests import HEX_DIGITS
from jaxckpt_train.store.dtypes import DTYPES, dtype_named
from jaxckpt_train.store.quiet_gc import paused_collection
from jaxckpt_train.store.segment import MAX_DIMENSIONS, MAX_HEADER_BYTES
from jaxckpt_train.store.tiling import check_tiling

FORMAT = "jaxckpt"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "COMMIT"
RESERVED_NAMES = frozenset({MANIFEST_NAME, COMMIT_NAME})
MAX_MANIFEST_BYTES = 1 << 30
MAX_ARRAYS = 500_000
MAX_INFO_BYTES = 1 << 20
# What comes of bytes that are no JSON, or not of the type that is wanted.
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
BLOCK_BYTES = 4 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_LIMIT = 1 << 62
_LARGEST_EMPTY = (1 << 63) - 1  # numpy makes no array, JAX ends the process, where all but the zeros come to more bytes


# gc=False: such records hold no cycles, and hundreds of thousands of them would slow the garbage collector down.
class ChunkRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The bytes of one box: `length` bytes at `offset` of file number `segment`, with the digests of its blocks."""

    box: Box
    segment: int
    offset: int
    length: int
    digests: str


class ArrayRecord(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One array: its name in the checkpointable, global shape, dtype, chunks, and the sharding it had (informative)."""

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
    """One checkpointable: its name and kind, its arrays and files, and what its handler recorded beside them."""

    name: str
    kind: str
    arrays: tuple[ArrayRecord, ...]
    files: tuple[FileRecord, ...]
    detail: msgspec.Raw


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in a checkpoint that decides how its bytes are read."""

    format: str
    format_version: int
    digest: str
    block_bytes: int
    segments: tuple[SegmentRecord, ...]
    parts: tuple[PartRecord, ...]


class _Undecoded(_Content, frozen=True, forbid_unknown_fields=True):
    """A manifest before it is known how large its free-form JSON is, which takes many times its size in memory."""

    info: msgspec.Raw


class Manifest(_Content, frozen=True, forbid_unknown_fields=True):
    """Everything in a checkpoint. `info` is free-form JSON about the run; it never decides how bytes are read."""

    info: dict[str, Any]

    def part(self, name: str) -> PartRecord | None:
        """The checkpointable with this name."""
        return next((part for part in self.parts if part.name == name), None)


class _Version(msgspec.Struct):
    format: str
    format_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    return msgspec.json.encode(manifest)


def check_version(data: bytes, subject: str) -> None:
    """Refuse what is not ours, or is of a newer format version, before anything else of it is looked at.

    Raises:
        CorruptCheckpointError: not JSON of this format.
        FormatVersionError: a newer version.
    """
    try:
        head = msgspec.json.decode(data, type=_Version)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: not valid: {error}") from error
    if head.format != FORMAT:
        raise CorruptCheckpointError(f"{subject}: format is {head.format!r}, expected {FORMAT!r}")
    if head.format_version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{subject}: format version {head.format_version}, but this jaxckpt_train reads up to {FORMAT_VERSION}; "
            "upgrade: pip install -U jaxckpt-train"
        )
    if head.format_version < 1:
        raise CorruptCheckpointError(f"{subject}: format version {head.format_version} never existed")


def decode_manifest(data: bytes, subject: str) -> Manifest:
    """Decode and fully validate manifest.json.

    Raises:
        CorruptCheckpointError: malformed, contradicting itself, or in another form than this package writes
            (which also refuses keys that appear twice).
        FormatVersionError: a newer version.
    """
    if data.count(b'"dtype":') > MAX_ARRAYS:  # before it takes memory; empty arrays cost their writer none
        raise CorruptCheckpointError(f"{subject}: more than {MAX_ARRAYS:,} arrays")
    check_version(data, subject)
    try:
        with paused_collection():  # millions of small lists would take seconds
            found = msgspec.json.decode(data, type=_Undecoded)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: not valid: {error}") from error
    info = decode_info(found.info, subject)
    content = {name: getattr(found, name) for name in _Content.__struct_fields__}
    manifest = Manifest(**content, info=info)
    if msgspec.json.encode(manifest) != data:
        raise CorruptCheckpointError(f"{subject}: not in canonical form (a key twice, or edited by another program)")
    _check_files(manifest, subject)
    for part in manifest.parts:
        names = [array.name for array in part.arrays]
        if len(set(names)) != len(names):
            raise CorruptCheckpointError(f"{subject}: {part.name}: an array name appears twice")
        for array in part.arrays:
            _check_array(manifest, array, f"{subject}: {part.name}")
    _check_overlaps(manifest, subject)
    return manifest


def decode_info(raw: msgspec.Raw, subject: str) -> dict[str, Any]:
    """The `info` of a manifest.

    Raises:
        CorruptCheckpointError: no JSON object, or larger than any save makes it.
    """
    size = memoryview(raw).nbytes
    if size > MAX_INFO_BYTES:
        raise CorruptCheckpointError(f"{subject}: info of {size:,} bytes, expected at most {MAX_INFO_BYTES:,}")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: not valid: info: {error}") from error


def is_plain_name(name: str) -> bool:
    """Whether a name can be a file or checkpointable of ours: letters, digits, `_`, `-`, `.`, not hidden, no path."""
    return _PLAIN_NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def block_count(length: int, block_bytes: int) -> int:
    """How many digest blocks this many bytes have."""
    return -(-length // block_bytes)


def _check_files(manifest: Manifest, subject: str) -> None:
    if manifest.digest not in HEX_DIGITS:
        raise CorruptCheckpointError(f"{subject}: unknown digest {manifest.digest!r}")
    if not 4096 <= manifest.block_bytes < _LIMIT:
        raise CorruptCheckpointError(f"{subject}: block_bytes is {manifest.block_bytes}")
    width = HEX_DIGITS[manifest.digest]
    parts = [part.name for part in manifest.parts]
    if len(set(parts)) != len(parts) or not all(map(is_plain_name, parts)):
        raise CorruptCheckpointError(f"{subject}: checkpointable names are not plain or not unique: {parts}")
    for segment in manifest.segments:
        if not 0 < segment.header_bytes <= segment.bytes < _LIMIT or segment.header_bytes > MAX_HEADER_BYTES + 8:
            raise CorruptCheckpointError(f"{subject}: segment {segment.file!r} has impossible sizes")
        if len(segment.header_digest) != width:
            raise CorruptCheckpointError(f"{subject}: segment {segment.file!r}: digest of the header is too short")
    files = [segment.file for segment in manifest.segments]
    for part in manifest.parts:
        for file in part.files:
            if not 0 <= file.bytes < _LIMIT or len(file.digests) != width * block_count(
                file.bytes, manifest.block_bytes
            ):
                raise CorruptCheckpointError(f"{subject}: file {file.file!r} has an impossible size or digest")
            files.append(file.file)
    for name in files:
        pieces = name.split("/")
        if len(pieces) < 2 or pieces[0] not in parts or not all(map(is_plain_name, pieces)):
            raise CorruptCheckpointError(f"{subject}: {name!r} is not a plain file of a checkpointable")
    if len(set(files)) != len(files):
        raise CorruptCheckpointError(f"{subject}: a file appears twice")


def _check_array(manifest: Manifest, array: ArrayRecord, part: str) -> None:
    shape = array.shape
    if len(shape) > MAX_DIMENSIONS or (shape and not (min(shape) >= 0 and max(shape) < _LIMIT)):
        raise CorruptCheckpointError(f"{part}: array {array.name!r}: impossible shape {shape}")
    known = DTYPES.get(array.dtype) or dtype_named(array.dtype, f"{part}: array {array.name!r}")
    item = known.itemsize
    total = math.prod(shape) * item
    if total >= _LIMIT:
        raise CorruptCheckpointError(f"{part}: array {array.name!r}: impossible shape {shape}")
    if total == 0:
        if math.prod(size for size in shape if size) * item > _LARGEST_EMPTY:
            raise CorruptCheckpointError(f"{part}: array {array.name!r}: impossible shape {shape}")
        if array.chunks:
            raise CorruptCheckpointError(f"{part}: array {array.name!r}: chunks of an array without elements")
        return
    check_tiling([chunk.box for chunk in array.chunks], shape, f"{part}: array {array.name!r}")
    width = HEX_DIGITS[manifest.digest]
    for chunk in array.chunks:
        expected = total if len(array.chunks) == 1 else box_elements(chunk.box) * item
        problem = _chunk_problem(manifest, chunk, expected, width)
        if problem:
            raise CorruptCheckpointError(f"{part}: array {array.name!r}: {problem}")


def _chunk_problem(manifest: Manifest, chunk: ChunkRecord, expected_bytes: int, width: int) -> str | None:
    if chunk.length != expected_bytes:
        return f"box {chunk.box} of {expected_bytes} bytes is not {chunk.length} bytes"
    if not 0 <= chunk.segment < len(manifest.segments):
        return f"no segment number {chunk.segment}"
    segment = manifest.segments[chunk.segment]
    if chunk.offset < segment.header_bytes or chunk.offset + chunk.length > segment.bytes:
        return f"box {chunk.box} lies outside {segment.file!r}"
    if len(chunk.digests) != width * block_count(chunk.length, manifest.block_bytes):
        return f"box {chunk.box} has {len(chunk.digests)} digits of digests"
    return None


def _check_overlaps(manifest: Manifest, subject: str) -> None:
    """Chunks fill the data section of every segment exactly: no byte twice, none unaccounted for."""
    spans: list[list[tuple[int, int]]] = [[] for _ in manifest.segments]
    for part in manifest.parts:
        for array in part.arrays:
            for chunk in array.chunks:
                spans[chunk.segment].append((chunk.offset, chunk.offset + chunk.length))
    for segment, found in zip(manifest.segments, spans, strict=True):
        end = segment.header_bytes
        for start, stop in sorted(found):
            if start != end:
                raise CorruptCheckpointError(f"{subject}: {segment.file!r}: chunk at byte {start}, expected {end}")
            end = stop
        if end != segment.bytes:
            raise CorruptCheckpointError(f"{subject}: {segment.file!r}: chunks end at byte {end} of {segment.bytes}")
