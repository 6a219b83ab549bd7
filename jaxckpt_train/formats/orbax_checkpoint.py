"""Opens a checkpoint of Orbax: a step with its items, or one item, of its first interface or its second one."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError
from jaxckpt_train.formats.foreign import (
    JSON,
    Foreign,
    ForeignSegment,
    ForeignTree,
    ForeignValue,
    foreign_checkpoint,
)
from jaxckpt_train.formats.orbax_grain import STATE_FILE, grain_states
from jaxckpt_train.formats.orbax_looks import STEP_METADATA, TEMPORARY, is_item_folder, is_tree, step_number
from jaxckpt_train.formats.orbax_trees import open_tree
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.manifest import NOT_JSON, is_plain_name, shown
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.tree.leaf_records import ArrayLeaf, KeyLeaf, TreeRecord
from jaxckpt_train.tree.paths import ROOT

JSON_ITEM, METRICS, JAX_KEY = "metadata", "metrics", "jax_random_key"
_KEY_WIDTHS = {2: "threefry2x32", 4: "rbg"}
MAX_JSON_BYTES = 256 << 20
NAME = "state"


class _Found(NamedTuple):
    """What of a checkpoint has been opened so far."""

    parts: dict[str, ForeignTree | ForeignValue]
    segments: list[ForeignSegment]
    info: dict[str, Any]


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
    if is_tree(backend, directory, entries):
        _add_tree(backend, directory, NAME, entries, found)
    elif any(STATE_FILE.fullmatch(entry.name) for entry in entries):
        _add_item(backend, directory, NAME, found)
    else:
        for entry in entries:
            if is_item_folder(entry) and is_plain_name(entry.name):
                _add_item(backend, f"{directory}/{entry.name}", entry.name, found)
    if not found.parts:
        raise NotACheckpointError(f"{directory}: has metadata of Orbax, and no item that is known here")
    return foreign_checkpoint("Orbax", directory, found.parts, found.segments, info=found.info)


def _add_item(backend: Backend, directory: str, name: str, found: _Found) -> None:
    entries = backend.list(directory)
    names = {entry.name for entry in entries}
    if is_tree(backend, directory, entries):
        _add_tree(backend, directory, name, entries, found)
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


def _add_tree(backend: Backend, directory: str, name: str, entries: Sequence[Entry], found: _Found) -> None:
    tree = open_tree(backend, directory, entries, len(found.segments))
    found.parts[name] = tree.tree
    found.segments.extend(tree.segments)
    if tree.custom_metadata is not None:
        found.info.setdefault("custom_metadata", tree.custom_metadata)


def _step_info(backend: Backend, directory: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """What the step says of itself, as a manifest of ours would."""
    info: dict[str, Any] = {}
    step = step_number(directory.rpartition("/")[2])
    if step is not None:
        info["step"] = step
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
