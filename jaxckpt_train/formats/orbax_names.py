"""Recognizes Orbax checkpoints of all versions by names and a few bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from jaxckpt_train.checkpointables.base import STATE_FILE
from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_head

TREE_METADATA, STEP_METADATA, OCDBT = "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"
AGGREGATE = "checkpoint"
"""In the first versions, the file with the structure of a tree; also the directory of an array that is an item."""
ZARR = ".zarray"
TEMPORARY = ".orbax-checkpoint-tmp"
_HEAD_BYTES = 6
_PROCESS = re.compile(r"ocdbt\.process_\d+")  # next to a database: what each process has written to it
_STEP = re.compile(r"(?:.*_)?0*(\d+)")


def begins_as(backend: Backend, directory: str, name: str) -> str:
    """Return "map" or "list" if a file starts like the tree of a state in msgpack, otherwise "".

    The first byte alone is not enough: pickle, HDF5 and numpy files start with one that msgpack reads as a container.
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
    """Return the step directories of a run by step number, if the newest one is a step of Orbax."""
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
    """Return the entry `checkpoint` if it is a msgpack tree or the directory of one array of early Orbax, or None."""
    for entry in entries:
        if entry.name == AGGREGATE and entry.kind == "file":
            return entry if begins_as(backend, directory, AGGREGATE) else None
        if entry.name == AGGREGATE and entry.kind == "directory":
            with contextlib.suppress(StorageError):
                return entry if any(each.name == ZARR for each in backend.list(f"{directory}/{AGGREGATE}")) else None
    return None
