"""Recognizes what another tool has written at a path, and chooses one of several checkpoints in a directory."""

from __future__ import annotations

from collections.abc import Sequence

from jaxckpt_train.errors import NotACheckpointError, StepNotFoundError, StorageError
from jaxckpt_train.formats.foreign import ForeignCheckpoint
from jaxckpt_train.formats.orbax_names import has_orbax_names, holds_items, looks_like_orbax, orbax_steps
from jaxckpt_train.formats.orbax_read import open_orbax
from jaxckpt_train.formats.safetensors import (
    SUFFIX,
    is_index,
    open_safetensors,
    open_safetensors_folder,
    open_safetensors_index,
    safetensors_names,
)
from jaxckpt_train.formats.step_folders import FlaxFile, choose_checkpoint, flax_names
from jaxckpt_train.formats.torch import looks_like_torch, open_torch
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.committed import is_committed
from jaxckpt_train.store.timeouts import time_limited

MOST_NAMED = 5
_OUR_STEP = "step-"


@time_limited
def find_file(backend: Backend, path: str) -> ForeignCheckpoint | FlaxFile:
    """Open a file as safetensors, or as an index of its files, if its name says so, otherwise as a file of Flax."""
    if is_index(path.rpartition("/")[2]):
        return open_safetensors_index(backend, path)
    return open_safetensors(backend, path) if path.endswith(SUFFIX) else FlaxFile(path)


@time_limited
def find_in_directory(backend: Backend, path: str, step: float | None = None) -> ForeignCheckpoint | FlaxFile | None:
    """Open the checkpoint of another tool in a directory, or return None if none is recognized.

    `step` is the one to choose when the directory holds several. None: the newest one of Flax. Raises
    NotACheckpointError: several steps of Orbax or prefixes of Flax, or an unfinished save; StepNotFoundError.
    """
    try:
        entries = backend.list(path)
    except StorageError:
        return None
    if step is None:
        foreign = _find_single(backend, path, entries)
        if foreign is not None:
            return foreign
    several = _find_flax_step(backend, path, entries, step) or _find_orbax_step(backend, path, entries, step)
    if several is None and step is None and holds_items(backend, path, entries):
        return open_orbax(backend, path, entries)
    return several


def _find_single(backend: Backend, path: str, entries: Sequence[Entry]) -> ForeignCheckpoint | None:
    """Open a directory that is one checkpoint, not a run of several."""
    if has_orbax_names(entries):
        return open_orbax(backend, path, entries)
    if looks_like_torch(entries):
        return open_torch(backend, path, entries)
    indexes, names = safetensors_names(entries)
    if indexes or names:
        return open_safetensors_folder(backend, path, indexes, names)
    return open_orbax(backend, path, entries) if looks_like_orbax(backend, path, entries) else None


def _find_flax_step(
    backend: Backend, path: str, entries: Sequence[Entry], step: float | None
) -> ForeignCheckpoint | FlaxFile | None:
    found = flax_names(backend, path, entries)
    folders = [each.name for each in entries if each.kind == "directory"]
    if found is None or any(each.startswith(_OUR_STEP) and is_committed(backend, f"{path}/{each}") for each in folders):
        return None  # a run of this library continues in the directory, and its steps are newer
    name = choose_checkpoint(path, found, step)
    if name not in folders:
        is_newest = step is None
        before = f"{path}/{found.names[-2]}" if is_newest and found.names[1:] else None
        return FlaxFile(f"{path}/{name}", path, is_newest, before)
    inner = backend.list(f"{path}/{name}")
    if not looks_like_orbax(backend, f"{path}/{name}", inner):
        raise NotACheckpointError(f"{path}/{name}: expected a Flax file or an Orbax one, found a directory")
    return open_orbax(backend, f"{path}/{name}", inner)


def _find_orbax_step(
    backend: Backend, path: str, entries: Sequence[Entry], step: float | None
) -> ForeignCheckpoint | None:
    """Open a step of an Orbax run. Without a step, raise an error that lists the steps."""
    steps = orbax_steps(backend, path, entries)
    if not steps:
        return None
    shown, newest = ", ".join(map(str, list(steps)[-MOST_NAMED:])), f"{path}/{list(steps.values())[-1]}"
    if step is None:
        raise NotACheckpointError(
            f"{path}: expected one checkpoint, found an Orbax run with {len(steps)} steps, the last are {shown}; pass "
            f"the path of a step, such as {newest}, or --step on the command line"
        )
    if step not in steps:
        raise StepNotFoundError(f"{path}: has no step {step}; the last steps are {shown}")
    chosen = f"{path}/{steps[int(step)]}"
    return open_orbax(backend, chosen, backend.list(chosen))
