"""The manifest: the record of everything in a checkpoint, as typed JSON that is validated before it is believed."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError, UnsupportedLeafError
from jaxckpt_train.store.boxes import Box

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
# What comes of bytes that are no JSON, or not of the type that is wanted.
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 4096  # of which every size of a block is a multiple
MAX_BLOCK_BYTES = 64 << 20  # what one block takes in memory when it is verified
WHOLE_CHUNKS = 1 << 60  # bytes of a block where a chunk is read whole if it can be, as one of another tool's
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


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
    """The bytes of manifest.json.

    Raises:
        UnsupportedLeafError: more checkpointables than a load would take.
    """
    if len(manifest.parts) > MAX_PARTS:
        raise UnsupportedLeafError(f"{len(manifest.parts):,} checkpointables, expected at most {MAX_PARTS:,}")
    return msgspec.json.encode(manifest)


def shown(found: object, letters: int = 200) -> str:
    """How a message tells of what is in a file, however long that is."""
    text = str(found) if isinstance(found, Exception) else repr(found[:letters] if isinstance(found, str) else found)
    return text if len(text) <= letters + 2 else f"{text[:letters]}..."


def check_version(data: bytes | bytearray, subject: str) -> None:
    """Refuse what is not ours, or is of a newer format version, before anything else of it is looked at.

    Raises:
        CorruptCheckpointError: not JSON of this format.
        FormatVersionError: a newer version.
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
        raise CorruptCheckpointError(f"{subject}: format version {head.format_version} never existed")


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
        raise CorruptCheckpointError(f"{subject}: not valid: info: {shown(error)}") from error


def is_plain_name(name: str) -> bool:
    """Whether a name can be a file or checkpointable of ours: letters, digits, `_`, `-`, `.`, not hidden, no path."""
    return _PLAIN_NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def what_is_a_plain_name() -> str:
    """What was expected of a name that is none, for a message."""
    reserved = ", ".join(sorted(RESERVED_NAMES))
    return f"letters, digits, '_', '-' and '.', not '.' or '-' first, at most 200 of them, none of {reserved}"


def block_count(length: int, block_bytes: int) -> int:
    """How many digest blocks this many bytes have."""
    return -(-length // block_bytes)
