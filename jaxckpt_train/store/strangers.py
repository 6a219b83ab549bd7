"""What lies in a checkpoint's directory and is no part of it, such as a run: it must not go with the checkpoint."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backend import GONE, Backend, Entry, is_in_use
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    FORMAT,
    MANIFEST_NAME,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    NOT_JSON,
    RESERVED_NAMES,
    is_plain_name,
)
from jaxckpt_train.store.plain_files import read_head, read_or_none

MOST_TOLD = 5
_DATA_FILE = re.compile(r"p[0-9]{5}(-s[0-9]+\.safetensors|\.json)")
_OURS = f'{{"format":"{FORMAT}"'.encode()  # how COMMIT and the manifest begin
_HEAD_BYTES = 4096
_MOST_UNTOLD_BYTES = 64 << 20  # of a manifest, where COMMIT does not tell how many it has


class _Commit(msgspec.Struct):
    manifest_bytes: int


class _File(msgspec.Struct, array_like=True):
    file: str


class _Part(msgspec.Struct):
    name: str
    files: tuple[_File, ...]


class _Names(msgspec.Struct):
    """All that a manifest names; the rest of it, nearly all, is passed over."""

    format: str
    segments: tuple[_File, ...]
    parts: tuple[_Part, ...]


def strangers(backend: Backend, directory: str, *, certain: bool) -> Iterator[str]:
    """The files and directories in a checkpoint's directory that are no part of it. What is gone by now is none.

    Args:
        backend: where.
        directory: of the checkpoint.
        certain: whether the manifest is asked in any case. Otherwise it is only where not all files have the names that
            ours have, or a directory is empty: it takes long to read. Where it cannot be used, every file without
            such a name is a stranger if `certain`, and so are a COMMIT and a `manifest.json` that another program
            wrote; and else what surely is none of ours, as it holds something hidden or a checkpoint of its own.

    Raises:
        StorageError: the disk refuses to tell.
    """
    top = listed(backend, directory)
    folders = {entry.name: listed(backend, f"{directory}/{entry.name}") for entry in top if entry.kind == "directory"}
    beside = [entry.name for entry in top if entry.kind != "directory" and entry.name not in RESERVED_NAMES]
    if not certain and not beside and all(inside and _is_data(inside) for inside in folders.values()):
        return
    yield from beside
    names = _names(backend, directory)
    if names is None:
        for name, inside in folders.items():
            if not _is_data(inside) and (certain or not _may_be_own(backend, f"{directory}/{name}")):
                yield name
        if certain and not any(folders.values()) and is_of_another_program(backend, directory):
            yield from (entry.name for entry in top if entry.kind == "file" and entry.name in RESERVED_NAMES)
        return
    parts = {part.name for part in names.parts}
    yield from (name for name in folders if name not in parts)
    files = {file.file for named in (names.segments, *(part.files for part in names.parts)) for file in named}
    for name in folders:
        if name in parts:
            yield from _unnamed(backend, directory, name, files)


def listed(backend: Backend, directory: str) -> list[Entry]:
    """What is in a directory, but for removed files in use; nothing if it is gone, being replaced or removed."""
    try:
        return [entry for entry in backend.list(directory) if not is_in_use(entry.name)]
    except StorageError as error:
        if error.errno not in GONE:
            raise
        return []


def listed_below(backend: Backend, directory: str) -> Iterator[tuple[str, list[Entry] | None]]:
    """A directory and those below it, each with what is in it; None: it lies too deep for a path, so no save wrote it.

    They are not asked by one that asks the next: trees may be deeper than calls can be.
    """
    waiting = [directory]
    while waiting:
        here, inside = waiting.pop(), None
        try:
            inside = listed(backend, here)
        except StorageError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
        yield here, inside
        waiting += [f"{here}/{entry.name}" for entry in inside or () if entry.kind == "directory"]


def _is_data(inside: Sequence[Entry]) -> bool:
    """Whether a directory holds nothing but what only we make."""
    return all(entry.kind == "file" and _DATA_FILE.fullmatch(entry.name) for entry in inside)


def _may_be_own(backend: Backend, folder: str) -> bool:
    """Whether an object may have written all of it: no save takes what is hidden, and a checkpoint is another's."""
    return all(
        inside is not None and all(is_plain_name(entry.name) for entry in inside)
        for _, inside in listed_below(backend, folder)
    )


def _names(backend: Backend, directory: str) -> _Names | None:
    """None: there is no manifest of ours, or none that can be used.

    COMMIT may be gone, or hold nothing: the manifest is whole before it is made, and may stay when it is removed.
    """
    try:
        size = _manifest_bytes(backend, directory)
        limit = _MOST_UNTOLD_BYTES if size is None else MAX_MANIFEST_BYTES
        data = read_or_none(backend, directory, MANIFEST_NAME, limit, size=size)
        names = None if data is None else msgspec.json.decode(data, type=_Names)
    except (CorruptCheckpointError, *NOT_JSON):
        return None
    return names if names is not None and names.format == FORMAT else None


def _manifest_bytes(backend: Backend, directory: str) -> int | None:
    """How many bytes COMMIT says that the manifest has; None: it does not say."""
    commit = read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    try:
        return None if commit is None else msgspec.json.decode(commit, type=_Commit).manifest_bytes
    except NOT_JSON:
        return None


def is_of_another_program(backend: Backend, directory: str) -> bool:
    """Whether COMMIT and `manifest.json`, or the one that is there, say something and not that they are of our format.

    A power cut may leave zeros of them, which say nothing, or zeros after the first bytes.
    """
    heads = [read_head(backend, directory, name, _HEAD_BYTES).strip(b"\0") for name in RESERVED_NAMES]
    said = [head.partition(b"\0")[0] for head in heads if head]
    return bool(said) and not any(_OURS in text or _OURS.startswith(text) for text in said)


def _unnamed(backend: Backend, directory: str, part: str, files: set[str]) -> Iterator[str]:
    """The files in the folder of a part, however deep, that are not among `files`."""
    for here, inside in listed_below(backend, f"{directory}/{part}"):
        folder = here.removeprefix(f"{directory}/")
        if inside is None:
            yield folder
            continue
        paths = (f"{folder}/{entry.name}" for entry in inside if entry.kind != "directory")
        yield from (path for path in paths if path not in files)
