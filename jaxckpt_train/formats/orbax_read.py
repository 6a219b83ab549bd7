"""Opens Orbax checkpoints: a step with its items, or a single item, as any version of Orbax writes them.

An item that is a tree has its structure in `_METADATA`, or in the msgpack file `checkpoint` in the first versions,
which also holds small leaves. `tensorstore_reads` reads its arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from jaxckpt_train.checkpointables.base import STATE_FILE
from jaxckpt_train.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.formats.flax import MsgpackTree, decode_msgpack
from jaxckpt_train.formats.foreign import (
    JSON,
    NAME,
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
from jaxckpt_train.formats.orbax_metadata import (
    AGGREGATE,
    ARRAY_METADATAS,
    JAX_ARRAY,
    OCDBT,
    SCALAR,
    STEP_METADATA,
    STRING,
    STRINGS,
    TEMPORARY,
    TREE_METADATA,
    OrbaxTree,
    StoredLeaf,
    find_aggregate,
    grain_states,
    handler_kind,
    is_item_folder,
    is_tree,
    read_bytes,
    read_json,
    read_key_implementations,
    read_step,
    read_tree_metadata,
)
from jaxckpt_train.formats.tensorstore_reads import DECODING, OrbaxArray, open_arrays, read_error
from jaxckpt_train.pytree.leaves import ROOT, STORED, ArrayLeaf, KeyLeaf, LeafRecord, StrLeaf, TreeRecord, record_value
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.manifest import NOT_JSON, ArrayRecord, decode_value, encode_value, is_plain_name, shown
from jaxckpt_train.store.process_identity import has_huge_malloc
from jaxckpt_train.store.segment import ALIGNMENT

JSON_ITEM, SECOND_JSON_ITEM, METRICS, JAX_KEY = "metadata", "data.json", "metrics", "jax_random_key"
DONE = "commit_success.txt"
_KEY_WIDTHS = {2: "threefry2x32", 4: "rbg"}
_NUMBERS = {"bool", "int64", "float64", "complex128"}  # dtypes of Python's numbers
PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")  # the second one only in the very first versions


class _Found(NamedTuple):
    """The content of a checkpoint that has been opened so far."""

    parts: dict[str, ForeignPart]
    segments: Segments
    info: dict[str, Any]


def open_orbax(backend: Backend, directory: str, entries: Sequence[Entry]) -> ForeignCheckpoint:
    """Open a step, or an item of a step.

    Raises:
        NotACheckpointError: its save has not finished, or it contains no supported item.
        CorruptCheckpointError: it is damaged.
        UnsupportedLeafError: a leaf has a type that only a handler of the user can read.
        SettingsError: TensorStore is not installed.
        StorageError: it cannot be read.
    """
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
    """Add each item that the metadata of the step lists but that is missing or empty, as a damaged checkpointable.

    Loading such an item raises an error; the others load normally. Items of the user's own handlers are ignored.
    """
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
            problem = CorruptCheckpointError(
                f"{path}: expected the files of {shown(last)}, which {STEP_METADATA} lists, found "
                f"{few(sorted(files)) or there}; restore the folder from a copy, or load the other "
                "items by name"
            )
            found.parts[name] = ForeignValue(kind or JSON, problem)


def _read_json_item(backend: Backend, directory: str, name: str) -> ForeignValue:
    try:
        return ForeignValue(JSON, encode_value(decode_value(read_bytes(backend, directory, name))))
    except (*NOT_JSON, UnsupportedLeafError) as error:
        problem = f"{directory}/{name}: expected JSON, found something else: {shown(error)}"
        return ForeignValue(JSON, CorruptCheckpointError(problem))
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
    """Take leaves from the file `checkpoint`."""
    other = _read_aggregate(backend, directory) if AGGREGATE in names else OrbaxTree({}, {}, {}, {})
    for leaf in sorted(leaves):
        if leaf not in other.leaves and leaf not in other.stored:
            raise CorruptCheckpointError(
                f"{directory}/{AGGREGATE}: expected leaf {leaf!r}, which {TREE_METADATA} lists, found "
                f"{'none' if AGGREGATE in names else 'no such file'}"
            )
    tree.leaves |= {leaf: each for leaf, each in other.leaves.items() if leaf in leaves}
    tree.stored |= {leaf: each for leaf, each in other.stored.items() if leaf in leaves}
    tree.held |= {leaf: each for leaf, each in other.held.items() if leaf in leaves}
    tree.containers |= {leaf: each for leaf, each in other.containers.items() if leaf in leaves}


def _read_aggregate(backend: Backend, directory: str) -> OrbaxTree:
    return decode_aggregate(read_bytes(backend, directory, AGGREGATE), f"{directory}/{AGGREGATE}")


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
            raise CorruptCheckpointError(
                f"{directory}: leaf {leaf!r}: the array {parameter!r} would be outside of the checkpoint"
            )
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
            takes_direct=_takes_direct(backend, directory, names),
        )
    except CorruptCheckpointError as error:
        if tree.stored.keys() == {ROOT} and not names & {AGGREGATE, TREE_METADATA}:
            raise NotACheckpointError(
                f"{directory}: expected {TREE_METADATA} or {AGGREGATE} with the structure of the tree, found only "
                "arrays of Orbax"
            ) from error
        raise


def _takes_direct(backend: Backend, directory: str, names: set[str]) -> bool:
    """Return whether chunks can bypass the page cache. Without huge pages in the buffers, direct reads are slower."""
    if not has_huge_malloc():
        return False
    name = next(name for name in (OCDBT, TREE_METADATA, AGGREGATE, *names) if name in names)
    try:
        with contextlib.closing(backend.open(directory, name, direct=True)) as source:
            source.read_into(0, aligned_buffer(ALIGNMENT), 0)
    except CheckpointError:  # the file system refuses direct reads, or the name is a folder
        return False
    return True


def _has_database(backend: Backend, directory: str) -> bool:
    with contextlib.suppress(StorageError):
        return any(entry.name == OCDBT for entry in backend.list(directory))
    return False


def _stored_leaves(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, arrays: Mapping[str, OrbaxArray]
) -> dict[str, LeafRecord]:
    """Return the records of the leaves with stored data."""
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
    """Return whether a leaf is a Python number.

    Of an unknown type, a 64-bit scalar is one, as JAX has none by default.
    """
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
        raise CorruptCheckpointError(
            f"{path}: expected a msgpack tree of Orbax, found something else: {shown(error)}"
        ) from error
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
