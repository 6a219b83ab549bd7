"""Applies operations to an opened checkpoint: what comes out is one too, whose arrays are made when they are read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.formats.array_bytes import ArrayBytes, size_of
from jaxckpt_train.formats.foreign import ForeignFiles, Open
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Opener, Source
from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.dtypes import DTYPES, dtype_name
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, PartRecord, SegmentRecord
from jaxckpt_train.store.reader import read_box
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.surgery.checks import check_leaves
from jaxckpt_train.surgery.leaves import Leaf, Leaves
from jaxckpt_train.surgery.operation import Change, Operation
from jaxckpt_train.surgery.views import Stored, View
from jaxckpt_train.tree.leaf_records import TreeRecord, decode_tree, encode_tree, has_tree
from jaxckpt_train.tree.paths import ROOT, split


class Operated(NamedTuple):
    """What came out.

    Attributes:
        files: what is read from.
        committed: the checkpoint, with one checkpointable changed.
        plan: for each operation its name and what it has changed, as text.
    """

    files: Opener
    committed: Committed
    plan: tuple[tuple[str, tuple[Change, ...]], ...]


def operate(
    files: Opener, committed: Committed, name: str, operations: Sequence[Operation], settings: StoreSettings
) -> Operated:
    """Apply operations to the tree of one checkpointable, one after the other; nothing is read.

    Args:
        files: where.
        committed: the opened checkpoint.
        name: of the checkpointable.
        operations: in their order.
        settings: how the old arrays are read.

    Raises:
        MismatchError: there is no such tree, or an operation does not fit it.
    """
    part = committed.manifest.part(name)
    if part is None or not has_tree(part):
        there = ", ".join(repr(part.name) for part in committed.manifest.parts)
        raise MismatchError(f"{committed.directory}: expected a tree {name!r} to change, found {there or 'nothing'}")
    leaves = leaves_of(files, committed, part, settings)
    plan = []
    for number, operation in enumerate(operations):
        subject = f"{committed.directory}: operation {number + 1} of {len(operations)} ({operation.name})"
        before = dict(leaves)
        plan.append((operation.name, tuple(operation.apply(leaves, subject))))
        check_leaves(leaves, before, subject)
    return _made(files, committed, part, leaves, tuple(plan))


def leaves_of(files: Opener, committed: Committed, part: PartRecord, settings: StoreSettings) -> Leaves:
    """The leaves of a checkpointable that is a tree, with views of their arrays.

    Raises:
        CorruptCheckpointError: its record is damaged.
    """
    record = decode_tree(part, committed.directory)
    arrays = {array.name: array for array in part.arrays}
    found: Leaves = {}
    for name, leaf in record.leaves.items():
        array = arrays.get(name)
        view = None
        if array is not None:
            read = functools.partial(_read, files, committed, array, settings)
            view = Stored(array.shape, DTYPES[array.dtype], array.chunks, read)
        found[name] = Leaf(leaf, view)
    return found


def _read(
    files: Opener, committed: Committed, array: ArrayRecord, settings: StoreSettings, box: Box, target: np.ndarray
) -> None:
    if target.flags.c_contiguous:
        read_box(files, committed, array, box, target.reshape(-1).view(np.uint8), settings)
        return
    whole = np.empty(target.shape, target.dtype)
    read_box(files, committed, array, box, whole.reshape(-1).view(np.uint8), settings)
    target[...] = whole


def _made(
    files: Opener,
    committed: Committed,
    part: PartRecord,
    leaves: Leaves,
    plan: tuple[tuple[str, tuple[Change, ...]], ...],
) -> Operated:
    segments, opens = list(committed.manifest.segments), dict[str, Open]()
    arrays = []
    for name, leaf in leaves.items():
        if leaf.view is not None:
            arrays.append(_array(name, leaf.view, segments, opens, committed.directory))
    containers = _kept_containers(decode_tree(part, committed.directory).containers, leaves)
    record = TreeRecord(containers, {name: leaf.record for name, leaf in leaves.items()})
    changed = PartRecord(part.name, part.kind, tuple(arrays), part.files, encode_tree(record))
    parts = tuple(changed if each is part else each for each in committed.manifest.parts)
    manifest = msgspec.structs.replace(committed.manifest, parts=parts, segments=tuple(segments))
    return Operated(ForeignFiles(opens, files), dataclasses.replace(committed, manifest=manifest), plan)


def _kept_containers(containers: Mapping[str, str], leaves: Leaves) -> dict[str, str]:
    """The kinds of containers that are there still; a list that has got a gap is a mapping from now on."""
    children: dict[str, set[str]] = {}
    for name in leaves:
        keys = split(name)
        for depth, key in enumerate(keys):
            children.setdefault("/".join(keys[:depth]) or ROOT, set()).add(key)
    kept = {}
    for path, kind in containers.items():
        inside = children.get(path, set())
        is_whole = inside == {str(number) for number in range(len(inside))}
        if path in leaves or (inside and (is_whole or kind not in ("list", "tuple"))):
            kept[path] = kind
    return kept


def _array(name: str, view: View, segments: list[SegmentRecord], opens: dict[str, Open], directory: str) -> ArrayRecord:
    """The record of an array: chunks that are stored as they are, and others that a segment of its own makes."""
    chunks, made, at = list[ChunkRecord](), list[ChunkRecord](), 0
    own = len(segments)
    for piece in view.pieces() if math.prod(view.shape) else ():
        if piece.stored is not None:
            chunks.append(ChunkRecord(piece.box, *_place(piece.stored)))
            continue
        length = box_elements(piece.box) * view.dtype.itemsize
        chunk = ChunkRecord(piece.box, own, at, length, "")
        at += -(-length // ALIGNMENT) * ALIGNMENT
        chunks.append(chunk)
        made.append(chunk)
    if made:
        file = f"made/{own:06d}"
        segments.append(SegmentRecord(file, size_of(made), 0, ""))
        opens[file] = functools.partial(_source, f"{directory}: leaf {name!r}", view, made)
    return ArrayRecord(name, view.shape, dtype_name(view.dtype), tuple(chunks))


def _place(chunk: ChunkRecord) -> tuple[int, int, int, str]:
    return chunk.segment, chunk.offset, chunk.length, chunk.digests


def _source(subject: str, view: View, chunks: Sequence[ChunkRecord], direct: object) -> Source:
    return cast("Source", ArrayBytes(subject, view.dtype, chunks, view.read))
