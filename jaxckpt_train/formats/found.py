"""Tells what another tool has written at a path, and opens that."""

from __future__ import annotations

from collections.abc import Sequence

from jaxckpt_train.errors import NotACheckpointError, StorageError
from jaxckpt_train.formats.foreign import Foreign
from jaxckpt_train.formats.orbax_checkpoint import open_orbax
from jaxckpt_train.formats.orbax_looks import has_orbax_names, holds_items, looks_like_orbax, orbax_steps
from jaxckpt_train.formats.safetensors_files import SUFFIX, names_of, open_safetensors, open_safetensors_folder
from jaxckpt_train.store.backend import Backend, Entry

MOST_NAMED = 5


def open_foreign_file(backend: Backend, path: str) -> Foreign | None:
    """Open a file; None: it is none that is known here.

    Raises:
        CorruptCheckpointError: it should be one by its name, and is not, or is damaged.
        StorageError: it cannot be read.
    """
    return open_safetensors(backend, path) if path.endswith(SUFFIX) else None


def open_foreign_directory(backend: Backend, path: str) -> Foreign | None:
    """Open a directory; None: it is none that is known here.

    Raises:
        NotACheckpointError: it is a run of several steps, one of which has to be chosen.
        CorruptCheckpointError: what is in it is damaged.
        StorageError: it cannot be read.
    """
    try:
        entries = backend.list(path)
    except StorageError:
        return None
    if has_orbax_names(entries):
        return open_orbax(backend, path, entries)
    index, names = names_of(entry.name for entry in entries)
    if index is not None or names:
        return open_safetensors_folder(backend, path, index, names)
    if looks_like_orbax(backend, path, entries):
        return open_orbax(backend, path, entries)
    _refuse_run(backend, path, entries)
    if holds_items(backend, path, entries):
        return open_orbax(backend, path, entries)
    return None


def _refuse_run(backend: Backend, path: str, entries: Sequence[Entry]) -> None:
    """Name the steps of a run of Orbax."""
    steps = orbax_steps(backend, path, entries)
    if steps:
        shown = ", ".join(map(str, list(steps)[-MOST_NAMED:]))
        raise NotACheckpointError(
            f"{path}: a run of Orbax with {len(steps)} steps, the last ones {shown}; expected one of them, "
            f"such as {path}/{list(steps.values())[-1]}"
        )
