"""Opens an item of Orbax that is a tree, or one array: its structure, from whichever file tells it, and its arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.formats.foreign import ForeignSegment, ForeignTree
from jaxckpt_train.formats.orbax_aggregate import decode_aggregate, host_of
from jaxckpt_train.formats.orbax_arrays import OrbaxArray, hold_array, open_arrays
from jaxckpt_train.formats.orbax_looks import AGGREGATE, OCDBT, aggregate_of
from jaxckpt_train.formats.orbax_metadata import (
    ARRAY_METADATAS,
    MAX_METADATA_BYTES,
    STRINGS,
    TREE_METADATA,
    Kind,
    OrbaxTree,
    StoredLeaf,
    decode_key_implementations,
    decode_strings,
    decode_tree_metadata,
)
from jaxckpt_train.formats.orbax_scalars import scalar_leaves
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.huge_malloc import has_huge_malloc
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.staging import aligned_buffer
from jaxckpt_train.tree.leaf_records import STORED, ArrayLeaf, KeyLeaf, LeafRecord, StrLeaf, TreeRecord
from jaxckpt_train.tree.paths import ROOT

_NUMBERS = {"bool", "int64", "float64", "complex128"}


class OpenTree(NamedTuple):
    """An opened item: its tree, what its arrays are read from, and the metadata of the user's in it."""

    tree: ForeignTree
    segments: list[ForeignSegment]
    custom_metadata: Any


def open_tree(backend: Backend, directory: str, entries: Sequence[Entry], first_segment: int) -> OpenTree:
    """Open an item.

    Args:
        backend: where.
        directory: of the item.
        entries: what is in it.
        first_segment: the number of the first segment.

    Raises:
        NotACheckpointError: nothing tells of its structure.
        CorruptCheckpointError: it is damaged.
        UnsupportedLeafError: a leaf is of a type that only a handler of the user's own reads.
        SettingsError: TensorStore is not installed.
        StorageError: it cannot be read.
    """
    names = {entry.name for entry in entries}
    tree = _structure(backend, directory, entries, names)
    arrays = _open_arrays(backend, directory, names, tree, first_segment)
    for name, content in tree.held.items():
        arrays[name] = hold_array(f"{directory}: leaf {name!r}", name, content, first_segment + len(arrays))
    record = TreeRecord(tree.containers, _leaves(backend, directory, names, tree, arrays))
    kept = [arrays[leaf].record for leaf, each in record.leaves.items() if isinstance(each, STORED)]
    return OpenTree(ForeignTree(record, kept), [each.segment for each in arrays.values()], tree.custom_metadata)


def _structure(backend: Backend, directory: str, entries: Sequence[Entry], names: set[str]) -> OrbaxTree:
    """What the item says of its tree: `_METADATA`, of later versions, before the file `checkpoint`, of first ones."""
    aggregate = aggregate_of(backend, directory, entries)
    if TREE_METADATA in names:
        path = f"{directory}/{TREE_METADATA}"
        tree = decode_tree_metadata(_bytes_of(backend, directory, TREE_METADATA), path)
        if tree.elsewhere and AGGREGATE not in names:
            raise CorruptCheckpointError(
                f"{directory}: lacks the file {AGGREGATE!r} with leaf {tree.elsewhere[0]!r}, which {TREE_METADATA} has"
            )
        if tree.elsewhere:
            tree.take(_aggregate(backend, directory), f"{directory}/{AGGREGATE}")
        return tree
    if aggregate is not None and aggregate.kind == "file":
        return _aggregate(backend, directory)
    if AGGREGATE in names and aggregate is None:
        raise CorruptCheckpointError(f"{directory}/{AGGREGATE}: expected a tree of Orbax in msgpack, found none")
    tree = OrbaxTree.empty()
    tree.stored[ROOT] = StoredLeaf(AGGREGATE, Kind.UNKNOWN, False)  # an array that is an item by itself
    return tree


def _aggregate(backend: Backend, directory: str) -> OrbaxTree:
    return decode_aggregate(_bytes_of(backend, directory, AGGREGATE), f"{directory}/{AGGREGATE}")


def _bytes_of(backend: Backend, directory: str, name: str) -> bytes:
    return bytes(memoryview(read_whole(backend, directory, name, MAX_METADATA_BYTES)))


def _open_arrays(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, first_segment: int
) -> dict[str, OrbaxArray]:
    parameters = {leaf: each.parameter for leaf, each in tree.stored.items() if each.kind is not Kind.STRING}
    use_ocdbt = OCDBT in names if tree.use_ocdbt is None else tree.use_ocdbt
    for leaf, parameter in parameters.items():
        is_path = not use_ocdbt or tree.stored[leaf].kind is Kind.UNKNOWN  # else it is a key in the database
        if is_path and (parameter.startswith("/") or ".." in parameter.split("/")):
            raise CorruptCheckpointError(
                f"{directory}: leaf {leaf!r}: the array {parameter!r} would lie outside of the checkpoint"
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
                f"{directory}: arrays of Orbax without {TREE_METADATA}, which says what tree they make, or {AGGREGATE} "
                "of first versions"
            ) from error
        raise


def _takes_direct(backend: Backend, directory: str, names: set[str]) -> bool:
    """Whether chunks are to be read beside the page cache, into memory in huge pages: into any other that is slower."""
    if not has_huge_malloc():
        return False
    name = next(name for name in (OCDBT, TREE_METADATA, AGGREGATE, *names) if name in names)
    try:
        with contextlib.closing(backend.open(directory, name, direct=True)) as source:
            source.read_into(0, aligned_buffer(ALIGNMENT), 0)
    except CheckpointError:  # the file system refuses, or it is a folder
        return False
    return True


def _databases(backend: Backend, directory: str, tree: OrbaxTree) -> set[str]:
    """Folders with OCDBT databases of their own, where first versions put an array whose name has a `/` in it."""
    leaves = [each for each in tree.stored.values() if each.kind is Kind.UNKNOWN]
    folders = {each.parameter.rpartition("/")[0] for each in leaves} - {""}
    return {folder for folder in folders if _has_database(backend, f"{directory}/{folder}")}


def _has_database(backend: Backend, directory: str) -> bool:
    try:
        return any(entry.name == OCDBT for entry in backend.list(directory))
    except StorageError:
        return False


def _leaves(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, arrays: Mapping[str, OrbaxArray]
) -> dict[str, LeafRecord]:
    """The records of all leaves, in the order of Orbax's metadata, which is that of the tree."""
    texts = _read_json(backend, directory, STRINGS, decode_strings) if STRINGS in names else {}
    keys: dict[str, str] = {}
    if ARRAY_METADATAS in names:
        keys = _read_json(backend, f"{directory}/{ARRAY_METADATAS}", "process_0", decode_key_implementations)
    scalars = [leaf for leaf, each in tree.stored.items() if _is_number(each, arrays.get(leaf))]
    values = scalar_leaves(directory, {leaf: arrays[leaf] for leaf in scalars})
    leaves: dict[str, LeafRecord] = dict(tree.inline)
    for leaf, each in tree.stored.items():
        leaves[leaf] = values[leaf] if leaf in values else _stored_leaf(directory, leaf, each, texts, keys, arrays)
    return leaves


def _is_number(stored: StoredLeaf, array: OrbaxArray | None) -> bool:
    """Whether it is one of Python's own, as far as that is known: JAX has none of 64 bits unless it is asked to."""
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
            raise CorruptCheckpointError(f"{directory}/{STRINGS}: lacks the text of leaf {leaf!r}")
        return StrLeaf(texts[stored.parameter])
    if stored.parameter in keys:
        return KeyLeaf(keys[stored.parameter])
    if stored.kind is Kind.UNKNOWN:
        return ArrayLeaf(host_of(arrays[leaf].record.dtype))
    return ArrayLeaf("numpy" if stored.is_numpy else "jax")


def _read_json(backend: Backend, directory: str, name: str, decode: Any) -> dict[str, str]:
    try:
        data = read_whole(backend, directory, name, MAX_METADATA_BYTES)
    except StorageError:
        return {}
    found: dict[str, str] = decode(bytes(memoryview(data)), f"{directory}/{name}")
    return found
