"""A checkpoint of another tool, opened as if it were ours: a manifest of what it holds, and files behind it."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.array_bounds import array_bytes
from jaxckpt_train.store.backend import Opener, Source
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    FORMAT,
    FORMAT_VERSION,
    WHOLE_CHUNKS,
    ArrayRecord,
    FileRecord,
    Manifest,
    PartRecord,
    SegmentRecord,
    shown,
)
from jaxckpt_train.store.segment import MAX_DIMENSIONS
from jaxckpt_train.store.transaction import CommitRecord, Committed
from jaxckpt_train.tree.leaf_records import TreeRecord, encode_tree
from jaxckpt_train.tree.paths import one_below_another

Direct = bool | Literal["auto"]
Open = Callable[[Direct], Source]
PYTREE, JSON = "pytree", "json"  # the kinds of our own handlers


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A checkpoint of another tool.

    Attributes:
        kind: the tool, as messages tell it, such as "Orbax".
        files: what is read from.
        committed: what it holds, as if a transaction of ours had committed it; without digests.
        decoding: how many times its size reading an array takes beside that: stored, and decoded by other libraries.
    """

    kind: str
    files: ForeignFiles
    committed: Committed
    decoding: int = 0


@dataclasses.dataclass(frozen=True)
class ForeignSegment:
    """What chunks of arrays are read from.

    Attributes:
        name: of this one alone, within the checkpoint.
        size: in bytes.
        open: gives a source of that size.
    """

    name: str
    size: int
    open: Open


@dataclasses.dataclass(frozen=True)
class ForeignTree:
    """A checkpointable that is a tree: its leaves, and the arrays of those that are stored, in any order."""

    record: TreeRecord
    arrays: Sequence[ArrayRecord]


@dataclasses.dataclass(frozen=True)
class ForeignValue:
    """A checkpointable that is a value, as JSON, and the kind of handler that restores it."""

    kind: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class ForeignDamage:
    """A checkpointable that should be there and cannot be read; who reads it is told, and the others are whole.

    Attributes:
        kind: of the handler that restored it.
        message: of the error.
    """

    kind: str
    message: str


ForeignPart = ForeignTree | ForeignValue | ForeignDamage


class ForeignFiles:
    """An opener of what a foreign checkpoint was found to hold.

    Args:
        open_by_name: what opens each.
        others: opens what has another name; None: there is nothing else.
    """

    def __init__(self, open_by_name: Mapping[str, Open], others: Opener | None = None) -> None:
        self._open_by_name, self._others = open_by_name, others

    def open(self, directory: str, name: str, *, direct: Direct) -> Source:
        """Open one of them."""
        found = self._open_by_name.get(name)
        if found is None and self._others is not None:
            return self._others.open(directory, name, direct=direct)
        if found is None:
            raise StorageError(errno.ENOENT, os.strerror(errno.ENOENT), f"{directory}/{name}")
        return found(direct)


class HeldBytes:
    """A source of bytes that are in memory."""

    alignment = 1

    def __init__(self, name: str, data: bytes) -> None:
        self._name, self._data, self.size = name, data, len(data)

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        found = self._data[offset : offset + len(data)]
        if len(found) < needed:
            raise CorruptCheckpointError(f"{self._name}: ends at byte {offset + len(found)}, expected more")
        data[: len(found)] = np.frombuffer(found, np.uint8)

    def close(self) -> None:
        """It holds nothing but memory."""


def foreign_checkpoint(
    kind: str,
    directory: str,
    parts: Mapping[str, ForeignPart],
    segments: Sequence[ForeignSegment],
    *,
    block_bytes: int = WHOLE_CHUNKS,
    info: Mapping[str, Any] | None = None,
    decoding: int = 0,
) -> Foreign:
    """Open what was found as a checkpoint of ours.

    Args:
        kind: the tool.
        directory: which messages name.
        parts: the checkpointables by name: trees, values, and what is damaged.
        segments: what the chunks of the arrays refer to, by their place in it.
        block_bytes: a chunk is read in pieces of this many bytes.
        info: as in a manifest: `step`, `created`, `metrics`, `custom_metadata`, as far as the tool tells them.
        decoding: as of `Foreign`.

    Raises:
        CorruptCheckpointError: an array has a shape that none can have, or a leaf lies below another one.
    """
    opens = {segment.name: segment.open for segment in segments}
    records = []
    for name, part in parts.items():
        if isinstance(part, ForeignTree):
            _check_tree(part, directory)
            records.append(PartRecord(name, PYTREE, tuple(part.arrays), (), encode_tree(part.record)))
        else:
            size = len(part.data) if isinstance(part, ForeignValue) else 0
            file = FileRecord(f"{name}/p00000.json", size, "")
            opens[file.file] = _opens_part(f"{directory}/{file.file}", part)
            records.append(PartRecord(name, part.kind, (), (file,), msgspec.Raw(b"null")))
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        digest="none",
        block_bytes=block_bytes,
        segments=tuple(SegmentRecord(segment.name, segment.size, 0, "") for segment in segments),
        parts=tuple(records),
        info=dict(info or {}),
    )
    commit = msgspec.json.encode(CommitRecord(FORMAT, FORMAT_VERSION, 0, ""))  # who asks whether it is still there
    opens[COMMIT_NAME] = _opens(f"{directory}/{COMMIT_NAME}", commit)
    return Foreign(kind, ForeignFiles(opens), Committed(directory, manifest, ""), decoding)


def _check_tree(tree: ForeignTree, directory: str) -> None:
    """Refuse what could be copied into a checkpoint of ours, but never be opened there."""
    for array in tree.arrays:
        check_shape(array.shape, DTYPES[array.dtype].itemsize, f"{directory}: leaf {shown(array.name)}")
    pair = one_below_another(tree.record.leaves)
    if pair is not None:
        raise CorruptCheckpointError(f"{directory}: leaf {shown(pair[0])} lies below leaf {shown(pair[1])}")


def check_shape(shape: Sequence[int], itemsize: int, subject: str) -> None:
    """Raise CorruptCheckpointError if no array can have this shape; the message begins with `subject`."""
    if array_bytes(shape, itemsize) is None:
        raise CorruptCheckpointError(f"{subject}: impossible shape {shown(list(shape[: MAX_DIMENSIONS + 1]))}")


def _opens(name: str, data: bytes) -> Open:
    return lambda direct: cast("Source", HeldBytes(name, data))


def _opens_part(name: str, part: ForeignValue | ForeignDamage) -> Open:
    if isinstance(part, ForeignValue):
        return _opens(name, part.data)
    message = part.message

    def fail(direct: Direct) -> Source:
        raise CorruptCheckpointError(message)

    return fail
