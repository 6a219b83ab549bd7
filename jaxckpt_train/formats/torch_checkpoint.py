"""Opens a distributed checkpoint of PyTorch, a directory that `torch.distributed.checkpoint` has written."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.formats.array_bytes import record_of
from jaxckpt_train.formats.foreign import Foreign, ForeignSegment, ForeignTree, HeldBytes, foreign_checkpoint
from jaxckpt_train.formats.held_pieces import HeldPiece, Newest
from jaxckpt_train.formats.step_folders import TORCH_METADATA as METADATA
from jaxckpt_train.formats.step_folders import TORCH_SUFFIX as SUFFIX
from jaxckpt_train.formats.torch_items import TorchItems
from jaxckpt_train.formats.torch_metadata import Tensor, TorchMetadata, decode_torch_metadata
from jaxckpt_train.formats.torch_objects import ObjectLeaves
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.boxes import box_elements, full_box
from jaxckpt_train.store.dtypes import DTYPES, dtype_name
from jaxckpt_train.store.local_names import real_path
from jaxckpt_train.store.manifest import BLOCK_BYTES, ArrayRecord, ChunkRecord
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.tree.leaf_records import ArrayLeaf, LeafRecord, TreeRecord
from jaxckpt_train.tree.paths import ROOT, join, key_text

KIND, NAME = "PyTorch", "state"
MAX_METADATA_BYTES = 512 << 20
MOST_TOLD = 5
_log = logging.getLogger("jaxckpt_train")


class _Found(NamedTuple):
    """What has been opened so far."""

    leaves: dict[str, LeafRecord]
    arrays: list[ArrayRecord]
    segments: list[ForeignSegment]


def looks_like_torch(entries: Sequence[Entry]) -> bool:
    """Whether a directory may be a distributed checkpoint of PyTorch, finished or not: by names alone."""
    return any(entry.name.endswith(SUFFIX) for entry in entries)


def open_torch(backend: Backend, directory: str, entries: Sequence[Entry]) -> Foreign:
    """Open one.

    Args:
        backend: where.
        directory: of it.
        entries: what is in it.

    Raises:
        NotACheckpointError: its save has not ended.
        CorruptCheckpointError: it is damaged, or its metadata would run code.
        FormatVersionError: a tensor is of a dtype that is not known here.
        SettingsError: PyTorch is not installed.
        StorageError: it cannot be read.
    """
    if all(entry.name != METADATA for entry in entries):
        raise NotACheckpointError(
            f"{directory}: files of a distributed checkpoint of PyTorch without {METADATA}, which is written last; "
            "expected one whose save has ended"
        )
    data = read_whole(backend, *_place(f"{directory}/{METADATA}"), MAX_METADATA_BYTES)
    metadata = decode_torch_metadata(data.tobytes(), f"{directory}/{METADATA}")
    _check_files(backend, directory, metadata)
    items = TorchItems(directory)
    paths = {name: _path(name, metadata.paths) for name in (*metadata.tensors, *metadata.objects)}
    if len(set(paths.values())) != len(paths):
        raise CorruptCheckpointError(f"{directory}/{METADATA}: two tensors or objects have the same keys")
    found, newest = _Found({}, [], []), Newest()
    for name, tensor in metadata.tensors.items():
        found.leaves[paths[name]] = ArrayLeaf("numpy")
        found.arrays.append(_array(paths[name], tensor, items, newest, found.segments, directory))
    objects = _objects(directory, metadata, paths, items)
    for path, array in objects.arrays.items():
        found.arrays.append(_held(path, array, found.segments))
    record = TreeRecord(_lists(metadata, paths, objects) | objects.containers, found.leaves | objects.leaves)
    return foreign_checkpoint(
        KIND, directory, {NAME: ForeignTree(record, found.arrays)}, found.segments, block_bytes=BLOCK_BYTES
    )


def _place(path: str) -> tuple[str, str]:
    """The directory of a file and its name there; of a link those of what it leads to."""
    folder, _, name = real_path(path).rpartition("/")
    return folder or "/", name


def _check_files(backend: Backend, directory: str, metadata: TorchMetadata) -> None:
    """Each file is there, and as long as what lies in it needs."""
    ends: dict[str, int] = {}
    pieces = [item for tensor in metadata.tensors.values() for _, item in tensor.pieces]
    for item in (*pieces, *metadata.objects.values()):
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for file, end in ends.items():
        try:
            source = backend.open(*_place(f"{directory}/{file}"), direct=False)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CorruptCheckpointError(f"{directory}/{file}: is not there, but {METADATA} names it") from error
        source.close()
        if source.size < end:
            raise CorruptCheckpointError(f"{directory}/{file}: {source.size} bytes, but {METADATA} says {end}")


def _path(name: str, paths: Mapping[str, tuple[str | int, ...]]) -> str:
    """The leaf path: the keys that the planner of the save has told, else the name as one key.

    All keys of mappings have become text when they were saved: one of digits is taken for an integer, which those of
    optimizers are.
    """
    if name not in paths:
        return key_text(name, ROOT)
    path = ROOT
    for key in paths[name]:
        is_integer = isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key)) == key
        path = join(path, str(key) if is_integer else key_text(key, path))
    return path


def _array(
    path: str, tensor: Tensor, items: TorchItems, newest: Newest, segments: list[ForeignSegment], directory: str
) -> ArrayRecord:
    chunks = []
    for box, item in tensor.pieces:
        size = box_elements(box) * DTYPES[tensor.dtype].itemsize
        read = functools.partial(items.tensor, item, box, tensor.dtype)
        piece = HeldPiece(f"{directory}: leaf {path!r}", size, read, newest)
        chunks.append(ChunkRecord(box, len(segments), 0, size, ""))
        segments.append(ForeignSegment(f"{item.relative_path}/{len(segments):06d}", size, piece.open))
    return record_of(path, tensor.shape, tensor.dtype, tuple(chunks))


def _held(path: str, array: np.ndarray, segments: list[ForeignSegment]) -> ArrayRecord:
    """The record of an array that lies in memory."""
    data, name = array.tobytes(), f"objects/{len(segments):06d}"
    chunk = ChunkRecord(full_box(array.shape), len(segments), 0, len(data), "")
    segments.append(ForeignSegment(name, len(data), lambda direct: HeldBytes(name, data)))
    return record_of(path, array.shape, dtype_name(array.dtype), (chunk,))


def _objects(directory: str, metadata: TorchMetadata, paths: Mapping[str, str], items: TorchItems) -> ObjectLeaves:
    """What is no tensor. It is read now, all at once: it becomes part of the tree."""
    found = ObjectLeaves(directory, items.array)
    for name, value in items.values(list(metadata.objects.values())).items() if metadata.objects else ():
        found.add(paths[name], value)
    left_out = [f"{path} ({why})" for path, why in found.left_out.items()]
    if left_out:
        more = f", and {len(left_out) - MOST_TOLD} more" if len(left_out) > MOST_TOLD else ""
        _log.warning("%s: left out, since it is no plain data: %s%s", directory, "; ".join(left_out[:MOST_TOLD]), more)
    return found


def _lists(metadata: TorchMetadata, paths: Mapping[str, str], objects: ObjectLeaves) -> dict[str, str]:
    """The lists among the containers. One that has a gap, since what was in it is not saved, becomes a mapping."""
    children: dict[str, set[int]] = {}
    for name, keys in metadata.paths.items():
        if paths[name] in objects.left_out:
            continue
        texts = paths[name].split("/")
        for depth, key in enumerate(keys):
            if isinstance(key, int):
                children.setdefault("/".join(texts[:depth]) or ROOT, set()).add(key)
    return {path: "list" for path, found in children.items() if found == set(range(len(found)))}
