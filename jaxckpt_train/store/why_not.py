"""Says why a directory is no checkpoint, to who wanted to read one."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Sequence

from jaxckpt_train.errors import IncompleteCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME

_STEP = re.compile(r"step-[0-9]{10,16}(\.g[0-9]+)?")


def why_not_committed(backend: Backend, directory: str) -> NotACheckpointError:
    """The error about a directory without COMMIT, by what is found there."""
    try:
        names = [entry.name for entry in backend.list(directory)]
    except StorageError as error:
        found = "a file" if error.errno == errno.ENOTDIR else "nothing"
        return NotACheckpointError(f"{directory}: expected a checkpoint directory, found {found}")
    inside = {} if MANIFEST_NAME in names else {name: _in_folder(backend, f"{directory}/{name}") for name in names}
    if MANIFEST_NAME in names or any(map(_holds_data, inside.values())):
        return IncompleteCheckpointError(f"{directory}: has no {COMMIT_NAME}: never committed, or copied in part")
    committed = [name for name in names if not name.startswith(".") and _holds_commit(inside[name])]
    if committed:
        is_run = any(_STEP.fullmatch(name) for name in committed)
        of_run = f"; jaxckpt_train.StepManager({directory!r}).load() reads the latest step that is whole"
        return NotACheckpointError(
            f"{directory}: not one checkpoint but a directory of {len(committed)}; pass one of them, such as "
            f"{directory}/{committed[-1]}{of_run if is_run else ''}"
        )
    listing = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "an empty directory"
    return NotACheckpointError(
        f"{directory}: not a checkpoint: expected {COMMIT_NAME} and {MANIFEST_NAME}, found {listing}"
    )


def _in_folder(backend: Backend, folder: str) -> Sequence[Entry]:
    """One that may not be looked into, as `lost+found`, counts as empty."""
    try:
        return backend.list(folder)
    except StorageError:
        return ()


def _holds_commit(entries: Iterable[Entry]) -> bool:
    return any(entry.name == COMMIT_NAME for entry in entries)


def _holds_data(entries: Iterable[Entry]) -> bool:
    """Whether this is the folder of a checkpointable with a file of process 0 in it."""
    return any(entry.kind == "file" and entry.name.startswith("p00000") for entry in entries)
