"""What lies in a checkpoint's directory and is no part of it, such as a run: it must not go with the checkpoint."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backend import MISSING, Backend, Entry
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    NOT_JSON,
    RESERVED_NAMES,
    is_plain_name,
)
from jaxckpt_train.store.plain_files import read_or_none

_log = logging.getLogger("jaxckpt_train")
MOST_TOLD = 5
_DATA_FILE = re.compile(r"p[0-9]{5}(-s[0-9]+\.safetensors|\.json)")


class _Commit(msgspec.Struct):
    manifest_bytes: int


class _File(msgspec.Struct, array_like=True):
    file: str


class _Part(msgspec.Struct):
    name: str
    files: tuple[_File, ...]


class _Names(msgspec.Struct):
    """All that a manifest names; the rest of it, nearly all, is passed over."""

    segments: tuple[_File, ...]
    parts: tuple[_Part, ...]


def strangers(backend: Backend, directory: str, *, certain: bool) -> Iterator[str]:
    """The files and directories in a checkpoint's directory that are no part of it. What is gone by now is none.

    Args:
        backend: where.
        directory: of the checkpoint.
        certain: whether the manifest is asked in any case. Otherwise it is only where not all files have the names that
            ours have, or a directory is empty: it takes long to read. Where it cannot be used, every file without
            such a name is a stranger if `certain`, and else what surely is none of ours, as it holds something hidden
            or a checkpoint of its own.

    Raises:
        StorageError: the disk refuses to tell.
    """
    top = _listed(backend, directory)
    folders = {entry.name: _listed(backend, f"{directory}/{entry.name}") for entry in top if entry.kind == "directory"}
    beside = [entry.name for entry in top if entry.kind != "directory" and entry.name not in RESERVED_NAMES]
    if not certain and not beside and all(inside and _is_data(inside) for inside in folders.values()):
        return
    yield from beside
    names = _names(backend, directory)
    if names is None:
        for name, inside in folders.items():
            if not _is_data(inside) and (certain or not _may_be_own(backend, f"{directory}/{name}")):
                yield name
        return
    parts = {part.name for part in names.parts}
    yield from (name for name in folders if name not in parts)
    files = {file.file for named in (names.segments, *(part.files for part in names.parts)) for file in named}
    yield from _unnamed(backend, directory, [name for name in folders if name in parts], files)


def _listed(backend: Backend, directory: str) -> list[Entry]:
    try:
        return backend.list(directory)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return []  # it is being replaced, or removed


def _is_data(inside: Sequence[Entry]) -> bool:
    """Whether a directory holds nothing but what only we make."""
    return all(entry.kind == "file" and _DATA_FILE.fullmatch(entry.name) for entry in inside)


def _may_be_own(backend: Backend, folder: str) -> bool:
    """Whether an object may have written all of it: no save takes what is hidden, and a checkpoint is another's."""
    inside = _listed(backend, folder)
    return all(is_plain_name(entry.name) for entry in inside) and all(
        _may_be_own(backend, f"{folder}/{entry.name}") for entry in inside if entry.kind == "directory"
    )


def _names(backend: Backend, directory: str) -> _Names | None:
    """None: there is no manifest, or none that can be used."""
    try:
        commit = read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES)
        if commit is None:
            return None
        size = msgspec.json.decode(commit, type=_Commit).manifest_bytes
        data = read_or_none(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES, size=size)
        return None if data is None else msgspec.json.decode(data, type=_Names)
    except (CorruptCheckpointError, *NOT_JSON):
        return None


def _unnamed(backend: Backend, directory: str, folders: list[str], files: set[str]) -> Iterator[str]:
    """The files below these folders, however deep, that are not among `files`."""
    while folders:
        folder = folders.pop()
        for entry in _listed(backend, f"{directory}/{folder}"):
            path = f"{folder}/{entry.name}"
            if entry.kind == "directory":
                folders.append(path)
            elif path not in files:
                yield path


def remove_replaced(backend: Backend, directory: str, final: str) -> None:
    """Remove the checkpoint that the one at `final` has replaced; with strangers in it all of it is kept.

    It gets a name then that nobody cleans up, and a warning tells of it.

    Raises:
        StorageError: the file system refused; it is still there.
    """
    found = list(itertools.islice(strangers(backend, directory, certain=True), MOST_TOLD))
    if not found:
        backend.remove(f"{directory}/{COMMIT_NAME}")  # first: from now on it may go without another look
        backend.remove(directory)
        return
    kept, doubt = _set_aside(backend, directory, final), ""
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
    top = {entry.name: entry.kind for entry in _listed(backend, directory)}
    is_torn = may_be_torn and any(_size(backend, directory, name) == 0 for name in RESERVED_NAMES if name in top)
    if (COMMIT_NAME not in top or is_torn) and all(
        name in RESERVED_NAMES or _may_be_of_attempt(backend, f"{directory}/{name}", kind) for name, kind in top.items()
    ):
        backend.remove(directory)
    elif top:
        remove_replaced(backend, directory, final)


def _may_be_of_attempt(backend: Backend, path: str, kind: str) -> bool:
    """Whether it is a folder with no checkpoint in it, however deep; an object may be writing anything else there."""
    if kind != "directory" or not is_plain_name(os.path.basename(path)):
        return False
    inside = _listed(backend, path)
    return all(entry.name not in RESERVED_NAMES for entry in inside) and all(
        _may_be_of_attempt(backend, f"{path}/{entry.name}", entry.kind) for entry in inside if entry.kind == "directory"
    )


def _size(backend: Backend, directory: str, name: str) -> int | None:
    try:
        source = backend.open(directory, name, direct=False)
    except StorageError as error:
        if error.errno not in MISSING:
            raise
        return None
    source.close()
    return source.size


def _set_aside(backend: Backend, directory: str, final: str) -> str:
    for number in itertools.count(1):
        kept = f"{final}.replaced-{number}"
        try:
            backend.rename(directory, kept)
        except StorageError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return kept
    raise AssertionError("unreachable: the count has no end")
