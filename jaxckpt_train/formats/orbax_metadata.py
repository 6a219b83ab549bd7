"""What the metadata of an Orbax item says of its tree: its leaves, their kinds, and where their arrays lie."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.store.json_values import decode_told
from jaxckpt_train.store.manifest import NOT_JSON, shown
from jaxckpt_train.tree.leaf_records import EmptyLeaf, LeafRecord, NoneLeaf
from jaxckpt_train.tree.paths import MAX_DEPTH, ROOT, join, key_text

TREE_METADATA, STRINGS, ARRAY_METADATAS = "_METADATA", "_strings.json", "array_metadatas"
VALUE = "/value"  # of a variable of Flax NNX, which Orbax takes for a container
MAX_METADATA_BYTES = 512 << 20
MOST_DIGITS = 4000  # of an integer that Python still reads
_EMPTY = {"Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "dict"}


class Kind(enum.Enum):
    """What a leaf is to Orbax."""

    ARRAY = "array"
    SCALAR = "scalar"
    STRING = "string"
    UNKNOWN = "unknown"  # an array or a number: first versions do not say which


_KINDS = {"jax.Array": Kind.ARRAY, "np.ndarray": Kind.ARRAY, "scalar": Kind.SCALAR, "string": Kind.STRING}


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: int  # 1: of a sequence, 2: of a mapping


class _Value(msgspec.Struct, frozen=True):
    value_type: str
    skip_deserialize: bool = False


class _Entry(msgspec.Struct, frozen=True):
    key_metadata: tuple[_Key, ...]
    value_metadata: _Value


class _TreeMetadata(msgspec.Struct, frozen=True):
    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = False
    custom_metadata: Any = None
    value_metadata_tree: str | None = None
    store_array_data_equal_to_fill_value: bool | None = False


class StoredLeaf(NamedTuple):
    """A leaf with data: its name in Orbax's files, what it is, and whether it was a numpy array."""

    parameter: str
    kind: Kind
    is_numpy: bool


class OrbaxTree(NamedTuple):
    """The tree of an item.

    Attributes:
        containers: kinds of the containers that are no dicts, by path.
        inline: the leaves that have no data elsewhere, by leaf path.
        stored: the others.
        held: the content of arrays that are `inline`.
        elsewhere: the leaves that are in the file `checkpoint`, in the versions that have it.
        use_ocdbt: whether all arrays are in one OCDBT database; None: it is not said.
        use_zarr3: whether they are of the third version of zarr.
        custom_metadata: that was saved with the tree.
        is_whole: every chunk of the arrays was written; versions that do not say so left out chunks of zeros.
    """

    containers: dict[str, str]
    inline: dict[str, LeafRecord]
    stored: dict[str, StoredLeaf]
    held: dict[str, np.ndarray]
    elsewhere: list[str]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    custom_metadata: Any = None
    is_whole: bool = False

    @staticmethod
    def empty() -> OrbaxTree:
        """One without leaves."""
        return OrbaxTree({}, {}, {}, {}, [])

    def take(self, other: OrbaxTree, path: str) -> None:
        """Take over the leaves that are elsewhere from the tree of the file `checkpoint`.

        Raises:
            CorruptCheckpointError: one is not there.
        """
        for name in self.elsewhere:
            if name in other.inline:
                self.inline[name] = other.inline[name]
            elif name in other.stored:
                self.stored[name] = other.stored[name]
            else:
                raise CorruptCheckpointError(f"{path}: lacks leaf {name!r}, which the metadata of the tree has")
            if name in other.held:
                self.held[name] = other.held[name]
            if name in other.containers:
                self.containers[name] = other.containers[name]


def decode_tree_metadata(data: bytes, path: str) -> OrbaxTree:
    """The content of `_METADATA`.

    Raises:
        CorruptCheckpointError: it is not what Orbax writes.
        UnsupportedLeafError: a leaf is of a type that only a handler of the user's own knows.
    """
    try:
        found = decode_told(data, _TreeMetadata)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected the metadata of an Orbax tree, but: {shown(error)}") from error
    tree = OrbaxTree.empty()._replace(
        use_ocdbt=found.use_ocdbt,
        use_zarr3=bool(found.use_zarr3),
        custom_metadata=found.custom_metadata,
        is_whole=bool(found.store_array_data_equal_to_fill_value),
    )
    tuples = _tuples_of(found.value_metadata_tree)
    entries = list(found.tree_metadata.values())
    parents = {tuple(key.key for key in entry.key_metadata[:depth]) for entry in entries for depth in _below(entry)}
    for entry in entries:
        keys = tuple(key.key for key in entry.key_metadata)
        if keys in parents and entry.value_metadata.skip_deserialize:
            continue  # a container that was empty, until more was saved into it
        _add(tree, entry, tuples, path)
    return tree


def _below(entry: _Entry) -> range:
    return range(len(entry.key_metadata))


def _add(tree: OrbaxTree, entry: _Entry, tuples: set[tuple[str, ...]], path: str) -> None:
    if len(entry.key_metadata) > MAX_DEPTH:
        raise CorruptCheckpointError(f"{path}: a tree of more than {MAX_DEPTH} levels")
    name, keys = ROOT, tuple(key.key for key in entry.key_metadata)
    for depth, key in enumerate(entry.key_metadata):
        if key.key_type == 1:
            tree.containers[name] = "tuple" if keys[:depth] in tuples else "list"
        name = join(name, _key_text(key, name, path))
    value_type = entry.value_metadata.value_type
    if entry.value_metadata.skip_deserialize or value_type in ("None", *_EMPTY):
        tree.inline[name] = NoneLeaf() if value_type == "None" else EmptyLeaf()
        if _EMPTY.get(value_type, "dict") != "dict":
            tree.containers[name] = _EMPTY[value_type]
        if value_type not in ("None", *_EMPTY):
            tree.elsewhere.append(name)
        return
    kind = _KINDS.get(value_type)
    if kind is None:
        raise UnsupportedLeafError(
            f"{path}: leaf {name!r} is of Orbax's type {shown(value_type)}, which only a handler of its own reads; "
            "load it with Orbax, and save it here"
        )
    tree.stored[name] = StoredLeaf(".".join(keys), kind, value_type != "jax.Array")


def _key_text(key: _Key, parent: str, path: str) -> str:
    found = key_of_mapping(key.key, parent, path)
    if key.key_type == 1 and not found.isdigit():
        raise CorruptCheckpointError(f"{path}: below {parent!r}: {shown(key.key)} is no position in a sequence")
    return found


def key_of_mapping(key: str, parent: str, path: str) -> str:
    """A key as text; Orbax does not say whether a key of a mapping was an integer: what reads as one is taken for one.

    Raises:
        CorruptCheckpointError: it is no text that can be a key.
    """
    if key.isascii() and key.removeprefix("-").isdigit() and len(key) < MOST_DIGITS and str(int(key)) == key:
        return key
    try:
        return key_text(key, parent)
    except UnsupportedLeafError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from error


def _tuples_of(text: str | None) -> set[tuple[str, ...]]:
    """The paths of the tuples, which are told from lists only where Orbax was asked for rich types."""
    found: set[tuple[str, ...]] = set()
    if text is not None:
        try:
            _find_tuples(msgspec.json.decode(text), (), found)
        except NOT_JSON:
            return set()
    return found


def _find_tuples(node: Any, path: tuple[str, ...], found: set[tuple[str, ...]]) -> None:
    if isinstance(node, list):
        for number, child in enumerate(node):
            _find_tuples(child, (*path, str(number)), found)
        return
    if not isinstance(node, dict):
        return
    if node.get("category") == "custom" and node.get("clazz") == "tuple":
        found.add(path)
        _find_tuples(node.get("entries"), path, found)
    elif node.get("category") == "namedtuple":
        for entry in node.get("entries") or ():
            if isinstance(entry, dict):
                _find_tuples(entry.get("value"), (*path, str(entry.get("key"))), found)
    elif "category" not in node:
        for key, child in node.items():
            _find_tuples(child, (*path, key), found)


def decode_strings(data: bytes, path: str) -> dict[str, str]:
    """The content of `_strings.json`: text by the names of parameters."""
    try:
        return msgspec.json.decode(data, type=dict[str, str])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected texts by name, but: {shown(error)}") from error


def decode_key_implementations(data: bytes, path: str) -> dict[str, str]:
    """Of `array_metadatas/process_0`: the implementation of each PRNG key, by the names of parameters."""
    try:
        found = msgspec.json.decode(data, type=dict[str, list[dict[str, Any]]])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected metadata of arrays, but: {shown(error)}") from error
    implementations = {}
    for each in found.get("array_metadatas", []):
        one = each.get("array_metadata")
        extra = one.get("ext_metadata") if isinstance(one, Mapping) else None
        implementation = extra.get("random_key_impl") if isinstance(extra, Mapping) else None
        if isinstance(one, Mapping) and isinstance(implementation, str):
            implementations[str(one.get("param_name"))] = implementation
    return implementations
