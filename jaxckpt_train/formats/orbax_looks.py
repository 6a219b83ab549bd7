"""Tells a step, an item and a run of Orbax, of any version: by the names in a directory and a few bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from jaxckpt_train.errors import StorageError
from jaxckpt_train.formats.msgpack_heads import begins_as_text, first_bytes
from jaxckpt_train.formats.orbax_grain import STATE_FILE
from jaxckpt_train.formats.orbax_metadata import TREE_METADATA
from jaxckpt_train.store.backend import Backend, Entry

STEP_METADATA, OCDBT = "_CHECKPOINT_METADATA", "manifest.ocdbt"
AGGREGATE = "checkpoint"
"""In first versions: the file with the structure of a tree. And the name of an array that is an item by itself."""
ZARR = ".zarray"
TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?0*(\d+)")
_STRONG = {TREE_METADATA, STEP_METADATA, OCDBT}
_PROCESS = re.compile(r"ocdbt\.process_\d+")  # beside a database: what each process has written of it


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
        return begins_as_text(head[3 if first == 0xDE else 5 :])
    if first in (0xDC, 0xDD):
        return _is_node(head[3 if first == 0xDC else 5 :])
    return (0x80 < first < 0x90 and begins_as_text(head[1:])) or (0x90 < first < 0xA0 and _is_node(head[1:]))


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
