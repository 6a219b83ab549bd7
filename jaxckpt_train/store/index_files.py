"""Index files: in a large job, each process keeps the list of the chunks that it wrote in a file of its own.

One manifest with all chunks would be read by every process, and grows with their number. With index files, it lists
only whole arrays. Parts of arrays are in the index files (`p00003.index`), next to the segments of each process. Tables
list the index files with their size and digest, and what they cover of the arrays; the manifest has the digest of the
last table, the root. It lists either the index files, or tables that do. So a reader opens those that it needs.

What a file covers is recorded for groups of arrays with the same sharding, as fractions of their axes.

The primary, which sees no index file, still knows that all chunks together tile all arrays: `weights_of`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, check_tiling, full_box, intersect
from jaxckpt_train.store.files import open_recorded
from jaxckpt_train.store.manifest import (
    FORMAT_VERSION,
    HEX_DIGITS,
    ArrayRecord,
    ChunkRecord,
    IndexRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    SegmentRoom,
    check_segment,
    digest_function,
    shown,
)
from jaxckpt_train.store.process_index import IndexSummary, PartIndex, packed, part_index, unpacked
from jaxckpt_train.store.segment import DTYPES, LIMIT, ArraySource, Shardings
from jaxckpt_train.store.threads import paused_collection, shared_workers
from jaxckpt_train.store.timeouts import report_progress

TABLES_NAME = "index.tables"
MAX_INDEX_BYTES = 256 << 20
MAX_GROUPS = 64
"""Arrays of further shardings are grouped by their dimensions alone."""
FANOUT = 32
"""Up to twice as many index files are listed by the root."""
WHOLE_AXIS = 1 << 31
"""The length of every axis in a cover."""
_FINE_AXIS = 1 << 30  # up to this length, different places of an axis are different in a cover
READS_AT_ONCE, HELD_AT_ONCE = 8, 64
_PRIME = (1 << 31) - 1
SEEDS = 4
SEED_BYTES = 8 * SEEDS


def index_name(part: str, process: int) -> str:
    """The path of an index file; `part` is the checkpointable whose folder has it."""
    return f"{part}/p{process:05d}.index"


class _Shapes:
    """The shapes of the arrays of one checkpointable, as columns; `first` is the number of arrays before them."""

    def __init__(self, part: PartRecord, first: int) -> None:
        arrays = part.arrays
        self.first, self.dimensions = first, np.array([len(array.shape) for array in arrays], np.int64)
        self.sizes = np.zeros((len(arrays), int(self.dimensions.max(initial=0))), np.int64)
        for number, array in enumerate(arrays):
            self.sizes[number, : len(array.shape)] = array.shape
        self.item_bytes = np.array([DTYPES[array.dtype].itemsize for array in arrays], np.int64)
        self.is_divided = np.array([not array.chunks and 0 not in array.shape for array in arrays], bool)

    def by_dimensions(self, numbers: np.ndarray, boxes: np.ndarray) -> Iterator[_SomeBoxes]:
        """Divide boxes of the arrays with these numbers into those of arrays with equally many dimensions."""
        of_each = self.dimensions[numbers]
        starts = np.cumsum(2 * of_each) - 2 * of_each
        for dimensions in np.unique(of_each).tolist():
            rows = np.flatnonzero(of_each == dimensions)
            corners = boxes[starts[rows, None] + np.arange(2 * dimensions)].reshape(len(rows), dimensions, 2)
            yield _SomeBoxes(rows, numbers[rows], corners, self.sizes[numbers[rows], :dimensions])


class _SomeBoxes(NamedTuple):
    """Boxes with equally many dimensions: their rows, their arrays, corners (n, d, 2), and the arrays' sizes (n, d)."""

    rows: np.ndarray
    numbers: np.ndarray
    corners: np.ndarray
    sizes: np.ndarray


def _shapes_of(parts: Sequence[PartRecord]) -> list[_Shapes]:
    found, first = list[_Shapes](), 0
    for part in parts:
        found.append(_Shapes(part, first))
        first += len(part.arrays)
    return found


class ArrayGroups:
    """The groups of arrays with the same sharding: `of` has those of the arrays of each checkpointable."""

    def __init__(self, parts: Sequence[Sequence[ArrayRecord | ArraySource]]) -> None:
        known: dict[tuple[int, bytes], int] = {}
        self.of: list[np.ndarray] = []
        for arrays in parts:
            numbers, shardings, texts = [], Shardings(), dict[int, bytes]()
            for array in arrays:
                sharding = shardings.storable(array.sharding)  # which is one object for equal ones
                if id(sharding) not in texts:
                    texts[id(sharding)] = msgspec.json.encode(sharding)
                key = len(array.shape), texts[id(sharding)]
                if key not in known and len(known) >= MAX_GROUPS:
                    key = len(array.shape), b""
                numbers.append(known.setdefault(key, len(known)))
            self.of.append(np.array(numbers, np.int64))
        dimensions = np.array([dimensions for dimensions, _ in known], np.int64)
        self.first_axis = np.cumsum(dimensions) - dimensions
        self.axes = int(dimensions.sum())

    def digest(self) -> bytes:
        """A digest of the groups, which must be the same in all processes."""
        return hashlib.sha256(b"".join(map(packed, (*self.of, self.first_axis)))).digest()[:16]

    def extend(self, cover: np.ndarray, part: int, boxes: _SomeBoxes) -> None:
        """Add boxes of arrays of a checkpointable to a cover.

        It has, for each axis of each group, where it starts, and how far before the end it stops.
        """
        found, first = _fractions(boxes), self.first_axis[self.of[part][boxes.numbers]]
        for axis in range(found.shape[1]):
            np.minimum.at(cover[:, 0], first + axis, found[:, axis, 0])
            np.minimum.at(cover[:, 1], first + axis, WHOLE_AXIS - found[:, axis, 1])


def _fractions(boxes: _SomeBoxes) -> np.ndarray:
    """The corners as fractions of `WHOLE_AXIS`; different places stay different, except on extremely long axes."""
    found = np.floor(boxes.corners / boxes.sizes[:, :, None] * WHOLE_AXIS + 0.5).astype(np.int64)
    coarse = (boxes.sizes > _FINE_AXIS).astype(np.int64)
    found[:, :, 0] -= coarse
    found[:, :, 1] += coarse
    clipped: np.ndarray = found.clip(0, WHOLE_AXIS)
    return clipped


def _mixed(values: np.ndarray) -> np.ndarray:
    """A hash of 64-bit numbers (the finalizer of SplitMix64, Steele and others 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def weights_of(shapes: _Shapes, boxes: Iterable[_SomeBoxes], seed: bytes) -> np.ndarray:
    """The sums of the weights of boxes, one for each number in the seed.

    Each place on each axis of each array has a random number, which follows from the seed. The weight of a box is the
    product, over its axes, of the differences between its stop and its start. Weights add up: boxes that tile an array
    have the weight of the array. If they do not, they have it by chance in d of 2^31 seeds (Schwartz and Zippel, as in
    `boxes.py`).
    """
    sums = np.zeros(SEEDS, np.int64)
    with np.errstate(over="ignore"):
        for some in boxes:
            arrays = (shapes.first + some.numbers).astype(np.uint64)
            for number, own in enumerate(np.frombuffer(seed, "<u8")):
                weight = np.ones(len(some.numbers), np.int64)
                for axis in range(some.corners.shape[1]):
                    keys = _mixed(_mixed(arrays * np.uint64(64) + np.uint64(axis)) ^ own)
                    places = _mixed(keys[:, None] + some.corners[:, axis].astype(np.uint64)) % np.uint64(_PRIME)
                    sides = places.astype(np.int64)
                    weight = weight * ((sides[:, 1] - sides[:, 0]) % _PRIME) % _PRIME
                sums[number] = (sums[number] + weight.sum()) % _PRIME
    return sums


def _weights_of_all(shapes: Sequence[_Shapes], seed: bytes) -> np.ndarray:
    """The weights of all arrays that are in index files."""
    sums = np.zeros(SEEDS, np.int64)
    for each in shapes:
        numbers = np.flatnonzero(each.is_divided)
        stops = each.sizes[numbers]
        present = np.arange(stops.shape[1]) < each.dimensions[numbers, None]
        boxes = np.stack((np.zeros_like(stops), stops), axis=-1)[present].reshape(-1)
        sums += weights_of(each, each.by_dimensions(numbers, boxes), seed)
    return sums % _PRIME


def divided_index(
    segments: Sequence[SegmentRecord], chunks: Mapping[int, Sequence[ChunkRecord]], arrays: Sequence[ArrayRecord]
) -> tuple[PartIndex, PartIndex]:
    """What a process has written of one checkpointable: the segments with whole arrays only, and the others.

    `chunks` are by the number of their array.
    """
    pairs = [(number, chunk) for number, found in chunks.items() for chunk in found]
    moved = {chunk.segment for number, chunk in pairs if chunk.box != full_box(arrays[number].shape)}
    kept = set(range(len(segments))) - moved
    return _of_segments(segments, pairs, sorted(kept)), _of_segments(segments, pairs, sorted(moved))


def _of_segments(
    segments: Sequence[SegmentRecord], chunks: Iterable[tuple[int, ChunkRecord]], numbers: Sequence[int]
) -> PartIndex:
    places, found = {number: place for place, number in enumerate(numbers)}, dict[int, list[ChunkRecord]]()
    for array, chunk in chunks:
        if chunk.segment in places:
            moved = msgspec.structs.replace(chunk, segment=places[chunk.segment])
            found.setdefault(array, []).append(moved)
    return part_index([segments[number] for number in numbers], found)


def encode_index_file(
    parts: Sequence[PartRecord], indexes: Sequence[PartIndex], seed: bytes, digest: str
) -> tuple[IndexSummary, bytes]:
    """The index file of a process, and what the primary needs to know of it; `indexes` are of all checkpointables.

    The file is empty, and need not be written, if the process has no parts of arrays. Raises UnsupportedLeafError: they
    are too many.
    """
    segments = [segment for index in indexes for segment in index.segments]
    shapes, groups = _shapes_of(parts), ArrayGroups([part.arrays for part in parts])
    if not segments:
        return IndexSummary(0, b"", 0, 0, groups.digest(), b"", b""), b""
    cover, weights = np.full((groups.axes, 2), WHOLE_AXIS, np.int64), np.zeros(SEEDS, np.int64)
    for number, (index, each) in enumerate(zip(indexes, shapes, strict=True)):
        for some in each.by_dimensions(unpacked(index.chunks.arrays), unpacked(index.chunks.boxes)):
            groups.extend(cover, number, some)
            weights = (weights + weights_of(each, [some], seed)) % _PRIME
    data = msgspec.msgpack.encode(tuple(indexes))
    if len(data) > MAX_INDEX_BYTES:
        raise UnsupportedLeafError(f"index file of {len(data):,} bytes, expected at most {MAX_INDEX_BYTES:,}")
    found = bytes.fromhex(digest_function(digest)(data))
    total = sum(segment.bytes for segment in segments)
    of_boxes = groups.digest(), packed(weights), packed(cover.reshape(-1))
    return IndexSummary(len(data), found, len(segments), total, *of_boxes), data


def folder_of(parts: Sequence[PartRecord]) -> str:
    """The checkpointable whose folder has the index files: the first with arrays."""
    return next(part.name for part in parts if part.arrays)


class _Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A list of index files, or of tables; `covers` has two columns for each axis of each group."""

    lists_tables: bool
    numbers: bytes  # of processes; of tables, their offsets
    sizes: bytes
    digests: bytes
    covers: tuple[bytes, ...]


class _Listed(NamedTuple):
    """The columns of a table: `covers` has shape (entries, axes, 2)."""

    numbers: np.ndarray
    sizes: np.ndarray
    digests: Sequence[bytes]
    covers: np.ndarray

    def encoded(self, *, lists_tables: bool) -> bytes:
        columns = self.covers.reshape(len(self.numbers), -1).T
        table = _Table(
            lists_tables, packed(self.numbers), packed(self.sizes), b"".join(self.digests), tuple(map(packed, columns))
        )
        return msgspec.msgpack.encode(table)

    def some(self, start: int, stop: int) -> _Listed:
        rows = slice(start, stop)
        return _Listed(self.numbers[rows], self.sizes[rows], self.digests[rows], self.covers[rows])


def encode_tables(
    parts: Sequence[PartRecord], summaries: Sequence[IndexSummary], seed: bytes, digest: str
) -> tuple[IndexRecord, bytes] | None:
    """The file with the tables that list all index files; None: there are none. `parts` have only whole arrays.

    Raises CheckpointError: what the processes have written does not tile the arrays, or they differ in their shardings.
    """
    groups, sums = ArrayGroups([part.arrays for part in parts]), np.zeros(SEEDS, np.int64)
    own_groups = groups.digest()
    for process, each in enumerate(summaries):
        if each.groups != own_groups:
            raise CheckpointError(f"process {process} and process 0 save arrays with different shardings")
        if each.size:
            sums += unpacked(each.weights)
    if not np.array_equal(sums % _PRIME, _weights_of_all(_shapes_of(parts), seed)):
        raise CheckpointError(
            "the parts that the processes have written do not tile the arrays: one is missing, or was written twice; "
            "all processes must save the same arrays with the same shardings"
        )
    numbers = np.array([process for process, each in enumerate(summaries) if each.size], np.int64)
    if not len(numbers):
        return None
    present = [summaries[process] for process in numbers.tolist()]
    covers = np.stack([unpacked(each.cover) for each in present]).reshape(len(present), groups.axes, 2)
    sizes, digests = np.array([each.size for each in present], np.int64), [each.digest for each in present]
    listed, content, compute = _Listed(numbers, sizes, digests, covers), b"", digest_function(digest)
    is_large = len(numbers) > 2 * FANOUT
    if is_large:
        step = max(FANOUT, math.isqrt(len(numbers)))
        several = [listed.some(start, start + step) for start in range(0, len(numbers), step)]
        tables = [some.encoded(lists_tables=False) for some in several]
        sizes = np.array(list(map(len, tables)), np.int64)
        covers = np.stack([some.covers.min(axis=0) for some in several])
        digests, content = [bytes.fromhex(compute(table)) for table in tables], b"".join(tables)
        listed = _Listed(np.cumsum(sizes) - sizes, sizes, digests, covers)
    root = listed.encoded(lists_tables=is_large)
    totals = sum(each.segments for each in present), sum(each.data_bytes for each in present)
    name = f"{folder_of(parts)}/{TABLES_NAME}"
    return IndexRecord(name, len(content) + len(root), len(content), compute(root), *totals), content + root


class IndexFile(NamedTuple):
    """An index file as a table lists it; `cover` has the 64-bit numbers of what it covers."""

    process: int
    size: int
    digest: bytes
    cover: bytes


WantedBoxes = Mapping[str, Sequence[Box]]
"""Boxes of arrays, by the names of the arrays."""


class IndexFiles:
    """Reads the index files of a checkpoint, which may come from an untrusted source.

    All methods raise CorruptCheckpointError: a file is missing, damaged, or contradicts the manifest; StorageError.
    """

    def __init__(self, files: Opener, directory: str, manifest: Manifest, record: IndexRecord) -> None:
        self._files, self._directory, self._manifest, self._record = files, directory, manifest, record
        self._digest, self._width = digest_function(manifest.digest), HEX_DIGITS[manifest.digest] // 2
        self._shapes, self._groups = _shapes_of(manifest.parts), ArrayGroups([part.arrays for part in manifest.parts])
        self._folder = record.file.partition("/")[0]
        self.bytes_read = 0
        """How much of tables and index files has been read."""

    def covering(self, part: str, wanted: WantedBoxes) -> list[IndexFile]:
        """The index files that may have chunks of these boxes of arrays of a checkpointable."""
        number = self._part_number(part)
        places = {array.name: place for place, array in enumerate(self._manifest.parts[number].arrays)}
        asked = dict[int, set[tuple[tuple[int, int], ...]]]()
        shapes = self._shapes[number]
        for name, boxes in wanted.items():
            place = places[name]
            if not shapes.is_divided[place]:
                continue
            for some in shapes.by_dimensions(np.full(len(boxes), place), np.array(boxes, np.int64).reshape(-1)):
                group = asked.setdefault(int(self._groups.of[number][place]), set())
                group.update(tuple(map(tuple, box)) for box in _fractions(some).tolist())
        return [each for table in self._tables(asked) for each in table]

    def all(self) -> Iterator[IndexFile]:
        """All index files, by the number of their process."""
        for table in self._tables(None):
            yield from table

    def _tables(self, asked: Mapping[int, set[tuple[tuple[int, int], ...]]] | None) -> Iterator[list[IndexFile]]:
        """The entries for index files, table by table; `asked` has boxes by group, as fractions; None: all."""
        if asked is not None and not asked:
            return
        record = self._record
        source = open_recorded(self._files, self._directory, record.file, record.bytes, subject="file")
        with contextlib.closing(source):

            def read(start: int, size: int, digest: str) -> tuple[bool, _Listed]:
                data = np.empty(size, np.uint8)
                source.read_into(start, data, size)
                self.bytes_read += size
                return self._decode_table(data.tobytes(), digest)

            lists_tables, root = read(record.root, record.bytes - record.root, record.digest)
            if not lists_tables:
                yield self._entries(root, asked)
                return
            path, last = f"{self._directory}/{record.file}", -1
            for row in self._rows(root, asked):
                start, size = int(root.numbers[row]), int(root.sizes[row])
                if start + size > record.root:
                    raise CorruptCheckpointError(f"{path}: a table is not where it is said to be")
                lists_tables, table = read(start, size, root.digests[row].hex())
                if lists_tables or table.numbers[0] <= last:
                    raise CorruptCheckpointError(f"{path}: tables that list tables of tables, or something twice")
                if (root.covers[row] > table.covers.min(axis=0)).any():
                    raise CorruptCheckpointError(f"{path}: a table covers more than it is said to")
                last = int(table.numbers[-1])
                yield self._entries(table, asked)

    def _decode_table(self, data: bytes, digest: str) -> tuple[bool, _Listed]:
        path = f"{self._directory}/{self._record.file}"
        if self._digest(data) != digest:
            raise CorruptCheckpointError(f"{path}: not what was saved ({self._manifest.digest} differs)")
        try:
            table = msgspec.msgpack.decode(data, type=_Table)
            numbers, sizes = unpacked(table.numbers), unpacked(table.sizes)
            covers = [unpacked(column) for column in table.covers]
        except (ValueError, msgspec.MsgspecError) as error:
            raise CorruptCheckpointError(f"{path}: not valid: {shown(error)}") from error
        count = len(numbers)
        columns = [sizes, *covers]
        if len(covers) != 2 * self._groups.axes or any(len(each) != count for each in columns):
            raise CorruptCheckpointError(f"{path}: its columns have different lengths, or belong to other arrays")
        if not count or len(table.digests) != count * self._width or numbers[0] < 0 or sizes.min() < 1:
            raise CorruptCheckpointError(f"{path}: it is empty, or its columns have different lengths")
        if (np.diff(numbers) < (sizes[:-1] if table.lists_tables else 1)).any():
            raise CorruptCheckpointError(f"{path}: lists something twice")
        digests = [table.digests[at : at + self._width] for at in range(0, len(table.digests), self._width)]
        covered = np.array(covers, np.int64).T.reshape(count, self._groups.axes, 2)
        return table.lists_tables, _Listed(numbers, sizes, digests, covered)

    def _rows(self, table: _Listed, asked: Mapping[int, set[tuple[tuple[int, int], ...]]] | None) -> list[int]:
        """The entries of a table that cover some of what is asked."""
        if asked is None:
            return list(range(len(table.numbers)))
        chosen = np.zeros(len(table.numbers), bool)
        for group, boxes in asked.items():
            first = int(self._groups.first_axis[group])
            wanted = np.array(sorted(boxes), np.int64).reshape(len(boxes), -1, 2)
            covers = table.covers[:, first : first + wanted.shape[1]]
            for box in wanted:
                starts, stops = covers[:, :, 0], WHOLE_AXIS - covers[:, :, 1]
                chosen |= ((starts < box[:, 1]) & (box[:, 0] < stops)).all(axis=1)
        return np.flatnonzero(chosen).tolist()

    def _entries(self, table: _Listed, asked: Mapping[int, set[tuple[tuple[int, int], ...]]] | None) -> list[IndexFile]:
        return [
            IndexFile(int(table.numbers[row]), int(table.sizes[row]), table.digests[row], table.covers[row].tobytes())
            for row in self._rows(table, asked)
        ]

    def read(self, entry: IndexFile) -> bytes:
        """The content of an index file, which has the right digest."""
        name = index_name(self._folder, entry.process)
        if entry.size > MAX_INDEX_BYTES:
            raise CorruptCheckpointError(f"{self._directory}/{name}: expected at most {MAX_INDEX_BYTES:,} bytes")
        with contextlib.closing(open_recorded(self._files, self._directory, name, entry.size)) as source:
            content = np.empty(entry.size, np.uint8)
            source.read_into(0, content, entry.size)
        self.bytes_read += entry.size
        data = content.tobytes()
        if self._digest(data) != entry.digest.hex():
            raise CorruptCheckpointError(
                f"{self._directory}/{name}: not what was saved ({self._manifest.digest} differs)"
            )
        return data

    def read_all(self, entries: Sequence[IndexFile]) -> list[tuple[IndexFile, bytes]]:
        """The contents of several index files."""
        found: dict[int, bytes] = {}

        def read(number: int) -> None:
            found[number] = self.read(entries[number])

        shared_workers(READS_AT_ONCE, "jaxckpt-index").run_all(read, range(len(entries)))
        return [(entry, found[number]) for number, entry in enumerate(entries)]

    def contents(self, entries: Sequence[IndexFile] | None = None) -> Iterator[tuple[IndexFile, bytes]]:
        """The contents of these index files, or of all; some are read at a time."""
        entries = list(self.all()) if entries is None else entries
        for at in range(0, len(entries), HELD_AT_ONCE):
            yield from self.read_all(entries[at : at + HELD_AT_ONCE])
            report_progress()

    def chunks_of(self, entry: IndexFile, data: bytes) -> list[IndexedPart]:
        """The validated content of an index file: what it says of each checkpointable."""
        found = self._decoded(entry, data)
        cover = np.full((self._groups.axes, 2), WHOLE_AXIS, np.int64)
        for number, indexed in enumerate(found):
            for some in indexed.boxes():
                self._groups.extend(cover, number, some)
        if (np.frombuffer(entry.cover, np.int64) > cover.reshape(-1)).any():
            path = f"{self._directory}/{index_name(self._folder, entry.process)}"
            raise CorruptCheckpointError(f"{path}: covers more than the tables say, so that a reader would not find it")
        return found

    def _decoded(self, entry: IndexFile, data: bytes) -> list[IndexedPart]:
        subject = f"{self._directory}/{index_name(self._folder, entry.process)}"
        try:
            indexes = msgspec.msgpack.decode(data, type=tuple[PartIndex, ...])
            if len(indexes) != len(self._manifest.parts):
                raise ValueError(f"{len(indexes)} checkpointables")
            parts = zip(self._manifest.parts, self._shapes, indexes, strict=True)
            return [self._indexed(part, shapes, index, entry.process, subject) for part, shapes, index in parts]
        except (ValueError, IndexError, OverflowError, msgspec.MsgspecError) as error:
            raise CorruptCheckpointError(f"{subject}: not valid: {shown(error)}") from error

    def _indexed(self, part: PartRecord, shapes: _Shapes, index: PartIndex, process: int, subject: str) -> IndexedPart:
        """Validate what an index file says of a checkpointable. Raises ValueError: it contradicts the manifest."""
        for segment in index.segments:
            check_segment(segment, 2 * self._width, {part.name}, subject)
            if not segment.file.startswith(f"{part.name}/p{process:05d}-"):
                raise ValueError(f"{shown(segment.file)} belongs to another process")
        if len({segment.file for segment in index.segments}) != len(index.segments) or index.files:
            raise ValueError("a file appears twice")
        found = IndexedPart(index, shapes)
        found.check(self._width, self._manifest.block_bytes)
        return found

    def _part_number(self, name: str) -> int:
        return next(number for number, part in enumerate(self._manifest.parts) if part.name == name)

    def manifest_with(
        self, part: str, wanted: WantedBoxes, found: Iterable[tuple[IndexFile, bytes]], *, keeps_all: bool = False
    ) -> Manifest:
        """The manifest with the chunks of these boxes, from the contents of the index files that cover them.

        `keeps_all`: it has all other chunks of the same arrays, too.

        Raises CorruptCheckpointError: the index files do not have all of the boxes, or something twice.
        """
        number = self._part_number(part)
        record, segments = self._manifest.parts[number], list(self._manifest.segments)
        chunks: dict[str, list[ChunkRecord]] = {
            array.name: []
            for place, array in enumerate(record.arrays)
            if array.name in wanted and self._shapes[number].is_divided[place]
        }
        with paused_collection():
            for entry, data in found:
                indexed = self.chunks_of(entry, data)[number]
                for place, chunk in indexed.chunks(len(segments)):
                    name = record.arrays[place].name
                    if name in chunks and (keeps_all or _is_wanted(chunk.box, wanted[name])):
                        chunks[name].append(chunk)
                segments += indexed.segments
            arrays = []
            for array in record.arrays:
                if array.name in chunks:
                    array = msgspec.structs.replace(array, chunks=tuple(chunks[array.name]))
                    self._check_boxes(array, wanted[array.name], f"{self._directory}: {part}")
                arrays.append(array)
        parts = list(self._manifest.parts)
        parts[number] = msgspec.structs.replace(record, arrays=tuple(arrays))
        return msgspec.structs.replace(self._manifest, segments=tuple(segments), parts=tuple(parts))

    def manifest_of(self, found: Iterable[tuple[IndexFile, bytes]]) -> Manifest:
        """The manifest with whole arrays, and with all chunks in these index files."""
        segments = list(self._manifest.segments)
        chunks = [[list(array.chunks) for array in part.arrays] for part in self._manifest.parts]
        with paused_collection():
            for entry, data in found:
                for of_part, indexed in zip(chunks, self.chunks_of(entry, data), strict=True):
                    for place, chunk in indexed.chunks(len(segments)):
                        of_part[place].append(chunk)
                    segments += indexed.segments
            parts = []
            for part, of_part in zip(self._manifest.parts, chunks, strict=True):
                pairs = zip(part.arrays, of_part, strict=True)
                arrays = tuple([msgspec.structs.replace(array, chunks=tuple(own)) for array, own in pairs])
                parts.append(msgspec.structs.replace(part, arrays=arrays))
        return msgspec.structs.replace(self._manifest, segments=tuple(segments), parts=tuple(parts))

    def _check_boxes(self, array: ArrayRecord, boxes: Sequence[Box], subject: str) -> None:
        for box in filter(box_elements, boxes):
            shared = [common for chunk in array.chunks if (common := intersect(box, chunk.box)) is not None]
            if shared != [box]:
                moved = [_relative(common, box) for common in shared]
                check_tiling(moved, box_shape(box), f"{subject}: array {array.name!r}, box {box}, in the index files")

    def complete(self) -> Manifest:
        """The manifest with all chunks, as a job without index files writes it. It may take very much memory."""
        manifest = self.manifest_of(self.contents())
        for part in manifest.parts:
            for array in part.arrays:
                if 0 not in array.shape:
                    subject = f"{self._directory}: {part.name}: array {array.name!r}, in the index files"
                    check_tiling([chunk.box for chunk in array.chunks], array.shape, subject)
        self.check_totals(manifest.segments[len(self._manifest.segments) :])
        return msgspec.structs.replace(manifest, format_version=FORMAT_VERSION, index=None)

    def check_totals(self, segments: Sequence[SegmentRecord]) -> None:
        """Raise CorruptCheckpointError if these are not all segments of the index files."""
        found = len(segments), sum(segment.bytes for segment in segments)
        if found != (self._record.segments, self._record.data_bytes):
            raise CorruptCheckpointError(
                f"{self._directory}: the index files list {found[0]:,} segments of {found[1]:,} bytes, but the "
                f"manifest says {self._record.segments:,} of {self._record.data_bytes:,}"
            )

    def weights(self, parts: Sequence[IndexedPart], seed: bytes) -> np.ndarray:
        """The weights of all boxes of an index file; see `weights_of`."""
        found = np.zeros(SEEDS, np.int64)
        for shapes, indexed in zip(self._shapes, parts, strict=True):
            found += weights_of(shapes, indexed.boxes(), seed)
        return found % _PRIME

    def check_weights(self, sums: np.ndarray, seed: bytes) -> None:
        """Raise CorruptCheckpointError if the sums of the weights of all index files are not those of the arrays."""
        if not np.array_equal(sums % _PRIME, _weights_of_all(self._shapes, seed)):
            raise CorruptCheckpointError(
                f"{self._directory}: the chunks in the index files do not tile the arrays: a gap or an overlap"
            )


class IndexedPart:
    """What a process has written of one checkpointable, from its index file."""

    def __init__(self, index: PartIndex, shapes: _Shapes) -> None:
        columns, self._shapes, self.segments = index.chunks, shapes, index.segments
        self._numbers, self._boxes = unpacked(columns.arrays), unpacked(columns.boxes)
        self._segments, self._offsets = unpacked(columns.segments), unpacked(columns.offsets)
        self._lengths, self._ends = unpacked(columns.lengths), unpacked(columns.digest_ends)
        self._digests = columns.digests

    def check(self, width: int, block_bytes: int) -> None:
        """Raise ValueError if a chunk contradicts its array or its segment; a digest has `width` bytes."""
        numbers, shapes, count = self._numbers, self._shapes, len(self._numbers)
        columns = (self._segments, self._offsets, self._lengths, self._ends)
        if any(len(each) != count for each in columns):
            raise ValueError("columns of different lengths")
        if not count:
            if len(self.segments) or len(self._boxes):
                raise ValueError("a segment without chunks")
            return
        if not 0 <= numbers.min() <= numbers.max() < len(shapes.dimensions) or not shapes.is_divided[numbers].all():
            raise ValueError("chunks of other arrays")
        if 2 * shapes.dimensions[numbers].sum() != len(self._boxes):
            raise ValueError("boxes with other dimensions")
        expected = np.empty(count, np.int64)
        for some in self.boxes():
            starts, stops = some.corners[:, :, 0], some.corners[:, :, 1]
            if not ((starts >= 0) & (starts < stops) & (stops <= some.sizes)).all():
                raise ValueError("a box outside of its array")
            expected[some.rows] = np.prod(stops - starts, axis=1) * shapes.item_bytes[some.numbers]
        if (self._lengths != expected).any() or (
            np.diff(self._ends, prepend=0) != width * -(-expected // block_bytes)
        ).any():
            raise ValueError("a chunk of another size than its box, or with other digests")
        if len(self._digests) != self._ends[-1]:
            raise ValueError("digests of other chunks")
        if not 0 <= self._segments.min() <= self._segments.max() < len(self.segments):
            raise ValueError("a segment that does not exist")
        if self._offsets.min() < 0 or self._offsets.max() >= LIMIT:
            raise ValueError("an impossible offset")
        room = SegmentRoom(self.segments, width, block_bytes)
        if not room.are_filled_by(self._segments, self._offsets, self._lengths):
            raise ValueError("the chunks do not fill the segments exactly: a gap or an overlap")

    def boxes(self) -> Iterator[_SomeBoxes]:
        """All boxes."""
        return self._shapes.by_dimensions(self._numbers, self._boxes)

    def chunks(self, first_segment: int) -> Iterator[tuple[int, ChunkRecord]]:
        """Each chunk with the number of its array; its segment has this number if it is the first."""
        boxes: list[Box] = [()] * len(self._numbers)
        for some in self.boxes():
            for row, corners in zip(some.rows.tolist(), some.corners.tolist(), strict=True):
                boxes[row] = tuple([(start, stop) for start, stop in corners])
        ends = self._ends.tolist()
        columns = (
            self._numbers.tolist(),
            boxes,
            (self._segments + first_segment).tolist(),
            self._offsets.tolist(),
            self._lengths.tolist(),
            [0, *ends][: len(ends)],
            ends,
        )
        for number, box, segment, offset, length, start, end in zip(*columns, strict=True):
            yield number, ChunkRecord(box, segment, offset, length, self._digests[start:end].hex())


def _is_wanted(box: Box, wanted: Sequence[Box]) -> bool:
    return any(intersect(box, each) is not None for each in wanted)


def _relative(inner: Box, outer: Box) -> Box:
    return tuple([(i[0] - o[0], i[1] - o[0]) for i, o in zip(inner, outer, strict=True)])
