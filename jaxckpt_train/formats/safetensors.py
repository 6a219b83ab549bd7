"""Writes a tree as safetensors files with an index, as Hugging Face lays models out.

Opens safetensors files of any origin, one or several with an index as Hugging Face writes them.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    MismatchError,
    NotACheckpointError,
    SettingsError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.formats.foreign import Foreign, ForeignSegment, ForeignTree, check_shape, foreign_checkpoint
from jaxckpt_train.pytree.flatten import ROOT, key_text, parse_key, split
from jaxckpt_train.pytree.leaves import (
    ArrayLeaf,
    BoolLeaf,
    FloatLeaf,
    IntLeaf,
    KeyLeaf,
    LeafRecord,
    TreeRecord,
    decode_tree,
    python_value,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Entry, Opener, Source
from jaxckpt_train.store.backends.local_names import real_path
from jaxckpt_train.store.boxes import Box, cut_box, full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.copy import BoxAhead, LazyBox, ReadAhead
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.files import SNIFFED_BYTES, digest_function, other_content, read_whole
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
from jaxckpt_train.store.segment import LENGTH_BYTES, ChunkSource, PlacedChunk, SegmentLayout, Tensor, encode_header
from jaxckpt_train.store.transaction import appearing
from jaxckpt_train.store.writer import SegmentWriter, write_segments

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
SHARD_BYTES = 5 * 10**9
"""As Hugging Face's tools cut models by default."""
BAND_BYTES = 64 << 20
_METADATA = "__metadata__"
_DTYPES = {ours: theirs for theirs, ours in NAMED.items()}
_NUMBERS = {BoolLeaf: "bool", IntLeaf: "int64", FloatLeaf: "float64"}
_ToCome = Callable[[ArrayRecord, Sequence[Box]], Sequence[BoxAhead]]
"""Some boxes of an array, each of which is read about when it is written."""


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


class Exported(NamedTuple):
    """What was written.

    Attributes:
        files: names of the files with tensors.
        tensors: names of the tensors by leaf path.
        left_out: leaves that the format has nothing for: text, None, empty containers, complex numbers of Python's own.
        nbytes: of all tensors.
        prng_keys: leaves that are PRNG keys, of which the bare integers were written.
    """

    files: tuple[str, ...]
    tensors: Mapping[str, str]
    left_out: tuple[str, ...]
    nbytes: int
    prng_keys: tuple[str, ...]


class _Tensor(NamedTuple):
    """A tensor to write: its name, shape and dtype, and what it is read from: an array, or a number."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    content: ArrayRecord | np.ndarray

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
    separator: str = ".",
    shard_bytes: int = SHARD_BYTES,
    single_file: bool = False,
    metadata: Mapping[str, str] | None = None,
    progress: ReadProgress | None = None,
) -> Exported:
    """Write the tree of a checkpointable as a folder with `model.safetensors`, or several files and their index.

    With `single_file` one file is written, and no folder.

    Args:
        files: what the checkpoint is read from.
        committed: the opened checkpoint.
        part: the checkpointable.
        backend: where to write.
        final: the folder, or the file, an absolute path where nothing is.
        settings: how the checkpoint is verified, and how durable the files are made.
        separator: between the keys of a leaf path in the name of its tensor.
        shard_bytes: a file has no more bytes of tensors, unless one alone is larger.
        single_file: whether all tensors are written into one file that has the path `final`.
        metadata: free-form text for each file; None: `{"format": "pt"}`, which some readers insist on.
        progress: called with numbers of bytes as they are written.

    Raises:
        MismatchError: two leaves would get one name, or one the name that the format keeps for its metadata, or a
            dtype has none in safetensors.
        SettingsError: `shard_bytes` is no whole number above 0, or `separator` is empty.
        CheckpointExistsError: something is at `final`.
        CorruptCheckpointError: bytes of the checkpoint are not what was saved.
        StorageError: the file system refused.
    """
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise SettingsError(f"export: shard_bytes: expected a whole number of bytes above 0, found {shard_bytes!r}")
    if not isinstance(separator, str) or not separator:  # nobody could take the names apart again
        raise SettingsError(f'export: separator: expected text such as ".", found {separator!r}')
    leaves = decode_tree(part, committed.directory).leaves
    tensors, names, left_out = _tensors(committed, part, leaves, separator)
    shards = [tensors] if single_file else list(_shards(tensors, shard_bytes))
    count = len(shards)
    file_names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    file_names = file_names if count > 1 else ["model.safetensors"]
    told = {"format": "pt"} if metadata is None else metadata
    with (
        ReadAhead(settings.read_budget_bytes, committed.directory) as ahead,
        appearing(backend, final, settings, file_names[0] if single_file else None) as attempt,
    ):

        def to_come(array: ArrayRecord, boxes: Sequence[Box]) -> list[BoxAhead]:
            return ahead.of([LazyBox(files, committed, array, box, settings) for box in boxes])

        layouts = [_layout(shard, to_come, told) for shard in shards]
        writers = [
            _writer(backend, f"{attempt.directory}/{name}", layout, settings)
            for layout, name in zip(layouts, file_names, strict=True)
        ]
        write_segments(backend, attempt.directory, writers, settings, progress, ahead.give_up)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if count > 1:
            attempt.write_file("model.safetensors.index.json", _index(shards, file_names, nbytes))
    prng_keys = tuple(leaf for leaf, record in leaves.items() if isinstance(record, KeyLeaf))
    file_names = [final.rpartition("/")[2]] if single_file else file_names
    return Exported(tuple(file_names), names, tuple(left_out), nbytes, prng_keys)


def _writer(backend: Backend, path: str, layout: SegmentLayout, settings: StoreSettings) -> SegmentWriter:
    create = functools.partial(backend.create, path, direct=settings.direct_io)
    return SegmentWriter(layout, create, digest_function(settings.digest), settings.durability != "none")


def _index(shards: Sequence[Sequence[_Tensor]], names: Sequence[str], nbytes: int) -> bytes:
    places = {tensor.name: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": nbytes}, "weight_map": places}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


def _tensors(
    committed: Committed, part: PartRecord, leaves: Mapping[str, LeafRecord], separator: str
) -> tuple[list[_Tensor], dict[str, str], list[str]]:
    arrays = {array.name: array for array in part.arrays}
    found, left_out, leaf_of = list[_Tensor](), list[str](), dict[str, str]()
    for leaf, record in leaves.items():
        content = _content(committed.directory, leaf, record, arrays.get(leaf))
        if content is None:
            left_out.append(leaf)
            continue
        name = separator.join(str(parse_key(key)) for key in split(leaf)) or "value"
        if name == _METADATA:
            raise MismatchError(
                f"{committed.directory}: leaf {leaf!r} would be called {name!r}, which in a safetensors file is its "
                f"metadata, so that nobody could read it; rename the leaf (--op 'rename {leaf} metadata'), or drop it"
            )
        dtype = DTYPES[content.dtype] if isinstance(content, ArrayRecord) else content.dtype
        if dtype.name not in _DTYPES:
            raise MismatchError(
                f"{committed.directory}: leaf {leaf!r} is of {dtype.name}, which safetensors has no name for; cast it "
                "(the operation cast), or leave it out (drop)"
            )
        if leaf_of.setdefault(name, leaf) != leaf:
            raise MismatchError(
                f"{committed.directory}: leaves {leaf_of[name]!r} and {leaf!r} would both be called {name!r}; rename "
                "one, or choose another separator"
            )
        found.append(_Tensor(name, content.shape, dtype, content))
    if not found:
        raise MismatchError(f"{committed.directory}: {part.name!r} has no arrays to export")
    return found, {leaf: name for name, leaf in leaf_of.items()}, left_out


def _content(subject: str, leaf: str, record: LeafRecord, array: ArrayRecord | None) -> ArrayRecord | np.ndarray | None:
    """What a leaf is as a tensor; None: it is none."""
    dtype = _NUMBERS.get(type(record))
    if array is not None or dtype is None:
        return array
    value = python_value(leaf, record, subject)
    if isinstance(record, IntLeaf) and not -(2**63) <= value < 2**63:
        raise MismatchError(f"{subject}: leaf {leaf!r}: an integer of {value.bit_length()} bits, expected at most 64")
    return np.asarray(value, dtype)


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


def _layout(shard: Sequence[_Tensor], to_come: _ToCome, metadata: Mapping[str, str]) -> SegmentLayout:
    """One file: its head, and its tensors in bands, each read when its turn comes."""
    entries, at = list[Tensor](), 0
    for tensor in shard:
        entries.append(Tensor(tensor.name, _DTYPES[tensor.dtype.name], tensor.shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    head = encode_header(entries, metadata)
    chunks = []
    for number, (tensor, entry) in enumerate(zip(shard, entries, strict=True)):
        start = len(head) + entry.start
        for source in _bands(tensor, to_come):
            chunks.append(PlacedChunk(number, source, start, source.data.nbytes))
            start += source.data.nbytes
    return SegmentLayout(head, chunks, len(head) + at)


def _bands(tensor: _Tensor, to_come: _ToCome) -> Iterator[ChunkSource]:
    if not tensor.nbytes:
        return
    if isinstance(tensor.content, np.ndarray):
        yield ChunkSource((), tensor.content)
        return
    boxes = list(cut_box(full_box(tensor.shape), tensor.dtype.itemsize, BAND_BYTES))
    yield from (ChunkSource(*each) for each in zip(boxes, to_come(tensor.content, boxes), strict=True))
