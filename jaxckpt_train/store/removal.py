"""Removes a checkpoint that was replaced, or what a save left, and keeps all of it where anything else is in it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Iterable, Sequence

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backend import GONE, MISSING, Backend
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME, RESERVED_NAMES, is_plain_name
from jaxckpt_train.store.strangers import MOST_TOLD, is_of_another_program, listed, listed_below, strangers

_log = logging.getLogger("jaxckpt_train")


def remove_replaced(backend: Backend, directory: str, final: str) -> None:
    """Remove the checkpoint that the one at `final` has replaced; with strangers in it all of it is kept.

    It gets a name then that nobody cleans up, and a warning tells of it. Of a link to a checkpoint the link goes.

    Raises:
        StorageError: the file system refused; it is still there.
    """
    match _refusal_to_open(backend, directory):
        case errno.EISDIR:
            _remove_or_keep(backend, directory, final)
        case errno.ELOOP:
            backend.remove(directory)
        case errno.ENOENT | errno.ESTALE:
            pass
        case _:
            keep(backend, directory, final, ["no directory"])


def _remove_or_keep(backend: Backend, directory: str, final: str, *, was_committed: bool = False) -> None:
    found = first_strangers(backend, directory)
    if not found:
        backend.remove(f"{directory}/{COMMIT_NAME}")  # first: from now on it may go without another look
        backend.remove(directory)
    elif was_committed and _size(backend, directory, COMMIT_NAME) is None:
        return  # another process found none, and is removing it: what was looked at was half of it
    else:
        keep(backend, directory, final, found)


def remove_without_commit(backend: Backend, directory: str) -> None:
    """Remove a checkpoint that has no COMMIT any more; last its manifest, which names the rest of it."""
    for entry in listed(backend, directory):
        if entry.name != MANIFEST_NAME:
            backend.remove(f"{directory}/{entry.name}")
    sync_directory(backend, directory)
    backend.remove(directory)


def first_strangers(backend: Backend, directory: str) -> list[str]:
    """Some of what is no part of the checkpoint there: enough to tell of.

    Raises:
        StorageError: the disk refuses to tell.
    """
    return list(itertools.islice(strangers(backend, directory, certain=True), MOST_TOLD))


def keep(backend: Backend, directory: str, final: str, found: Sequence[str]) -> None:
    """Give what was replaced a name that nobody cleans up, and tell of it.

    Raises:
        StorageError: the file system refused; it is still there.
    """
    kept, doubt = renamed(backend, directory, (f"{final}.replaced-{number}" for number in itertools.count(1))), ""
    if kept is None:
        return  # another process did
    try:
        sync_directory(backend, os.path.dirname(final))  # a power cut would bring it back as what is cleaned up
    except StorageError as error:
        doubt = f" (for now: {error})"
    _log.warning(
        "%s: what it replaced held more than a checkpoint: %s; nothing of it was removed, all of it is in %s now%s: "
        "move what you need to where it belongs, and remove the rest",
        *(final, ", ".join(found), kept, doubt),
    )


def remove_left_over(backend: Backend, directory: str, final: str, *, may_be_torn: bool) -> None:
    """Remove what a dead process left beside a checkpoint: an attempt, or what that had replaced and perhaps not seen.

    Args:
        backend: where.
        directory: what is left. An attempt has no COMMIT; or it was to be on the disk before it got its name, and is
            empty in part.
        final: the name of the checkpoint.
        may_be_torn: whether that may be, as the power may have gone since it was written.

    Raises:
        StorageError: the file system refused; it is still there.
    """
    top = {entry.name: entry.kind for entry in listed(backend, directory)}
    is_torn = may_be_torn and any(_size(backend, directory, name) == 0 for name in RESERVED_NAMES if name in top)
    is_attempt = (COMMIT_NAME not in top or is_torn) and all(
        kind != "directory" if name in RESERVED_NAMES else _may_be_of_attempt(backend, f"{directory}/{name}", kind)
        for name, kind in top.items()
    )
    if is_attempt and not _is_surely_of_another(backend, directory, COMMIT_NAME in top):
        backend.remove(directory)
    elif top:
        _remove_or_keep(backend, directory, final, was_committed=COMMIT_NAME in top)


def _is_surely_of_another(backend: Backend, directory: str, has_commit: bool) -> bool:
    try:
        return is_of_another_program(backend, directory)
    except StorageError:  # of a disk that does not tell: its name is that of an attempt
        if has_commit:  # or of what one has replaced
            raise
        return False


def _may_be_of_attempt(backend: Backend, path: str, kind: str) -> bool:
    """Whether it is a folder with no checkpoint in it, however deep; an object may be writing anything else there."""
    if kind != "directory" or not is_plain_name(os.path.basename(path)):
        return False
    return all(
        inside is not None
        and all(entry.name not in RESERVED_NAMES for entry in inside)
        and all(is_plain_name(entry.name) for entry in inside if entry.kind == "directory")
        for _, inside in listed_below(backend, path)
    )


def _refusal_to_open(backend: Backend, path: str) -> int | None:
    """Why it cannot be opened as a file, by which no link is followed; None: it is one."""
    try:
        backend.open(*os.path.split(path), direct=False).close()
    except StorageError as error:
        if error.errno not in MISSING:
            raise
        return error.errno
    return None


def _size(backend: Backend, directory: str, name: str) -> int | None:
    try:
        source = backend.open(directory, name, direct=False)
    except StorageError as error:
        if error.errno not in MISSING:
            raise
        return None
    source.close()
    return source.size


def renamed(backend: Backend, path: str, names: Iterable[str]) -> str | None:
    """Rename it to the first of these names that is free, and tell which; None: it is gone.

    Raises:
        StorageError: the file system refused.
    """
    for name in names:
        try:
            backend.rename(path, name)
        except StorageError as error:
            if error.errno in GONE:
                return None
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return name
    raise AssertionError("unreachable: of such names there is no end")
