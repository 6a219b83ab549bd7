"""What processes that died in a save have left beside a checkpoint: found, and cleaned up."""

from __future__ import annotations

import os
import re

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.local import side_name
from jaxckpt_train.store.machine import is_dead_tag, is_tag_of_another_boot
from jaxckpt_train.store.removal import remove_left_over, remove_replaced
from jaxckpt_train.store.transaction import is_committed

_ATTEMPT = re.compile(r"\.(?P<final>.+)\.tmp-(?P<tag>[0-9a-f]{8}-[0-9a-f]{8}-[0-9]+-[0-9]+)-[0-9]+", re.DOTALL)


def attempts(backend: Backend, parent: str) -> list[tuple[str, str]]:
    """The attempts below `parent`, dead or alive: their directories, and the names they would have got."""
    found = [(entry, _ATTEMPT.fullmatch(entry.name)) for entry in backend.list(parent) if entry.kind == "directory"]
    return [(f"{parent}/{entry.name}", match["final"]) for entry, match in found if match is not None]


def remove_dead_attempts(backend: Backend, final: str) -> None:
    """Remove what attempts at this one checkpoint left whose processes ran on this machine and are gone.

    An exchange cut between its renames is taken back, or its older checkpoint removed if the newer is in place. That it
    is in place may be known to memory only: nothing is removed before the names are on the disk. An older checkpoint
    that holds anything else is kept, as `remove_replaced` does.

    Raises:
        StorageError: some of it could not be removed; the rest is.
    """
    parent, name = os.path.split(final)
    removed = list[tuple[Entry, bool]]()
    for entry in backend.list(parent):
        path = os.path.join(parent, entry.name)
        match = _ATTEMPT.fullmatch(entry.name)
        is_aside = path == side_name(final)
        if match is not None and match["final"] == name and is_dead_tag(match["tag"]):
            removed.append((entry, is_tag_of_another_boot(match["tag"])))
        elif is_aside and is_committed(backend, final):
            removed.append((entry, False))  # it was a checkpoint, and never an attempt
        elif is_aside and is_committed(backend, path):
            backend.rename(path, final)
    if removed:
        sync_directory(backend, parent)
    refused = [error for entry, may_be_torn in removed if (error := _refusal(backend, entry, final, may_be_torn))]
    if refused:
        raise refused[0]


def _refusal(backend: Backend, entry: Entry, final: str, may_be_torn: bool) -> StorageError | None:
    """Remove it; why that was refused, if it was: the others go all the same."""
    path = os.path.join(os.path.dirname(final), entry.name)
    try:
        if entry.kind == "directory":
            remove_left_over(backend, path, final, may_be_torn=may_be_torn)
        else:
            remove_replaced(backend, path, final)
    except StorageError as error:
        return error
    return None
