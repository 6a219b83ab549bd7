"""Opens distributed checkpoints of PyTorch, the directories that `torch.distributed.checkpoint` writes.

`.metadata` is decoded and checked without PyTorch, and never runs code. Only `TorchItems` imports PyTorch, to read the
content of tensors and other objects.
"""

from __future__ import annotations

import errno
import functools
import importlib
import io
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxckpt_train.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    NotACheckpointError,
    SettingsError,
    StorageError,
)
from jaxckpt_train.formats.foreign import (
    CachedPiece,
    ForeignCheckpoint,
    ForeignSegment,
    ForeignTree,
    MemorySource,
    RecentPieces,
    array_record,
    foreign_call,
    make_foreign_checkpoint,
)
from jaxckpt_train.formats.step_folders import TORCH_METADATA as METADATA
from jaxckpt_train.formats.step_folders import TORCH_SUFFIX as SUFFIX
from jaxckpt_train.formats.torch_pickle import (
    BytesEntry,
    Chunk,
    Dtype,
    Index,
    Metadata,
    ObjectLeaves,
    Properties,
    Refused,
    Size,
    Stored,
    TensorEntry,
    read_metadata_pickle,
)
from jaxckpt_train.pytree.leaves import ArrayLeaf, LeafRecord, TreeRecord
from jaxckpt_train.pytree.paths import MAX_DEPTH, ROOT, join, key_text
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.backends.local_names import real_path
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, check_tiling, full_box
from jaxckpt_train.store.dtypes import DTYPES, dtype_name
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import BLOCK_BYTES, MAX_ARRAYS, ArrayRecord, ChunkRecord, is_plain_name, shown
from jaxckpt_train.store.process_identity import memory_bytes
from jaxckpt_train.store.segment import LIMIT, MAX_DIMENSIONS
from jaxckpt_train.store.threads import paused_collection

# Dtypes for which PyTorch and ml_dtypes have the same name and bytes. Quantised dtypes and those below 8 bits are left
# out.
KNOWN_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
)
OLDEST = (2, 8)  # `weights_only=True` can be made to run code in versions before 2.6
KIND, NAME = "PyTorch", "state"
MAX_METADATA_BYTES = 512 << 20
MAX_LISTED = 5
_log = logging.getLogger("jaxckpt_train")


def looks_like_torch(entries: Sequence[Entry]) -> bool:
    """Return whether a directory has the names of a distributed checkpoint of PyTorch, finished or not."""
    return any(entry.name.endswith(SUFFIX) for entry in entries)


def open_torch(backend: Backend, directory: str, entries: Sequence[Entry]) -> ForeignCheckpoint:
    """Open a distributed checkpoint.

    Args:
        backend: the storage.
        directory: the directory of the checkpoint.
        entries: its entries.

    Raises:
        NotACheckpointError: its save has not finished.
        CorruptCheckpointError: it is damaged, or its metadata would run code.
        FormatVersionError: the dtype of a tensor is not supported.
        SettingsError: PyTorch is not installed.
        StorageError: it cannot be read.
    """
    if all(entry.name != METADATA for entry in entries):
        raise NotACheckpointError(
            f"{directory}: expected a finished distributed checkpoint of PyTorch, found its files without {METADATA}, "
            "which is written last"
        )
    data = read_whole(backend, *_folder_and_name(f"{directory}/{METADATA}"), MAX_METADATA_BYTES)
    metadata = decode_torch_metadata(data.tobytes(), f"{directory}/{METADATA}")
    _check_files(backend, directory, metadata)
    items = TorchItems(directory)
    paths = {name: _leaf_path(name, metadata.paths) for name in (*metadata.tensors, *metadata.objects)}
    if len(set(paths.values())) != len(paths):
        raise CorruptCheckpointError(f"{directory}/{METADATA}: expected different keys, found the same ones twice")
    found, recent = _Found({}, [], []), RecentPieces()
    for name, tensor in metadata.tensors.items():
        found.leaves[paths[name]] = ArrayLeaf("numpy")
        found.arrays.append(_tensor_record(paths[name], tensor, items, recent, found.segments, directory))
    objects = _read_objects(directory, metadata, paths, items)
    for path, array in objects.arrays.items():
        found.arrays.append(_memory_record(path, array, found.segments))
    record = TreeRecord(_lists(metadata, paths, objects) | objects.containers, found.leaves | objects.leaves)
    return make_foreign_checkpoint(
        KIND, directory, {NAME: ForeignTree(record, found.arrays)}, found.segments, block_bytes=BLOCK_BYTES
    )


class _Found(NamedTuple):
    """The content of a checkpoint that has been opened so far."""

    leaves: dict[str, LeafRecord]
    arrays: list[ArrayRecord]
    segments: list[ForeignSegment]


def _folder_and_name(path: str) -> tuple[str, str]:
    """Return the directory and the name of a file, after following a symbolic link."""
    folder, _, name = real_path(path).rpartition("/")
    return folder or "/", name


def _check_files(backend: Backend, directory: str, metadata: TorchMetadata) -> None:
    """Check that each file exists, and contains everything that the metadata assigns to it."""
    ends: dict[str, int] = {}
    pieces = [item for tensor in metadata.tensors.values() for _, item in tensor.pieces]
    for item in (*pieces, *metadata.objects.values()):
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for file, end in ends.items():
        try:
            source = backend.open(*_folder_and_name(f"{directory}/{file}"), direct=False)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CorruptCheckpointError(
                f"{directory}/{file}: {METADATA} names this file, but it does not exist"
            ) from error
        source.close()
        if source.size < end:
            raise CorruptCheckpointError(
                f"{directory}/{file}: expected at least the {end} bytes of {METADATA}, found {source.size}"
            )


def _leaf_path(name: str, paths: Mapping[str, tuple[str | int, ...]]) -> str:
    """Return the leaf path of a tensor or object: its recorded keys, otherwise its name as a single key.

    PyTorch saves all keys of mappings as text. A key of digits becomes an integer again, as in states of optimizers.
    """
    if name not in paths:
        return key_text(name, ROOT)
    path = ROOT
    for key in paths[name]:
        is_integer = isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key)) == key
        path = join(path, str(key) if is_integer else key_text(key, path))
    return path


def _tensor_record(
    path: str, tensor: Tensor, items: TorchItems, recent: RecentPieces, segments: list[ForeignSegment], directory: str
) -> ArrayRecord:
    chunks = []
    for box, item in tensor.pieces:
        size = box_elements(box) * DTYPES[tensor.dtype].itemsize
        read = functools.partial(items.tensor, item, box, tensor.dtype)
        piece = CachedPiece(f"{directory}: leaf {path!r}", size, read, recent)
        chunks.append(ChunkRecord(box, len(segments), 0, size, ""))
        segments.append(ForeignSegment(f"{item.relative_path}/{len(segments):06d}", size, piece.open))
    return array_record(path, tensor.shape, tensor.dtype, tuple(chunks))


def _memory_record(path: str, array: np.ndarray, segments: list[ForeignSegment]) -> ArrayRecord:
    """Return the record of an array in memory, and add its segment."""
    data, name = array.tobytes(), f"objects/{len(segments):06d}"
    chunk = ChunkRecord(full_box(array.shape), len(segments), 0, len(data), "")
    segments.append(ForeignSegment(name, len(data), lambda direct: MemorySource(name, data)))
    return array_record(path, array.shape, dtype_name(array.dtype), (chunk,))


def _read_objects(directory: str, metadata: TorchMetadata, paths: Mapping[str, str], items: TorchItems) -> ObjectLeaves:
    """Read the objects that are not tensors. All of them are read at once, because they are part of the tree."""
    found = ObjectLeaves(directory, items.array)
    for name, value in items.values(list(metadata.objects.values())).items() if metadata.objects else ():
        found.add(paths[name], value)
    left_out = [f"{path} ({why})" for path, why in found.left_out.items()]
    if left_out:
        more = f", and {len(left_out) - MAX_LISTED} more" if len(left_out) > MAX_LISTED else ""
        _log.warning(
            "%s: left out objects that are not plain data: %s%s", directory, "; ".join(left_out[:MAX_LISTED]), more
        )
    return found


def _lists(metadata: TorchMetadata, paths: Mapping[str, str], objects: ObjectLeaves) -> dict[str, str]:
    """Return the lists among the containers. A list becomes a mapping if some of its positions are not saved."""
    children: dict[str, set[int]] = {}
    for name, keys in metadata.paths.items():
        if paths[name] in objects.left_out:
            continue
        texts = paths[name].split("/")
        for depth, key in enumerate(keys):
            if isinstance(key, int):
                children.setdefault("/".join(texts[:depth]) or ROOT, set()).add(key)
    return {path: "list" for path, found in children.items() if found == set(range(len(found)))}


class Item(NamedTuple):
    """A tensor or object in a file of the checkpoint. The last four fields have the names that PyTorch's reader uses.

    Attributes:
        name: the name of the tensor or object.
        relative_path: the file.
        offset: the position of its first byte.
        length: its size in bytes.
        transform_descriptors: the transformations of its bytes, such as compression.
    """

    name: str
    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


class Tensor(NamedTuple):
    """A tensor. Its pieces tile it, and none of them is empty."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[Box, Item], ...]


class TorchMetadata(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        tensors: the tensors by name.
        objects: everything else by name.
        paths: the keys that lead to a tensor or object, by name. Integers are positions in a list. A name is absent if
            the metadata does not record its keys.
    """

    tensors: dict[str, Tensor]
    objects: dict[str, Item]
    paths: dict[str, tuple[str | int, ...]]


def decode_torch_metadata(data: bytes, path: str) -> TorchMetadata:
    """Decode the content of `.metadata` without running anything that it names.

    Raises:
        CorruptCheckpointError: it is not metadata of PyTorch, or contradicts itself.
        FormatVersionError: the dtype of a tensor is not supported.
    """
    with paused_collection():
        return _check_metadata(read_metadata_pickle(data, path), path)


def _check_metadata(metadata: Metadata, path: str) -> TorchMetadata:
    entries, stored = _mapping(metadata, "state_dict_metadata", path), _mapping(metadata, "storage_data", path)
    if len(entries) > MAX_ARRAYS or len(stored) > MAX_ARRAYS:
        most = max(len(entries), len(stored))
        raise CorruptCheckpointError(f"{path}: expected at most {MAX_ARRAYS:,} tensors and pieces, found {most:,}")
    items = {index.key: position for index, position in stored.items() if isinstance(index, Index)}
    found = TorchMetadata({}, {}, {})
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise CorruptCheckpointError(f"{path}: expected names as text, found {type(name).__name__}")
        if isinstance(entry, TensorEntry):
            found.tensors[name] = _tensor(name, entry, items, f"{path}: tensor {shown(name)}")
        elif isinstance(entry, BytesEntry):
            found.objects[name] = _item(name, items.get((name, None)), f"{path}: object {shown(name)}")
        else:
            raise CorruptCheckpointError(f"{path}: expected a tensor or an object as {shown(name)}, found neither")
    found.paths.update(_key_paths(metadata.get("planner_data"), entries))
    return found


def _mapping(metadata: Metadata, name: str, path: str) -> dict[Any, Any]:
    found = metadata.get(name)
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path}: expected PyTorch metadata with {name}, found none")
    return found


def _tensor(name: str, entry: TensorEntry, items: Mapping[Any, Any], subject: str) -> Tensor:
    shape, chunks = _numbers(entry.get("size"), subject), entry.get("chunks")
    if not isinstance(chunks, list):
        raise CorruptCheckpointError(f"{subject}: expected a list of chunks, found {type(chunks).__name__}")
    pieces: dict[Box, Item] = {}
    for chunk in chunks:
        if not isinstance(chunk, Chunk):
            raise CorruptCheckpointError(f"{subject}: expected chunks, found {type(chunk).__name__}")
        offsets, sizes = _numbers(chunk.get("offsets"), subject), _numbers(chunk.get("sizes"), subject)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptCheckpointError(f"{subject}: expected chunks of {len(shape)} dimensions, found another number")
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if box_elements(box):  # a process may hold no element of a tensor
            pieces[box] = _item(name, _chunk_item(name, offsets, items, len(chunks)), subject)
    full = tuple((0, size) for size in shape)
    if box_elements(full) or pieces:
        check_tiling(list(pieces), shape, subject)
    return Tensor(shape, _dtype(entry, subject), tuple(pieces.items()))


def _chunk_item(name: str, offsets: tuple[int, ...], items: Mapping[Any, Any], chunks: int) -> Any:
    item = items.get((name, offsets))
    return items.get((name, None)) if item is None and chunks == 1 else item


def _numbers(found: Any, subject: str) -> tuple[int, ...]:
    try:
        numbers = found.numbers if isinstance(found, Size) else None
    except ValueError as error:
        raise CorruptCheckpointError(f"{subject}: {error}") from error
    if numbers is None or len(numbers) > MAX_DIMENSIONS:
        raise CorruptCheckpointError(f"{subject}: expected a shape, found {type(found).__name__}")
    return tuple(_number(number, subject) for number in numbers)


def _number(found: Any, subject: str) -> int:
    if type(found) is not int or not 0 <= found < LIMIT:
        what = shown(found) if type(found) is int else type(found).__name__
        raise CorruptCheckpointError(f"{subject}: expected a size or an offset, found {what}")
    return found


def _dtype(entry: TensorEntry, subject: str) -> str:
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, Properties) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Dtype):
        raise CorruptCheckpointError(f"{subject}: expected a dtype, found {type(dtype).__name__}")
    if dtype.arguments[0] not in KNOWN_DTYPES:
        raise FormatVersionError(f"{subject}: has the unsupported dtype {dtype.arguments[0]}")
    return str(dtype.arguments[0])


def _item(name: str, found: Any, subject: str) -> Item:
    if not isinstance(found, Stored):
        raise CorruptCheckpointError(f"{subject}: expected its position in a file, found none")
    file, transforms = found.get("relative_path"), found.get("transform_descriptors") or ()
    if not isinstance(file, str) or not is_plain_name(file):
        what = shown(file) if isinstance(file, str) else type(file).__name__
        raise CorruptCheckpointError(f"{subject}: expected a file of this directory, found {what}")
    if not isinstance(transforms, tuple | list) or not all(isinstance(each, str) for each in transforms):
        raise CorruptCheckpointError(f"{subject}: expected names of transformations, found something else")
    offset, length = _number(found.get("offset"), subject), _number(found.get("length"), subject)
    return Item(name, file, offset, length, tuple(transforms))


def _key_paths(found: Any, entries: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """Return the keys that lead to each entry, where the planner of the save has recorded them in its usual form."""
    if not isinstance(found, dict):
        return {}
    return {name: tuple(keys) for name, keys in found.items() if name in entries and _is_path(keys)}


def _is_path(keys: Any) -> bool:
    if not isinstance(keys, tuple | list) or not 0 < len(keys) <= MAX_DEPTH:
        return False
    return all(isinstance(key, str) or (type(key) is int and key >= 0) for key in keys)


class TorchItems:
    """Reads single tensors and objects through PyTorch.

    Args:
        directory: the directory of the checkpoint.

    Raises:
        SettingsError: PyTorch is not installed, or too old.
    """

    def __init__(self, directory: str) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
            self._planner: Any = importlib.import_module("torch.distributed.checkpoint.planner")
        except ImportError as error:
            raise SettingsError(
                f"{directory}: reading a distributed checkpoint of PyTorch needs PyTorch, which cannot be imported "
                f"({shown(error)}): pip install 'jaxckpt-train[torch]', or pip install torch"
            ) from error
        version = str(self._torch.__version__)
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
            raise SettingsError(f"{directory}: expected PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, found {version}")
        self._directory = directory

    def tensor(self, item: Item, box: Box, dtype: str) -> np.ndarray:
        """Return the bytes of a piece of a tensor, flat.

        Raises:
            CorruptCheckpointError: the piece is damaged.
            StorageError: the piece cannot be read, or does not fit into memory.
        """
        size = box_elements(box) * DTYPES[dtype].itemsize
        try:
            data = np.empty(size, np.uint8)
        except (MemoryError, ValueError) as error:
            problem = f"reading {item.name!r} needs {size} bytes, but this machine has {memory_bytes()} bytes of memory"
            raise StorageError(errno.ENOMEM, problem, self._directory) from error
        target = self._torch.from_numpy(data).view(getattr(self._torch, dtype)).reshape(box_shape(box))
        self._read([item], self._planner.LoadItemType.TENSOR, box_shape(box), _IntoTensor(target))
        return data

    def values(self, items: Sequence[Item]) -> Mapping[str, Any]:
        """Return objects that are not tensors, by name: plain data that may contain tensors, or a `Refused`.

        Raises:
            CorruptCheckpointError: an object is damaged.
            StorageError: an object cannot be read.
        """
        found: dict[str, Any] = {}
        self._read(items, self._planner.LoadItemType.BYTE_IO, (), _Values(self._torch, self._directory, found))
        return found

    def array(self, value: Any) -> np.ndarray | None:
        """Return a tensor inside an object as an array, or None if it is not a tensor or has an unsupported dtype."""
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        if (
            not isinstance(value, self._torch.Tensor)
            or dtype not in KNOWN_DTYPES
            or value.layout != self._torch.strided
        ):
            return None
        data = np.empty(value.numel() * DTYPES[dtype].itemsize, np.uint8)
        self._torch.from_numpy(data).view(value.dtype).reshape(value.shape).copy_(value.detach())
        return data.view(DTYPES[dtype]).reshape(tuple(value.shape))

    def _read(self, items: Sequence[Item], kind: Any, shape: tuple[int, ...], planner: Any) -> None:
        """Let PyTorch's reader read whole items. It must never read the metadata, because that would run its pickle."""
        size, index = self._torch.Size, self._checkpoint.metadata.MetadataIndex
        zeros = size([0] * len(shape))
        named = {index(item.name): item for item in items}
        reads = [self._planner.ReadItem(kind, key, zeros, key, zeros, size(shape)) for key in named]
        try:
            reader = self._checkpoint.FileSystemReader(self._directory)
            reader.set_up_storage_reader(self._checkpoint.metadata.Metadata({}, storage_data=named), True)
            with foreign_call():
                reader.read_data(self._planner.LoadPlan(reads), planner).wait()
        except (CorruptCheckpointError, StorageError, MemoryError):
            raise
        except OSError as error:
            raise StorageError(error.errno or 0, error.strerror or shown(error), self._directory) from error
        except Exception as error:  # a foreign parser may raise anything
            names = ", ".join(repr(item.name) for item in items[:3])
            raise CorruptCheckpointError(f"{self._directory}: {names} cannot be read: {shown(error)}") from error


class _IntoTensor:
    """The part of PyTorch's `LoadPlanner` that copies what the reader has read into a tensor."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def resolve_tensor(self, read_item: Any) -> Any:
        """Return the tensor to fill."""
        return self._target

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        """Do nothing: the reader has filled the tensor."""


class _Values:
    """The part of PyTorch's `LoadPlanner` that decodes objects as plain data.

    PyTorch's own planner would construct whatever class an object names, and run its code.
    """

    def __init__(self, torch: Any, directory: str, found: dict[str, Any]) -> None:
        self._torch, self._directory, self._found = torch, directory, found

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Decode one object."""
        name = read_item.dest_index.fqn
        try:
            self._found[name] = self._torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # a foreign parser may raise anything
            unknown = self._unsafe_names(value)
            if not unknown:
                raise CorruptCheckpointError(f"{self._directory}: {name!r} cannot be read: {shown(error)}") from error
            self._found[name] = Refused(f"loading it would call {shown(', '.join(unknown))}")

    def _unsafe_names(self, value: io.BytesIO) -> list[str]:
        """Return the names in an object that PyTorch does not consider plain data."""
        value.seek(0)
        try:
            return sorted(self._torch.serialization.get_unsafe_globals_in_checkpoint(value))
        except Exception:  # noqa: BLE001  # a foreign parser; in a damaged object it finds no names
            return []
