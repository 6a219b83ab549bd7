"""Opens Orbax checkpoints: a step with its items, or a single item, as any version of Orbax writes them.

An item that is a tree has its structure in `_METADATA`, or in the msgpack file `checkpoint` in the first versions,
which also holds small leaves. `tensorstore_reads` reads its arrays.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train.checkpointables.base import STATE_FILE
from jaxckpt_train.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.formats.foreign import (
    JSON,
    ForeignCheckpoint,
    ForeignDamage,
    ForeignPart,
    ForeignSegment,
    ForeignTree,
    ForeignValue,
    foreign_call,
    make_foreign_checkpoint,
)
from jaxckpt_train.formats.orbax_metadata import (
    AGGREGATE,
    ARRAY_METADATAS,
    MAX_JSON_BYTES,
    MAX_METADATA_BYTES,
    OCDBT,
    STEP_METADATA,
    STRINGS,
    TEMPORARY,
    TREE_METADATA,
    Kind,
    OrbaxTree,
    StoredLeaf,
    decode_key_implementations,
    decode_strings,
    decode_tree_metadata,
    find_aggregate,
    grain_states,
    handler_kind,
    is_item_folder,
    is_stateful_handler,
    is_tree,
    mapping_key,
    read_step,
)
from jaxckpt_train.formats.tensorstore_reads import DECODING, OrbaxArray, hold_array, open_arrays, read_error
from jaxckpt_train.pytree.leaves import (
    STORED,
    ArrayLeaf,
    EmptyLeaf,
    KeyLeaf,
    LeafRecord,
    NoneLeaf,
    StrLeaf,
    TreeRecord,
    record_value,
)
from jaxckpt_train.pytree.paths import MAX_DEPTH, ROOT, join
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import NOT_JSON, is_plain_name, shown
from jaxckpt_train.store.manifest_decoding import decode_untrusted, decode_value, encode_value
from jaxckpt_train.store.process_identity import has_huge_malloc
from jaxckpt_train.store.segment import ALIGNMENT

NAME = "state"
JSON_ITEM, SECOND_JSON_ITEM, METRICS, JAX_KEY = "metadata", "data.json", "metrics", "jax_random_key"
DONE = "commit_success.txt"
MOST_NAMED = 5
_KEY_WIDTHS = {2: "threefry2x32", 4: "rbg"}
_NUMBERS = {"bool", "int64", "float64", "complex128"}  # dtypes of Python's numbers
# The file `checkpoint`
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")  # the second one only in the very first versions
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # msgpack extension types of Flax
_CHUNKED = "__msgpack_chunked_array__"
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 58


class _Found(NamedTuple):
    """The content of a checkpoint that has been opened so far."""

    parts: dict[str, ForeignPart]
    segments: list[ForeignSegment]
    info: dict[str, Any]


def open_orbax(backend: Backend, directory: str, entries: Sequence[Entry]) -> ForeignCheckpoint:
    """Open a step, or an item of a step.

    Args:
        backend: the storage.
        directory: the directory of the step or item.
        entries: its entries.

    Raises:
        NotACheckpointError: its save has not finished, or it contains no supported item.
        CorruptCheckpointError: it is damaged.
        UnsupportedLeafError: a leaf has a type that only a handler of the user can read.
        StorageError: it cannot be read.
    """
    if TEMPORARY in directory.rpartition("/")[2]:
        raise NotACheckpointError(f"{directory}: expected a finished step of Orbax, found an unfinished save")
    info, handlers = read_step(backend, directory, entries)
    found = _Found({}, [], info)
    if is_tree(backend, directory, entries):
        _add_tree(backend, directory, NAME, entries, found)
    elif any(STATE_FILE.fullmatch(entry.name) for entry in entries):
        _add_item(backend, directory, NAME, found)
    else:
        for entry in entries:
            if is_item_folder(entry) and is_plain_name(entry.name):
                _add_item(backend, f"{directory}/{entry.name}", entry.name, found)
        _add_missing(backend, directory, entries, handlers, found)
    if not found.parts:
        raise NotACheckpointError(f"{directory}: has Orbax metadata, but no item of a supported kind")
    damaged = [part for part in found.parts.values() if isinstance(part, ForeignDamage)]
    if len(damaged) == len(found.parts):
        raise CorruptCheckpointError(damaged[0].message)
    return make_foreign_checkpoint("Orbax", directory, found.parts, found.segments, info=found.info, decoding=DECODING)


def _add_item(backend: Backend, directory: str, name: str, found: _Found) -> None:
    entries = backend.list(directory)
    names = {entry.name for entry in entries}
    if is_tree(backend, directory, entries):
        _add_tree(backend, directory, name, entries, found)
    elif JSON_ITEM in names or SECOND_JSON_ITEM in names:
        found.parts[name] = _read_json_item(backend, directory, JSON_ITEM if JSON_ITEM in names else SECOND_JSON_ITEM)
    elif METRICS in names:
        _add_metrics(backend, directory, name, found)
    elif JAX_KEY in names:
        _add_key(backend, directory, name, found)
    else:
        states = grain_states(backend, directory, names)
        if states is not None:
            found.parts[name] = states


def _add_tree(backend: Backend, directory: str, name: str, entries: Sequence[Entry], found: _Found) -> None:
    tree = open_tree(backend, directory, entries, len(found.segments))
    found.parts[name] = tree.tree
    found.segments.extend(tree.segments)
    if tree.custom_metadata is not None:
        found.info.setdefault("custom_metadata", tree.custom_metadata)


def _add_metrics(backend: Backend, directory: str, name: str, found: _Found) -> None:
    try:
        found.info["metrics"] = _read_json(backend, directory, METRICS)
    except CorruptCheckpointError as error:
        found.parts[name] = ForeignDamage(JSON, str(error))


def _add_key(backend: Backend, directory: str, name: str, found: _Found) -> None:
    """Add a PRNG key that is an item: an inner item with its data, and one that records whether the key was typed.

    Orbax does not record the implementation. It is derived from the width of the data.
    """
    inner = _Found({}, found.segments, {})
    _add_item(backend, f"{directory}/{JAX_KEY}", name, inner)
    metadata = _read_json(backend, f"{directory}/{JAX_KEY}_metadata", JSON_ITEM)
    part = inner.parts.get(name)
    if not isinstance(part, ForeignTree) or len(part.arrays) != 1:
        raise CorruptCheckpointError(f"{directory}/{JAX_KEY}: expected one array with the data of a PRNG key")
    array = msgspec.structs.replace(part.arrays[0], name=ROOT)
    implementation = _KEY_WIDTHS.get(array.shape[-1]) if array.shape else None
    is_typed = isinstance(metadata, Mapping) and metadata.get("typed") is True
    leaf = KeyLeaf(implementation) if is_typed and implementation else ArrayLeaf()
    found.parts[name] = ForeignTree(TreeRecord({}, {ROOT: leaf}), [array])


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
        path, kind, is_folder = f"{directory}/{name}", handler_kind(handler), name in folders
        files = [entry.name for entry in backend.list(path) if entry.name != DONE] if is_folder else []
        if METRICS in files:
            continue  # already added to the metadata of the step
        if kind == JSON and len(files) == 1:
            found.parts[name] = _read_json_item(backend, path, files[0])  # a handler may choose the name of the file
        elif not is_folder or (kind is not None and not (files and is_stateful_handler(handler))):
            what = ", ".join(sorted(files)[:MOST_NAMED]) or ("an empty folder" if is_folder else "no folder")
            found.parts[name] = ForeignDamage(
                kind or JSON,
                f"{path}: expected the files of {shown(handler.rpartition('.')[2])}, which {STEP_METADATA} lists, "
                f"found {what}; restore the folder from a copy, or load the other items by name",
            )


def _read_json_item(backend: Backend, directory: str, name: str) -> ForeignValue | ForeignDamage:
    try:
        data = _read_bytes(backend, directory, name)
        return ForeignValue(JSON, encode_value(decode_value(data)))
    except (*NOT_JSON, UnsupportedLeafError) as error:
        return ForeignDamage(JSON, f"{directory}/{name}: expected JSON, found something else: {shown(error)}")
    except CorruptCheckpointError as error:
        return ForeignDamage(JSON, str(error))


def _read_json(backend: Backend, directory: str, name: str) -> Any:
    try:
        return decode_untrusted(_read_bytes(backend, directory, name))
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{directory}/{name}: expected JSON, found something else: {shown(error)}"
        ) from error


def _read_bytes(backend: Backend, directory: str, name: str) -> bytes:
    return bytes(memoryview(read_whole(backend, directory, name, MAX_JSON_BYTES)))


class OpenTree(NamedTuple):
    """An opened item: its tree, the segments of its arrays, and the user's metadata."""

    tree: ForeignTree
    segments: list[ForeignSegment]
    custom_metadata: Any


def open_tree(backend: Backend, directory: str, entries: Sequence[Entry], first_segment: int) -> OpenTree:
    """Open an item that is a tree or an array.

    Args:
        backend: the storage.
        directory: the directory of the item.
        entries: its entries.
        first_segment: the number of its first segment.

    Raises:
        NotACheckpointError: the item has no file with its structure.
        CorruptCheckpointError: it is damaged.
        UnsupportedLeafError: a leaf has a type that only a handler of the user can read.
        SettingsError: TensorStore is not installed.
        StorageError: it cannot be read.
    """
    names = {entry.name for entry in entries}
    tree = _read_structure(backend, directory, entries, names)
    arrays = _open_arrays(backend, directory, names, tree, first_segment)
    for name, content in tree.held.items():
        arrays[name] = hold_array(f"{directory}: leaf {name!r}", name, content, first_segment + len(arrays))
    record = TreeRecord(tree.containers, _leaf_records(backend, directory, names, tree, arrays))
    kept = [arrays[leaf].record for leaf, each in record.leaves.items() if isinstance(each, STORED)]
    return OpenTree(ForeignTree(record, kept), [each.segment for each in arrays.values()], tree.custom_metadata)


def _read_structure(backend: Backend, directory: str, entries: Sequence[Entry], names: set[str]) -> OrbaxTree:
    """Read the structure of a tree. Later versions write `_METADATA`, which has priority over the file `checkpoint`."""
    aggregate = find_aggregate(backend, directory, entries)
    if TREE_METADATA in names:
        path = f"{directory}/{TREE_METADATA}"
        tree = decode_tree_metadata(_tree_bytes(backend, directory, TREE_METADATA), path)
        if tree.in_aggregate and AGGREGATE not in names:
            raise CorruptCheckpointError(
                f"{directory}: expected the file {AGGREGATE!r} with leaf {tree.in_aggregate[0]!r}, "
                f"which {TREE_METADATA} lists, found no such file"
            )
        if tree.in_aggregate:
            tree.take_from_aggregate(_read_aggregate(backend, directory), f"{directory}/{AGGREGATE}")
        return tree
    if aggregate is not None and aggregate.kind == "file":
        return _read_aggregate(backend, directory)
    if AGGREGATE in names and aggregate is None:
        raise CorruptCheckpointError(f"{directory}/{AGGREGATE}: expected a msgpack tree of Orbax, found something else")
    tree = OrbaxTree.empty()
    tree.stored[ROOT] = StoredLeaf(AGGREGATE, Kind.UNKNOWN, False)  # the item is a single array
    return tree


def _read_aggregate(backend: Backend, directory: str) -> OrbaxTree:
    return decode_aggregate(_tree_bytes(backend, directory, AGGREGATE), f"{directory}/{AGGREGATE}")


def _tree_bytes(backend: Backend, directory: str, name: str) -> bytes:
    return bytes(memoryview(read_whole(backend, directory, name, MAX_METADATA_BYTES)))


def _open_arrays(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, first_segment: int
) -> dict[str, OrbaxArray]:
    parameters = {leaf: each.parameter for leaf, each in tree.stored.items() if each.kind is not Kind.STRING}
    use_ocdbt = OCDBT in names if tree.use_ocdbt is None else tree.use_ocdbt
    for leaf, parameter in parameters.items():
        # Otherwise the parameter is a key in the database. In the first versions it may also start with the path of
        # one.
        is_path = not use_ocdbt or tree.stored[leaf].kind is Kind.UNKNOWN
        if is_path and (parameter.startswith("/") or ".." in parameter.split("/")):
            raise CorruptCheckpointError(
                f"{directory}: leaf {leaf!r}: the array {parameter!r} would be outside of the checkpoint"
            )
    try:
        return open_arrays(
            backend,
            directory,
            parameters,
            use_ocdbt=use_ocdbt,
            use_zarr3=tree.use_zarr3,
            first_segment=first_segment,
            databases=_databases(backend, directory, tree),
            is_whole=tree.is_whole,
            takes_direct=_takes_direct(backend, directory, names),
        )
    except CorruptCheckpointError as error:
        if ROOT in tree.stored and tree.stored[ROOT].kind is Kind.UNKNOWN and AGGREGATE not in names:
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


def _databases(backend: Backend, directory: str, tree: OrbaxTree) -> set[str]:
    """Return the folders with a database of their own.

    The first versions use one for a parameter with `/` in its name.
    """
    leaves = [each for each in tree.stored.values() if each.kind is Kind.UNKNOWN]
    folders = {each.parameter.rpartition("/")[0] for each in leaves} - {""}
    return {folder for folder in folders if _has_database(backend, f"{directory}/{folder}")}


def _has_database(backend: Backend, directory: str) -> bool:
    try:
        return any(entry.name == OCDBT for entry in backend.list(directory))
    except StorageError:
        return False


def _leaf_records(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, arrays: Mapping[str, OrbaxArray]
) -> dict[str, LeafRecord]:
    """Return the records of all leaves in the order of Orbax's metadata, which is the order of the tree."""
    texts = _read_optional_json(backend, directory, STRINGS, decode_strings) if STRINGS in names else {}
    keys: dict[str, str] = {}
    if ARRAY_METADATAS in names:
        keys = _read_optional_json(backend, f"{directory}/{ARRAY_METADATAS}", "process_0", decode_key_implementations)
    scalars = [leaf for leaf, each in tree.stored.items() if _is_number(each, arrays.get(leaf))]
    values = scalar_leaves(directory, {leaf: arrays[leaf] for leaf in scalars})
    leaves: dict[str, LeafRecord] = dict(tree.inline)
    for leaf, each in tree.stored.items():
        leaves[leaf] = values[leaf] if leaf in values else _stored_leaf(directory, leaf, each, texts, keys, arrays)
    return leaves


def _is_number(stored: StoredLeaf, array: OrbaxArray | None) -> bool:
    """Return whether a leaf is a Python number.

    Of an unknown kind, a 64-bit scalar is one, as JAX has none by default.
    """
    if stored.kind is Kind.UNKNOWN and array is not None:
        return array.record.shape == () and array.record.dtype in _NUMBERS
    return stored.kind is Kind.SCALAR


def _stored_leaf(
    directory: str,
    leaf: str,
    stored: StoredLeaf,
    texts: Mapping[str, str],
    keys: Mapping[str, str],
    arrays: Mapping[str, OrbaxArray],
) -> LeafRecord:
    if stored.kind is Kind.STRING:
        if stored.parameter not in texts:
            raise CorruptCheckpointError(f"{directory}/{STRINGS}: expected the text of leaf {leaf!r}, found none")
        return StrLeaf(texts[stored.parameter])
    if stored.parameter in keys:
        return KeyLeaf(keys[stored.parameter])
    if stored.kind is Kind.UNKNOWN:
        return ArrayLeaf(_guess_host(arrays[leaf].record.dtype))
    return ArrayLeaf("numpy" if stored.is_numpy else "jax")


def _read_optional_json(backend: Backend, directory: str, name: str, decode: Any) -> dict[str, str]:
    try:
        data = read_whole(backend, directory, name, MAX_METADATA_BYTES)
    except StorageError:
        return {}
    found: dict[str, str] = decode(bytes(memoryview(data)), f"{directory}/{name}")
    return found


def scalar_leaves(directory: str, arrays: Mapping[str, OrbaxArray]) -> dict[str, LeafRecord]:
    """Return the records of scalar leaves. All of them are read at once, since there may be thousands.

    Raises:
        CorruptCheckpointError: a leaf is damaged.
        StorageError: the system refused to read a leaf.
    """
    found: dict[str, LeafRecord] = {leaf: ArrayLeaf("scalar") for leaf in arrays}
    futures = {leaf: _start_read(array) for leaf, array in arrays.items() if array.record.shape == ()}
    for leaf, future in futures.items():
        try:
            with foreign_call():
                value = future.result()
        except ValueError as error:
            raise read_error(error, f"{directory}: leaf {leaf!r} cannot be read") from error
        record = record_value(leaf, value.item())
        if record is not None:
            found[leaf] = record
    return found


def _start_read(array: OrbaxArray) -> Any:
    assert array.limits is not None
    array.limits.check()
    return array.store.read()


def decode_aggregate(data: bytes, path: str) -> OrbaxTree:
    """Decode the msgpack file `checkpoint` of a tree.

    Leaves that are stored outside the file are of `Kind.UNKNOWN`: it does not record whether they are arrays or
    numbers.

    Raises:
        CorruptCheckpointError: it is not a tree of Orbax.
        UnsupportedLeafError: a leaf is too large for a manifest.
    """
    try:
        found = msgspec.msgpack.decode(data)
    except NOT_JSON as error:
        raise CorruptCheckpointError(
            f"{path}: expected a msgpack tree of Orbax, found something else: {shown(error)}"
        ) from error
    if not isinstance(found, dict | list):
        raise CorruptCheckpointError(f"{path}: expected a tree of Orbax, found a {type(found).__name__}")
    tree = OrbaxTree.empty()
    _add_node(tree, found, ROOT, 0, path)
    return tree


def _add_node(tree: OrbaxTree, node: Any, name: str, depth: int, path: str) -> None:
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(f"{path}: expected a tree of at most {MAX_DEPTH} levels, found more")
    if isinstance(node, list):
        tree.containers[name] = "list"
    if isinstance(node, dict) and _CHUNKED in node:
        tree.held[name] = _joined_array(node, f"{path}: leaf {name!r}")
        tree.inline[name] = ArrayLeaf(_guess_host(tree.held[name].dtype.name))
    elif isinstance(node, dict | list):
        if not node:
            tree.inline[name] = EmptyLeaf()
        children = node.items() if isinstance(node, dict) else ((str(at), child) for at, child in enumerate(node))
        for key, child in children:
            if not isinstance(key, str):
                raise CorruptCheckpointError(f"{path}: below {name!r}: expected text keys, found {shown(key)}")
            _add_node(tree, child, join(name, mapping_key(key, name, path)), depth + 1, path)
    else:
        _add_leaf(tree, node, name, path)


def _add_leaf(tree: OrbaxTree, node: Any, name: str, path: str) -> None:
    subject = f"{path}: leaf {name!r}"
    if isinstance(node, str) and node.startswith(_PLACEHOLDERS):
        parameter = node.partition("://")[2]
        tree.stored[name] = StoredLeaf(parameter, Kind.UNKNOWN, False)
    elif isinstance(node, msgspec.msgpack.Ext) and node.code in (_ARRAY, _SCALAR):
        tree.held[name] = _decode_array(node.data, subject)
        tree.inline[name] = ArrayLeaf("scalar" if node.code == _SCALAR else _guess_host(tree.held[name].dtype.name))
    elif isinstance(node, msgspec.msgpack.Ext):
        record = record_value(name, _decode_complex(node, subject))
        assert record is not None
        tree.inline[name] = record
    else:
        record = NoneLeaf() if node is None else _python_record(name, node, path)
        if record is None:
            raise CorruptCheckpointError(f"{subject}: expected a type that Orbax writes, found {type(node).__name__}")
        tree.inline[name] = record


def _python_record(name: str, value: Any, path: str) -> Any:
    try:
        return record_value(name, value)
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{path}: {error}") from error


def _guess_host(dtype: str) -> Literal["jax", "numpy"]:
    """Guess whether an array was numpy's. JAX has no 64-bit types by default."""
    return "numpy" if dtype in ("int64", "uint64", "float64", "complex128") else "jax"


def _decode_complex(node: msgspec.msgpack.Ext, subject: str) -> complex:
    if node.code == _COMPLEX:
        try:
            return complex(*msgspec.msgpack.decode(node.data, type=tuple[float, float]))
        except NOT_JSON as error:
            raise CorruptCheckpointError(
                f"{subject}: expected a complex number, found something else: {shown(error)}"
            ) from error
    raise CorruptCheckpointError(f"{subject}: expected msgpack extension type 1, 2 or 3, found {node.code}")


def _decode_array(data: Any, subject: str) -> np.ndarray:
    try:
        shape, name, content = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], str, bytes])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{subject}: expected an array, found something else: {shown(error)}") from error
    dtype = DTYPES.get(name)
    if dtype is None:
        raise CorruptCheckpointError(f"{subject}: expected a known dtype, found {shown(name)}")
    _check_shape(shape, subject)
    if math.prod(shape) * dtype.itemsize != len(content):
        raise CorruptCheckpointError(
            f"{subject}: expected {math.prod(shape) * dtype.itemsize} bytes for {name}{list(shape)}, found "
            f"{len(content)}"
        )
    return np.frombuffer(content, dtype).reshape(shape)


def _check_shape(shape: Sequence[int], subject: str) -> None:
    # numpy refuses such a shape even if one of its sizes is 0
    too_large = math.prod(max(1, abs(size)) for size in shape) >= _MOST_ELEMENTS
    if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 or too_large:
        raise CorruptCheckpointError(f"{subject}: expected the shape of an array, found {shown(list(shape))}")


def _joined_array(node: Mapping[Any, Any], subject: str) -> np.ndarray:
    """Decode an array of more than 1 GiB, which Flax stores in pieces."""
    shape, pieces = _numbered_values(node.get("shape")), _numbered_values(node.get("chunks"))
    if any(not isinstance(size, int) for size in shape) or any(
        not isinstance(piece, msgspec.msgpack.Ext) or piece.code != _ARRAY for piece in pieces
    ):
        raise CorruptCheckpointError(f"{subject}: expected the pieces of an array, found something else")
    _check_shape(shape, subject)
    arrays = [_decode_array(piece.data, subject) for piece in pieces]
    if len({(array.dtype, array.ndim) for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise CorruptCheckpointError(f"{subject}: expected pieces of one array, found different dtypes or dimensions")
    found = sum(len(array) for array in arrays)
    if found != math.prod(shape):
        raise CorruptCheckpointError(
            f"{subject}: expected pieces with the {math.prod(shape)} elements of the shape {shown(shape)}, "
            f"found {found} elements"
        )
    return np.concatenate(arrays).reshape(shape)


def _numbered_values(found: Any) -> list[Any]:
    """Return the values of a map with the keys "0", "1", ..."""
    if not isinstance(found, dict) or set(found) != {str(number) for number in range(len(found))}:
        return [None]
    return [found[str(number)] for number in range(len(found))]


def encode_aggregate(leaves: Iterable[tuple[tuple[tuple[str, int], ...], Any]]) -> bytes:
    """Encode the structure of a tree as the file `checkpoint`, which versions before 0.5 need to restore anything.

    Args:
        leaves: for each leaf its keys, with 1 for a position in a sequence and 2 for a key of a mapping, and its
            content: a placeholder for a stored leaf, or text, None or an empty container.
    """
    root: dict[str, Any] = {}
    sequences = set[int]()
    for keys, value in leaves:
        if not keys:  # the whole tree is this leaf
            return msgspec.msgpack.encode(value)
        node = root
        for depth, (key, kind) in enumerate(keys):
            if kind == 1:
                sequences.add(id(node))
            node = node.setdefault(key, value if depth == len(keys) - 1 else {})
    return msgspec.msgpack.encode(_restore_sequences(root, sequences))


def placeholder(parameter: str) -> str:
    """Return the text in the file `checkpoint` that refers to a leaf stored outside the file."""
    return f"{_PLACEHOLDERS[0]}{parameter}"


def _restore_sequences(node: Any, sequences: set[int]) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _restore_sequences(child, sequences) for key, child in node.items()}
    positions = [str(number) for number in range(len(children))]
    if id(node) in sequences and set(positions) == set(children):
        return [children[position] for position in positions]
    return children
