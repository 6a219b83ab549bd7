"""Opens distributed checkpoints of PyTorch, the directories that `torch.distributed.checkpoint` writes.

`.metadata` is decoded and checked without PyTorch, and never runs code. Only `TorchItems` imports PyTorch, to read the
content of tensors and other objects.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    NotACheckpointError,
    SettingsError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.formats.foreign import (
    NAME,
    ForeignCheckpoint,
    ForeignTree,
    PieceCache,
    PlainTree,
    Segments,
    array_record,
    few,
    foreign_call,
    linked,
    make_foreign_checkpoint,
    mapping_key,
)
from jaxckpt_train.formats.step_folders import TORCH_METADATA as METADATA
from jaxckpt_train.formats.step_folders import TORCH_SUFFIX as SUFFIX
from jaxckpt_train.formats.torch_pickle import DTYPE, Record, is_record, numbers_of, read_metadata_pickle
from jaxckpt_train.pytree.leaves import MAX_DEPTH, ROOT, ArrayLeaf, TreeRecord, join, key_text
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.boxes import Box, box_elements, check_tiling
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import MAX_ARRAYS, ArrayRecord, is_plain_name, shown
from jaxckpt_train.store.segment import DTYPES, LIMIT, MAX_DIMENSIONS
from jaxckpt_train.store.threads import paused_collection

# Dtypes for which PyTorch and ml_dtypes have the same name and bytes. Quantised dtypes and those below 8 bits are left
# out.
KNOWN_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
)
OLDEST = (2, 8)  # `weights_only=True` can be made to run code in versions before 2.6
KIND = "PyTorch"
MAX_METADATA_BYTES = 512 << 20
DECODING = 1  # PyTorch decodes a piece before it is copied to its place
_log = logging.getLogger("jaxckpt_train")


def looks_like_torch(entries: Sequence[Entry]) -> bool:
    """Return whether a directory has a distributed checkpoint of PyTorch, finished or not."""
    return any(entry.name.endswith(SUFFIX) for entry in entries)


def open_torch(backend: Backend, directory: str, entries: Sequence[Entry]) -> ForeignCheckpoint:
    """Open a distributed checkpoint. Raises CorruptCheckpointError if it is damaged, or its metadata would run code."""
    if is_url(directory):
        raise NotACheckpointError(
            f"{directory}: expected a checkpoint that can be read from a URL, found one of PyTorch, which is read from "
            "local files only: download its folder, and pass the path of the copy"
        )
    if all(entry.name != METADATA for entry in entries):
        raise NotACheckpointError(f"{directory}: expected a finished save of PyTorch, found one without {METADATA}")
    data = read_whole(backend, *linked(f"{directory}/{METADATA}"), MAX_METADATA_BYTES)
    metadata = decode_torch_metadata(data.tobytes(), f"{directory}/{METADATA}")
    _check_files(backend, directory, metadata)
    items = TorchItems(directory)
    paths = {name: _leaf_path(name, metadata.paths) for name in (*metadata.tensors, *metadata.objects)}
    if len(set(paths.values())) != len(paths):
        raise CorruptCheckpointError(f"{directory}/{METADATA}: expected different keys, found the same ones twice")
    segments, cache = Segments(), PieceCache()
    arrays = [
        _tensor_record(f"{directory}: leaf {paths[name]!r}", paths[name], tensor, items, segments, cache)
        for name, tensor in metadata.tensors.items()
    ]
    objects, left_out = _read_objects(directory, metadata, paths, items)
    arrays += [segments.hold(leaf, array) for leaf, array in objects.arrays.items()]
    leaves = {paths[name]: ArrayLeaf("numpy") for name in metadata.tensors} | objects.leaves
    record = TreeRecord(_lists(metadata, paths, left_out) | objects.containers, leaves)
    parts = {NAME: ForeignTree(record, arrays)}
    return make_foreign_checkpoint(KIND, directory, parts, segments, decoding=DECODING)


def _check_files(backend: Backend, directory: str, metadata: TorchMetadata) -> None:
    """Check that each file exists, and contains everything that the metadata assigns to it."""
    ends: dict[str, int] = {}
    pieces = [item for tensor in metadata.tensors.values() for item in tensor.pieces.values()]
    for item in (*pieces, *metadata.objects.values()):
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for file, end in ends.items():
        try:
            source = backend.open(*linked(f"{directory}/{file}"), direct=False)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CorruptCheckpointError(f"{directory}/{file}: does not exist, but {METADATA} names it") from error
        source.close()
        if source.size < end:
            found = f"expected at least the {end} bytes of {METADATA}, found {source.size}"
            raise CorruptCheckpointError(f"{directory}/{file}: {found}")


def _leaf_path(name: str, paths: Mapping[str, tuple[str | int, ...]]) -> str:
    """Return the leaf path of a tensor or object: its recorded keys, otherwise its name as a single key."""
    if name not in paths:
        return key_text(name, ROOT)
    path = ROOT
    for key in paths[name]:
        path = join(path, mapping_key(str(key), path))
    return path


def _tensor_record(
    subject: str, leaf: str, tensor: Tensor, items: TorchItems, segments: Segments, cache: PieceCache
) -> ArrayRecord:
    def read(box: Box, target: np.ndarray) -> None:
        items.read_tensor(tensor.pieces[box], tensor.dtype, target)

    chunks = segments.decode(subject, DTYPES[tensor.dtype], list(tensor.pieces), read, cache)
    return array_record(leaf, tensor.shape, tensor.dtype, chunks)


class _Objects(PlainTree):
    def __init__(self, directory: str, items: TorchItems) -> None:
        super().__init__(directory)
        self._items = items

    def _decoded(self, path: str, value: Any) -> Any:
        array = self._items.array(value)
        return value if array is None else array


def _read_objects(
    directory: str, metadata: TorchMetadata, paths: Mapping[str, str], items: TorchItems
) -> tuple[PlainTree, dict[str, str]]:
    """Read all objects that are not tensors, which are part of the tree, and return why some were left out."""
    found, left_out = _Objects(directory, items), dict[str, str]()
    values = items.values(list(metadata.objects.values())) if metadata.objects else {}
    for name, value in values.items():
        path, inner = paths[name], _Objects(directory, items)
        try:
            if isinstance(value, UnsupportedLeafError):
                raise value
            inner.add(path, value)
        except UnsupportedLeafError as error:
            left_out[path] = str(error).removeprefix(f"{directory}: ")
        else:
            found.leaves |= inner.leaves
            found.containers |= inner.containers
            found.arrays |= inner.arrays
    if left_out:
        reasons = few([f"{path} ({why})" for path, why in left_out.items()], "; ")
        _log.warning("%s: left out objects that are not plain data: %s", directory, reasons)
    return found, left_out


def _lists(metadata: TorchMetadata, paths: Mapping[str, str], left_out: Mapping[str, str]) -> dict[str, str]:
    """Return the lists among the containers. A list becomes a mapping if some of its positions are not saved."""
    children: dict[str, set[int]] = {}
    for name, keys in metadata.paths.items():
        if paths[name] in left_out:
            continue
        texts = paths[name].split("/")
        for depth, key in enumerate(keys):
            if isinstance(key, int):
                children.setdefault("/".join(texts[:depth]) or ROOT, set()).add(key)
    return {path: "list" for path, found in children.items() if found == set(range(len(found)))}


class Item(NamedTuple):
    """A tensor or object in a file of the checkpoint. All but `name` are called as in PyTorch's reader."""

    name: str
    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]  # such as compression


class Tensor(NamedTuple):
    """A tensor. Its pieces tile it, and none of them is empty."""

    shape: tuple[int, ...]
    dtype: str
    pieces: dict[Box, Item]


class TorchMetadata(NamedTuple):
    """The content of a checkpoint, by name."""

    tensors: dict[str, Tensor]
    objects: dict[str, Item]
    paths: dict[str, tuple[str | int, ...]]  # the keys that lead to each, if recorded; integers are positions in a list


def decode_torch_metadata(data: bytes, path: str) -> TorchMetadata:
    """Decode the content of `.metadata` without running anything that it names."""
    with paused_collection():
        return _check_metadata(read_metadata_pickle(data, path), path)


def _check_metadata(metadata: Record, path: str) -> TorchMetadata:
    entries, items = (_mapping(metadata, name, path) for name in ("state_dict_metadata", "storage_data"))
    if len(entries) > MAX_ARRAYS or len(items) > MAX_ARRAYS:
        most = max(len(entries), len(items))
        raise CorruptCheckpointError(f"{path}: expected at most {MAX_ARRAYS:,} tensors and pieces, found {most:,}")
    found = TorchMetadata({}, {}, {})
    for name, entry in entries.items():
        subject = f"{path}: {shown(name)}"
        if isinstance(name, str) and is_record(entry, "TensorStorageMetadata"):
            found.tensors[name] = _tensor(name, entry, items, subject)
        elif isinstance(name, str) and is_record(entry, "BytesStorageMetadata"):
            found.objects[name] = _item(name, items.get((name, None)), subject)
        else:
            raise CorruptCheckpointError(f"{subject}: expected the name of a tensor or an object, found neither")
    keys = metadata.get("planner_data")  # where the planner of the save has recorded them in its usual form
    for name in entries if isinstance(keys, dict) else ():
        if _is_path(keys.get(name)):
            found.paths[name] = tuple(keys[name])
    return found


def _mapping(metadata: Record, name: str, path: str) -> dict[Any, Any]:
    found = metadata.get(name)
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path}: expected PyTorch metadata with {name}, found none")
    return found


def _tensor(name: str, entry: Record, items: Mapping[Any, Any], subject: str) -> Tensor:
    shape, chunks = _numbers(entry.get("size"), subject), entry.get("chunks")
    if not isinstance(chunks, list):
        raise CorruptCheckpointError(f"{subject}: expected a list of chunks, found {type(chunks).__name__}")
    pieces: dict[Box, Item] = {}
    for chunk in chunks:
        if not is_record(chunk, "ChunkStorageMetadata"):
            raise CorruptCheckpointError(f"{subject}: expected chunks, found {type(chunk).__name__}")
        offsets, sizes = _numbers(chunk.get("offsets"), subject), _numbers(chunk.get("sizes"), subject)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptCheckpointError(f"{subject}: expected chunks of {len(shape)} dimensions, found another number")
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if box_elements(box):  # a process may hold no element of a tensor
            item = items.get((name, offsets))
            pieces[box] = _item(name, items.get((name, None)) if item is None and len(chunks) == 1 else item, subject)
    if pieces or 0 not in shape:
        check_tiling(list(pieces), shape, subject)
    properties = entry.get("properties")
    state = properties.state if is_record(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not is_record(dtype, DTYPE):
        raise CorruptCheckpointError(f"{subject}: expected a dtype, found {type(dtype).__name__}")
    if dtype.arguments[0] not in KNOWN_DTYPES:
        raise FormatVersionError(f"{subject}: has the unsupported dtype {dtype.arguments[0]}")
    return Tensor(shape, str(dtype.arguments[0]), pieces)


def _numbers(found: Any, subject: str) -> tuple[int, ...]:
    try:
        numbers = numbers_of(found)
    except ValueError as error:
        raise CorruptCheckpointError(f"{subject}: {error}") from error
    if len(numbers) > MAX_DIMENSIONS:
        raise CorruptCheckpointError(f"{subject}: expected a shape, found {len(numbers)} dimensions")
    return tuple(_number(number, subject) for number in numbers)


def _number(found: Any, subject: str) -> int:
    if type(found) is not int or not 0 <= found < LIMIT:
        what = shown(found) if type(found) is int else type(found).__name__
        raise CorruptCheckpointError(f"{subject}: expected a size or an offset, found {what}")
    return found


def _item(name: str, found: Any, subject: str) -> Item:
    if not is_record(found, "_StorageInfo"):
        raise CorruptCheckpointError(f"{subject}: expected its position in a file, found none")
    file, transforms = found.get("relative_path"), found.get("transform_descriptors") or ()
    if not isinstance(file, str) or not is_plain_name(file):
        what = shown(file) if isinstance(file, str) else type(file).__name__
        raise CorruptCheckpointError(f"{subject}: expected a file of this directory, found {what}")
    if not isinstance(transforms, tuple | list) or not all(isinstance(each, str) for each in transforms):
        raise CorruptCheckpointError(f"{subject}: expected names of transformations, found something else")
    offset, length = _number(found.get("offset"), subject), _number(found.get("length"), subject)
    return Item(name, file, offset, length, tuple(transforms))


def _is_path(keys: Any) -> bool:
    if not isinstance(keys, tuple | list) or not 0 < len(keys) <= MAX_DEPTH:
        return False
    return all(isinstance(key, str) or (type(key) is int and key >= 0) for key in keys)


class TorchItems:
    """Reads single tensors and objects through PyTorch. Raises SettingsError if it is not installed, or too old."""

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

    def read_tensor(self, item: Item, dtype: str, target: np.ndarray) -> None:
        """Read a piece of a tensor into a row-major array."""
        flat = self._torch.from_numpy(target.reshape(-1).view(np.uint8))
        tensor = flat.view(getattr(self._torch, dtype)).reshape(target.shape)
        self._read([item], self._planner.LoadItemType.TENSOR, target.shape, _IntoTensor(tensor))

    def values(self, items: Sequence[Item]) -> Mapping[str, Any]:
        """Return objects that are not tensors, by name: plain data with tensors in it, or an UnsupportedLeafError."""
        found: dict[str, Any] = {}
        self._read(items, self._planner.LoadItemType.BYTE_IO, (), _Values(self._torch, self._directory, found))
        return found

    def array(self, value: Any) -> np.ndarray | None:
        """Return a tensor inside an object as an array, or None if it is not a tensor or has an unsupported dtype."""
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        is_tensor = isinstance(value, self._torch.Tensor) and dtype in KNOWN_DTYPES
        if not is_tensor or value.layout != self._torch.strided:
            return None
        data = np.empty(tuple(value.shape), DTYPES[dtype])
        flat = self._torch.from_numpy(data.reshape(-1).view(np.uint8))
        flat.view(value.dtype).reshape(value.shape).copy_(value.detach())
        return data

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
    """The part of PyTorch's `LoadPlanner` that gives the reader the tensor to fill."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def resolve_tensor(self, read_item: Any) -> Any:
        return self._target

    def commit_tensor(self, read_item: Any, tensor: Any) -> None: ...


class _Values:
    """Decodes objects as plain data. PyTorch's own planner would construct whatever class an object names."""

    def __init__(self, torch: Any, directory: str, found: dict[str, Any]) -> None:
        self._torch, self._directory, self._found = torch, directory, found

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self._found[name] = self._torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # a foreign parser may raise anything
            unknown = self._unsafe_names(value)
            if not unknown:
                raise CorruptCheckpointError(f"{self._directory}: {name!r} cannot be read: {shown(error)}") from error
            self._found[name] = UnsupportedLeafError(f"loading it would call {shown(', '.join(unknown))}")

    def _unsafe_names(self, value: io.BytesIO) -> list[str]:
        """Return the names in an object that PyTorch does not consider plain data."""
        value.seek(0)
        try:
            return sorted(self._torch.serialization.get_unsafe_globals_in_checkpoint(value))
        except Exception:  # noqa: BLE001  # a foreign parser; in a damaged object it finds no names
            return []
