"""Opens a checkpoint of Orbax: a step with its items, or one item, of its first interface or its second one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedLeafError
from jaxckpt_train.formats.foreign import (
    JSON,
    Foreign,
    ForeignDamage,
    ForeignPart,
    ForeignSegment,
    ForeignTree,
    ForeignValue,
    foreign_checkpoint,
)
from jaxckpt_train.formats.orbax_arrays import DECODING
from jaxckpt_train.formats.orbax_grain import STATE_FILE, grain_states
from jaxckpt_train.formats.orbax_looks import STEP_METADATA, TEMPORARY, is_item_folder, is_tree
from jaxckpt_train.formats.orbax_step import MAX_JSON_BYTES, is_of_any_object, kind_of, read_step
from jaxckpt_train.formats.orbax_trees import open_tree
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.json_values import decode_told, decode_value, encode_value
from jaxckpt_train.store.manifest import NOT_JSON, is_plain_name, shown
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.tree.leaf_records import ArrayLeaf, KeyLeaf, TreeRecord
from jaxckpt_train.tree.paths import ROOT

JSON_ITEM, SECOND_JSON_ITEM, METRICS, JAX_KEY = "metadata", "data.json", "metrics", "jax_random_key"
DONE = "commit_success.txt"
MOST_NAMED = 5
_KEY_WIDTHS = {2: "threefry2x32", 4: "rbg"}
NAME = "state"


class _Found(NamedTuple):
    """What of a checkpoint has been opened so far."""

    parts: dict[str, ForeignPart]
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
        raise NotACheckpointError(f"{directory}: has metadata of Orbax, and no item that is known here")
    damaged = [part for part in found.parts.values() if isinstance(part, ForeignDamage)]
    if len(damaged) == len(found.parts):
        raise CorruptCheckpointError(damaged[0].message)
    return foreign_checkpoint("Orbax", directory, found.parts, found.segments, info=found.info, decoding=DECODING)


def _add_item(backend: Backend, directory: str, name: str, found: _Found) -> None:
    entries = backend.list(directory)
    names = {entry.name for entry in entries}
    if is_tree(backend, directory, entries):
        _add_tree(backend, directory, name, entries, found)
    elif JSON_ITEM in names or SECOND_JSON_ITEM in names:
        found.parts[name] = _json_item(backend, directory, JSON_ITEM if JSON_ITEM in names else SECOND_JSON_ITEM)
    elif METRICS in names:
        _add_metrics(backend, directory, name, found)
    elif JAX_KEY in names:
        _add_key(backend, directory, name, found)
    else:
        states = grain_states(backend, directory, names)
        if states is not None:
            found.parts[name] = states


def _add_metrics(backend: Backend, directory: str, name: str, found: _Found) -> None:
    try:
        found.info["metrics"] = _json_of(backend, directory, METRICS)
    except CorruptCheckpointError as error:
        found.parts[name] = ForeignDamage(JSON, str(error))


def _add_key(backend: Backend, directory: str, name: str, found: _Found) -> None:
    """A PRNG key that was saved by itself: an item for its data, and one that says whether it was a typed one.

    Its implementation is not told; Orbax takes the default one, which the width of the data fits, or does not.
    """
    inner = _Found({}, found.segments, {})
    _add_item(backend, f"{directory}/{JAX_KEY}", name, inner)
    told = _json_of(backend, f"{directory}/{JAX_KEY}_metadata", JSON_ITEM)
    part = inner.parts.get(name)
    if not isinstance(part, ForeignTree) or len(part.arrays) != 1:
        raise CorruptCheckpointError(f"{directory}/{JAX_KEY}: expected one array, the data of a PRNG key")
    array = msgspec.structs.replace(part.arrays[0], name=ROOT)
    implementation = _KEY_WIDTHS.get(array.shape[-1]) if array.shape else None
    is_typed = isinstance(told, Mapping) and told.get("typed") is True
    leaf = KeyLeaf(implementation) if is_typed and implementation else ArrayLeaf()
    found.parts[name] = ForeignTree(TreeRecord({}, {ROOT: leaf}), [array])


def _json_item(backend: Backend, directory: str, name: str) -> ForeignValue | ForeignDamage:
    try:
        data = _bytes_of(backend, directory, name)
        return ForeignValue(JSON, encode_value(decode_value(data)))
    except (*NOT_JSON, UnsupportedLeafError) as error:
        return ForeignDamage(JSON, f"{directory}/{name}: expected JSON, but: {shown(error)}")
    except CorruptCheckpointError as error:
        return ForeignDamage(JSON, str(error))


def _json_of(backend: Backend, directory: str, name: str) -> Any:
    try:
        return decode_told(_bytes_of(backend, directory, name))
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{directory}/{name}: expected JSON, but: {shown(error)}") from error


def _bytes_of(backend: Backend, directory: str, name: str) -> bytes:
    return bytes(memoryview(read_whole(backend, directory, name, MAX_JSON_BYTES)))


def _add_tree(backend: Backend, directory: str, name: str, entries: Sequence[Entry], found: _Found) -> None:
    tree = open_tree(backend, directory, entries, len(found.segments))
    found.parts[name] = tree.tree
    found.segments.extend(tree.segments)
    if tree.custom_metadata is not None:
        found.info.setdefault("custom_metadata", tree.custom_metadata)


def _add_missing(
    backend: Backend, directory: str, entries: Sequence[Entry], handlers: Mapping[str, str], found: _Found
) -> None:
    """What the step says that it has, and that is not there: who wants it is told, all else is loaded.

    What a handler of the user's own has written is left alone.
    """
    folders = {entry.name for entry in entries if is_item_folder(entry)}
    for name, handler in handlers.items():
        if name in found.parts or not is_plain_name(name):
            continue
        path, kind, is_folder = f"{directory}/{name}", kind_of(handler), name in folders
        files = [entry.name for entry in backend.list(path) if entry.name != DONE] if is_folder else []
        if METRICS in files:
            continue  # which became metadata of the step
        if kind == JSON and len(files) == 1:
            found.parts[name] = _json_item(backend, path, files[0])  # whatever name its handler was given
        elif not is_folder or (kind is not None and not (files and is_of_any_object(handler))):
            what = ", ".join(sorted(files)[:MOST_NAMED]) or ("an empty folder" if is_folder else "no such folder")
            found.parts[name] = ForeignDamage(
                kind or JSON,
                f"{path}: expected what {shown(handler.rpartition('.')[2])} wrote, which {STEP_METADATA} names, "
                f"found {what}; bring it back from a copy, or load the others by their names",
            )
