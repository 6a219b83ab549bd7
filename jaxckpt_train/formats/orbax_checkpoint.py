"""Opens a checkpoint of Orbax: a step with its items, or one item, of its first interface or its second one."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.formats.foreign import (
    JSON,
    Foreign,
    ForeignSegment,
    ForeignTree,
    ForeignValue,
    foreign_checkpoint,
)
from jaxckpt_train.formats.orbax_arrays import OrbaxArray, open_arrays
from jaxckpt_train.formats.orbax_grain import STATE_FILE, grain_states
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
from jaxckpt_train.store.manifest import NOT_JSON, is_plain_name, shown
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.tree.leaf_records import ArrayLeaf, KeyLeaf, LeafRecord, StrLeaf, TreeRecord
from jaxckpt_train.tree.paths import ROOT

STEP_METADATA, JSON_ITEM, OCDBT = "_CHECKPOINT_METADATA", "metadata", "manifest.ocdbt"
METRICS, JAX_KEY = "metrics", "jax_random_key"
_KEY_WIDTHS = {2: "threefry2x32", 4: "rbg"}
TEMPORARY = ".orbax-checkpoint-tmp"
MAX_JSON_BYTES = 256 << 20
NAME = "state"
_STEP = re.compile(r"(?:.*_)?0*(\d+)")


class _Found(NamedTuple):
    """What of a checkpoint has been opened so far."""

    parts: dict[str, ForeignTree | ForeignValue]
    segments: list[ForeignSegment]
    info: dict[str, Any]


def looks_like_orbax(entries: Sequence[Entry]) -> bool:
    """Whether a directory may be a step or an item of Orbax: by names alone."""
    names = {entry.name for entry in entries}
    return bool(names & {TREE_METADATA, STEP_METADATA, OCDBT}) or any(map(STATE_FILE.fullmatch, names))


def open_orbax(backend: Backend, directory: str, entries: Sequence[Entry]) -> Foreign:
    """Open a step, or an item of one.

    Args:
        backend: where.
        directory: of it.
        entries: what is in it.

    Raises:
        NotACheckpointError: its save has not ended, or nothing in it is known here.
        CorruptCheckpointError: it is damaged.
        UnsupportedLeafError: a leaf is of a type that only a handler of the user's own reads.
        StorageError: it cannot be read.
    """
    if TEMPORARY in directory.rpartition("/")[2]:
        raise NotACheckpointError(f"{directory}: a save of Orbax that has not ended; expected a step that was finished")
    found = _Found({}, [], _step_info(backend, directory, entries))
    names = {entry.name for entry in entries}
    if names & {TREE_METADATA, OCDBT}:
        _add_tree(backend, directory, NAME, names, found)
    elif any(map(STATE_FILE.fullmatch, names)):
        _add_item(backend, directory, NAME, found)
    else:
        for entry in entries:
            if entry.kind == "directory" and is_plain_name(entry.name) and TEMPORARY not in entry.name:
                _add_item(backend, f"{directory}/{entry.name}", entry.name, found)
    if not found.parts:
        raise NotACheckpointError(f"{directory}: has metadata of Orbax, and no item that is known here")
    return foreign_checkpoint("Orbax", directory, found.parts, found.segments, info=found.info)


def _add_item(backend: Backend, directory: str, name: str, found: _Found) -> None:
    names = {entry.name for entry in backend.list(directory)}
    if names & {TREE_METADATA, OCDBT}:
        _add_tree(backend, directory, name, names, found)
    elif JSON_ITEM in names:
        found.parts[name] = ForeignValue(JSON, _json_of(backend, directory, JSON_ITEM))
    elif METRICS in names:
        found.info["metrics"] = msgspec.json.decode(_json_of(backend, directory, METRICS))
    elif JAX_KEY in names:
        _add_key(backend, directory, name, found)
    else:
        states = grain_states(backend, directory, names)
        if states is not None:
            found.parts[name] = states


def _add_key(backend: Backend, directory: str, name: str, found: _Found) -> None:
    """A PRNG key that was saved by itself: an item for its data, and one that says whether it was a typed one.

    Its implementation is not told; Orbax takes the default one, which the width of the data fits, or does not.
    """
    inner = _Found({}, found.segments, {})
    _add_item(backend, f"{directory}/{JAX_KEY}", name, inner)
    told = msgspec.json.decode(_json_of(backend, f"{directory}/{JAX_KEY}_metadata", JSON_ITEM))
    part = inner.parts.get(name)
    if not isinstance(part, ForeignTree) or len(part.arrays) != 1:
        raise CorruptCheckpointError(f"{directory}/{JAX_KEY}: expected one array, the data of a PRNG key")
    array = msgspec.structs.replace(part.arrays[0], name=ROOT)
    implementation = _KEY_WIDTHS.get(array.shape[-1]) if array.shape else None
    is_typed = isinstance(told, Mapping) and told.get("typed") is True
    leaf = KeyLeaf(implementation) if is_typed and implementation else ArrayLeaf()
    found.parts[name] = ForeignTree(TreeRecord({}, {ROOT: leaf}), [array])


def _json_of(backend: Backend, directory: str, name: str) -> bytes:
    data = bytes(memoryview(read_whole(backend, directory, name, MAX_JSON_BYTES)))
    try:
        return msgspec.json.encode(msgspec.json.decode(data))
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{directory}/{name}: expected JSON, but: {shown(error)}") from error


def _add_tree(backend: Backend, directory: str, name: str, names: set[str], found: _Found) -> None:
    if TREE_METADATA not in names:
        raise NotACheckpointError(
            f"{directory}: arrays of Orbax without {TREE_METADATA}, which says what tree they make; load it with the "
            "version of Orbax that wrote it, and save it here"
        )
    data = bytes(memoryview(read_whole(backend, directory, TREE_METADATA, MAX_METADATA_BYTES)))
    tree = decode_tree_metadata(data, f"{directory}/{TREE_METADATA}")
    arrays = _open(directory, names, tree, found)
    record = TreeRecord(tree.containers, _leaves(backend, directory, names, tree, arrays))
    kept = [arrays[leaf].record for leaf, each in record.leaves.items() if isinstance(each, ArrayLeaf | KeyLeaf)]
    found.parts[name] = ForeignTree(record, kept)
    found.segments.extend(each.segment for each in arrays.values())
    if tree.custom_metadata is not None:
        found.info.setdefault("custom_metadata", tree.custom_metadata)


def _open(directory: str, names: set[str], tree: OrbaxTree, found: _Found) -> dict[str, OrbaxArray]:
    use_ocdbt = OCDBT in names if tree.use_ocdbt is None else tree.use_ocdbt
    parameters = {leaf: each.parameter for leaf, each in tree.stored.items() if each.kind is not Kind.STRING}
    first = len(found.segments)
    return open_arrays(directory, parameters, use_ocdbt=use_ocdbt, use_zarr3=tree.use_zarr3, first_segment=first)


def _leaves(
    backend: Backend, directory: str, names: set[str], tree: OrbaxTree, arrays: Mapping[str, OrbaxArray]
) -> dict[str, LeafRecord]:
    """The records of all leaves, in the order of Orbax's metadata, which is that of the tree."""
    texts = _read_json(backend, directory, STRINGS, decode_strings) if STRINGS in names else {}
    keys: dict[str, str] = {}
    if ARRAY_METADATAS in names:
        keys = _read_json(backend, f"{directory}/{ARRAY_METADATAS}", "process_0", decode_key_implementations)
    scalars = [leaf for leaf, each in tree.stored.items() if each.kind is Kind.SCALAR]
    values = scalar_leaves(directory, {leaf: arrays[leaf] for leaf in scalars})
    leaves: dict[str, LeafRecord] = dict(tree.inline)
    for leaf, each in tree.stored.items():
        leaves[leaf] = values[leaf] if leaf in values else _stored_leaf(directory, leaf, each, texts, keys)
    return leaves


def _stored_leaf(
    directory: str, leaf: str, stored: StoredLeaf, texts: Mapping[str, str], keys: Mapping[str, str]
) -> LeafRecord:
    if stored.kind is Kind.STRING:
        if stored.parameter not in texts:
            raise CorruptCheckpointError(f"{directory}/{STRINGS}: lacks the text of leaf {leaf!r}")
        return StrLeaf(texts[stored.parameter])
    if stored.parameter in keys:
        return KeyLeaf(keys[stored.parameter])
    return ArrayLeaf("numpy" if stored.is_numpy else "jax")


def _read_json(backend: Backend, directory: str, name: str, decode: Any) -> dict[str, str]:
    try:
        data = read_whole(backend, directory, name, MAX_METADATA_BYTES)
    except StorageError:
        return {}
    found: dict[str, str] = decode(bytes(memoryview(data)), f"{directory}/{name}")
    return found


def _step_info(backend: Backend, directory: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """What the step says of itself, as a manifest of ours would."""
    info: dict[str, Any] = {}
    step = _STEP.fullmatch(directory.rpartition("/")[2])
    if step is not None:
        info["step"] = int(step[1])
    if all(entry.name != STEP_METADATA for entry in entries):
        return info
    data = bytes(memoryview(read_whole(backend, directory, STEP_METADATA, MAX_JSON_BYTES)))
    try:
        told = msgspec.json.decode(data, type=dict[str, Any])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{directory}/{STEP_METADATA}: expected JSON, but: {shown(error)}") from error
    metrics, custom, ended = told.get("metrics"), told.get("custom_metadata"), told.get("commit_timestamp_nsecs")
    if isinstance(metrics, Mapping):
        info["metrics"] = dict(metrics)
    if custom:
        info["custom_metadata"] = custom
    if isinstance(ended, int):
        time = datetime.datetime.fromtimestamp(ended / 1e9, datetime.UTC)
        info["created"] = time.isoformat(timespec="milliseconds")
    return info


def orbax_steps(backend: Backend, directory: str, entries: Sequence[Entry]) -> dict[int, str]:
    """The directories of a run's steps by their numbers, if its newest one is a step of Orbax.

    Args:
        backend: where.
        directory: of the run.
        entries: what is in it.
    """
    steps = steps_of(entries)
    for name in list(steps.values())[-1:]:
        with contextlib.suppress(StorageError):
            inner = backend.list(f"{directory}/{name}")
            folders = [each.name for each in inner if each.kind == "directory"]
            if looks_like_orbax(inner) or any(
                looks_like_orbax(backend.list(f"{directory}/{name}/{each}")) for each in folders
            ):
                return steps
    return {}


def steps_of(entries: Sequence[Entry]) -> dict[int, str]:
    """The directories of steps that a run of Orbax may have, by their numbers."""
    found = {}
    for entry in entries:
        match = _STEP.fullmatch(entry.name)
        if entry.kind == "directory" and match is not None and TEMPORARY not in entry.name:
            found[int(match[1])] = entry.name
    return dict(sorted(found.items()))
