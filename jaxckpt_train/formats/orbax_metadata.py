"""The tree of an Orbax checkpoint in the form that a target has for the same leaves.

Refuses what TensorStore would end the process for: files and chunks larger than they can be, or than memory is.

What a step of Orbax says of itself: its metadata as a manifest of ours has them, and the items that it has.

Tells a step, an item and a run of Orbax, of any version: by the names in a directory and a few bytes.

What the metadata of an Orbax item says of its tree: its leaves, their kinds, and where their arrays lie.

The state of a data iterator of Grain in a step of Orbax: one file of each process that took part.
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
from jaxckpt_train.pytree.flatten import EMPTY, MAX_DEPTH, ROOT, Flat, join, key_text
from jaxckpt_train.pytree.leaves import EmptyLeaf, LeafRecord, NoneLeaf, TreeRecord
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import NOT_JSON, shown
from jaxckpt_train.store.manifest_decoding import decode_untrusted
from jaxckpt_train.store.process_identity import memory_bytes

_MAX_BYTES = 256 << 20
TREE_METADATA, STRINGS, ARRAY_METADATAS = "_METADATA", "_strings.json", "array_metadatas"
VALUE = "/value"  # of a variable of Flax NNX, which Orbax takes for a container
MAX_METADATA_BYTES = 512 << 20
MOST_DIGITS = 4000  # of an integer that Python still reads
_EMPTY = {"Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "dict"}
STEP_METADATA, OCDBT = "_CHECKPOINT_METADATA", "manifest.ocdbt"
AGGREGATE = "checkpoint"
"""In first versions: the file with the structure of a tree. And the name of an array that is an item by itself."""
ZARR = ".zarray"
TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?0*(\d+)")
_STRONG = {TREE_METADATA, STEP_METADATA, OCDBT}
_PROCESS = re.compile(r"ocdbt\.process_\d+")  # beside a database: what each process has written of it
MAX_JSON_BYTES = 256 << 20
_END_OF_TIME_NS = 10**9 * 3600 * 24 * 365 * 8000  # later than that Python has no years; it is no time of a step
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
_OF_ANY_OBJECT = ".StatefulCheckpointableHandler"  # which has Grain's iterators write themselves, as any other object
MOST_METADATA_BYTES = 64 << 20  # of a file that says what an array, or a database, is like
MORE_STORED = 1 << 20  # than a chunk has bytes: what does not compress, with its head
LARGE_CHUNK_BYTES = 1 << 30  # a smaller one may be larger than its array
_NUMBER = re.compile(r"~s-?[0-9]+")


"""The kind of a checkpointable with the states of all processes by the names of their files."""


def grain_states(backend: Backend, directory: str, names: Iterable[str]) -> ForeignValue | None:
    """The states that Grain's handler has saved; None: there are none.

    What JSON holds as it is stands there as data, to be looked at; all else as the text of the file.

    Args:
        backend: where.
        directory: of the item.
        names: what is in it.

    Raises:
        CorruptCheckpointError: a file is too large.
        StorageError: one cannot be read.
    """
    files = [name for name in sorted(names) if STATE_FILE.fullmatch(name)]
    if not files:
        return None
    shown = {name: _shown(_text(backend, directory, name)) for name in files}
    return ForeignValue(ORBAX_GRAIN, msgspec.json.encode(shown))


def _text(backend: Backend, directory: str, name: str) -> str:
    """What is no text becomes no JSON either: it is told when an iterator is set, as the rest of the step is sound."""
    data = bytes(memoryview(read_whole(backend, directory, name, _MAX_BYTES)))
    return data.decode(errors="backslashreplace")


def _shown(text: str) -> Any:
    try:
        state = json.loads(text)
        is_same = not isinstance(state, str) and msgspec.json.decode(msgspec.json.encode(state)) == state
    except (*NOT_JSON, ValueError, OverflowError, RecursionError):
        return text
    return state if is_same else text


class Kind(enum.Enum):
    """What a leaf is to Orbax."""

    ARRAY = "array"
    SCALAR = "scalar"
    STRING = "string"
    UNKNOWN = "unknown"  # an array or a number: first versions do not say which


_VALUE_KINDS = {"jax.Array": Kind.ARRAY, "np.ndarray": Kind.ARRAY, "scalar": Kind.SCALAR, "string": Kind.STRING}


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
        found = decode_untrusted(data, _TreeMetadata)
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
    kind = _VALUE_KINDS.get(value_type)
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


def looks_like_orbax(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Whether a directory may be a step of later versions, or an item of any.

    Args:
        backend: where.
        directory: of it.
        entries: what is in it.
    """
    return has_orbax_names(entries) or aggregate_of(backend, directory, entries) is not None


def is_tree(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Whether a directory is an item that is a tree, or one array."""
    has_names = any(entry.name in (TREE_METADATA, OCDBT) for entry in entries)
    return has_names or aggregate_of(backend, directory, entries) is not None


def has_orbax_names(entries: Sequence[Entry]) -> bool:
    """Whether names are there that nobody else uses."""
    return any(entry.name in _STRONG or STATE_FILE.fullmatch(entry.name) for entry in entries)


def aggregate_of(backend: Backend, directory: str, entries: Sequence[Entry]) -> Entry | None:
    """What is called `checkpoint`, as others have one too, if it may be of first versions of Orbax; None else.

    It is a file of msgpack with a tree, or the directory of one array.
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
    """Whether a file begins as a map whose first key is text, or as an array whose first element is no number.

    Files of pickle, HDF5 and numpy begin with a byte that would be the head of a map or an array.
    """
    if not head:
        return False
    first = head[0]
    if first in (0x80, 0x90):  # one without children, and nothing after it
        return size == 1
    if first in (0xDE, 0xDF):
        return begins_as_msgpack_str(head[3 if first == 0xDE else 5 :])
    if first in (0xDC, 0xDD):
        return _is_node(head[3 if first == 0xDC else 5 :])
    return (0x80 < first < 0x90 and begins_as_msgpack_str(head[1:])) or (0x90 < first < 0xA0 and _is_node(head[1:]))


def _is_node(head: bytes) -> bool:
    return bool(head) and 0x80 <= head[0] < 0xE0


def holds_items(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Whether a directory may be a step of first versions, which say nothing of it: there are items in it."""
    with contextlib.suppress(StorageError):
        return any(_may_be_item(backend, f"{directory}/{entry.name}") for entry in entries if is_item_folder(entry))
    return False


def is_item_folder(entry: Entry) -> bool:
    """Whether it is a directory that a save has finished, and not a part of an item."""
    is_finished = TEMPORARY not in entry.name and not entry.name.startswith(".")
    return entry.kind == "directory" and is_finished and not _PROCESS.fullmatch(entry.name)


def _may_be_item(backend: Backend, directory: str) -> bool:
    return looks_like_orbax(backend, directory, backend.list(directory))


def orbax_steps(backend: Backend, directory: str, entries: Sequence[Entry]) -> dict[int, str]:
    """The directories of a run's steps by their numbers, if its newest one is a step of Orbax.

    What is a step or an item itself has none, whatever its items are called.

    Args:
        backend: where.
        directory: of the run.
        entries: what is in it.
    """
    steps = {} if has_orbax_names(entries) else steps_of(entries)
    for name in list(steps.values())[-1:]:
        with contextlib.suppress(StorageError):
            path = f"{directory}/{name}"
            inner = backend.list(path)
            if looks_like_orbax(backend, path, inner) or holds_items(backend, path, inner):
                return steps
    return {}


def steps_of(entries: Sequence[Entry]) -> dict[int, str]:
    """The directories of steps that a run of Orbax may have, by their numbers."""
    found = {}
    for entry in entries:
        number = step_number(entry.name)
        if number is not None and is_item_folder(entry):
            found[number] = entry.name
    return dict(sorted(found.items()))


def step_number(name: str) -> int | None:
    """The number of a step, by the name of its directory; None: it is none."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


class StepTold(NamedTuple):
    """What a step says of itself.

    Attributes:
        info: as in a manifest.
        handlers: of items, by the names of those; versions before 0.11 name none.
    """

    info: dict[str, Any]
    handlers: dict[str, str]


def read_step(backend: Backend, directory: str, entries: Sequence[Entry]) -> StepTold:
    """What a step says of itself.

    Args:
        backend: where.
        directory: of the step, or of an item.
        entries: what is in it.

    Raises:
        CorruptCheckpointError: it is no JSON.
        StorageError: it cannot be read.
    """
    info: dict[str, Any] = {}
    step = step_number(directory.rpartition("/")[2])
    if step is not None:
        info["step"] = step
    if all(entry.name != STEP_METADATA for entry in entries):
        return StepTold(info, {})
    data = bytes(memoryview(read_whole(backend, directory, STEP_METADATA, MAX_JSON_BYTES)))
    try:
        told = decode_untrusted(data, dict[str, Any])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{directory}/{STEP_METADATA}: expected JSON, but: {shown(error)}") from error
    metrics, custom, ended = told.get("metrics"), told.get("custom_metadata"), told.get("commit_timestamp_nsecs")
    if isinstance(metrics, Mapping):
        info["metrics"] = dict(metrics)
    if custom:
        info["custom_metadata"] = custom
    if isinstance(ended, int) and 0 <= ended < _END_OF_TIME_NS:
        time = datetime.datetime.fromtimestamp(ended / 1e9, datetime.UTC)
        info["created"] = time.isoformat(timespec="milliseconds")
    handlers = told.get("item_handlers")  # text where the step is an item itself; None for what was found without one
    found = handlers.items() if isinstance(handlers, Mapping) else ()
    return StepTold(info, {name: handler for name, handler in found if isinstance(handler, str)})


def kind_of(handler: str) -> str | None:
    """The kind of checkpointable that a handler of Orbax or Grain writes; None: it is another one's."""
    if handler.startswith("grain."):
        return ORBAX_GRAIN
    return _HANDLER_KINDS.get(handler.rpartition(".")[2]) if handler.startswith("orbax.") else None


def is_of_any_object(handler: str) -> bool:
    """Whether what a handler writes may be of any object of the user's, and not of Grain."""
    return handler.endswith(_OF_ANY_OBJECT)


def check_metadata(
    files: Backend, directory: str, folders: Collection[str], *, use_ocdbt: bool, use_zarr3: bool
) -> None:
    """Refuse metadata that is too large, which is read as soon as an array is opened.

    Args:
        files: where.
        directory: of the item.
        folders: those of its arrays, where they are files, and those with a database of their own.
        use_ocdbt: whether the item has a database.
        use_zarr3: the version of zarr.

    Raises:
        CorruptCheckpointError: some is.
    """
    name_there = OCDBT if use_ocdbt else "zarr.json" if use_zarr3 else ".zarray"
    names = [OCDBT] if use_ocdbt else []
    for name in names + [f"{folder}/{name_there}" if folder else name_there for folder in folders]:
        size = _size(files, directory, name)
        if size > MOST_METADATA_BYTES:
            raise CorruptCheckpointError(
                f"{directory}/{name}: {size:,} bytes, expected at most {MOST_METADATA_BYTES:,} of metadata"
            )


def _size(files: Backend, directory: str, name: str) -> int:
    """How large a file is; 0: there is none that can be read, which TensorStore tells of."""
    try:
        source = files.open(directory, name, direct=False)
    except (StorageError, CorruptCheckpointError):
        return 0
    try:
        return source.size
    finally:
        source.close()


def chunk_shape(store: Any, *, is_stored: bool = False) -> list[int]:
    """What is decoded together, or stored together; all of an array that has no chunks."""
    layout = store.chunk_layout
    chunk = (layout.write_chunk if is_stored else layout.read_chunk).shape or store.shape
    return [size or whole for size, whole in zip(chunk, store.shape, strict=True)]


def chunk_bytes(store: Any, *, is_stored: bool = False) -> int:
    """Size of that, as it is decoded."""
    return math.prod(chunk_shape(store, is_stored=is_stored)) * int(store.dtype.numpy_dtype.itemsize)


class Bounds:
    """Of the chunks of an array, which are looked at once, before the first is read.

    Args:
        files: where; None: it lies in a database, which has digests of what it tells about sizes.
        directory: of the item.
        folder: of the array in it.
        subject: the array, for messages.
        store: the array, of TensorStore.
    """

    def __init__(self, files: Backend | None, directory: str, folder: str, subject: str, store: Any) -> None:
        self._files, self._directory, self._folder, self._subject = files, directory, folder, subject
        self._store = store
        self._is_checked, self._lock = False, threading.Lock()

    def check(self) -> None:
        """Refuse what cannot be read.

        Raises:
            CorruptCheckpointError: a chunk has more bytes than it can have.
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
                f"{self._subject}: its chunks are of {size:,} bytes, expected at most its own {array_bytes:,}"
            )
        if 2 * size > memory_bytes():
            raise StorageError(
                errno.ENOMEM,
                f"{self._subject}: a chunk of {size:,} bytes does not fit into memory twice, as it is "
                f"stored and as it is decoded: this machine has {memory_bytes():,}",
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
                    f"{self._subject}: {self._directory}/{name}: {size:,} bytes, expected at most {most:,} of a chunk "
                    f"of {stored:,}"
                )


def _chunk_files(files: Backend, directory: str, folder: str) -> Iterator[str]:
    """The files of an array's chunks: named by numbers, with dots or folders between them, in zarr 3 after a `c`."""
    try:
        entries = files.list(f"{directory}/{folder}" if folder else directory)
    except StorageError:  # told by whoever reads it
        return
    for entry in entries:
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name[0].isdigit() or entry.name == "c" or entry.name.startswith("c."):
            if entry.kind == "directory":
                yield from _chunk_files(files, directory, name)
            else:
                yield name


def in_form_of(target: Flat, record: TreeRecord, names: Mapping[str, str]) -> tuple[TreeRecord, dict[str, str]]:
    """The leaves and their names, as far as the target has none of them, in another form that it has.

    Orbax does not say whether a key of a mapping was text or an integer, saves variables of NNX as mappings, and a
    NamedTuple without fields, such as some of Optax's states, as None.

    Args:
        target: its leaves.
        record: of the checkpoint.
        names: of its leaves by their paths there.
    """
    wanted = dict(zip(target.names, target.leaves, strict=True))
    taken, leaves, found = set(names.values()) & wanted.keys(), dict[str, LeafRecord](record.leaves), dict[str, str]()
    plain = dict[str, list[str]]()
    for name in wanted:
        plain.setdefault(_plain(name), []).append(name)
    for saved, name in names.items():
        others = (each for form in _forms(name) for each in plain.get(form, ()) if each not in taken)
        found[saved] = name if name in wanted else next(others, name)
        taken.add(found[saved])
        if isinstance(leaves[saved], NoneLeaf) and wanted.get(found[saved]) is EMPTY:
            leaves[saved] = EmptyLeaf()
    return TreeRecord(record.containers, leaves), found


def _forms(name: str) -> Iterator[str]:
    yield _plain(name)
    if name.endswith(VALUE):
        yield _plain(name.removesuffix(VALUE))


def _plain(name: str) -> str:
    """With the digits alone of each key that may be text or an integer."""
    return "/".join(key[2:] if _NUMBER.fullmatch(key) else key for key in name.split("/"))
