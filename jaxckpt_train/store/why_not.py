"""Says why a directory is no checkpoint, to who wanted to read one."""

from __future__ import annotations

import errno

from jaxckpt_train.errors import IncompleteCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME


def why_not_committed(backend: Backend, directory: str) -> NotACheckpointError:
    """The error about a directory without COMMIT, by what is found there."""
    try:
        names = [entry.name for entry in backend.list(directory)]
    except StorageError as error:
        found = "a file" if error.errno == errno.ENOTDIR else "nothing"
        return NotACheckpointError(f"{directory}: expected a checkpoint directory, found {found}")
    if MANIFEST_NAME in names or any(_holds_data(backend, f"{directory}/{name}") for name in names):
        return IncompleteCheckpointError(f"{directory}: has no {COMMIT_NAME}: never committed, or copied in part")
    inside = [name for name in names if not name.startswith(".") and _holds_commit(backend, f"{directory}/{name}")]
    if inside:
        return NotACheckpointError(
            f"{directory}: not one checkpoint but a directory of {len(inside)}; pass one of them, such as "
            f"{directory}/{inside[-1]}"
        )
    listing = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "an empty directory"
    return NotACheckpointError(
        f"{directory}: not a checkpoint: expected {COMMIT_NAME} and {MANIFEST_NAME}, found {listing}"
    )


def _holds_commit(backend: Backend, folder: str) -> bool:
    """One that may not be looked into, as `lost+found`, counts as none."""
    try:
        return any(entry.name == COMMIT_NAME for entry in backend.list(folder))
    except StorageError:
        return False


def _holds_data(backend: Backend, folder: str) -> bool:
    """Whether this is the folder of a checkpointable with a file of process 0 in it."""
    try:
        return any(entry.kind == "file" and entry.name.startswith("p00000") for entry in backend.list(folder))
    except StorageError:
        return False
