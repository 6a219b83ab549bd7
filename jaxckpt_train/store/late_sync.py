"""Makes durable what was written without being synced: a committed checkpoint, names in a directory."""

from __future__ import annotations

import os
from collections.abc import Collection

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backend import UNSUPPORTED, Backend


def make_durable(backend: Backend, directory: str) -> None:
    """Sync all files and directories of a checkpoint that was committed without, and its parent.

    A file system that cannot sync directories at all is taken as it is: whoever saves without is there for that reason.

    Raises:
        StorageError: the file system refused; nothing is known of what is on the disk.
    """
    _sync_tree(backend, directory)
    sync_directory(backend, os.path.dirname(directory))


def _sync_tree(backend: Backend, directory: str) -> None:
    for entry in backend.list(directory):
        path = f"{directory}/{entry.name}"
        if entry.kind == "directory":
            _sync_tree(backend, path)
        elif entry.kind == "file":
            backend.sync(path)
    sync_directory(backend, directory)


def sync_directory(backend: Backend, directory: str, tolerated: Collection[int] = ()) -> None:
    """Sync the names in a directory, on a file system that can; `tolerated` are codes of other refusals that may be.

    Raises:
        StorageError: the file system refused.
    """
    try:
        backend.sync(directory)
    except StorageError as error:
        if error.errno not in {*UNSUPPORTED, *tolerated}:
            raise
