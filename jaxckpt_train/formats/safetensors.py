"""Reads and writes safetensors models: one file, or several files with an index, as Hugging Face lays them out."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    MismatchError,
    NotACheckpointError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.formats.foreign import (
    NAME,
    ForeignCheckpoint,
    ForeignTree,
    Segments,
    array_record,
    check_shape,
    few,
    linked,
    make_foreign_checkpoint,
)
from jaxckpt_train.pytree.leaves import (
    ROOT,
    ArrayLeaf,
    BoolLeaf,
    FloatLeaf,
    IntLeaf,
    KeyLeaf,
    LeafRecord,
    TreeRecord,
    decode_tree,
    key_text,
    parse_key,
    python_value,
    split,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Entry, Opener, Source
from jaxckpt_train.store.boxes import Box, cut_box, full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.copy import LazyBox, ReadAhead
from jaxckpt_train.store.files import SNIFFED_BYTES, other_content, read_whole
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    MAX_ARRAYS,
    NOT_JSON,
    ArrayRecord,
    ChunkRecord,
    PartRecord,
    is_plain_name,
    shown,
)
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.segment import (
    DTYPES,
    LENGTH_BYTES,
    ChunkSource,
    PlacedChunk,
    SegmentLayout,
    Tensor,
    encode_header,
)
from jaxckpt_train.store.transaction import atomic_directory
from jaxckpt_train.store.writer import SegmentWriter, write_segments

SUFFIX = ".safetensors"
MOST_FILES = 10_000  # in one model
# A variant such as fp16 may be in either name: `model.fp16-00001-of-00002.safetensors`,
# `model-00001-of-00002.fp16.safetensors`; `model.safetensors.index.fp16.json`, `model.safetensors.fp16.index.json`,
# `model.fp16.safetensors.index.json`.
_INDEX = re.compile(r".*\.safetensors(\..+)?\.index(\..+)?\.json", re.DOTALL)
_NUMBERED = re.compile(
    r"(?P<before>(.*[-_.])?)(?P<number>[0-9]+)(?P<after>-of-(?P<count>[0-9]+)([-_.].+)?\.safetensors)", re.DOTALL
)
_PARTIAL_TENSORS = "DCP_SHARDING_INFO"  # metadata key in the per-process files of torch.distributed.checkpoint
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_INDEX_BYTES = 256 << 20
KIND = "safetensors"
# safetensors dtypes and their numpy and ml_dtypes names. F4 and the 6-bit floats are left out: their elements share
# bytes.
NAMED = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
BAND_BYTES = 64 << 20
_METADATA = "__metadata__"
_DTYPES = {ours: theirs for theirs, ours in NAMED.items()}
_NUMBERS = {BoolLeaf: "bool", IntLeaf: "int64", FloatLeaf: "float64"}


class _Entry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class Header(NamedTuple):
    """The header of a file, the offset of the data, and the size of the file."""

    tensors: Mapping[str, _Entry]
    metadata: Mapping[str, str]
    data_start: int
    size: int


def is_index(name: str) -> bool:
    """Return whether the name of a file is that of an index of safetensors files, of any variant."""
    return _INDEX.fullmatch(name) is not None


def open_safetensors(backend: Backend, path: str) -> ForeignCheckpoint:
    """Open one safetensors file as a checkpoint, unless its name says that it is one of several files of a model."""
    folder, _, name = path.rpartition("/")
    if _missing([name]):
        raise NotACheckpointError(f"{path}: is one of several files of a model; pass the folder of the files, {folder}")
    return _open_files(backend, path, folder, [name], None)


def open_safetensors_index(backend: Backend, path: str) -> ForeignCheckpoint:
    """Open the files that an index names, and ignore others in the folder."""
    folder, _, name = path.rpartition("/")
    weight_map = _read_index(backend, folder, name)
    return _open_files(backend, path, folder, list(dict.fromkeys(weight_map.values())), weight_map)


def open_safetensors_folder(
    backend: Backend, folder: str, indexes: Sequence[str], names: Sequence[str]
) -> ForeignCheckpoint:
    """Open the model in a folder: the files of an index, one file, or all files of one numbered series."""
    if len(indexes) > 1:
        raise NotACheckpointError(f"{folder}: expected one index, found {few(indexes)}; pass the path of one")
    if not indexes:
        series = _by_model(names)
        if len(series) > 1:
            firsts = [numbered[min(numbered)] for numbered in series.values()]
            models = f"{len(series)} models: {few(firsts)}"
            raise NotACheckpointError(f"{folder}: expected one model, found {models}; pass the path of one file")
        _refuse_missing(folder, names)
        return _open_files(backend, folder, folder, names, None)
    weight_map = _read_index(backend, folder, indexes[0])
    named = list(dict.fromkeys(weight_map.values()))
    found = _open_files(backend, folder, folder, named, weight_map, refuse_unlisted=True)
    others = sorted(set(names).difference(named))
    if others:
        raise NotACheckpointError(
            f"{folder}: expected only the files that {indexes[0]} names, found also {few(others)}; pass the path of "
            "the index, or of one file"
        )
    _refuse_missing(folder, named)
    return found


def _open_files(
    backend: Backend,
    subject: str,
    folder: str,
    names: Sequence[str],
    weight_map: Mapping[str, str] | None,
    *,
    refuse_unlisted: bool = False,
) -> ForeignCheckpoint:
    """Open files of one folder. `refuse_unlisted` makes a tensor that the index does not list an error."""
    arrays: dict[str, ArrayRecord] = {}
    segments, metadata, unlisted = Segments(), dict[str, str](), ""
    for name in names:
        path = f"{folder}/{name}"
        try:
            header = read_header(backend, path)
        except StorageError as error:
            if weight_map is None or error.errno != errno.ENOENT:
                raise
            raise CorruptCheckpointError(f"{path}: the index names this file, but it does not exist") from error
        number = segments.add(name, header.size, functools.partial(_open, backend, path))
        metadata |= header.metadata
        if _PARTIAL_TENSORS in header.metadata:
            raise UnsupportedLeafError(
                f"{path}: expected complete tensors, found the parts of one process of torch.distributed.checkpoint; "
                "merge them with its consolidate_safetensors_files"
            )
        for tensor, entry in header.tensors.items():
            if weight_map is not None and weight_map.get(tensor) != name:
                if tensor not in weight_map:
                    unlisted = unlisted or f"{path}: the index does not list tensor {shown(tensor)}"
                continue  # the index assigns this tensor to another file
            leaf = key_text(tensor, ROOT)  # the whole name is one key, whatever characters it contains
            if leaf in arrays:
                raise CorruptCheckpointError(f"{path}: tensor {tensor!r} is also in another file of the folder")
            start, stop = entry.data_offsets
            chunk = ChunkRecord(full_box(entry.shape), number, header.data_start + start, stop - start, "")
            arrays[leaf] = array_record(leaf, entry.shape, NAMED[entry.dtype], (chunk,))
    for tensor, name in (weight_map or {}).items():
        if key_text(tensor, ROOT) not in arrays:
            raise CorruptCheckpointError(f"{folder}/{name}: has no tensor {tensor!r}, which the index assigns to it")
    if refuse_unlisted and unlisted:
        raise CorruptCheckpointError(f"{unlisted}; pass the path of the index to ignore such tensors")
    record = TreeRecord({}, {leaf: ArrayLeaf("numpy") for leaf in arrays})
    info = {"custom_metadata": metadata} if metadata else {}
    parts = {NAME: ForeignTree(record, list(arrays.values()))}
    return make_foreign_checkpoint(KIND, subject, parts, segments, block_bytes=BLOCK_BYTES, info=info)


def _by_model(names: Sequence[str]) -> dict[tuple[str, str, int], dict[int, str]]:
    """Group files by model: each series (`model-00001-of-00002`) by its numbers, every other file as a series of one.

    The keys are the texts before and after the number, and the length of the series.
    """
    found: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None or not 0 < int(match["count"]) <= MOST_FILES:
            found[name, "", 1] = {1: name}
        else:
            series = found.setdefault((match["before"], match["after"], int(match["count"])), {})
            series[int(match["number"])] = name
    return found


def _missing(names: Sequence[str]) -> list[str]:
    """Return the names that are absent from the numbered series of these names."""
    found = []
    for (before, after, count), numbered in _by_model(names).items():
        width = min(map(len, numbered.values())) - len(before) - len(after)
        first = min(1, *numbered)  # some tools count from 0
        found += [
            f"{before}{number:0{width}}{after}" for number in range(first, first + count) if number not in numbered
        ]
    return found


def _refuse_missing(folder: str, names: Sequence[str]) -> None:
    if missing := _missing(names):
        raise CorruptCheckpointError(f"{folder}: expected all files of a numbered series, found no {few(missing)}")


def read_header(backend: Backend, path: str) -> Header:
    """Read and check the header of a safetensors file: the tensors fit their shapes, and fill the file without gaps."""
    with contextlib.closing(_open(backend, path, False)) as source:
        size = source.size
        length = int.from_bytes(_read(source, 0, LENGTH_BYTES, path), "little")
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            other = other_content(_read(source, 0, min(size, SNIFFED_BYTES), path))
            found = other or f"a header of {length:,} bytes in a file of {size:,}"
            raise CorruptCheckpointError(f"{path}: expected a safetensors file, found {found}")
        text = _read(source, LENGTH_BYTES, length, path)
    return _parse_header(text, LENGTH_BYTES + length, size, path)


def _read(source: Source, offset: int, length: int, path: str) -> bytes:
    if offset + length > source.size:
        least = f"expected a safetensors file of at least {offset + length} bytes"
        raise CorruptCheckpointError(f"{path}: {least}, found {source.size} bytes")
    data = np.empty(length, np.uint8)
    source.read_into(offset, data, length)
    return data.tobytes()


def _parse_header(text: bytes, data_start: int, size: int, path: str) -> Header:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.get(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str] | None) or {}
        entries = ((name, entry) for name, entry in raw.items() if name != _METADATA)
        tensors = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries}
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{path}: expected a safetensors file, found one with an invalid header: {shown(error)}"
        ) from error
    content = {_METADATA: metadata, **tensors} if _METADATA in raw else tensors
    if len(text.strip()) > len(msgspec.json.encode(content)):
        _refuse_repeated_names(text, path)  # the header is longer than its content needs, so a name may occur twice
    if len(tensors) > MAX_ARRAYS:
        raise CorruptCheckpointError(f"{path}: expected at most {MAX_ARRAYS:,} tensors, found {len(tensors):,}")
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        _check_tensor(entry, f"{path}: tensor {shown(name)}")
        if entry.data_offsets[0] != at:
            starts = f"starts at byte {entry.data_offsets[0]} of the data, expected {at}"
            raise CorruptCheckpointError(f"{path}: tensor {shown(name)} {starts}")
        at = entry.data_offsets[1]
    if data_start + at != size:
        raise CorruptCheckpointError(f"{path}: expected the {data_start + at} bytes of its header, found {size}")
    return Header(tensors, metadata, data_start, size)


def _refuse_repeated_names(text: bytes, path: str) -> None:
    """Refuse a header that contains a name twice, because readers disagree on which of the two counts."""

    def checked(pairs: list[tuple[str, Any]]) -> None:
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise CorruptCheckpointError(f"{path}: the header contains {shown(name)} twice")
            names.add(name)

    try:
        json.loads(text, object_pairs_hook=checked)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path}: expected a safetensors file, found one with an invalid header: {shown(error)}"
        ) from error


def _check_tensor(entry: _Entry, subject: str) -> None:
    dtype = NAMED.get(entry.dtype)
    if dtype is None:
        raise FormatVersionError(f"{subject} has the unsupported dtype {shown(entry.dtype)}")
    check_shape(entry.shape, DTYPES[dtype].itemsize, subject)
    start, stop = entry.data_offsets
    if stop - start != math.prod(entry.shape) * DTYPES[dtype].itemsize:
        raise CorruptCheckpointError(f"{subject}: found {stop - start} bytes for {dtype}{list(entry.shape)}")


def _read_index(backend: Backend, folder: str, index: str) -> dict[str, str]:
    data = read_whole(backend, *linked(f"{folder}/{index}"), MAX_INDEX_BYTES)
    try:
        found = msgspec.json.decode(data, type=_Index).weight_map
    except NOT_JSON as error:
        other = other_content(bytes(data[:SNIFFED_BYTES])) or f"invalid JSON: {shown(error)}"
        raise CorruptCheckpointError(f"{folder}/{index}: expected an index of tensors, found {other}") from error
    if not found:
        raise CorruptCheckpointError(f"{folder}/{index}: expected an index of tensors, found an empty one")
    for name in set(found.values()):
        if not is_plain_name(name):
            raise CorruptCheckpointError(f"{folder}/{index}: expected a file of this folder, found {shown(name)}")
    return found


def _open(backend: Backend, path: str, direct: Any) -> Source:
    return backend.open(*linked(path), direct=direct)


def safetensors_names(entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """Return the names of the indexes in a folder, and those of the safetensors files."""
    names = sorted(entry.name for entry in entries if entry.kind != "directory")
    return [name for name in names if is_index(name)], [name for name in names if name.endswith(SUFFIX)]


class Exported(NamedTuple):
    """The result of an export."""

    files: tuple[str, ...]  # the names of those with tensors
    left_out: tuple[str, ...]  # leaves that the format cannot represent: text, None, empty containers, complex numbers
    nbytes: int  # of all tensors
    prng_keys: tuple[str, ...]  # leaves that are PRNG keys, whose raw integers were written


class _Tensor(NamedTuple):
    """A tensor to write, in bands of its first axes: numbers, or boxes of a stored array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bands: Sequence[tuple[Box, LazyBox | np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_safetensors(
    files: Opener,
    committed: Committed,
    part: PartRecord,
    backend: Backend,
    final: str,
    settings: StoreSettings,
    *,
    separator: str,
    shard_bytes: int,
    single_file: bool,
    metadata: Mapping[str, str],
    progress: ReadProgress,
) -> Exported:
    """Write a tree as a folder `final` with `model.safetensors`, or with several files and their index.

    `separator` separates the keys of a leaf path in the name of its tensor. `shard_bytes` limits the tensors in a file,
    but a larger tensor gets a file of its own. With `single_file`, all are in one file at `final`.

    Raises MismatchError: two leaves would get the same name, or a leaf cannot have its name or dtype;
    CheckpointExistsError: something exists at `final`.
    """
    leaves = decode_tree(part, committed.directory).leaves
    leaf_of, left_out, tensors = dict[str, str](), list[str](), list[_Tensor]()
    arrays = {array.name: array for array in part.arrays}
    for leaf, record in leaves.items():
        subject = f"{committed.directory}: leaf {leaf!r}"
        content = arrays.get(leaf) or _number(subject, leaf, record)
        if content is None:
            left_out.append(leaf)
            continue
        name = separator.join(str(parse_key(key)) for key in split(leaf)) or "value"
        dtype = DTYPES[str(content.dtype)]
        _check_name(subject, leaf, name, dtype, leaf_of)
        boxes = list(cut_box(full_box(content.shape), dtype.itemsize, BAND_BYTES)) if math.prod(content.shape) else []
        bands = [
            (box, content if isinstance(content, np.ndarray) else LazyBox(files, committed, content, box, settings))
            for box in boxes
        ]
        tensors.append(_Tensor(name, content.shape, dtype, bands))
    if not tensors:
        raise MismatchError(f"{committed.directory}: {part.name!r} has no arrays to export")
    shards = [tensors] if single_file else list(_shards(tensors, shard_bytes))
    count = len(shards)
    file_names = [final.rpartition("/")[2] if single_file else "model.safetensors"]
    if count > 1:
        file_names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    with (
        ReadAhead(settings.read_budget_bytes, committed.directory) as ahead,
        atomic_directory(backend, final, settings, file_names[0] if single_file else None) as attempt,
    ):
        layouts = [_layout(shard, ahead, metadata) for shard in shards]
        writers = [
            SegmentWriter(backend, f"{attempt.directory}/{name}", layout, settings)
            for layout, name in zip(layouts, file_names, strict=True)
        ]
        write_segments(backend, attempt.directory, writers, settings, progress, ahead.give_up)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if count > 1:
            places = {tensor.name: name for shard, name in zip(shards, file_names, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": nbytes}, "weight_map": places}
            encoded = msgspec.json.format(msgspec.json.encode(index), indent=2)
            attempt.write_file("model.safetensors.index.json", encoded)
    prng_keys = tuple(leaf for leaf, record in leaves.items() if isinstance(record, KeyLeaf))
    return Exported(tuple(file_names), tuple(left_out), nbytes, prng_keys)


def _number(subject: str, leaf: str, record: LeafRecord) -> np.ndarray | None:
    """Return a number as an array. None: the format cannot represent the leaf."""
    dtype = _NUMBERS.get(type(record))
    if dtype is None:
        return None
    value = python_value(leaf, record, subject)
    if isinstance(record, IntLeaf) and not -(2**63) <= value < 2**63:
        raise MismatchError(f"{subject}: expected at most 64 bits, found {value.bit_length()}")
    return np.asarray(value, dtype)


def _check_name(subject: str, leaf: str, name: str, dtype: np.dtype, leaf_of: dict[str, str]) -> None:
    """Add a leaf by the name of its tensor, or raise MismatchError if a tensor cannot have this name or dtype."""
    if name == _METADATA:
        raise MismatchError(
            f"{subject} would be called {name!r}, which is reserved; rename it (--op 'rename {leaf} metadata')"
        )
    if dtype.name not in _DTYPES:
        raise MismatchError(f"{subject} has the dtype {dtype.name}, which safetensors cannot name; cast it, or drop it")
    if leaf_of.setdefault(name, leaf) != leaf:
        raise MismatchError(
            f"{subject} and {leaf_of[name]!r} would both be called {name!r}; rename one, or choose another separator"
        )


def _shards(tensors: Sequence[_Tensor], most: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _layout(shard: Sequence[_Tensor], ahead: ReadAhead, metadata: Mapping[str, str]) -> SegmentLayout:
    """Lay out one file: its header, and its tensors in bands that are read ahead in order."""
    entries, at = list[Tensor](), 0
    for tensor in shard:
        entries.append(Tensor(tensor.name, _DTYPES[tensor.dtype.name], tensor.shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    header = encode_header(entries, metadata)
    chunks, start = [], len(header)
    for number, tensor in enumerate(shard):
        for box, band in tensor.bands:
            source = ChunkSource(box, band if isinstance(band, np.ndarray) else ahead.of([band])[0])
            chunks.append(PlacedChunk(number, source, start, band.nbytes))
            start += band.nbytes
    return SegmentLayout(header, chunks, len(header) + at)
