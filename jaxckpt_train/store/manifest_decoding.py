"""Decode a manifest that may come from an untrusted source.

Each part is validated before the next one takes memory. Long JSON lists are decoded in batches, so that an invalid list
is refused at its first bad element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store.boxes import Box, box_elements, check_corners, check_tiling, corners_of, full_box
from jaxckpt_train.store.dtypes import DTYPES, dtype_named
from jaxckpt_train.store.manifest import (
    HEX_DIGITS,
    MANY,
    MAX_ARRAYS,
    MAX_BLOCK_BYTES,
    MAX_PARTS,
    MIN_BLOCK_BYTES,
    NOT_JSON,
    ArrayRecord,
    ChunkRecord,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    SegmentRoom,
    block_count,
    check_version,
    decode_info,
    is_plain_name,
    shown,
)
from jaxckpt_train.store.segment import LIMIT, MAX_DIMENSIONS, MAX_HEADER_BYTES, Shardings, array_bytes, decode_sharding
from jaxckpt_train.store.threads import paused_collection

BATCH_BYTES = 64 << 10
T = TypeVar("T")
_BETWEEN_FILES, _BETWEEN_ARRAYS, _BETWEEN_CHUNKS = b'"],["', b'},{"name":"', b'"],[['
_LONGEST_PATH = 4096
_MAX_BOX_BYTES = MAX_DIMENSIONS * len("[1000000000000000000,1000000000000000000],") + 2
_MAX_DTYPE_LETTERS = 100
_NOTHING = msgspec.Raw(b"")
_segments, _segment = msgspec.json.Decoder(list[SegmentRecord]).decode, msgspec.json.Decoder(SegmentRecord).decode
_files, _file = msgspec.json.Decoder(list[FileRecord]).decode, msgspec.json.Decoder(FileRecord).decode
_shape, _box = msgspec.json.Decoder(tuple[int, ...]).decode, msgspec.json.Decoder(Box).decode


def elements(
    raw: msgspec.Raw, between: bytes, decode_some: Callable[[Any], list[T]], decode_one: Callable[[Any], T]
) -> Iterator[T]:
    """Yield the elements of a JSON list, decoding only a few at a time.

    Args:
        raw: the list, without white space.
        between: the bytes that separate two elements and never occur within one: the end of an element, a comma, and
            the start of the next. A list with these bytes elsewhere is not in canonical form, and is refused where it
            is cut.
        decode_some: decodes a list of at most 64 KiB.
        decode_one: decodes a single larger element. It should check the element first, because decoding may take many
            times as much memory.

    Raises msgspec.MsgspecError: it is not a list of these elements.
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


class _Outline(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    format_version: int
    digest: str
    block_bytes: int
    segments: msgspec.Raw
    parts: msgspec.Raw
    info: msgspec.Raw


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

    Raises CorruptCheckpointError: it is malformed, contradicts itself, or is not in canonical form (which also refuses
    duplicate keys); FormatVersionError: it is of a newer version.
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
        if len(set(files)) != len(files):
            raise CorruptCheckpointError(f"{self._subject}: a file appears twice")
        content = (outline.format, outline.format_version, outline.digest, self._block_bytes)
        return Manifest(*content, self._segments, parts, info)

    def _all_segments(self, raw: msgspec.Raw) -> Iterator[SegmentRecord]:
        for segment in elements(raw, _BETWEEN_FILES, _segments, _segment):
            if not 0 < segment.header_bytes <= segment.bytes < LIMIT or segment.header_bytes > MAX_HEADER_BYTES + 8:
                raise CorruptCheckpointError(f"{self._subject}: segment {shown(segment.file)}: impossible sizes")
            if len(segment.header_digest) != self._width:
                raise CorruptCheckpointError(
                    f"{self._subject}: segment {shown(segment.file)} has an invalid header digest"
                )
            self._check_file_name(segment.file)
            yield segment

    def _all_files(self, raw: msgspec.Raw) -> Iterator[FileRecord]:
        for file in elements(raw, _BETWEEN_FILES, _files, _file):
            if not 0 <= file.bytes < LIMIT or len(file.digests) != self._digits(file.bytes):
                raise CorruptCheckpointError(
                    f"{self._subject}: file {shown(file.file)} has an impossible size or digest"
                )
            self._check_file_name(file.file)
            yield file

    def _check_file_name(self, name: str) -> None:
        pieces = name.split("/") if len(name) <= _LONGEST_PATH else []
        if len(pieces) < 2 or pieces[0] not in self._part_names or not all(map(is_plain_name, pieces)):
            raise CorruptCheckpointError(f"{self._subject}: {shown(name)} is not a plain file of a checkpointable")

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
        shape = array.shape
        known = DTYPES.get(array.dtype)
        if known is None:
            if len(array.dtype) > _MAX_DTYPE_LETTERS:
                raise CorruptCheckpointError(
                    f"{part}: array {shown(array.name)}: expected the name of a dtype, found {shown(array.dtype)}"
                )
            known = dtype_named(array.dtype, f"{part}: array {shown(array.name)}")
        total = array_bytes(shape, known.itemsize)
        if total is None:
            dimensions = tuple(shape[: MAX_DIMENSIONS + 1])
            raise CorruptCheckpointError(f"{part}: array {shown(array.name)}: impossible shape {shown(dimensions)}")
        if total == 0:
            if array.chunks:
                raise CorruptCheckpointError(
                    f"{part}: array {shown(array.name)}: expected no chunks for an array without elements, "
                    f"found {len(array.chunks)}"
                )
            return
        if len(array.chunks) > MANY and self._surely_fine(array, known.itemsize, part):
            return
        if len(array.chunks) != 1 or array.chunks[0].box != full_box(shape):
            check_tiling([chunk.box for chunk in array.chunks], shape, f"{part}: array {shown(array.name)}")
        for chunk in array.chunks:
            expected = total if len(array.chunks) == 1 else box_elements(chunk.box) * known.itemsize
            problem = self._chunk_problem(chunk, expected)
            if problem:
                raise CorruptCheckpointError(f"{part}: array {shown(array.name)}: {problem}")

    def _surely_fine(self, array: ArrayRecord, item_bytes: int, part: str) -> bool:
        corners = corners_of([chunk.box for chunk in array.chunks], len(array.shape))
        if corners is None:
            return False
        check_corners(corners, array.shape, f"{part}: array {shown(array.name)}")
        return self._room_in_segments.surely_holds(array.chunks, corners, item_bytes)

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
