"""Recognizes Orbax checkpoints of all versions, and reads the metadata of steps and trees."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.checkpointables.base import ORBAX_GRAIN, STATE_FILE
from jaxckpt_train.errors import CorruptCheckpointError, StorageError, UnsupportedLeafError
from jaxckpt_train.formats.foreign import JSON, PYTREE, ForeignValue, mapping_key
from jaxckpt_train.pytree.leaves import EMPTY, MAX_DEPTH, ROOT, EmptyLeaf, Flat, LeafRecord, NoneLeaf, TreeRecord, join
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_head, read_whole
from jaxckpt_train.store.manifest import NOT_JSON, decode_untrusted, shown

# How Orbax is recognized
TREE_METADATA, STEP_METADATA, OCDBT = "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"
AGGREGATE = "checkpoint"
"""In the first versions, the file with the structure of a tree; also the directory of an array that is an item."""
ZARR = ".zarray"
TEMPORARY = ".orbax-checkpoint-tmp"
_HEAD_BYTES = 6
_PROCESS = re.compile(r"ocdbt\.process_\d+")  # next to a database: what each process has written to it
_STEP = re.compile(r"(?:.*_)?0*(\d+)")

# Steps
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
    "StatefulCheckpointableHandler": ORBAX_GRAIN,  # also saves any other stateful object
}

# Trees
STRINGS, ARRAY_METADATAS = "_strings.json", "array_metadatas"
VALUE = "/value"  # the child of a Flax NNX variable, which Orbax saves as a container
MAX_METADATA_BYTES = 512 << 20
JAX_ARRAY, NUMPY_ARRAY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"  # Orbax's types of leaves
_EMPTY = {"Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "dict"}
_TYPED_INTEGER = re.compile(r"~s-?[0-9]+")


def begins_as(backend: Backend, directory: str, name: str) -> str:
    """Return "map" or "list" if a file starts like the tree of a state in msgpack, otherwise "".

    The first byte alone is not enough: pickle, HDF5 and numpy files start with a byte that msgpack reads as a map or
    a list. So the first key must be text, or the first element not a number.
    """
    head = b""
    with contextlib.suppress(StorageError):
        head = read_head(backend, directory, name, _HEAD_BYTES)
    if head in (b"\x80", b"\x90"):  # an empty container must be the whole file
        return "map" if head == b"\x80" else "list"
    first = head[0] if head else 0
    child = head[{0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}.get(first, 1) :]
    if 0x80 < first < 0x90 or first in (0xDE, 0xDF):
        return "map" if child and (0xA0 <= child[0] < 0xC0 or 0xD9 <= child[0] <= 0xDB) else ""
    is_list = 0x90 < first < 0xA0 or first in (0xDC, 0xDD)
    return "list" if is_list and child and 0x80 <= child[0] < 0xE0 else ""


def looks_like_orbax(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Return whether a directory may be a step of a later Orbax version, or an item of any version."""
    return has_orbax_names(entries) or find_aggregate(backend, directory, entries) is not None


def has_orbax_names(entries: Sequence[Entry]) -> bool:
    """Return whether a directory contains a name that only Orbax uses."""
    names = {TREE_METADATA, STEP_METADATA, OCDBT}
    return any(entry.name in names or STATE_FILE.fullmatch(entry.name) for entry in entries)


def is_tree(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Return whether a directory is an item that is a tree or an array."""
    has_names = any(entry.name in (TREE_METADATA, OCDBT) for entry in entries)
    return has_names or find_aggregate(backend, directory, entries) is not None


def holds_items(backend: Backend, directory: str, entries: Sequence[Entry]) -> bool:
    """Return whether a directory contains items. A step of the first versions has no metadata."""
    folders = (f"{directory}/{entry.name}" for entry in entries if is_item_folder(entry))
    with contextlib.suppress(StorageError):
        return any(looks_like_orbax(backend, folder, backend.list(folder)) for folder in folders)
    return False


def is_item_folder(entry: Entry) -> bool:
    """Return whether an entry is a directory of a finished save, and not a part of an item."""
    is_finished = TEMPORARY not in entry.name and not entry.name.startswith(".")
    return entry.kind == "directory" and is_finished and not _PROCESS.fullmatch(entry.name)


def orbax_steps(backend: Backend, directory: str, entries: Sequence[Entry]) -> dict[int, str]:
    """Return the step directories of a run by step number, if the newest one is a step of Orbax.

    A step or an item contains no steps, even if its items have names like steps.
    """
    if has_orbax_names(entries):
        return {}
    found = {step_number(entry.name): entry.name for entry in entries if is_item_folder(entry)}
    steps = {number: found[number] for number in sorted(number for number in found if number is not None)}
    for name in list(steps.values())[-1:]:
        with contextlib.suppress(StorageError):
            path = f"{directory}/{name}"
            inner = backend.list(path)
            if looks_like_orbax(backend, path, inner) or holds_items(backend, path, inner):
                return steps
    return {}


def step_number(name: str) -> int | None:
    """Return the step number in the name of a directory, or None."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def find_aggregate(backend: Backend, directory: str, entries: Sequence[Entry]) -> Entry | None:
    """Return the entry `checkpoint` if the first versions of Orbax may have written it, otherwise None.

    It is a msgpack file with a tree, or the directory of one array. Other tools use the same name.
    """
    for entry in entries:
        if entry.name == AGGREGATE and entry.kind == "file":
            return entry if begins_as(backend, directory, AGGREGATE) else None
        if entry.name == AGGREGATE and entry.kind == "directory":
            with contextlib.suppress(StorageError):
                return entry if any(each.name == ZARR for each in backend.list(f"{directory}/{AGGREGATE}")) else None
    return None


def read_json(backend: Backend, directory: str, name: str, kind: Any = Any) -> Any:
    """Read a JSON file of Orbax. Raises CorruptCheckpointError if it is not JSON of this kind."""
    try:
        return decode_untrusted(read_bytes(backend, directory, name), kind)
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{directory}/{name}: expected JSON metadata of Orbax, found something else: {shown(error)}"
        ) from error


def read_bytes(backend: Backend, directory: str, name: str) -> bytes:
    """Read a file of metadata."""
    return bytes(memoryview(read_whole(backend, directory, name, MAX_METADATA_BYTES)))


class StepInfo(NamedTuple):
    """The metadata of a step: the `info` of a manifest, and the handlers of the items, since version 0.11."""

    info: dict[str, Any]
    handlers: dict[str, str]


def read_step(backend: Backend, directory: str, entries: Sequence[Entry]) -> StepInfo:
    """Read the metadata of a step. An item has none."""
    info: dict[str, Any] = {}
    step = step_number(directory.rpartition("/")[2])
    if step is not None:
        info["step"] = step
    if all(entry.name != STEP_METADATA for entry in entries):
        return StepInfo(info, {})
    found = read_json(backend, directory, STEP_METADATA, dict[str, Any])
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
    store_array_data_equal_to_fill_value: bool | None = False


class StoredLeaf(NamedTuple):
    """A leaf with stored data: its name in Orbax's files, and its type. The first versions do not record the type."""

    parameter: str
    value_type: str | None = None


@dataclasses.dataclass
class OrbaxTree:
    """The tree of an item, by path."""

    containers: dict[str, str]
    leaves: dict[str, LeafRecord]  # those without stored data
    stored: dict[str, StoredLeaf]
    held: dict[str, np.ndarray]  # the content of arrays that are among `leaves`
    use_ocdbt: bool | None = None  # None: the metadata does not say
    use_zarr3: bool = False
    custom_metadata: Any = None
    is_whole: bool = False  # versions that do not record this left out chunks of zeros


def read_tree_metadata(backend: Backend, directory: str) -> tuple[OrbaxTree, list[str]]:
    """Read `_METADATA`. Some versions have the content of some leaves in the file `checkpoint`: return their paths.

    Raises UnsupportedLeafError if a leaf has a type that only a handler of the user can read.
    """
    found = read_json(backend, directory, TREE_METADATA, _TreeMetadata)
    tree = OrbaxTree(
        {}, {}, {}, {}, found.use_ocdbt, bool(found.use_zarr3), found.custom_metadata,
        is_whole=bool(found.store_array_data_equal_to_fill_value),
    )  # fmt: skip
    entries = found.tree_metadata.values()
    parents = {
        tuple(key.key for key in entry.key_metadata[:depth])
        for entry in entries
        for depth in range(len(entry.key_metadata))
    }
    in_aggregate = []
    for entry in entries:
        keys = tuple(key.key for key in entry.key_metadata)
        if keys in parents and entry.value_metadata.skip_deserialize:
            continue  # the container was empty when it was recorded; a later entry has a leaf in it
        name = _leaf_path(tree, entry, f"{directory}/{TREE_METADATA}")
        value_type = entry.value_metadata.value_type
        if value_type == "None":
            tree.leaves[name] = NoneLeaf()
        elif value_type in _EMPTY:
            tree.leaves[name] = EmptyLeaf()
            if _EMPTY[value_type] != "dict":
                tree.containers[name] = _EMPTY[value_type]
        elif entry.value_metadata.skip_deserialize:
            in_aggregate.append(name)
        elif value_type in (JAX_ARRAY, NUMPY_ARRAY, SCALAR, STRING):
            tree.stored[name] = StoredLeaf(".".join(keys), value_type)
        else:
            raise UnsupportedLeafError(
                f"{directory}/{TREE_METADATA}: leaf {name!r} has Orbax's type {shown(value_type)}, which needs a "
                "handler of your own; load it with Orbax, and save it with jaxckpt_train"
            )
    return tree, in_aggregate


def _leaf_path(tree: OrbaxTree, entry: _Entry, path: str) -> str:
    """Return the leaf path of an entry, and note the lists on the way."""
    if len(entry.key_metadata) > MAX_DEPTH:
        raise CorruptCheckpointError(f"{path}: expected a tree of at most {MAX_DEPTH} levels, found more")
    name = ROOT
    for key in entry.key_metadata:
        text = mapping_key(key.key, name)
        if key.key_type == 1:
            tree.containers[name] = "list"
            if not text.isdigit():
                raise CorruptCheckpointError(
                    f"{path}: below {name!r}: expected a position in a sequence, found {shown(key.key)}"
                )
        name = join(name, text)
    return name


def read_key_implementations(backend: Backend, directory: str) -> dict[str, str]:
    """Read the implementation of each PRNG key by parameter name, which the first process has written."""
    implementations: dict[str, str] = {}
    folder = f"{directory}/{ARRAY_METADATAS}"
    if any(entry.name == "process_0" for entry in backend.list(folder)):
        found = read_json(backend, folder, "process_0", dict[str, list[dict[str, Any]]])
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
    NamedTuple without fields, such as some states of Optax, as None. `names` are those of the leaves by their paths in
    the checkpoint.
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


def grain_states(backend: Backend, directory: str, entries: Sequence[Entry]) -> ForeignValue | None:
    """Return the states that Grain's handler has saved in an item, or None if there are none.

    A state is stored as JSON data if JSON can represent it exactly, otherwise as the text of its file.
    """
    files = sorted(entry.name for entry in entries if STATE_FILE.fullmatch(entry.name))
    # Bytes that are not text become text that is not JSON. The error then appears when an iterator is restored, and the
    # rest of the step can still be loaded.
    texts = {name: read_bytes(backend, directory, name).decode(errors="backslashreplace") for name in files}
    states = {name: _as_data(text) for name, text in texts.items()}
    return ForeignValue(ORBAX_GRAIN, msgspec.json.encode(states)) if states else None


def _as_data(text: str) -> Any:
    try:
        state = json.loads(text)
        is_same = not isinstance(state, str) and msgspec.json.decode(msgspec.json.encode(state)) == state
    except (*NOT_JSON, ValueError, OverflowError):
        return text
    return state if is_same else text
