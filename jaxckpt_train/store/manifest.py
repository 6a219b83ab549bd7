"""The manifest: the typed record of everything in a checkpoint, stored as JSON; its names, limits and checks.

A manifest may come from an untrusted source. `decode_manifest` validates each part before the next one takes memory,
and decodes long lists in batches, so that an invalid list is refused at its first bad element.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError, SettingsError, UnsupportedLeafError
from jaxckpt_train.store.boxes import Box, box_elements, check_corners, check_tiling, corners_of, full_box
from jaxckpt_train.store.segment import (
    DTYPES,
    LIMIT,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    Shardings,
    array_bytes,
    decode_sharding,
    dtype_named,
)
from jaxckpt_train.store.threads import paused_collection

HexDigest = Callable[[memoryview | bytes], str]  # in lower case
HEX_DIGITS = {"xxh3-128": 32, "sha256": 64, "blake3": 64}
FORMAT = "jaxckpt"
FORMAT_VERSION = 1
INDEXED_VERSION = 2
"""The version of a manifest with index files; a reader of version 1 would miss their chunks."""
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
BATCH_BYTES = 64 << 10
T = TypeVar("T")
_BETWEEN_FILES, _BETWEEN_ARRAYS, _BETWEEN_CHUNKS = b'"],["', b'},{"name":"', b'"],[['
_LONGEST_PATH = 4096
_MAX_BOX_BYTES = MAX_DIMENSIONS * len("[1000000000000000000,1000000000000000000],") + 2
_MAX_DTYPE_LETTERS = 100
_NOTHING = msgspec.Raw(b"")


def digest_function(name: str) -> HexDigest:
    """The function that computes this digest. Raises SettingsError: it is unknown, or requires a missing package."""
    if name == "xxh3-128":
        return xxhash.xxh3_128_hexdigest
    if name == "sha256":
        return lambda data: hashlib.sha256(data).hexdigest()
    if name == "blake3":
        try:
            blake3 = importlib.import_module("blake3")
        except ImportError as error:
            raise SettingsError(
                'digest "blake3" requires the package blake3: pip install "jaxckpt-train[blake3]"'
            ) from error
        return lambda data: str(blake3.blake3(data).hexdigest())
    raise SettingsError(f"digest: expected one of {', '.join(HEX_DIGITS)}, found {name!r}")


def block_digests(data: np.ndarray, block_bytes: int, digest: HexDigest) -> str:
    """The concatenated digests of consecutive blocks of a flat uint8 array; the last block may be shorter."""
    view = memoryview(data)
    return "".join(digest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes))


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


class IndexRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The index files of the processes (`index_files.py`), and the file with the tables that list them.

    Attributes:
        file, bytes: the path of the tables below the checkpoint, and its size.
        root, digest: the offset of the last table, from which all others are found, and its digest.
        segments, data_bytes: of all segments that the index files list, their number and size.
    """

    file: str
    bytes: int
    root: int
    digest: str
    segments: int
    data_bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything in a checkpoint. `info` is free-form JSON about the run; it never decides how data is read.

    With `index`, arrays with elements that have no chunks here have them in the index files.
    """

    format: str
    format_version: int
    digest: str
    block_bytes: int
    segments: tuple[SegmentRecord, ...]
    parts: tuple[PartRecord, ...]
    info: dict[str, Any]
    index: IndexRecord | None = None

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
    """Refuse data of another format (CorruptCheckpointError) or of a newer version (FormatVersionError)."""
    try:
        head = msgspec.json.decode(data, type=_Version)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: not valid: {shown(error)}") from error
    if head.format != FORMAT:
        raise CorruptCheckpointError(f"{subject}: format is {shown(head.format)}, expected {FORMAT!r}")
    if head.format_version > INDEXED_VERSION:
        raise FormatVersionError(
            f"{subject}: format version {head.format_version}, but this jaxckpt_train reads up to {INDEXED_VERSION}; "
            "upgrade: pip install -U jaxckpt-train"
        )
    if head.format_version < 1:
        raise CorruptCheckpointError(f"{subject}: format version {head.format_version} does not exist")


def decode_info(raw: msgspec.Raw, subject: str) -> dict[str, Any]:
    """Decode the `info` of a manifest. Raises CorruptCheckpointError: it is too large, or not a JSON object."""
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
    """The result of Python's decoder, in a tuple; None if it fails too, or if the text is not valid Unicode."""
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


def check_segment(segment: SegmentRecord, width: int, parts: Collection[str], subject: str) -> None:
    """Raise CorruptCheckpointError: impossible sizes or names; `width` is that of a digest, `parts` are the names."""
    if not 0 < segment.header_bytes <= segment.bytes < LIMIT or segment.header_bytes > MAX_HEADER_BYTES + 8:
        raise CorruptCheckpointError(f"{subject}: segment {shown(segment.file)}: impossible sizes")
    if len(segment.header_digest) != width:
        raise CorruptCheckpointError(f"{subject}: segment {shown(segment.file)}: invalid header digest")
    check_file_name(segment.file, parts, subject)


def check_file_name(name: str, parts: Collection[str], subject: str) -> None:
    """Raise CorruptCheckpointError: this is not the name of a plain file below the folder of a checkpointable."""
    pieces = name.split("/") if len(name) <= _LONGEST_PATH else []
    if len(pieces) < 2 or pieces[0] not in parts or not all(map(is_plain_name, pieces)):
        raise CorruptCheckpointError(f"{subject}: {shown(name)} is not a plain file of a checkpointable")


class SegmentRoom:
    """Checks the positions of many chunks in their segments at once; the methods return True only for valid chunks."""

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
        return self.are_filled_by(segments, offsets, lengths)

    def are_filled_by(self, segments: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> bool:
        """As `are_full`, for columns of the chunks; there is at least one."""
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


_segments, _segment = msgspec.json.Decoder(list[SegmentRecord]).decode, msgspec.json.Decoder(SegmentRecord).decode
_files, _file = msgspec.json.Decoder(list[FileRecord]).decode, msgspec.json.Decoder(FileRecord).decode
_shape, _box = msgspec.json.Decoder(tuple[int, ...]).decode, msgspec.json.Decoder(Box).decode


def elements(
    raw: msgspec.Raw, between: bytes, decode_some: Callable[[Any], list[T]], decode_one: Callable[[Any], T]
) -> Iterator[T]:
    """Yield the elements of a JSON list, decoding only a few at a time.

    `between` separates two elements and never occurs within one: the end of an element, a comma, and the start of the
    next. A list with these bytes elsewhere is not in canonical form, and is refused where it is cut. `decode_some`
    decodes a list of at most 64 KiB; `decode_one` a single larger element, which it should check first, because
    decoding may take many times as much memory.
    """
    view = memoryview(raw)
    if bytes(view[:1]) != b"[":
        yield from decode_some(view)  # raises an error that names the actual type
        return
    start, end = 1, len(view) - 1
    while start < end:
        stop = _cut(view, start, end, between)
        if stop - start <= BATCH_BYTES:
            yield from decode_some(b"[" + view[start:stop] + b"]")
        else:
            yield decode_one(view[start:stop])
        start = stop + 1


def length(raw: msgspec.Raw, between: bytes) -> int:
    """The number of elements of a list in canonical form, without decoding it."""
    view, overlap = memoryview(raw), len(between) - 1
    windows = range(0, len(view), BATCH_BYTES)
    return (len(view) > 2) + sum(bytes(view[at : at + BATCH_BYTES + overlap]).count(between) for at in windows)


def _cut(view: memoryview, start: int, end: int, between: bytes) -> int:
    """Where the largest batch of whole elements ends; at least one element."""
    if end - start <= BATCH_BYTES:
        return end
    comma = between.index(b",")
    found = bytes(view[start : start + BATCH_BYTES]).rfind(between)
    if found >= 0:
        return start + found + comma
    overlap = len(between) - 1
    for at in range(start + BATCH_BYTES - overlap, end, BATCH_BYTES):
        found = bytes(view[at : at + BATCH_BYTES + overlap]).find(between)
        if found >= 0:
            return at + found + comma
    return end


class _PartOutline(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    name: str
    kind: str
    arrays: msgspec.Raw
    files: msgspec.Raw
    detail: msgspec.Raw


# A list with a limited number of elements: msgspec refuses it at the first element too many, before it is decoded.
_Parts = msgspec.defstruct(
    "_Parts",
    [(f"part_{number}", _PartOutline, None) for number in range(MAX_PARTS)],
    array_like=True,
    gc=False,
    forbid_unknown_fields=True,
)


class _Outline(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    format_version: int
    digest: str
    block_bytes: int
    segments: msgspec.Raw
    parts: msgspec.Raw
    info: msgspec.Raw
    index: IndexRecord | None = None


def _size(outline: _Outline) -> int:
    """The size of the outline's encoding in canonical form."""
    rest = msgspec.structs.replace(outline, segments=_NOTHING, parts=_NOTHING, info=_NOTHING)
    pieces = (outline.segments, outline.parts, outline.info)
    return len(msgspec.json.encode(rest)) + sum(memoryview(piece).nbytes for piece in pieces)


class _LargeArray(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    name: str
    shape: msgspec.Raw
    dtype: str
    chunks: msgspec.Raw
    sharding: msgspec.Raw


class _LargeChunk(msgspec.Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    box: msgspec.Raw
    segment: int
    offset: int
    length: int
    digests: str


_outline, _parts = msgspec.json.Decoder(_Outline).decode, msgspec.json.Decoder(_Parts).decode
_arrays, _large_array = msgspec.json.Decoder(list[ArrayRecord]).decode, msgspec.json.Decoder(_LargeArray).decode
_chunks, _large_chunk = msgspec.json.Decoder(list[ChunkRecord]).decode, msgspec.json.Decoder(_LargeChunk).decode


def decode_manifest(data: bytes | bytearray, subject: str) -> Manifest:
    """Decode and fully validate manifest.json.

    Raises CorruptCheckpointError: it is malformed, contradicts itself, or is not in canonical form; FormatVersionError.
    """
    check_version(data, subject)
    try:
        with paused_collection():  # collections during millions of small lists would take seconds
            manifest = _Decoding(_outline(data), len(data), subject).manifest(data)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: not valid: {shown(error)}") from error
    if msgspec.json.encode(manifest) != data:
        raise _another_form(subject)
    if not SegmentRoom(manifest.segments, 0, 1).are_full([each for part in manifest.parts for each in part.arrays]):
        raise CorruptCheckpointError(f"{subject}: the chunks do not fill the segments exactly: a gap or an overlap")
    return manifest


def _another_form(subject: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{subject}: not in canonical form (a duplicate key, or edited by another program)")


class _Decoding:
    """Decodes one manifest and checks each record."""

    def __init__(self, outline: _Outline, size: int, subject: str) -> None:
        self._outline, self._subject = outline, subject
        if outline.digest not in HEX_DIGITS:
            raise CorruptCheckpointError(f"{subject}: unknown digest {shown(outline.digest)}")
        self._width, self._block_bytes = HEX_DIGITS[outline.digest], outline.block_bytes
        if not MIN_BLOCK_BYTES <= self._block_bytes <= MAX_BLOCK_BYTES or self._block_bytes % MIN_BLOCK_BYTES:
            raise CorruptCheckpointError(f"{subject}: block_bytes is {shown(self._block_bytes)}")
        if _size(outline) != size:  # a duplicate key, perhaps repeated a million times
            raise _another_form(subject)
        found = msgspec.structs.astuple(_parts(outline.parts))
        self._parts: list[_PartOutline] = [part for part in found if part is not None]
        self._part_names = {part.name for part in self._parts}
        names = [part.name for part in self._parts]
        if len(self._part_names) != len(names) or not all(map(is_plain_name, names)):
            some = ", ".join(map(shown, names[:5]))
            raise CorruptCheckpointError(f"{subject}: checkpointable names are not plain or not unique: {some}")
        if (outline.format_version == INDEXED_VERSION) != (outline.index is not None):
            raise CorruptCheckpointError(f"{subject}: format version {outline.format_version} contradicts its index")
        self._segments: tuple[SegmentRecord, ...] = ()
        self._room_in_segments = SegmentRoom((), self._width, self._block_bytes)
        self._room = MAX_ARRAYS

    def manifest(self, data: bytes | bytearray) -> Manifest:
        """Decode everything; `data` is the encoded manifest."""
        outline = self._outline
        info = decode_info(outline.info, self._subject)
        # Cheap to forge, so check it before decoding: each segment and each chunk ends with these bytes, and each
        # segment has at least one chunk.
        if 2 * length(outline.segments, _BETWEEN_FILES) > data.count(b'"]'):
            raise CorruptCheckpointError(f"{self._subject}: a segment has no chunks")
        if sum(length(part.arrays, _BETWEEN_ARRAYS) for part in self._parts) > MAX_ARRAYS:
            raise self._too_many_arrays()
        self._segments = tuple(self._all_segments(outline.segments))
        self._room_in_segments = SegmentRoom(self._segments, self._width, self._block_bytes)
        parts = tuple([self._part(part) for part in self._parts])
        files = [segment.file for segment in self._segments]
        files += [file.file for part in parts for file in part.files]
        if outline.index is not None:
            self._check_index(outline.index)
            files.append(outline.index.file)
        if len(set(files)) != len(files):
            raise CorruptCheckpointError(f"{self._subject}: a file appears twice")
        content = (outline.format, outline.format_version, outline.digest, self._block_bytes)
        return Manifest(*content, self._segments, parts, info, outline.index)

    def _all_segments(self, raw: msgspec.Raw) -> Iterator[SegmentRecord]:
        for segment in elements(raw, _BETWEEN_FILES, _segments, _segment):
            check_segment(segment, self._width, self._part_names, self._subject)
            yield segment

    def _check_index(self, index: IndexRecord) -> None:
        if not 0 <= index.root < index.bytes <= MAX_MANIFEST_BYTES or len(index.digest) != self._width:
            raise CorruptCheckpointError(f"{self._subject}: {shown(index.file)}: impossible sizes or digest")
        if index.segments < 1 or not 0 < index.data_bytes < LIMIT:
            raise CorruptCheckpointError(f"{self._subject}: {shown(index.file)}: lists no data")
        check_file_name(index.file, self._part_names, self._subject)

    def _all_files(self, raw: msgspec.Raw) -> Iterator[FileRecord]:
        for file in elements(raw, _BETWEEN_FILES, _files, _file):
            if not 0 <= file.bytes < LIMIT or len(file.digests) != self._digits(file.bytes):
                raise CorruptCheckpointError(f"{self._subject}: file {shown(file.file)}: impossible size or digest")
            check_file_name(file.file, self._part_names, self._subject)
            yield file

    def _digits(self, length: int) -> int:
        return self._width * block_count(length, self._block_bytes)

    def _part(self, outline: _PartOutline) -> PartRecord:
        arrays = tuple(self._all_arrays(outline.arrays, f"{self._subject}: {outline.name}"))
        if len({array.name for array in arrays}) != len(arrays):
            raise CorruptCheckpointError(f"{self._subject}: {outline.name}: an array name appears twice")
        return PartRecord(outline.name, outline.kind, arrays, tuple(self._all_files(outline.files)), outline.detail)

    def _all_arrays(self, raw: msgspec.Raw, part: str) -> Iterator[ArrayRecord]:
        shardings = Shardings()

        def large(text: memoryview) -> ArrayRecord:
            return self._large_array(text, part)

        for array in elements(raw, _BETWEEN_ARRAYS, _arrays, large):
            self._room -= 1
            if self._room < 0:
                raise self._too_many_arrays()
            self._check_array(array, part)
            if array.sharding is not None:
                sharding = shardings.shared(array.sharding)
                array = ArrayRecord(array.name, array.shape, array.dtype, array.chunks, sharding)
            yield array

    def _too_many_arrays(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._subject}: more than {MAX_ARRAYS:,} arrays")

    def _large_array(self, text: memoryview, part: str) -> ArrayRecord:
        """An array with a long record: its lists are checked before they are decoded."""
        found = _large_array(text)
        subject = f"{part}: array {shown(found.name)}"
        if memoryview(found.shape).nbytes > _MAX_BOX_BYTES:
            raise CorruptCheckpointError(f"{subject}: shape of more than {MAX_DIMENSIONS} dimensions")
        shape = _shape(found.shape)

        def large(text: memoryview) -> ChunkRecord:
            chunk = _large_chunk(text)
            if memoryview(chunk.box).nbytes > _MAX_BOX_BYTES:
                raise CorruptCheckpointError(f"{subject}: box of more than {MAX_DIMENSIONS} dimensions")
            return ChunkRecord(_box(chunk.box), chunk.segment, chunk.offset, chunk.length, chunk.digests)

        chunks, dimensions, width, block_bytes = [], len(shape), self._width, self._block_bytes
        for chunk in elements(found.chunks, _BETWEEN_CHUNKS, _chunks, large):
            size = chunk.length  # inlined, because there may be millions of chunks
            if len(chunk.box) != dimensions or size < 1 or len(chunk.digests) != width * -(-size // block_bytes):
                raise CorruptCheckpointError(f"{subject}: invalid size, box or digests of a chunk of {size} bytes")
            chunks.append(chunk)
        return ArrayRecord(found.name, shape, found.dtype, tuple(chunks), decode_sharding(found.sharding))

    def _check_array(self, array: ArrayRecord, part: str) -> None:
        def subject() -> str:  # computed only for an error, because there may be many arrays
            return f"{part}: array {shown(array.name)}"

        shape, known = array.shape, DTYPES.get(array.dtype)
        if known is None:
            if len(array.dtype) > _MAX_DTYPE_LETTERS:
                raise CorruptCheckpointError(f"{subject()}: expected the name of a dtype, found {shown(array.dtype)}")
            known = dtype_named(array.dtype, subject())
        total = array_bytes(shape, known.itemsize)
        if total is None:
            dimensions = tuple(shape[: MAX_DIMENSIONS + 1])
            raise CorruptCheckpointError(f"{subject()}: impossible shape {shown(dimensions)}")
        if total == 0:
            if array.chunks:
                raise CorruptCheckpointError(f"{subject()}: {len(array.chunks)} chunks of an array without elements")
            return
        if not array.chunks and self._outline.index is not None:
            return
        if len(array.chunks) > MANY:
            corners = corners_of([chunk.box for chunk in array.chunks], len(shape))
            if corners is not None:
                check_corners(corners, shape, subject())
                if self._room_in_segments.surely_holds(array.chunks, corners, known.itemsize):
                    return
        if len(array.chunks) != 1 or array.chunks[0].box != full_box(shape):
            check_tiling([chunk.box for chunk in array.chunks], shape, subject())
        for chunk in array.chunks:
            expected = total if len(array.chunks) == 1 else box_elements(chunk.box) * known.itemsize
            problem = self._chunk_problem(chunk, expected)
            if problem:
                raise CorruptCheckpointError(f"{subject()}: {problem}")

    def _chunk_problem(self, chunk: ChunkRecord, expected_bytes: int) -> str | None:
        if chunk.length != expected_bytes:
            return f"box {chunk.box} has {chunk.length} bytes, expected {expected_bytes}"
        if not 0 <= chunk.segment < len(self._segments):
            return f"segment number {chunk.segment} does not exist"
        segment = self._segments[chunk.segment]
        if chunk.offset < segment.header_bytes or chunk.offset + chunk.length > segment.bytes:
            return f"box {chunk.box} is outside {segment.file!r}"
        if len(chunk.digests) != self._digits(chunk.length):
            return f"box {chunk.box} has {len(chunk.digests)} digest digits, expected {self._digits(chunk.length)}"
        return None
