"""The msgpack format of `flax.training.checkpoints` and `flax.serialization.to_bytes`, also used by early Orbax."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedLeafError
from jaxckpt_train.formats.foreign import (
    NAME,
    ForeignCheckpoint,
    ForeignTree,
    PlainTree,
    Segments,
    few,
    make_foreign_checkpoint,
)
from jaxckpt_train.pytree.leaves import ROOT, StrLeaf, TreeRecord
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.files import SNIFFED_BYTES, other_content, read_whole
from jaxckpt_train.store.manifest import BLOCK_BYTES, NOT_JSON, shown
from jaxckpt_train.store.segment import DTYPES

KIND = "Flax"
ARRAYS_OF_A_JOB = "_gda"  # suffix of a directory with the arrays of several processes
_ELSEWHERE = "//GDAPlaceholder:"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types
_CHUNKED = "__msgpack_chunked_array__"
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 1 << 58
_STEP = re.compile(r"(?:.*_)?([0-9]{1,18})", re.DOTALL)


def open_flax(backend: Backend, path: str, *, is_checkpoint: bool) -> ForeignCheckpoint:
    """Open a Flax msgpack file. Other content is damage if `is_checkpoint`: a directory of Flax contains the file."""
    folder, _, name = path.rpartition("/")
    data = read_whole(backend, folder, name, limit=None)
    try:
        found = decode_msgpack(data)
    except NOT_JSON as error:
        other = other_content(bytes(data[:SNIFFED_BYTES])) or f"{type(error).__name__}: {error}"
        why = other if len(data) else "it is empty, perhaps after a full disk or a crash"
        what = f"found another file ({why})"
        if is_checkpoint:
            raise CorruptCheckpointError(f"{path}: expected a Flax msgpack file, {what}") from error
        if name.endswith(".json"):
            what = f"found a JSON file; pass the directory of the checkpoint, {folder or '/'}"
        raise NotACheckpointError(f"{path}: expected a checkpoint directory or a Flax msgpack file, {what}") from error
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path}: expected a Flax msgpack file of a map, found a {type(found).__name__}")
    tree, segments = _FlaxTree(path), Segments()
    tree.add(ROOT, found)
    _refuse_arrays_elsewhere(tree, path)
    arrays = [segments.hold(leaf, array) for leaf, array in tree.arrays.items()]
    step = _STEP.fullmatch(name)
    info = {} if step is None else {"step": int(step[1])}
    parts = {NAME: ForeignTree(TreeRecord(tree.containers, tree.leaves), arrays)}
    return make_foreign_checkpoint(KIND, path, parts, segments, block_bytes=BLOCK_BYTES, info=info)


def _refuse_arrays_elsewhere(tree: PlainTree, path: str) -> None:
    """Raise UnsupportedLeafError if Flax has saved arrays of several processes in a directory next to the file."""
    texts = [leaf.value for leaf in tree.leaves.values() if isinstance(leaf, StrLeaf)]
    names = [repr(text.removeprefix(_ELSEWHERE)) for text in texts if text.startswith(_ELSEWHERE)]
    if names:
        raise UnsupportedLeafError(
            f"{path}: cannot read {few(names)}: Flax has saved these arrays of several "
            f"processes in {path}{ARRAYS_OF_A_JOB}; restore them with Flax in a job with the same number of processes, "
            "and save the state with jaxckpt_train"
        )


def decode_msgpack(data: Any) -> Any:
    """Decode msgpack for a `MsgpackTree`. The content of arrays stays where it is in `data`. Raises as `NOT_JSON`."""
    return msgspec.msgpack.decode(memoryview(data), ext_hook=msgspec.msgpack.Ext)


class MsgpackTree(PlainTree):
    """The leaves of a tree with Flax's extensions of msgpack. All of its keys are text."""

    def _key_text(self, key: Any, parent: str) -> str:
        if not isinstance(key, str):
            raise CorruptCheckpointError(f"{self._subject}: below {parent!r}: expected text as map keys, found {key!r}")
        return super()._key_text(key, parent)

    def _decoded(self, path: str, value: Any) -> Any:
        subject = f"{self._subject}: leaf {path!r}"
        if isinstance(value, dict) and _CHUNKED in value:
            return _joined_array(value, subject)
        if not isinstance(value, msgspec.msgpack.Ext):
            return value
        if value.code == _COMPLEX:
            return complex(*_decode(value.data, tuple[float, float], subject))
        if value.code not in (_ARRAY, _SCALAR):
            raise CorruptCheckpointError(f"{subject}: expected msgpack extension type 1, 2 or 3, found {value.code}")
        array = _decode_array(value.data, subject)
        return array if value.code == _ARRAY or array.shape else array[()]


class _FlaxTree(MsgpackTree):
    """A tree in which Flax wrote lists and tuples as maps with the keys "0", "1", ..."""

    def _decoded(self, path: str, value: Any) -> Any:
        value = super()._decoded(path, value)
        return _values_if_numbered(value) or value if isinstance(value, dict) else value


def _values_if_numbered(found: Any) -> list[Any]:
    """Return the values of a map with the keys "0", "1", ...; no values for anything else."""
    if not isinstance(found, dict) or found.keys() != {str(number) for number in range(len(found))}:
        return []
    return [found[str(number)] for number in range(len(found))]


def _decode(data: Any, kind: Any, subject: str) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: expected an array or a number: {shown(error)}") from error


def _decode_array(data: Any, subject: str) -> np.ndarray:
    shape, name, content = _decode(data, tuple[tuple[int, ...], str, memoryview], subject)
    dtype = DTYPES.get(name)
    if dtype is None:
        raise CorruptCheckpointError(f"{subject}: expected a known dtype, found {shown(name)}")
    _check_shape(shape, len(content) / dtype.itemsize, subject)
    return np.frombuffer(content, dtype).reshape(shape)


def _check_shape(shape: Sequence[Any], elements: float, subject: str) -> None:
    """Raise CorruptCheckpointError unless this is the shape of an array with this number of elements."""
    is_shape = all(isinstance(size, int) and size >= 0 for size in shape) and len(shape) <= _MOST_DIMENSIONS
    # numpy refuses such a shape even if one of its sizes is 0
    if not is_shape or math.prod(max(1, size) for size in shape) >= _MOST_ELEMENTS or math.prod(shape) != elements:
        raise CorruptCheckpointError(f"{subject}: shape {shown(list(shape))} does not fit {elements:g} elements")


def _joined_array(node: Mapping[Any, Any], subject: str) -> np.ndarray:
    """Decode an array of more than 1 GiB, which Flax stores in pieces."""
    pieces = _values_if_numbered(node.get("chunks"))
    if not pieces or any(not isinstance(piece, msgspec.msgpack.Ext) or piece.code != _ARRAY for piece in pieces):
        raise CorruptCheckpointError(f"{subject}: expected the pieces of an array, found something else")
    arrays = [_decode_array(piece.data, subject).reshape(-1) for piece in pieces]
    if len({array.dtype for array in arrays}) != 1:
        raise CorruptCheckpointError(f"{subject}: expected pieces of one array, found different dtypes")
    shape = _values_if_numbered(node.get("shape"))
    _check_shape(shape, sum(map(len, arrays)), subject)
    return np.concatenate(arrays).reshape(shape)
