"""What `.metadata` says of a checkpoint of PyTorch, checked: its tensors, its other objects, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxckpt_train.errors import CorruptCheckpointError, FormatVersionError
from jaxckpt_train.formats.torch_pickle import (
    BytesEntry,
    Chunk,
    Dtype,
    Index,
    Metadata,
    Properties,
    Size,
    Stored,
    TensorEntry,
    read_metadata_pickle,
)
from jaxckpt_train.store.array_bounds import LIMIT
from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.manifest import MAX_ARRAYS, is_plain_name, shown
from jaxckpt_train.store.quiet_gc import paused_collection
from jaxckpt_train.store.segment import MAX_DIMENSIONS
from jaxckpt_train.store.tiling import check_tiling
from jaxckpt_train.tree.paths import MAX_DEPTH

# Names of dtypes that PyTorch and ml_dtypes give to the same bytes. Not so quantised ones and those below 8 bits.
KNOWN_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
)


class Item(NamedTuple):
    """Something in a file of the checkpoint. The fields after the first are named as PyTorch's reader asks for them.

    Attributes:
        name: of the tensor or object.
        relative_path: the file.
        offset: of its first byte.
        length: in bytes.
        transform_descriptors: how its bytes were changed, such as compressed.
    """

    name: str
    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


class Tensor(NamedTuple):
    """A tensor: its pieces tile it, and none is empty."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[Box, Item], ...]


class TorchMetadata(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        tensors: by their names.
        objects: what is no tensor, by its name.
        paths: the keys that lead to a tensor or object, by its name; integers are positions of a list. Those that are
            not told are not here.
    """

    tensors: dict[str, Tensor]
    objects: dict[str, Item]
    paths: dict[str, tuple[str | int, ...]]


def decode_torch_metadata(data: bytes, path: str) -> TorchMetadata:
    """The content of `.metadata`; nothing that it names is run.

    Raises:
        CorruptCheckpointError: it is not what PyTorch writes, or contradicts itself.
        FormatVersionError: a tensor is of a dtype that is not known here.
    """
    with paused_collection():
        return _decoded(read_metadata_pickle(data, path), path)


def _decoded(metadata: Metadata, path: str) -> TorchMetadata:
    entries, stored = _mapping(metadata, "state_dict_metadata", path), _mapping(metadata, "storage_data", path)
    if len(entries) > MAX_ARRAYS or len(stored) > MAX_ARRAYS:
        raise CorruptCheckpointError(f"{path}: more than {MAX_ARRAYS:,} tensors or pieces, expected fewer")
    items = {index.key: place for index, place in stored.items() if isinstance(index, Index)}
    found = TorchMetadata({}, {}, {})
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise CorruptCheckpointError(f"{path}: a {type(name).__name__} among the names, expected text")
        if isinstance(entry, TensorEntry):
            found.tensors[name] = _tensor(name, entry, items, f"{path}: tensor {shown(name)}")
        elif isinstance(entry, BytesEntry):
            found.objects[name] = _item(name, items.get((name, None)), f"{path}: object {shown(name)}")
        else:
            raise CorruptCheckpointError(f"{path}: {shown(name)} is neither a tensor nor an object")
    found.paths.update(_paths(metadata.get("planner_data"), entries))
    return found


def _mapping(metadata: Metadata, name: str, path: str) -> dict[Any, Any]:
    found = metadata.get(name)
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path}: expected metadata of PyTorch with {name}, found none")
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
            raise CorruptCheckpointError(f"{subject}: of {len(shape)} dimensions, but a chunk has other ones")
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if box_elements(box):  # a process may have none of a tensor
            pieces[box] = _item(name, _place(name, offsets, items, len(chunks)), subject)
    full = tuple((0, size) for size in shape)
    if box_elements(full) or pieces:
        check_tiling(list(pieces), shape, subject)
    return Tensor(shape, _dtype(entry, subject), tuple(pieces.items()))


def _place(name: str, offsets: tuple[int, ...], items: Mapping[Any, Any], chunks: int) -> Any:
    place = items.get((name, offsets))
    return items.get((name, None)) if place is None and chunks == 1 else place


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
        raise CorruptCheckpointError(f"{subject}: expected a size or a place, found {what}")
    return found


def _dtype(entry: TensorEntry, subject: str) -> str:
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, Properties) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Dtype):
        raise CorruptCheckpointError(f"{subject}: expected a dtype, found {type(dtype).__name__}")
    if dtype.arguments[0] not in KNOWN_DTYPES:
        raise FormatVersionError(f"{subject}: of dtype {dtype.arguments[0]}, which is not known here")
    return str(dtype.arguments[0])


def _item(name: str, found: Any, subject: str) -> Item:
    if not isinstance(found, Stored):
        raise CorruptCheckpointError(f"{subject}: it is not said where it lies")
    file, transforms = found.get("relative_path"), found.get("transform_descriptors") or ()
    if not isinstance(file, str) or not is_plain_name(file):
        what = shown(file) if isinstance(file, str) else type(file).__name__
        raise CorruptCheckpointError(f"{subject}: lies in {what}, expected a file of this directory")
    if not isinstance(transforms, tuple | list) or not all(isinstance(each, str) for each in transforms):
        raise CorruptCheckpointError(f"{subject}: expected names of transformations, found others")
    offset, length = _number(found.get("offset"), subject), _number(found.get("length"), subject)
    return Item(name, file, offset, length, tuple(transforms))


def _paths(found: Any, entries: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """The keys that lead to each entry, as far as the planner of the save has told them in its usual form."""
    if not isinstance(found, dict):
        return {}
    return {name: tuple(keys) for name, keys in found.items() if name in entries and _is_path(keys)}


def _is_path(keys: Any) -> bool:
    if not isinstance(keys, tuple | list) or not 0 < len(keys) <= MAX_DEPTH:
        return False
    return all(isinstance(key, str) or (type(key) is int and key >= 0) for key in keys)
