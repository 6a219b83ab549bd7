"""Tells what another tool has written at a path, and which one is meant where there are several."""

from __future__ import annotations

from collections.abc import Sequence

from jaxckpt_train.errors import NotACheckpointError, StepNotFoundError, StorageError
from jaxckpt_train.formats.flax import FlaxFile, chosen_name, flax_names
from jaxckpt_train.formats.foreign import Foreign
from jaxckpt_train.formats.orbax_metadata import has_orbax_names, holds_items, looks_like_orbax, orbax_steps
from jaxckpt_train.formats.orbax_read import open_orbax
from jaxckpt_train.formats.safetensors import (
    SUFFIX,
    is_index,
    names_of,
    open_safetensors,
    open_safetensors_folder,
    open_safetensors_index,
)
from jaxckpt_train.formats.torch import looks_like_torch, open_torch
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.committed import is_committed

MOST_NAMED = 5
_OUR_STEP = "step-"


def find_file(backend: Backend, path: str) -> Foreign | FlaxFile:
    """What a file is: of safetensors, or an index of such files, by its name; else perhaps of Flax.

    Raises:
        CorruptCheckpointError: it should be one of safetensors, and is not, or is damaged.
        StorageError: it cannot be read.
    """
    if is_index(path.rpartition("/")[2]):
        return open_safetensors_index(backend, path)
    return open_safetensors(backend, path) if path.endswith(SUFFIX) else FlaxFile(path)


def find_in_directory(backend: Backend, path: str, step: float | None = None) -> Foreign | FlaxFile | None:
    """What a directory is, or the one that is meant of several in it; None: nothing that is known here.

    Args:
        backend: where.
        path: of the directory.
        step: which one of several; None: of those of Flax the newest one.

    Raises:
        NotACheckpointError: it is a run of Orbax, a step of which has to be chosen, has Flax's of several names, or its
            save has not ended.
        StepNotFoundError: it has several, and no such step.
        CorruptCheckpointError: what is in it is damaged.
        StorageError: it cannot be read.
    """
    try:
        entries = backend.list(path)
    except StorageError:
        return None
    if step is None:
        foreign = _one(backend, path, entries)
        if foreign is not None:
            return foreign
    several = _of_flax(backend, path, entries, step) or _of_orbax_run(backend, path, entries, step)
    if several is None and step is None and holds_items(backend, path, entries):
        return open_orbax(backend, path, entries)
    return several


def _one(backend: Backend, path: str, entries: Sequence[Entry]) -> Foreign | None:
    """What a directory is by itself."""
    if has_orbax_names(entries):
        return open_orbax(backend, path, entries)
    if looks_like_torch(entries):
        return open_torch(backend, path, entries)
    indexes, names = names_of(entries)
    if indexes or names:
        return open_safetensors_folder(backend, path, indexes, names)
    return open_orbax(backend, path, entries) if looks_like_orbax(backend, path, entries) else None


def _of_flax(backend: Backend, path: str, entries: Sequence[Entry], step: float | None) -> Foreign | FlaxFile | None:
    found = flax_names(backend, path, entries)
    folders = [each.name for each in entries if each.kind == "directory"]
    if found is None or any(each.startswith(_OUR_STEP) and is_committed(backend, f"{path}/{each}") for each in folders):
        return None  # a run of ours that was begun in the same directory has newer ones
    name = chosen_name(path, found, step)
    if name not in folders:
        is_newest = step is None
        before = f"{path}/{found.names[-2]}" if is_newest and found.names[1:] else None
        return FlaxFile(f"{path}/{name}", path, is_newest, before)
    inner = backend.list(f"{path}/{name}")
    if not looks_like_orbax(backend, f"{path}/{name}", inner):
        raise NotACheckpointError(
            f"{path}/{name}: is the checkpoint of Flax that is meant in {path}, and holds nothing of Orbax; expected a "
            "file, or what Flax has Orbax write"
        )
    return open_orbax(backend, f"{path}/{name}", inner)


def _of_orbax_run(backend: Backend, path: str, entries: Sequence[Entry], step: float | None) -> Foreign | None:
    """The step of a run of Orbax; without one its steps are named."""
    steps = orbax_steps(backend, path, entries)
    if not steps:
        return None
    shown, newest = ", ".join(map(str, list(steps)[-MOST_NAMED:])), f"{path}/{list(steps.values())[-1]}"
    if step is None and len(steps) == 1:
        raise NotACheckpointError(
            f"{path}: a run of Orbax with 1 step; expected that, {newest}; on the command line --step {shown}"
        )
    if step is None:
        raise NotACheckpointError(
            f"{path}: a run of Orbax with {len(steps)} steps, the last ones {shown}; expected one of them, "
            f"such as {newest}; on the command line --step says which"
        )
    if step not in steps:
        raise StepNotFoundError(f"{path}: has no step {step}; the last ones are {shown}")
    chosen = f"{path}/{steps[int(step)]}"
    return open_orbax(backend, chosen, backend.list(chosen))
