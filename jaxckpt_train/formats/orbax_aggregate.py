"""What the msgpack file `checkpoint` of Orbax's first versions tells: a tree's structure, small leaves inline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.formats.orbax_metadata import Kind, OrbaxTree, StoredLeaf, key_of_mapping
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import NOT_JSON, shown
from jaxckpt_train.tree.leaf_records import ArrayLeaf, EmptyLeaf, NoneLeaf, record_value
from jaxckpt_train.tree.paths import MAX_DEPTH, ROOT, join

_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")  # the latter in the very first ones
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # msgpack's extension types, as Flax has them
_CHUNKED = "__msgpack_chunked_array__"
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 58


def decode_aggregate(data: bytes, path: str) -> OrbaxTree:
    """The content of the file.

    What was stored beside it is of `Kind.UNKNOWN`: whether it was an array or a number is not said.

    Raises:
        CorruptCheckpointError: it is not what Orbax writes.
        UnsupportedLeafError: a leaf is too large to be held by a manifest.
    """
    try:
        found = msgspec.msgpack.decode(data)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected a tree of Orbax in msgpack, but: {shown(error)}") from error
    if not isinstance(found, dict | list):
        raise CorruptCheckpointError(f"{path}: expected a tree of Orbax, found a {type(found).__name__}")
    tree = OrbaxTree.empty()
    _add(tree, found, ROOT, 0, path)
    return tree


def encode_aggregate(leaves: Iterable[tuple[tuple[tuple[str, int], ...], Any]]) -> bytes:
    """The file with the structure of a tree, without which versions before 0.5 restore nothing.

    Args:
        leaves: the keys of each, with 1 for a position in a sequence and 2 for a key of a mapping, and what it is
            there: a placeholder of what is stored beside it, or text, None or an empty container.
    """
    root: dict[str, Any] = {}
    sequences = set[int]()
    for keys, value in leaves:
        if not keys:  # the tree is this leaf
            return msgspec.msgpack.encode(value)
        node = root
        for depth, (key, kind) in enumerate(keys):
            if kind == 1:
                sequences.add(id(node))
            node = node.setdefault(key, value if depth == len(keys) - 1 else {})
    return msgspec.msgpack.encode(_with_sequences(root, sequences))


def placeholder(parameter: str) -> str:
    """What stands there for what is stored beside it."""
    return f"{_PLACEHOLDERS[0]}{parameter}"


def _with_sequences(node: Any, sequences: set[int]) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _with_sequences(child, sequences) for key, child in node.items()}
    positions = [str(number) for number in range(len(children))]
    if id(node) in sequences and set(positions) == set(children):
        return [children[position] for position in positions]
    return children


def _add(tree: OrbaxTree, node: Any, name: str, depth: int, path: str) -> None:
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"{path}: a tree of more than {MAX_DEPTH} levels")
    if isinstance(node, list):
        tree.containers[name] = "list"
    if isinstance(node, dict) and _CHUNKED in node:
        tree.held[name] = _joined(node, f"{path}: leaf {name!r}")
        tree.inline[name] = ArrayLeaf(host_of(tree.held[name].dtype.name))
    elif isinstance(node, dict | list):
        if not node:
            tree.inline[name] = EmptyLeaf()
        children = node.items() if isinstance(node, dict) else ((str(at), child) for at, child in enumerate(node))
        for key, child in children:
            if not isinstance(key, str):
                raise CorruptCheckpointError(f"{path}: below {name!r}: expected keys of text, found {shown(key)}")
            _add(tree, child, join(name, key_of_mapping(key, name, path)), depth + 1, path)
    else:
        _add_leaf(tree, node, name, path)


def _add_leaf(tree: OrbaxTree, node: Any, name: str, path: str) -> None:
    subject = f"{path}: leaf {name!r}"
    if isinstance(node, str) and node.startswith(_PLACEHOLDERS):
        parameter = node.partition("://")[2]
        tree.stored[name] = StoredLeaf(parameter, Kind.UNKNOWN, False)
    elif isinstance(node, msgspec.msgpack.Ext) and node.code in (_ARRAY, _SCALAR):
        tree.held[name] = _array(node.data, subject)
        tree.inline[name] = ArrayLeaf("scalar" if node.code == _SCALAR else host_of(tree.held[name].dtype.name))
    elif isinstance(node, msgspec.msgpack.Ext):
        record = record_value(name, _complex(node, subject))
        assert record is not None
        tree.inline[name] = record
    else:
        record = NoneLeaf() if node is None else _python_record(name, node, path)
        if record is None:
            raise CorruptCheckpointError(f"{subject}: a {type(node).__name__}, which Orbax does not write")
        tree.inline[name] = record


def _python_record(name: str, value: Any, path: str) -> Any:
    try:
        return record_value(name, value)
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{path}: {error}") from error


def host_of(dtype: str) -> Literal["jax", "numpy"]:
    """What an array was whose kind is not told: JAX has none of 64 bits unless it is asked to."""
    return "numpy" if dtype in ("int64", "uint64", "float64", "complex128") else "jax"


def _complex(node: msgspec.msgpack.Ext, subject: str) -> complex:
    if node.code == _COMPLEX:
        try:
            return complex(*msgspec.msgpack.decode(node.data, type=tuple[float, float]))
        except NOT_JSON as error:
            raise CorruptCheckpointError(f"{subject}: expected a complex number, but: {shown(error)}") from error
    raise CorruptCheckpointError(f"{subject}: of msgpack's extension type {node.code}, expected 1, 2 or 3")


def _array(data: Any, subject: str) -> np.ndarray:
    try:
        shape, name, content = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], str, bytes])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: expected an array, but: {shown(error)}") from error
    dtype = DTYPES.get(name)
    if dtype is None:
        raise CorruptCheckpointError(f"{subject}: an array of {shown(name)}, which is not known here")
    _check_shape(shape, subject)
    if math.prod(shape) * dtype.itemsize != len(content):
        raise CorruptCheckpointError(
            f"{subject}: {len(content)} bytes, expected {math.prod(shape) * dtype.itemsize} for {name}{list(shape)}"
        )
    return np.frombuffer(content, dtype).reshape(shape)


def _check_shape(shape: Sequence[int], subject: str) -> None:
    too_large = (
        math.prod(max(1, abs(size)) for size in shape) >= _MOST_ELEMENTS
    )  # numpy has none, with a size of 0 or not
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 or too_large:
        raise CorruptCheckpointError(f"{subject}: expected the shape of an array, found {shown(list(shape))}")


def _joined(node: Mapping[Any, Any], subject: str) -> np.ndarray:
    """An array of more than a GiB, which is kept in pieces."""
    shape, pieces = _numbered(node.get("shape")), _numbered(node.get("chunks"))
    if any(not isinstance(size, int) for size in shape) or any(
        not isinstance(piece, msgspec.msgpack.Ext) or piece.code != _ARRAY for piece in pieces
    ):
        raise CorruptCheckpointError(f"{subject}: expected the pieces of an array, found others")
    _check_shape(shape, subject)
    arrays = [_array(piece.data, subject) for piece in pieces]
    if len({(array.dtype, array.ndim) for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise CorruptCheckpointError(f"{subject}: pieces of arrays that do not belong together")
    if sum(len(array) for array in arrays) != math.prod(shape):
        raise CorruptCheckpointError(f"{subject}: pieces of an array that do not fill its shape {shown(shape)}")
    return np.concatenate(arrays).reshape(shape)


def _numbered(found: Any) -> list[Any]:
    """The values of a map of "0", "1", ..."""
    if not isinstance(found, dict) or set(found) != {str(number) for number in range(len(found))}:
        return [None]
    return [found[str(number)] for number in range(len(found))]
