"""Recognizes Orbax checkpoints of all versions, and reads their metadata.

In order: which directories are runs, steps and items of Orbax; the metadata of a step; the metadata of a tree; the
states of Grain's iterators; and the limits of stored chunks. TensorStore aborts the process when it runs out of memory,
so sizes are checked before it reads anything.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import errno
import json
import math
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.checkpointables.base import ORBAX_GRAIN, STATE_FILE
from jaxckpt_train.errors import CorruptCheckpointError, StorageError, UnsupportedLeafError
from jaxckpt_train.formats.foreign import JSON, PYTREE, ForeignValue, begins_as_msgpack_str, first_bytes
from jaxckpt_train.pytree.leaves import EMPTY, EmptyLeaf, Flat, LeafRecord, NoneLeaf, TreeRecord
from jaxckpt_train.pytree.paths import MAX_DEPTH, ROOT, join, key_text
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import NOT_JSON, shown
from jaxckpt_train.store.manifest_decoding import decode_untrusted
from jaxckpt_train.store.process_identity import memory_bytes

# How Orbax is recognized
TREE_METADATA, STEP_METADATA, OCDBT = "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"
AGGREGATE = "checkpoint"
"""In the first versions, the file with the structure of a tree; also the directory of an array that is an item."""
ZARR = ".zarray"
TEMPORARY = ".orbax-checkpoint-tmp"
_UNIQUE_NAMES = {TREE_METADATA, STEP_METADATA, OCDBT}
_PROCESS = re.compile(r"ocdbt\.process_\d+")  # next to a database: what each process has written to it
_STEP = re.compile(r"(?:.*_)?0*(\d+)")

# Steps
MAX_JSON_BYTES = 256 << 20
_MAX_TIME_NS = 10**9 * 3600 * 24 * 365 * 8000  # the datetime module ends at the year 9999
_HANDLER_KINDS = {
    "PyTreeCheckpointHandler": PYTREE,
    "StandardCheckpointHandler": PYTREE,
    "PyTreeHandler": PYTREE,
    "ArrayCheckpointHandler": PYTREE,
    "JaxRandomKeyCheckpointHandler": PYTREE,
    "JsonCheckpointHandler": JSON,
    "JsonHandler": JSON,
    "MetricsHandler": JSON,
    "StatefulCheckpointableHandler": ORBAX_GRAIN,
}
_STATEFUL_HANDLER = ".StatefulCheckpointableHandler"  # saves Grain's iterators, and any other stateful object

# Trees
STRINGS, ARRAY_METADATAS = "_strings.json", "array_metadatas"
VALUE = "/value"  # the child of a Flax NNX variable, which Orbax saves as a container
MAX_METADATA_BYTES = 512 << 20
MOST_DIGITS = 4000  # of an integer; Python refuses to parse more than 4300
_EMPTY = {"Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "dict"}
_TYPED_INTEGER = re.compile(r"~s-?[0-9]+")

# States of Grain's iterators
_MAX_STATE_BYTES = 256 << 20

# Limits of arrays
MOST_METADATA_BYTES = 64 << 20  # of the metadata file of an array or a database
MORE_STORED = 1 << 20  # the largest excess of a stored chunk over its decoded size, for its header
LARGE_CHUNK_BYTES = 1 << 30  # a chunk up to this size may be larger than its array


def looks_like_orbax(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Return whether a directory may be a step of a later Orbax version, or an item of any version."""
    return has_orbax_names(entries) or find_aggregate(backend, directory, entries) is not None


def has_orbax_names(entries: Sequence[Entry]) -> bool:
    """Return whether a directory contains a name that only Orbax uses."""
    return any(entry.name in _UNIQUE_NAMES or STATE_FILE.fullmatch(entry.name) for entry in entries)


def is_tree(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Return whether a directory is an item that is a tree or an array."""
    has_names = any(entry.name in (TREE_METADATA, OCDBT) for entry in entries)
    return has_names or find_aggregate(backend, directory, entries) is not None


def holds_items(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Return whether a directory contains items. A step of the first versions has no metadata."""
    with contextlib.suppress(StorageError):
        return any(_may_be_item(backend, f"{directory}/{entry.name}") for entry in entries if is_item_folder(entry))
    return False


def _may_be_item(backend: Backend, directory: str) -> bool:
    return looks_like_orbax(backend, directory, backend.list(directory))


def is_item_folder(entry: Entry) -> bool:
    """Return whether an entry is a directory of a finished save, and not a part of an item."""
    is_finished = TEMPORARY not in entry.name and not entry.name.startswith(".")
    return entry.kind == "directory" and is_finished and not _PROCESS.fullmatch(entry.name)


def orbax_steps(backend: Backend, directory: str, entries: Sequence[Entry]) -> dict[int, str]:
    """Return the step directories of a run by step number, if the newest one is a step of Orbax.

    A step or an item contains no steps, even if its items have names like steps.

    Args:
        backend: the storage.
        directory: the directory of the run.
        entries: its entries.
    """
    steps = {} if has_orbax_names(entries) else _step_folders(entries)
    for name in list(steps.values())[-1:]:
        with contextlib.suppress(StorageError):
            path = f"{directory}/{name}"
            inner = backend.list(path)
            if looks_like_orbax(backend, path, inner) or holds_items(backend, path, inner):
                return steps
    return {}


def _step_folders(entries: Sequence[Entry]) -> dict[int, str]:
    found = {}
    for entry in entries:
        number = step_number(entry.name)
        if number is not None and is_item_folder(entry):
            found[number] = entry.name
    return dict(sorted(found.items()))


def step_number(name: str) -> int | None:
    """Return the step number in the name of a directory, or None."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def find_aggregate(backend: Backend, directory: str, entries: Sequence[Entry]) -> Entry | None:
    """Return the entry `checkpoint` if the first versions of Orbax may have written it, otherwise None.

    It is a msgpack file with a tree, or the directory of one array. Other tools use the same name.
    """
    found = next((entry for entry in entries if entry.name == AGGREGATE), None)
    if found is None:
        return None
    with contextlib.suppress(StorageError):
        if found.kind == "directory":
            inner = backend.list(f"{directory}/{AGGREGATE}")
            return found if any(entry.name == ZARR for entry in inner) else None
        if found.kind == "file" and _is_msgpack_tree(*first_bytes(backend, directory, AGGREGATE)):
            return found
    return None


def _is_msgpack_tree(head: bytes, size: int) -> bool:
    """Return whether a file starts with a map whose first key is text, or an array whose first element is not a number.

    The first byte alone is not enough: pickle, HDF5 and numpy files start with a byte that msgpack reads as a map or an
    array.
    """
    if not head:
        return False
    first = head[0]
    if first in (0x80, 0x90):  # an empty map or array must be the whole file
        return size == 1
    if first in (0xDE, 0xDF):
        return begins_as_msgpack_str(head[3 if first == 0xDE else 5 :])
    if first in (0xDC, 0xDD):
        return _is_node(head[3 if first == 0xDC else 5 :])
    return (0x80 < first < 0x90 and begins_as_msgpack_str(head[1:])) or (0x90 < first < 0xA0 and _is_node(head[1:]))


def _is_node(head: bytes) -> bool:
    return bool(head) and 0x80 <= head[0] < 0xE0


class StepInfo(NamedTuple):
    """The metadata of a step.

    Attributes:
        info: the `info` of a manifest.
        handlers: the handlers of the items by item name. Versions before 0.11 do not record them.
    """

    info: dict[str, Any]
    handlers: dict[str, str]


def read_step(backend: Backend, directory: str, entries: Sequence[Entry]) -> StepInfo:
    """Read the metadata of a step.

    Args:
        backend: the storage.
        directory: the directory of the step, or of an item.
        entries: its entries.

    Raises:
        CorruptCheckpointError: the metadata is not JSON.
        StorageError: the metadata cannot be read.
    """
    info: dict[str, Any] = {}
    step = step_number(directory.rpartition("/")[2])
    if step is not None:
        info["step"] = step
    if all(entry.name != STEP_METADATA for entry in entries):
        return StepInfo(info, {})
    data = bytes(memoryview(read_whole(backend, directory, STEP_METADATA, MAX_JSON_BYTES)))
    try:
        found = decode_untrusted(data, dict[str, Any])
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{directory}/{STEP_METADATA}: expected JSON, found something else: {shown(error)}"
        ) from error
    metrics, custom, ended = found.get("metrics"), found.get("custom_metadata"), found.get("commit_timestamp_nsecs")
    if isinstance(metrics, Mapping):
        info["metrics"] = dict(metrics)
    if custom:
        info["custom_metadata"] = custom
    if isinstance(ended, int) and 0 <= ended < _MAX_TIME_NS:
        time = datetime.datetime.fromtimestamp(ended / 1e9, datetime.UTC)
        info["created"] = time.isoformat(timespec="milliseconds")
    handlers = found.get("item_handlers")  # text where the step itself is an item; a value is None without a handler
    items = handlers.items() if isinstance(handlers, Mapping) else ()
    return StepInfo(info, {name: handler for name, handler in items if isinstance(handler, str)})


def handler_kind(handler: str) -> str | None:
    """Return the kind of checkpointable that a handler of Orbax or Grain writes, or None for other handlers."""
    if handler.startswith("grain."):
        return ORBAX_GRAIN
    return _HANDLER_KINDS.get(handler.rpartition(".")[2]) if handler.startswith("orbax.") else None


def is_stateful_handler(handler: str) -> bool:
    """Return whether a handler writes stateful objects of any class, not only Grain's iterators."""
    return handler.endswith(_STATEFUL_HANDLER)


class Kind(enum.Enum):
    """The type of a leaf in Orbax."""

    ARRAY = "array"
    SCALAR = "scalar"
    STRING = "string"
    UNKNOWN = "unknown"  # an array or a number: the first versions do not record which


_VALUE_KINDS = {"jax.Array": Kind.ARRAY, "np.ndarray": Kind.ARRAY, "scalar": Kind.SCALAR, "string": Kind.STRING}


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: int  # 1: sequence, 2: mapping


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
    """A leaf with stored data: its name in Orbax's files, its type, and whether it was a numpy array."""

    parameter: str
    kind: Kind
    is_numpy: bool


class OrbaxTree(NamedTuple):
    """The tree of an item.

    Attributes:
        containers: the kinds of containers other than dicts, by path.
        inline: the leaves without stored data, by leaf path.
        stored: the leaves with stored data, by leaf path.
        held: the content of arrays that are `inline`.
        in_aggregate: the leaves whose content is in the file `checkpoint`, in the versions that have this file.
        use_ocdbt: whether all arrays are in one OCDBT database. None: the metadata does not say.
        use_zarr3: whether the arrays use version 3 of zarr.
        custom_metadata: the user's metadata of the tree.
        is_whole: whether every chunk was written. Versions that do not record this left out chunks of zeros.
    """

    containers: dict[str, str]
    inline: dict[str, LeafRecord]
    stored: dict[str, StoredLeaf]
    held: dict[str, np.ndarray]
    in_aggregate: list[str]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    custom_metadata: Any = None
    is_whole: bool = False

    @staticmethod
    def empty() -> OrbaxTree:
        """Return a tree without leaves."""
        return OrbaxTree({}, {}, {}, {}, [])

    def take_from_aggregate(self, other: OrbaxTree, path: str) -> None:
        """Take the leaves of `in_aggregate` from the tree of the file `checkpoint`.

        Raises:
            CorruptCheckpointError: a leaf is missing there.
        """
        for name in self.in_aggregate:
            if name in other.inline:
                self.inline[name] = other.inline[name]
            elif name in other.stored:
                self.stored[name] = other.stored[name]
            else:
                raise CorruptCheckpointError(
                    f"{path}: expected leaf {name!r}, which the metadata of the tree lists, found none"
                )
            if name in other.held:
                self.held[name] = other.held[name]
            if name in other.containers:
                self.containers[name] = other.containers[name]


def decode_tree_metadata(data: bytes, path: str) -> OrbaxTree:
    """Decode the content of `_METADATA`.

    Raises:
        CorruptCheckpointError: it is not the metadata of an Orbax tree.
        UnsupportedLeafError: a leaf has a type that only a handler of the user can read.
    """
    try:
        found = decode_untrusted(data, _TreeMetadata)
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{path}: expected the metadata of an Orbax tree, found something else: {shown(error)}"
        ) from error
    tree = OrbaxTree.empty()._replace(
        use_ocdbt=found.use_ocdbt,
        use_zarr3=bool(found.use_zarr3),
        custom_metadata=found.custom_metadata,
        is_whole=bool(found.store_array_data_equal_to_fill_value),
    )
    tuples = _tuple_paths(found.value_metadata_tree)
    entries = list(found.tree_metadata.values())
    parents = {
        tuple(key.key for key in entry.key_metadata[:depth])
        for entry in entries
        for depth in range(len(entry.key_metadata))
    }
    for entry in entries:
        keys = tuple(key.key for key in entry.key_metadata)
        if keys in parents and entry.value_metadata.skip_deserialize:
            continue  # the container was empty when it was recorded; a later entry has a leaf in it
        _add_leaf(tree, entry, tuples, path)
    return tree


def _add_leaf(tree: OrbaxTree, entry: _Entry, tuples: set[tuple[str, ...]], path: str) -> None:
    if len(entry.key_metadata) > MAX_DEPTH:
        raise CorruptCheckpointError(f"{path}: expected a tree of at most {MAX_DEPTH} levels, found more")
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
            tree.in_aggregate.append(name)
        return
    kind = _VALUE_KINDS.get(value_type)
    if kind is None:
        raise UnsupportedLeafError(
            f"{path}: leaf {name!r} has Orbax's type {shown(value_type)}, which needs a handler of your own; "
            "load it with Orbax, and save it with jaxckpt_train"
        )
    tree.stored[name] = StoredLeaf(".".join(keys), kind, value_type != "jax.Array")


def _key_text(key: _Key, parent: str, path: str) -> str:
    found = mapping_key(key.key, parent, path)
    if key.key_type == 1 and not found.isdigit():
        raise CorruptCheckpointError(
            f"{path}: below {parent!r}: expected a position in a sequence, found {shown(key.key)}"
        )
    return found


def mapping_key(key: str, parent: str, path: str) -> str:
    """Return a key of a mapping as text. Orbax does not record key types, so text that looks like an integer is one.

    Raises:
        CorruptCheckpointError: the text cannot be a key.
    """
    if key.isascii() and key.removeprefix("-").isdigit() and len(key) < MOST_DIGITS and str(int(key)) == key:
        return key
    try:
        return key_text(key, parent)
    except UnsupportedLeafError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from error


def _tuple_paths(text: str | None) -> set[tuple[str, ...]]:
    """Return the paths of the tuples. Orbax distinguishes them from lists only when it saves rich types."""
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
    """Decode the content of `_strings.json`: the text leaves by parameter name."""
    try:
        return msgspec.json.decode(data, type=dict[str, str])
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{path}: expected a JSON map of texts, found something else: {shown(error)}"
        ) from error


def decode_key_implementations(data: bytes, path: str) -> dict[str, str]:
    """Decode `array_metadatas/process_0`: the implementation of each PRNG key by parameter name."""
    try:
        found = msgspec.json.decode(data, type=dict[str, list[dict[str, Any]]])
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{path}: expected JSON metadata of arrays, found something else: {shown(error)}"
        ) from error
    implementations = {}
    for each in found.get("array_metadatas", []):
        metadata = each.get("array_metadata")
        extra = metadata.get("ext_metadata") if isinstance(metadata, Mapping) else None
        implementation = extra.get("random_key_impl") if isinstance(extra, Mapping) else None
        if isinstance(metadata, Mapping) and isinstance(implementation, str):
            implementations[str(metadata.get("param_name"))] = implementation
    return implementations


def match_target(target: Flat, record: TreeRecord, names: Mapping[str, str]) -> tuple[TreeRecord, dict[str, str]]:
    """Rename leaves that are not in the target to equivalent leaves that are.

    Orbax does not record whether a key of a mapping is text or an integer. It saves variables of NNX as mappings, and a
    NamedTuple without fields, such as some states of Optax, as None.

    Args:
        target: the target.
        record: the tree of the checkpoint.
        names: the names of the leaves by their paths in the checkpoint.

    Returns:
        The tree and the names, adapted to the target.
    """
    wanted = dict(zip(target.names, target.leaves, strict=True))
    taken, leaves, found = set(names.values()) & wanted.keys(), dict[str, LeafRecord](record.leaves), dict[str, str]()
    plain = dict[str, list[str]]()
    for name in wanted:
        plain.setdefault(_plain_name(name), []).append(name)
    for saved, name in names.items():
        others = (each for form in _equivalents(name) for each in plain.get(form, ()) if each not in taken)
        found[saved] = name if name in wanted else next(others, name)
        taken.add(found[saved])
        if isinstance(leaves[saved], NoneLeaf) and wanted.get(found[saved]) is EMPTY:
            leaves[saved] = EmptyLeaf()
    return TreeRecord(record.containers, leaves), found


def _equivalents(name: str) -> Iterator[str]:
    yield _plain_name(name)
    if name.endswith(VALUE):
        yield _plain_name(name.removesuffix(VALUE))


def _plain_name(name: str) -> str:
    """Return a leaf path in which text keys that look like integers are plain integers."""
    return "/".join(key[2:] if _TYPED_INTEGER.fullmatch(key) else key for key in name.split("/"))


def grain_states(backend: Backend, directory: str, names: Iterable[str]) -> ForeignValue | None:
    """Return the states that Grain's handler has saved in an item, or None if there are none.

    A state is stored as JSON data if JSON can represent it exactly, otherwise as the text of its file.

    Args:
        backend: the storage.
        directory: the directory of the item.
        names: the names in it.

    Raises:
        CorruptCheckpointError: a file is too large.
        StorageError: a file cannot be read.
    """
    files = [name for name in sorted(names) if STATE_FILE.fullmatch(name)]
    if not files:
        return None
    states = {name: _as_data(_read_text(backend, directory, name)) for name in files}
    return ForeignValue(ORBAX_GRAIN, msgspec.json.encode(states))


def _read_text(backend: Backend, directory: str, name: str) -> str:
    # Bytes that are not text become text that is not JSON. The error then appears when an iterator is restored, and the
    # rest of the step can still be loaded.
    data = bytes(memoryview(read_whole(backend, directory, name, _MAX_STATE_BYTES)))
    return data.decode(errors="backslashreplace")


def _as_data(text: str) -> Any:
    try:
        state = json.loads(text)
        is_same = not isinstance(state, str) and msgspec.json.decode(msgspec.json.encode(state)) == state
    except (*NOT_JSON, ValueError, OverflowError, RecursionError):
        return text
    return state if is_same else text


def check_metadata_sizes(
    files: Backend, directory: str, folders: Collection[str], *, use_ocdbt: bool, use_zarr3: bool
) -> None:
    """Refuse array metadata that is too large, because TensorStore reads it whole when it opens an array.

    Args:
        files: the storage.
        directory: the directory of the item.
        folders: the folders of arrays that are stored as files, and those with a database of their own.
        use_ocdbt: whether the item has a database.
        use_zarr3: whether arrays use version 3 of zarr.

    Raises:
        CorruptCheckpointError: a metadata file is too large.
    """
    name_there = OCDBT if use_ocdbt else "zarr.json" if use_zarr3 else ".zarray"
    names = [OCDBT] if use_ocdbt else []
    for name in names + [f"{folder}/{name_there}" if folder else name_there for folder in folders]:
        size = _size(files, directory, name)
        if size > MOST_METADATA_BYTES:
            raise CorruptCheckpointError(
                f"{directory}/{name}: expected at most {MOST_METADATA_BYTES:,} bytes of metadata, found {size:,}"
            )


def _size(files: Backend, directory: str, name: str) -> int:
    """Return the size of a file, or 0 if it cannot be read. TensorStore reports such a file."""
    try:
        source = files.open(directory, name, direct=False)
    except (StorageError, CorruptCheckpointError):
        return 0
    try:
        return source.size
    finally:
        source.close()


def chunk_shape(store: Any, *, is_stored: bool = False) -> list[int]:
    """Return the shape of a chunk as it is decoded or stored. An array without chunks is a single chunk."""
    layout = store.chunk_layout
    chunk = (layout.write_chunk if is_stored else layout.read_chunk).shape or store.shape
    return [size or whole for size, whole in zip(chunk, store.shape, strict=True)]


def chunk_bytes(store: Any, *, is_stored: bool = False) -> int:
    """Return the decoded size of a chunk in bytes."""
    return math.prod(chunk_shape(store, is_stored=is_stored)) * int(store.dtype.numpy_dtype.itemsize)


class ChunkLimits:
    """Checks the sizes of the chunks of an array once, before the first chunk is read.

    Args:
        files: the storage. None: the array is in a database, which protects its sizes by digests.
        directory: the directory of the item.
        folder: the folder of the array in it.
        subject: the name of the array for messages.
        store: the array of TensorStore.
    """

    def __init__(self, files: Backend | None, directory: str, folder: str, subject: str, store: Any) -> None:
        self._files, self._directory, self._folder, self._subject = files, directory, folder, subject
        self._store = store
        self._is_checked, self._lock = False, threading.Lock()

    def check(self) -> None:
        """Refuse an array with a chunk that cannot be read.

        Raises:
            CorruptCheckpointError: a chunk is larger than its shape allows.
            StorageError: a chunk does not fit into memory.
        """
        with self._lock:
            if not self._is_checked:
                self._check_chunks()
                self._check_files()
                self._is_checked = True

    def _check_chunks(self) -> None:
        size = chunk_bytes(self._store)
        array_bytes = math.prod(self._store.shape) * int(self._store.dtype.numpy_dtype.itemsize)
        if size > max(LARGE_CHUNK_BYTES, array_bytes):
            raise CorruptCheckpointError(
                f"{self._subject}: expected chunks of at most {array_bytes:,} bytes, its own size, found {size:,}"
            )
        if 2 * size > memory_bytes():
            raise StorageError(
                errno.ENOMEM,
                f"{self._subject}: reading a chunk of {size:,} bytes needs twice its size, but this machine has "
                f"{memory_bytes():,} bytes of memory",
            )

    def _check_files(self) -> None:
        if self._files is None:
            return
        stored = chunk_bytes(self._store, is_stored=True)
        most = stored + (stored >> 3) + MORE_STORED
        for name in _chunk_files(self._files, self._directory, self._folder):
            size = _size(self._files, self._directory, name)
            if size > most:
                raise CorruptCheckpointError(
                    f"{self._subject}: {self._directory}/{name}: expected at most {most:,} bytes for a chunk of "
                    f"{stored:,}, found {size:,}"
                )


def _chunk_files(files: Backend, directory: str, folder: str) -> Iterator[str]:
    """Yield the files of chunks. Their names are numbers joined by dots or folders, in zarr 3 with a leading `c`."""
    try:
        entries = files.list(f"{directory}/{folder}" if folder else directory)
    except StorageError:  # reading the array reports it
        return
    for entry in entries:
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name[0].isdigit() or entry.name == "c" or entry.name.startswith("c."):
            if entry.kind == "directory":
                yield from _chunk_files(files, directory, name)
            else:
                yield name
