"""Opens safetensors files of any origin, one or several with an index as Hugging Face writes them."""

from __future__ import annotations

import errno
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    NotACheckpointError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.formats.foreign import Foreign, ForeignSegment, ForeignTree, check_shape, foreign_checkpoint
from jaxckpt_train.store.backend import Backend, Entry, Source
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.local_names import real_path
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    MAX_ARRAYS,
    NOT_JSON,
    ArrayRecord,
    ChunkRecord,
    is_plain_name,
    shown,
)
from jaxckpt_train.store.plain_files import SNIFFED_BYTES, other_content, read_whole
from jaxckpt_train.store.segment import LENGTH_BYTES
from jaxckpt_train.tree.leaf_records import ArrayLeaf, TreeRecord
from jaxckpt_train.tree.paths import ROOT, key_text

SUFFIX = ".safetensors"
MOST_FILES = 10_000  # of one model
MOST_NAMED = 3
# A variant such as fp16 may be in either name: `model.fp16-00001-of-00002.safetensors`,
# `model-00001-of-00002.fp16.safetensors`; `model.safetensors.index.fp16.json`, `model.safetensors.fp16.index.json`,
# `model.fp16.safetensors.index.json`.
_INDEX = re.compile(r".*\.safetensors(\..+)?\.index(\..+)?\.json", re.DOTALL)
_NUMBERED = re.compile(
    r"(?P<before>(.*[-_.])?)(?P<number>[0-9]+)(?P<after>-of-(?P<count>[0-9]+)([-_.].+)?\.safetensors)", re.DOTALL
)
_PARTS_OF_TENSORS = "DCP_SHARDING_INFO"  # metadata of files that torch.distributed.checkpoint writes, one a process
MAX_HEADER_BYTES = 100_000_000  # what safetensors itself reads at most
MAX_INDEX_BYTES = 256 << 20
NAME, KIND = "state", "safetensors"
# What safetensors names, as numpy and ml_dtypes know it. Not so F4 and floats of 6 bits, of which several share bytes.
NAMED = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    """What an index says: the file of each tensor."""

    weight_map: dict[str, str]


class Header(NamedTuple):
    """The head of a file: its tensors, its free-form text, where the data begins, and the size of the file."""

    tensors: Mapping[str, _Entry]
    metadata: Mapping[str, str]
    data_start: int
    size: int


def is_index(name: str) -> bool:
    """Whether a file is by its name an index of safetensors files, of any variant."""
    return _INDEX.fullmatch(name) is not None


def open_safetensors(backend: Backend, path: str) -> Foreign:
    """Open one file.

    Raises:
        NotACheckpointError: it is one of several files of a model.
        CorruptCheckpointError: it is none, or damaged.
        StorageError: it cannot be read.
    """
    folder, _, name = path.rpartition("/")
    if _missing([name]):
        raise NotACheckpointError(
            f"{path}: by its name one of several files of a model; pass the folder that holds all of them, {folder}"
        )
    return _opened(backend, path, folder, [name], None)


def open_safetensors_index(backend: Backend, path: str) -> Foreign:
    """Open what one index names, whatever else is in its folder.

    Raises:
        CorruptCheckpointError: it is no index, or a file that it names is missing, damaged, or lacks a tensor.
        StorageError: it cannot be read.
    """
    folder, _, name = path.rpartition("/")
    weight_map = _read_index(backend, folder, name)
    return _opened(backend, path, folder, list(dict.fromkeys(weight_map.values())), weight_map)


def open_safetensors_folder(backend: Backend, folder: str, indexes: Sequence[str], names: Sequence[str]) -> Foreign:
    """Open a folder that holds one model: the files of its index, one file, or all files of one numbered series.

    Args:
        backend: where.
        folder: which.
        indexes: names of the indexes in it.
        names: names of the safetensors files in it.

    Raises:
        NotACheckpointError: it holds several models, or files that the index does not name.
        CorruptCheckpointError: a file is none, or missing though the index or the others' names say that it exists; it
            lacks a tensor of the index, or holds one that the index leaves out; or a tensor is in two files.
        StorageError: one cannot be read.
    """
    if len(indexes) > 1:
        raise NotACheckpointError(
            f"{folder}: expected one index, found {_listed(indexes)}; pass the path of the index that you mean"
        )
    if not indexes:
        series = _series(names)
        if len(series) > 1:
            firsts = [numbered[min(numbered)] for numbered in series.values()]
            raise NotACheckpointError(
                f"{folder}: expected the files of one model, found {len(series)} models: {_listed(firsts)}; pass the "
                "path of one file, or move the others to a folder of their own"
            )
        _refuse_missing(folder, names)
        return _opened(backend, folder, folder, names, None)
    weight_map = _read_index(backend, folder, indexes[0])
    named = list(dict.fromkeys(weight_map.values()))
    there = set(names)
    for name in named:
        if name not in there:
            raise CorruptCheckpointError(f"{folder}/{name}: is not there, but the index names it")
    found = _opened(backend, folder, folder, named, weight_map, takes_all=True)
    others = sorted(there.difference(named))
    if others:
        raise NotACheckpointError(
            f"{folder}: expected the files that {indexes[0]} names, found also {_listed(others)}; pass the path of the "
            "index to load only what it names, or that of another file"
        )
    _refuse_missing(folder, named)
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _opened(
    backend: Backend,
    subject: str,
    folder: str,
    names: Sequence[str],
    weight_map: Mapping[str, str] | None,
    *,
    takes_all: bool = False,
) -> Foreign:
    """Open files of one folder; `takes_all`: a tensor that the index leaves out is an error."""
    arrays: dict[str, ArrayRecord] = {}
    segments, metadata, unlisted = list[ForeignSegment](), dict[str, str](), list[tuple[str, str]]()
    for number, name in enumerate(names):
        path = f"{folder}/{name}"
        header = read_header(backend, path) if weight_map is None else _indexed(backend, path)
        segments.append(ForeignSegment(name, header.size, functools.partial(_open, backend, path)))
        metadata |= header.metadata
        if _PARTS_OF_TENSORS in header.metadata:
            raise UnsupportedLeafError(
                f"{path}: expected whole tensors, found parts that one process of torch.distributed.checkpoint wrote; "
                "write whole ones with its consolidate_safetensors_files, and load those"
            )
        for tensor, entry in header.tensors.items():
            if weight_map is not None and weight_map.get(tensor) != name:
                if tensor not in weight_map:
                    unlisted.append((path, tensor))
                continue  # the index chooses
            leaf = leaf_name(tensor)
            if leaf in arrays:
                raise CorruptCheckpointError(f"{path}: tensor {tensor!r} is in another file of the folder, too")
            arrays[leaf] = _array(path, leaf, tensor, entry, header.data_start, number)
    for tensor, name in (weight_map or {}).items():
        if leaf_name(tensor) not in arrays:
            raise CorruptCheckpointError(f"{folder}/{name}: lacks tensor {tensor!r}, which the index says it has")
    if takes_all and unlisted:
        path, tensor = unlisted[0]
        raise CorruptCheckpointError(
            f"{path}: tensor {shown(tensor)} is not in the index; pass the path of the index to load only what it names"
        )
    record = TreeRecord({}, {leaf: ArrayLeaf("numpy") for leaf in arrays})
    info = {"custom_metadata": metadata} if metadata else {}
    parts = {NAME: ForeignTree(record, list(arrays.values()))}
    return foreign_checkpoint(KIND, subject, parts, segments, block_bytes=BLOCK_BYTES, info=info)


def _series(names: Sequence[str]) -> dict[tuple[str, str], dict[int, str]]:
    """Files by model: those of a numbered series (`model-00001-of-00002`) by their numbers, others by themselves."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None or not 0 < int(match["count"]) <= MOST_FILES:
            found[(name, "")] = {1: name}
        else:
            found.setdefault((match["before"], match["after"]), {})[int(match["number"])] = name
    return found


def _missing(names: Sequence[str]) -> list[str]:
    """Names of files that the numbered names among these say exist, and that are not among them."""
    found = []
    for (before, after), numbered in _series(names).items():
        if not after:
            continue
        match = _NUMBERED.fullmatch(next(iter(numbered.values())))
        assert match is not None
        width = min(len(name) for name in numbered.values()) - len(before) - len(after)
        first = min(1, *numbered)  # some count from 0
        wanted = range(first, first + int(match["count"]))
        found += [f"{before}{number:0{width}}{after}" for number in wanted if number not in numbered]
    return found


def _refuse_missing(folder: str, names: Sequence[str]) -> None:
    missing = _missing(names)
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CorruptCheckpointError(f"{folder}/{missing[0]}: is not there, by the names of the others{more}")


def _indexed(backend: Backend, path: str) -> Header:
    """The head of a file that an index names."""
    try:
        return read_header(backend, path)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise CorruptCheckpointError(f"{path}: is not there, but the index names it") from error


def leaf_name(tensor: str) -> str:
    """The leaf path of a tensor: its name is one key, whatever is in it."""
    return key_text(tensor, ROOT)


def read_header(backend: Backend, path: str) -> Header:
    """The head of a safetensors file, checked: its tensors lie within the file, and fit their shapes.

    Raises:
        CorruptCheckpointError: it is no such file, or damaged.
        StorageError: it cannot be read.
    """
    source = _open(backend, path, False)
    try:
        size = source.size
        length = int.from_bytes(_read(source, 0, LENGTH_BYTES, path), "little")
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            other = other_content(_read(source, 0, min(size, SNIFFED_BYTES), path))
            found = other or f"a head of {length:,} bytes in a file of {size:,}"
            raise CorruptCheckpointError(f"{path}: expected a safetensors file, found {found}")
        text = _read(source, LENGTH_BYTES, length, path)
    finally:
        source.close()
    return _parsed(text, LENGTH_BYTES + length, size, path)


def _read(source: Source, offset: int, length: int, path: str) -> bytes:
    if offset + length > source.size:
        raise CorruptCheckpointError(f"{path}: expected a safetensors file, found {source.size} bytes")
    data = np.empty(length, np.uint8)
    source.read_into(offset, data, length)
    return data.tobytes()


def _parsed(text: bytes, data_start: int, size: int, path: str) -> Header:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.get("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str] | None) or {}
        entries = ((name, entry) for name, entry in raw.items() if name != "__metadata__")
        tensors = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries}
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected a safetensors file, but its head: {shown(error)}") from error
    content = {"__metadata__": metadata, **tensors} if "__metadata__" in raw else tensors
    if len(text.strip()) > len(msgspec.json.encode(content)):
        _check_names(text, path)  # it is longer than what it says needs, and may say something twice
    if len(tensors) > MAX_ARRAYS:
        raise CorruptCheckpointError(f"{path}: {len(tensors):,} tensors, expected at most {MAX_ARRAYS:,}")
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        _check(name, entry, path)
        if entry.data_offsets[0] != at:
            raise CorruptCheckpointError(
                f"{path}: tensor {shown(name)} begins at byte {entry.data_offsets[0]} of the data, expected {at}"
            )
        at = entry.data_offsets[1]
    if data_start + at != size:
        raise CorruptCheckpointError(f"{path}: {size} bytes, but its head says {data_start + at}")
    return Header(tensors, metadata, data_start, size)


def _check_names(text: bytes, path: str) -> None:
    """Refuse a head in which a name stands twice: each reader would take another one of the two."""

    def checked(pairs: list[tuple[str, Any]]) -> None:
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise CorruptCheckpointError(f"{path}: {shown(name)} stands twice in its head")
            names.add(name)

    try:
        json.loads(text, object_pairs_hook=checked)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: expected a safetensors file, but its head: {shown(error)}") from error


def _check(name: str, entry: _Entry, path: str) -> None:
    dtype = NAMED.get(entry.dtype)
    if dtype is None:
        raise FormatVersionError(f"{path}: tensor {shown(name)} of dtype {shown(entry.dtype)}, which is not known here")
    check_shape(entry.shape, DTYPES[dtype].itemsize, f"{path}: tensor {shown(name)}")
    start, stop = entry.data_offsets
    if stop - start != math.prod(entry.shape) * DTYPES[dtype].itemsize:
        raise CorruptCheckpointError(
            f"{path}: tensor {shown(name)}: {stop - start} bytes do not fit {dtype}{list(entry.shape)}"
        )


def _array(path: str, leaf: str, tensor: str, entry: _Entry, data_start: int, segment: int) -> ArrayRecord:
    start, stop = entry.data_offsets
    if len(leaf) > 65_536:
        raise UnsupportedLeafError(f"{path}: a tensor whose name has {len(tensor):,} letters")
    chunks = (ChunkRecord(full_box(entry.shape), segment, data_start + start, stop - start, ""),)
    return ArrayRecord(leaf, entry.shape, NAMED[entry.dtype], chunks if stop > start else ())


def _read_index(backend: Backend, folder: str, index: str) -> dict[str, str]:
    where, _, name = real_path(f"{folder}/{index}").rpartition("/")
    data = read_whole(backend, where, name, MAX_INDEX_BYTES)
    try:
        found = msgspec.json.decode(data, type=_Index).weight_map
    except NOT_JSON as error:
        other = other_content(bytes(data[:SNIFFED_BYTES]))
        why = f"found {other}" if other else f"but: {shown(error)}"
        raise CorruptCheckpointError(f"{folder}/{index}: expected an index of tensors, {why}") from error
    if not found:
        raise CorruptCheckpointError(f"{folder}/{index}: expected an index of tensors, found none in it")
    for name in set(found.values()):
        if not is_plain_name(name):
            raise CorruptCheckpointError(f"{folder}/{index}: names {shown(name)}, expected files of this folder")
    return found


def _open(backend: Backend, path: str, direct: Any) -> Source:
    """Open a file; of a link what it leads to."""
    folder, _, name = real_path(path).rpartition("/")
    return backend.open(folder or "/", name, direct=direct)


def names_of(entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """The indexes of a folder, and its safetensors files."""
    names = sorted(entry.name for entry in entries if entry.kind != "directory")
    return [name for name in names if is_index(name)], [name for name in names if name.endswith(SUFFIX)]
