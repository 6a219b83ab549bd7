"""The common ground of the readers of other tools' formats.

Every reader describes a checkpoint with the library's own manifest (`make_foreign_checkpoint`), and serves the content
of its arrays as segments (`Segments`). The rest of the library then reads it like a checkpoint of its own.
"""

from __future__ import annotations

import atexit
import bisect
import dataclasses
import errno
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError, UnsupportedLeafError
from jaxckpt_train.pytree.leaves import (
    MAX_DEPTH,
    ArrayLeaf,
    EmptyLeaf,
    LeafRecord,
    TreeRecord,
    encode_tree,
    find_nested_leaves,
    join,
    key_text,
    record_value,
)
from jaxckpt_train.store.backends.base import Opener, Source
from jaxckpt_train.store.backends.local_names import real_path
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, full_box, row_major_range
from jaxckpt_train.store.committed import CommitRecord, Committed
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    FORMAT,
    FORMAT_VERSION,
    MAX_ARRAYS,
    WHOLE_CHUNKS,
    ArrayRecord,
    ChunkRecord,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    shown,
)
from jaxckpt_train.store.segment import ALIGNMENT, DTYPES, MAX_DIMENSIONS, array_bytes, dtype_name
from jaxckpt_train.store.threads import PerProcess
from jaxckpt_train.store.timeouts import call_started_s

EXIT_WAIT_S = 30.0  # the exit waits no longer than this for foreign calls, because storage may never answer
INTERRUPTED_EXIT_WAIT_S = 2.0  # the same, after the user has interrupted the process
CACHED_PIECES_BYTES = 256 << 20
MOST_NAMED = 5  # things in a message
MOST_DIGITS = 4000  # of an integer; Python refuses to parse more than 4300
PYTREE, JSON = "pytree", "json"  # kinds of the library's own handlers
NAME = "state"  # the checkpointable of formats that have only one
ReadBox = Callable[[Box, np.ndarray], None]
"""Fills a row-major array with the content of a box. Several threads call it."""
Direct = bool | Literal["auto"]
Open = Callable[[Direct], Source]


@dataclasses.dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint that the tool `kind` has written, described as a committed checkpoint without digests.

    `decoding` is the memory that another library needs to decode an array, as a multiple of the size of the array.
    """

    kind: str
    files: ForeignFiles
    committed: Committed
    decoding: int = 0


class ForeignTree(NamedTuple):
    """A checkpointable that is a tree: its leaves, and the records of its stored arrays in any order."""

    record: TreeRecord
    arrays: Sequence[ArrayRecord]


class ForeignValue(NamedTuple):
    """A checkpointable that the handler of a kind restores from JSON. Reading it raises an error if `data` is one."""

    kind: str
    data: bytes | CorruptCheckpointError


ForeignPart = ForeignTree | ForeignValue


class ForeignFiles:
    """Opens segments and files by name, and other names with `others`."""

    def __init__(self, open_by_name: Mapping[str, Open], others: Opener | None = None) -> None:
        self._open_by_name, self._others = open_by_name, others

    def open(self, directory: str, name: str, *, direct: Direct) -> Source:
        found = self._open_by_name.get(name)
        if found is not None:
            return found(direct)
        if self._others is not None:
            return self._others.open(directory, name, direct=direct)
        raise StorageError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}/{name}")


class Segments:
    """The segments of a foreign checkpoint, to which readers add the content of arrays."""

    def __init__(self, records: Sequence[SegmentRecord] = ()) -> None:
        self.records, self.opens = list(records), dict[str, Open]()

    def add(self, name: str, size: int, open_it: Open) -> int:
        """Add a segment, and return its number."""
        self.records.append(SegmentRecord(name, size, 0, ""))
        self.opens[name] = open_it
        return len(self.records) - 1

    def hold(self, leaf: str, array: np.ndarray) -> ArrayRecord:
        """Add an array in memory."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        number = self.add(f"held/{len(self.records):06d}", len(content), _open_bytes(leaf, content))
        chunk = ChunkRecord(full_box(array.shape), number, 0, len(content), "")
        return array_record(leaf, array.shape, dtype_name(array.dtype), (chunk,))

    def decode(
        self, subject: str, dtype: np.dtype, boxes: Sequence[Box], read: ReadBox, cache: PieceCache | None = None
    ) -> tuple[ChunkRecord, ...]:
        """Add an array that is decoded when it is read, and return its chunks. Each chunk starts on a page of its own.

        `cache` keeps whole chunks, where reading a part of a chunk costs as much as reading all of it.
        """
        chunks, at = list[ChunkRecord](), 0
        for box in boxes:
            length = box_elements(box) * dtype.itemsize
            chunks.append(ChunkRecord(box, len(self.records), at, length, ""))
            at += -(-length // ALIGNMENT) * ALIGNMENT
        source = _DecodedSource(subject, dtype, chunks, read, cache)
        self.add(f"decoded/{len(self.records):06d}", source.size, lambda direct: cast("Source", source))
        return tuple(chunks)


def make_foreign_checkpoint(
    kind: str,
    directory: str,
    parts: Mapping[str, ForeignPart],
    segments: Segments,
    *,
    block_bytes: int = WHOLE_CHUNKS,
    info: Mapping[str, Any] | None = None,
    decoding: int = 0,
) -> ForeignCheckpoint:
    """Describe the content of another tool's checkpoint as a checkpoint of this library.

    A chunk is read in `block_bytes` at a time. Raises CorruptCheckpointError if the result could be copied into a
    checkpoint of this library but not be opened there: an impossible shape, or a leaf below another leaf.
    """
    opens, records = segments.opens, []
    for name, part in parts.items():
        if isinstance(part, ForeignTree):
            for array in part.arrays:
                check_shape(array.shape, DTYPES[array.dtype].itemsize, f"{directory}: leaf {shown(array.name)}")
            pair = find_nested_leaves(part.record.leaves)
            if pair is not None:
                raise CorruptCheckpointError(f"{directory}: leaf {shown(pair[0])} is below leaf {shown(pair[1])}")
            records.append(PartRecord(name, PYTREE, tuple(part.arrays), (), encode_tree(part.record)))
        else:
            file = FileRecord(f"{name}/p00000.json", len(part.data) if isinstance(part.data, bytes) else 0, "")
            opens[file.file] = _open_bytes(f"{directory}/{file.file}", part.data)
            records.append(PartRecord(name, part.kind, (), (file,), msgspec.Raw(b"null")))
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        digest="none",
        block_bytes=block_bytes,
        segments=tuple(segments.records),
        parts=tuple(records),
        info=dict(info or {}),
    )
    # A check whether the checkpoint still exists reads this file.
    commit = msgspec.json.encode(CommitRecord(FORMAT, FORMAT_VERSION, 0, ""))
    opens[COMMIT_NAME] = _open_bytes(f"{directory}/{COMMIT_NAME}", commit)
    return ForeignCheckpoint(kind, ForeignFiles(opens), Committed(directory, manifest, ""), decoding)


def check_shape(shape: Sequence[int], itemsize: int, subject: str) -> None:
    """Raise CorruptCheckpointError if the shape is impossible. The message begins with `subject`."""
    if array_bytes(shape, itemsize) is None:
        raise CorruptCheckpointError(f"{subject}: impossible shape {shown(list(shape[: MAX_DIMENSIONS + 1]))}")


def array_record(leaf: str, shape: Sequence[int], dtype: str, chunks: tuple[ChunkRecord, ...]) -> ArrayRecord:
    """Return the record of an array. An array without elements has no chunks."""
    return ArrayRecord(leaf, tuple(shape), dtype, chunks if math.prod(shape) else ())


def linked(path: str) -> tuple[str, str]:
    """Return the directory and the name of a file, after following symbolic links."""
    folder, _, name = real_path(path).rpartition("/")
    return folder or "/", name


def few(texts: Sequence[str], separator: str = ", ") -> str:
    """Return the first texts for a message, and how many more there are."""
    more = [f"and {len(texts) - MOST_NAMED} more"] if len(texts) > MOST_NAMED else []
    return separator.join([*texts[:MOST_NAMED], *more])


def grid_boxes(shape: Sequence[int], chunk_shape: Sequence[int]) -> list[Box]:
    """Return the boxes of a regular grid over an array, in row-major order. Boxes at the upper ends may be smaller."""
    if not math.prod(shape):
        return []  # avoids the product below: another axis may be huge
    cuts = [
        [(start, min(start + width, size)) for start in range(0, size, width)]
        for size, width in zip(shape, chunk_shape, strict=True)
    ]
    return list(itertools.product(*cuts))


def _open_bytes(name: str, data: bytes | np.ndarray | CorruptCheckpointError) -> Open:
    def open_it(direct: Direct) -> Source:
        if isinstance(data, CorruptCheckpointError):
            raise CorruptCheckpointError(str(data))
        return cast("Source", _MemorySource(name, data))

    return open_it


class _MemorySource:
    alignment = 1

    def __init__(self, name: str, data: bytes | np.ndarray) -> None:
        self._name, self._data, self.size = name, np.frombuffer(data, np.uint8), len(data)

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        found = self._data[offset : offset + len(data)]
        if len(found) < needed:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {offset + len(found)}, expected more")
        data[: len(found)] = found

    def close(self) -> None: ...


def read_range(read: ReadBox, box: Box, first: int, elements: np.ndarray) -> None:
    """Fill a flat array with the elements of a box from `first` on, in row-major order."""
    at = 0
    for part in row_major_range(box, first, first + len(elements)):
        count = box_elements(part)
        read(part, elements[at : at + count].reshape(box_shape(part)))
        at += count


class _DecodedSource:
    """A source of the chunks of one array, which decodes them on request. See `Segments.decode`."""

    alignment = 1

    def __init__(
        self, subject: str, dtype: np.dtype, chunks: Sequence[ChunkRecord], read: ReadBox, cache: PieceCache | None
    ) -> None:
        self._subject, self._dtype, self._chunks, self._read, self._cache = subject, dtype, chunks, read, cache
        self._starts = [chunk.offset for chunk in chunks]
        self.size = chunks[-1].offset + chunks[-1].length if chunks else 0

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """Read whole elements. The padding between chunks is left as it is."""
        stop = offset + needed
        if stop > self.size:
            raise CorruptCheckpointError(f"{self._subject}: ends at byte {self.size}, expected {stop}")
        first = max(0, bisect.bisect_right(self._starts, offset) - 1)
        for chunk in self._chunks[first : bisect.bisect_left(self._starts, stop)]:
            low, high = max(offset, chunk.offset), min(stop, chunk.offset + chunk.length)
            if low < high:
                self._read_part(chunk, low - chunk.offset, data[low - offset : high - offset])

    def close(self) -> None: ...

    def _read_part(self, chunk: ChunkRecord, skipped: int, target: np.ndarray) -> None:
        """Read a chunk from `skipped` bytes after its first byte on."""
        if self._cache is not None and len(target) < chunk.length:
            key = (chunk.segment, chunk.offset)
            target[:] = self._cache.get(key, functools.partial(self._whole, chunk))[skipped : skipped + len(target)]
        else:
            read_range(self._read, chunk.box, skipped // self._dtype.itemsize, target.view(self._dtype))

    def _whole(self, chunk: ChunkRecord) -> np.ndarray:
        content = np.empty(chunk.length, np.uint8)
        self._read_part(chunk, 0, content)
        return content


class PieceCache:
    """Shares pieces that are read as a whole: those in use, the last one, and more within `CACHED_PIECES_BYTES`."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0
        self._of_pieces: dict[Hashable, threading.Lock] = {}
        self._alive: weakref.WeakValueDictionary[Hashable, np.ndarray] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Hashable, np.ndarray] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a piece as flat uint8, and read it unless it is cached."""
        with self._lock:
            of_piece = self._of_pieces.setdefault(key, threading.Lock())
        with of_piece:
            content = self._alive.get(key)
            if content is None:
                content = read()
            with self._lock:
                self._alive[key] = content
                if key not in self._kept:
                    self._kept[key] = content
                    self._bytes += content.nbytes
                self._kept.move_to_end(key)
                while self._bytes > CACHED_PIECES_BYTES and len(self._kept) > 1:
                    self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return content


class PlainTree:
    """Collects the leaves of nested containers by path, and their arrays. Subclasses decode values of their formats."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self.leaves: dict[str, LeafRecord] = {}
        self.containers: dict[str, str] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, path: str, value: Any) -> None:
        """Add a value and everything in it. Raises UnsupportedLeafError if something in it cannot be a leaf."""
        if path.count("/") >= MAX_DEPTH or len(self.leaves) >= MAX_ARRAYS:
            most = f"expected at most {MAX_DEPTH} levels and {MAX_ARRAYS:,} values, found more"
            raise CorruptCheckpointError(f"{self._subject}: {path!r:.100}: {most}")
        value = self._decoded(path, value)
        if isinstance(value, np.ndarray | np.generic):
            self.arrays[path] = np.asarray(value)
            self.leaves[path] = ArrayLeaf("numpy" if isinstance(value, np.ndarray) else "scalar")
        elif isinstance(value, dict | list | tuple):
            if not isinstance(value, dict):
                self.containers[path] = "list" if isinstance(value, list) else "tuple"
                for number, child in enumerate(value):
                    self.add(join(path, str(number)), child)
            else:
                for key, child in value.items():
                    self.add(join(path, self._key_text(key, path)), child)
            if not value:
                self.leaves[path] = EmptyLeaf()
        else:
            record = record_value(path, value)
            if record is None:
                raise UnsupportedLeafError(f"{self._subject}: {path!r}: a {type(value).__name__} cannot be a leaf")
            self.leaves[path] = record

    def _decoded(self, path: str, value: Any) -> Any:
        return value

    def _key_text(self, key: Any, parent: str) -> str:
        return key_text(key, parent)


def mapping_key(key: str, parent: str) -> str:
    """Return a key of a format that has only text keys as a part of a path. Text that looks like an integer is one."""
    if key.isascii() and key.removeprefix("-").isdigit() and len(key) < MOST_DIGITS and str(int(key)) == key:
        return key
    return key_text(key, parent)


class _Calls:
    """Counts the foreign calls of this process, and makes its exit wait for them.

    At exit, Python stops daemon threads that return to the interpreter. One with C++ frames aborts the whole process.
    """

    def __init__(self, _: None) -> None:
        self._changed, self._count, self._process = threading.Condition(), 0, os.getpid()
        self._exiting_since, self.exit_wait_s = math.inf, EXIT_WAIT_S
        atexit.register(self._wait)

    def __enter__(self) -> None:
        with self._changed:
            since = call_started_s()
            # The request is older than the exit, so its caller is gone. No new foreign call may start for it.
            if since is not None and since < self._exiting_since < math.inf:
                raise StorageError(errno.ECANCELED, "the process is ending")
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _wait(self) -> None:
        if os.getpid() == self._process:  # a forked child does not have the parent's threads
            with self._changed:
                self._exiting_since = time.monotonic()
                self._changed.wait_for(lambda: self._count == 0, self.exit_wait_s)


_calls = PerProcess(_Calls)


def foreign_call() -> _Calls:
    """Return a context manager for a call of another tool's native code, for which the exit of the process waits."""
    return _calls.get(None)


def shorten_exit_wait() -> None:
    """Shorten the wait at exit for foreign calls after the user has interrupted the process."""
    _calls.get(None).exit_wait_s = INTERRUPTED_EXIT_WAIT_S
