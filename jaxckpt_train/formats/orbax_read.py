"""Opens Orbax checkpoints: a step with its items, or a single item, as any version of Orbax writes them.

An item that is a tree has its structure in `_METADATA`, or in the msgpack file `checkpoint` in the first versions,
which also holds small leaves. `tensorstore_reads` reads its arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.checkpointables.base import ORBAX_GRAIN, STATE_FILE
from jaxckpt_train.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.formats.flax import MsgpackTree, decode_msgpack
from jaxckpt_train.formats.foreign import (
    JSON,
    NAME,
    PYTREE,
    ForeignCheckpoint,
    ForeignPart,
    ForeignTree,
    ForeignValue,
    Segments,
    few,
    foreign_call,
    make_foreign_checkpoint,
    mapping_key,
)
from jaxckpt_train.formats.orbax_names import (
    AGGREGATE,
    OCDBT,
    STEP_METADATA,
    TEMPORARY,
    TREE_METADATA,
    find_aggregate,
    is_item_folder,
    is_tree,
    step_number,
)
from jaxckpt_train.formats.tensorstore_reads import DECODING, OrbaxArray, open_arrays, read_error
from jaxckpt_train.pytree.leaves import (
    EMPTY,
    MAX_DEPTH,
    ROOT,
    STORED,
    ArrayLeaf,
    EmptyLeaf,
    Flat,
    KeyLeaf,
    LeafRecord,
    NoneLeaf,
    StrLeaf,
    TreeRecord,
    join,
    record_value,
)
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import (
    NOT_JSON,
    ArrayRecord,
    decode_untrusted,
    decode_value,
    encode_value,
    is_plain_name,
    shown,
)

JSON_ITEM, SECOND_JSON_ITEM, METRICS, JAX_KEY = "metadata", "data.json", "metrics", "jax_random_key"
DONE = "commit_success.txt"
_KEY_WIDTHS = {2: "threefry2x32", 4: "rbg"}
_NUMBERS = {"bool", "int64", "float64", "complex128"}  # dtypes of Python's numbers
PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")  # the second one only in the very first versions
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
STRINGS, ARRAY_METADATAS = "_strings.json", "array_metadatas"
VALUE = "/value"  # the child of a Flax NNX variable, which Orbax saves as a container
MAX_METADATA_BYTES = 512 << 20
JAX_ARRAY, NUMPY_ARRAY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"  # Orbax's types of leaves
_EMPTY = {"Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "dict"}
_TYPED_INTEGER = re.compile(r"~s-?[0-9]+")


class _Found(NamedTuple):
    parts: dict[str, ForeignPart]
    segments: Segments
    info: dict[str, Any]


def open_orbax(backend: Backend, directory: str, entries: Sequence[Entry]) -> ForeignCheckpoint:
    """Open a step, or an item of a step. Raises NotACheckpointError for an unfinished save, or without known items."""
    if TEMPORARY in directory.rpartition("/")[2]:
        raise NotACheckpointError(f"{directory}: expected a finished step of Orbax, found an unfinished save")
    info, handlers = read_step(backend, directory, entries)
    found = _Found({}, Segments(), info)
    if is_tree(backend, directory, entries) or any(STATE_FILE.fullmatch(entry.name) for entry in entries):
        _add_item(backend, directory, NAME, entries, found)
    else:
        for entry in entries:
            if is_item_folder(entry) and is_plain_name(entry.name):
                path = f"{directory}/{entry.name}"
                _add_item(backend, path, entry.name, backend.list(path), found)
        _add_missing(backend, directory, entries, handlers, found)
    if not found.parts:
        raise NotACheckpointError(f"{directory}: has Orbax metadata, but no item of a supported kind")
    errors = [part.data for part in found.parts.values() if isinstance(part, ForeignValue)]
    damage = [error for error in errors if isinstance(error, CorruptCheckpointError)]
    if len(damage) == len(found.parts):
        raise damage[0]
    return make_foreign_checkpoint("Orbax", directory, found.parts, found.segments, info=found.info, decoding=DECODING)


def _add_item(backend: Backend, directory: str, name: str, entries: Sequence[Entry], found: _Found) -> None:
    names = {entry.name for entry in entries}
    if is_tree(backend, directory, entries):
        found.parts[name], custom_metadata = _open_tree(backend, directory, entries, found.segments)
        if custom_metadata is not None:
            found.info.setdefault("custom_metadata", custom_metadata)
    elif JSON_ITEM in names or SECOND_JSON_ITEM in names:
        found.parts[name] = _read_json_item(backend, directory, JSON_ITEM if JSON_ITEM in names else SECOND_JSON_ITEM)
    elif METRICS in names:
        try:
            found.info["metrics"] = read_json(backend, directory, METRICS)
        except CorruptCheckpointError as error:
            found.parts[name] = ForeignValue(JSON, error)
    elif JAX_KEY in names:
        found.parts[name] = _open_key(backend, directory, found.segments)
    elif states := grain_states(backend, directory, entries):
        found.parts[name] = states


def _open_key(backend: Backend, directory: str, segments: Segments) -> ForeignTree:
    """Open a PRNG key that is an item: an inner item with its data, and one that records whether the key was typed.

    Orbax does not record the implementation. It is derived from the width of the data.
    """
    path = f"{directory}/{JAX_KEY}"
    tree, _ = _open_tree(backend, path, backend.list(path), segments)
    metadata = read_json(backend, f"{path}_metadata", JSON_ITEM)
    if len(tree.arrays) != 1:
        raise CorruptCheckpointError(f"{path}: expected one array with the data of a PRNG key")
    array = msgspec.structs.replace(tree.arrays[0], name=ROOT)
    implementation = _KEY_WIDTHS.get(array.shape[-1]) if array.shape else None
    is_typed = isinstance(metadata, Mapping) and metadata.get("typed") is True
    leaf = KeyLeaf(implementation) if is_typed and implementation else ArrayLeaf()
    return ForeignTree(TreeRecord({}, {ROOT: leaf}), [array])


def _add_missing(
    backend: Backend, directory: str, entries: Sequence[Entry], handlers: Mapping[str, str], found: _Found
) -> None:
    """Add each item that the step lists but that is missing or empty, as damaged, except of the user's handlers."""
    folders = {entry.name for entry in entries if is_item_folder(entry)}
    for name, handler in handlers.items():
        if name in found.parts or not is_plain_name(name):
            continue
        path, kind, last = f"{directory}/{name}", handler_kind(handler), handler.rpartition(".")[2]
        files = [entry.name for entry in backend.list(path) if entry.name != DONE] if name in folders else []
        if METRICS in files:
            continue  # already added to the metadata of the step
        if kind == JSON and len(files) == 1:
            found.parts[name] = _read_json_item(backend, path, files[0])  # a handler may choose the name of the file
        # Objects of any class are saved by the stateful handler, not only Grain's iterators.
        elif name not in folders or (kind is not None and not (files and last == "StatefulCheckpointableHandler")):
            there = "an empty folder" if name in folders else "no folder"
            problem = f"expected the files of {shown(last)}, found {few(sorted(files)) or there}"
            error = CorruptCheckpointError(f"{path}: {problem}; load the other items by name")
            found.parts[name] = ForeignValue(kind or JSON, error)


def _read_json_item(backend: Backend, directory: str, name: str) -> ForeignValue:
    try:
        return ForeignValue(JSON, encode_value(decode_value(_read_bytes(backend, directory, name))))
    except (*NOT_JSON, UnsupportedLeafError) as error:
        return ForeignValue(JSON, CorruptCheckpointError(f"{directory}/{name}: expected JSON: {shown(error)}"))
    except CorruptCheckpointError as error:
        return ForeignValue(JSON, error)


def _open_tree(
    backend: Backend, directory: str, entries: Sequence[Entry], segments: Segments
) -> tuple[ForeignTree, Any]:
    """Open an item that is a tree or an array, and return it with the user's metadata. Raises as `open_orbax`."""
    names = {entry.name for entry in entries}
    tree = _read_structure(backend, directory, entries, names)
    opened = _open_arrays(backend, directory, names, tree, segments)
    arrays = {leaf: array.record for leaf, array in opened.items()}
    arrays |= {leaf: segments.hold(leaf, content) for leaf, content in tree.held.items()}
    leaves = tree.leaves | _stored_leaves(backend, directory, names, tree, opened)
    kept = [arrays[leaf] for leaf, each in leaves.items() if isinstance(each, STORED)]
    return ForeignTree(TreeRecord(tree.containers, leaves), kept), tree.custom_metadata


def _read_structure(backend: Backend, directory: str, entries: Sequence[Entry], names: set[str]) -> OrbaxTree:
    """Read the structure of a tree. Later versions write `_METADATA`, which has priority over the file `checkpoint`."""
    if TREE_METADATA in names:
        tree, in_aggregate = read_tree_metadata(backend, directory)
        if in_aggregate:
            _take_from_aggregate(backend, directory, names, tree, set(in_aggregate))
        return tree
    aggregate = find_aggregate(backend, directory, entries)
    if aggregate is not None and aggregate.kind == "file":
        return _read_aggregate(backend, directory)
    if AGGREGATE in names and aggregate is None:
        raise CorruptCheckpointError(f"{directory}/{AGGREGATE}: expected a msgpack tree of Orbax, found something else")
    return OrbaxTree({}, {}, {ROOT: StoredLeaf(AGGREGATE)}, {})  # the item is a single array


def _take_from_aggregate(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, leaves: Collection[str]
) -> None:
    other = _read_aggregate(backend, directory) if AGGREGATE in names else OrbaxTree({}, {}, {}, {})
    for leaf in sorted(leaves):
        if leaf not in other.leaves and leaf not in other.stored:
            raise CorruptCheckpointError(f"{directory}/{AGGREGATE}: has no leaf {leaf!r}, which {TREE_METADATA} lists")
    tree.leaves |= {leaf: each for leaf, each in other.leaves.items() if leaf in leaves}
    tree.stored |= {leaf: each for leaf, each in other.stored.items() if leaf in leaves}
    tree.held |= {leaf: each for leaf, each in other.held.items() if leaf in leaves}
    tree.containers |= {leaf: each for leaf, each in other.containers.items() if leaf in leaves}


def _read_aggregate(backend: Backend, directory: str) -> OrbaxTree:
    return decode_aggregate(_read_bytes(backend, directory, AGGREGATE), f"{directory}/{AGGREGATE}")


def _open_arrays(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, segments: Segments
) -> dict[str, OrbaxArray]:
    parameters = {leaf: each.parameter for leaf, each in tree.stored.items() if each.value_type != STRING}
    use_ocdbt = OCDBT in names if tree.use_ocdbt is None else tree.use_ocdbt
    databases = set[str]()
    for leaf, parameter in parameters.items():
        is_old = tree.stored[leaf].value_type is None
        # Later the parameter is a key in the database, unless there is none. It is a path in the first versions, which
        # have a database of its own for a parameter with `/` in its name.
        if (is_old or not use_ocdbt) and (parameter.startswith("/") or ".." in parameter.split("/")):
            raise CorruptCheckpointError(f"{directory}: leaf {leaf!r}: the array {parameter!r} is outside of it")
        folder = parameter.rpartition("/")[0]
        if is_old and folder and folder not in databases and _has_database(backend, f"{directory}/{folder}"):
            databases.add(folder)
    try:
        return open_arrays(
            backend,
            directory,
            parameters,
            segments,
            use_ocdbt=use_ocdbt,
            use_zarr3=tree.use_zarr3,
            databases=databases,
            is_whole=tree.is_whole,
        )
    except CorruptCheckpointError as error:
        if tree.stored.keys() == {ROOT} and not names & {AGGREGATE, TREE_METADATA}:
            raise NotACheckpointError(
                f"{directory}: expected {TREE_METADATA} or {AGGREGATE} with the tree, found only arrays of Orbax"
            ) from error
        raise


def _has_database(backend: Backend, directory: str) -> bool:
    with contextlib.suppress(StorageError):
        return any(entry.name == OCDBT for entry in backend.list(directory))
    return False


def _stored_leaves(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, arrays: Mapping[str, OrbaxArray]
) -> dict[str, LeafRecord]:
    texts = read_json(backend, directory, STRINGS, dict[str, str]) if STRINGS in names else {}
    keys = read_key_implementations(backend, directory) if ARRAY_METADATAS in names else {}
    records = {leaf: array.record for leaf, array in arrays.items()}
    numbers = {leaf: arrays[leaf] for leaf, each in tree.stored.items() if _is_number(each, records.get(leaf))}
    leaves = _read_numbers(directory, numbers)
    for leaf, (parameter, value_type) in tree.stored.items():
        if leaf in leaves:
            continue
        if value_type == STRING:
            if parameter not in texts:
                raise CorruptCheckpointError(f"{directory}/{STRINGS}: expected the text of leaf {leaf!r}, found none")
            leaves[leaf] = StrLeaf(texts[parameter])
        elif parameter in keys:
            leaves[leaf] = KeyLeaf(keys[parameter])
        elif value_type is None:
            leaves[leaf] = ArrayLeaf(_guess_host(records[leaf].dtype))
        else:
            leaves[leaf] = ArrayLeaf("jax" if value_type == JAX_ARRAY else "numpy")
    return leaves


def _is_number(stored: StoredLeaf, array: ArrayRecord | None) -> bool:
    """Return whether a leaf is a Python number. Of an unknown type, a 64-bit scalar is one: JAX has none by default."""
    if stored.value_type is None and array is not None:
        return array.shape == () and array.dtype in _NUMBERS
    return stored.value_type == SCALAR


def _guess_host(dtype: str) -> Literal["jax", "numpy"]:
    """Guess whether an array was numpy's. JAX has no 64-bit types by default."""
    return "numpy" if dtype in ("int64", "uint64", "float64", "complex128") else "jax"


def _read_numbers(directory: str, arrays: Mapping[str, OrbaxArray]) -> dict[str, LeafRecord]:
    """Return the records of Python numbers. All of them are read at once, since there may be thousands."""
    found: dict[str, LeafRecord] = {leaf: ArrayLeaf("scalar") for leaf in arrays}
    futures = {}
    for leaf, array in arrays.items():
        if array.record.shape == ():
            array.check_size()
            futures[leaf] = array.store.read()
    for leaf, future in futures.items():
        try:
            with foreign_call():
                value = future.result()
        except ValueError as error:
            raise read_error(error, f"{directory}: leaf {leaf!r} cannot be read") from error
        found[leaf] = record_value(leaf, value.item()) or found[leaf]
    return found


class _Aggregate(MsgpackTree):
    def _key_text(self, key: Any, parent: str) -> str:
        super()._key_text(key, parent)
        return mapping_key(key, parent)


def decode_aggregate(data: bytes, path: str) -> OrbaxTree:
    """Decode the msgpack file `checkpoint` of a tree, which does not record the types of leaves stored elsewhere."""
    try:
        found = decode_msgpack(data)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected a msgpack tree of Orbax: {shown(error)}") from error
    if not isinstance(found, dict | list):
        raise CorruptCheckpointError(f"{path}: expected a tree of Orbax, found a {type(found).__name__}")
    tree = _Aggregate(path)
    tree.add(ROOT, found)
    leaves, stored = dict[str, LeafRecord](), dict[str, StoredLeaf]()
    for name, leaf in tree.leaves.items():
        if isinstance(leaf, StrLeaf) and leaf.value.startswith(PLACEHOLDERS):
            stored[name] = StoredLeaf(leaf.value.partition("://")[2])
        elif isinstance(leaf, ArrayLeaf) and leaf.host == "numpy":
            leaves[name] = ArrayLeaf(_guess_host(tree.arrays[name].dtype.name))
        else:
            leaves[name] = leaf
    return OrbaxTree(tree.containers, leaves, stored, tree.arrays)


def read_json(backend: Backend, directory: str, name: str, kind: Any = Any) -> Any:
    """Read a JSON file of Orbax. Raises CorruptCheckpointError if it is not JSON of this kind."""
    try:
        return decode_untrusted(_read_bytes(backend, directory, name), kind)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{directory}/{name}: expected JSON metadata: {shown(error)}") from error


def _read_bytes(backend: Backend, directory: str, name: str) -> bytes:
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
    """Read `_METADATA`. Also return the paths of leaves whose content is in the file `checkpoint` in some versions."""
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
                raise CorruptCheckpointError(f"{path}: below {name!r}: expected a position, found {shown(key.key)}")
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

    Orbax does not record whether a key is text or an integer, saves variables of NNX as mappings, and a NamedTuple
    without fields, such as some states of Optax, as None. `names` are those of the leaves by their paths.
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
    """Return the states of Grain's handler in an item, or None: as JSON data if that is exact, otherwise as text."""
    files = sorted(entry.name for entry in entries if STATE_FILE.fullmatch(entry.name))
    # Bytes that are not text become text that is not JSON. The error then appears when an iterator is restored, and the
    # rest of the step can still be loaded.
    texts = {name: _read_bytes(backend, directory, name).decode(errors="backslashreplace") for name in files}
    states = {name: _as_data(text) for name, text in texts.items()}
    return ForeignValue(ORBAX_GRAIN, msgspec.json.encode(states)) if states else None


def _as_data(text: str) -> Any:
    try:
        state = json.loads(text)
        is_same = not isinstance(state, str) and msgspec.json.decode(msgspec.json.encode(state)) == state
    except (*NOT_JSON, ValueError, OverflowError):
        return text
    return state if is_same else text
