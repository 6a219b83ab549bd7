"""What processes that died in a save have left beside a checkpoint: found, and cleaned up.

Removes a checkpoint that was replaced, or what a save left, and keeps all of it where anything else is in it.

What lies in a checkpoint's directory and is no part of it, such as a run: it must not go with the checkpoint.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import GONE, MISSING, Backend, Entry, is_in_use, sync_directory
from jaxckpt_train.store.backends.local import side_name
from jaxckpt_train.store.committed import attempt_paths, is_committed
from jaxckpt_train.store.files import read_head, read_or_none
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
from jaxckpt_train.store.process_identity import is_dead_tag, is_tag_of_another_boot

MAX_LISTED = 5
_DATA_FILE = re.compile(r"p[0-9]{5}(-s[0-9]+\.safetensors|\.json)")
_OURS = f'{{"format":"{FORMAT}"'.encode()  # how COMMIT and the manifest begin
_HEAD_BYTES = 4096
_MOST_UNTOLD_BYTES = 64 << 20  # of a manifest, where COMMIT does not tell how many it has
_log = logging.getLogger("jaxckpt_train")
_ATTEMPT = re.compile(r"\.(?P<final>.+)\.tmp-(?P<tag>[0-9a-f]{8}-[0-9a-f]{8}-[0-9]+-[0-9]+)-[0-9]+", re.DOTALL)
_ASIDE = re.compile(r"\..+\.aside", re.DOTALL)


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


def untracked_files(backend: Backend, directory: str, *, certain: bool) -> Iterator[str]:
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
        if certain and not any(folders.values()) and belongs_to_another_program(backend, directory):
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


def belongs_to_another_program(backend: Backend, directory: str) -> bool:
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
    found = first_untracked_files(backend, directory)
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


def first_untracked_files(backend: Backend, directory: str) -> list[str]:
    """Some of what is no part of the checkpoint there: enough to tell of.

    Raises:
        StorageError: the disk refuses to tell.
    """
    return list(itertools.islice(untracked_files(backend, directory, certain=True), MAX_LISTED))


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


def remove_stale_temporary(backend: Backend, directory: str, final: str, *, may_be_torn: bool) -> None:
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
        return belongs_to_another_program(backend, directory)
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


def is_temporary_name(name: str) -> bool:
    """Whether a save may make something of this name, and so later saves remove it."""
    return any(pattern.fullmatch(name) for pattern in (_ATTEMPT, _ASIDE))


def attempts(backend: Backend, parent: str) -> list[tuple[str, str]]:
    """The attempts below `parent`, dead or alive: their directories, and the names they would have got."""
    found = [(entry, _ATTEMPT.fullmatch(entry.name)) for entry in backend.list(parent) if entry.kind == "directory"]
    return [(f"{parent}/{entry.name}", match["final"]) for entry, match in found if match is not None]


def dead_attempts(backend: Backend, parent: str) -> list[str]:
    """The names of the attempts below `parent` whose processes ran on this machine, and are gone."""
    found = [(entry.name, _ATTEMPT.fullmatch(entry.name)) for entry in backend.list(parent)]
    return [name for name, match in found if match is not None and is_dead_tag(match["tag"])]


def remove_dead_attempts(backend: Backend, final: str) -> None:
    """Remove what attempts at this one checkpoint left whose processes ran on this machine and are gone.

    An exchange cut between its renames is taken back, or its older checkpoint removed if the newer is in place. That it
    is in place may be known to memory only: nothing is removed before the names are on the disk. An older checkpoint
    that holds anything else is kept, as `remove_replaced` does; what is none stays, if anything else is in it.

    Raises:
        StorageError: some of it could not be removed; the rest is.
    """
    parent, name = os.path.split(final)
    removals = list[Callable[[], None]]()
    entries = backend.list(parent)
    for entry in entries:
        path, tag = os.path.join(parent, entry.name), _dead_tag(entry, name)
        if tag is not None:
            may_be_torn = is_tag_of_another_boot(tag)
            removals.append(functools.partial(_remove_left, backend, entry, final, may_be_torn))
        elif path == side_name(final) and entry.kind != "file":  # an exchange moves directories, and links to them
            if is_committed(backend, final):
                removals.append(functools.partial(_remove_aside, backend, entry, final))
            elif is_committed(backend, path):
                if Entry(name, "directory") in entries and not first_untracked_files(backend, final):
                    remove_without_commit(backend, final)  # half of it is gone: a crash cut its replacement in place
                backend.rename(path, final)
    if removals:
        sync_directory(backend, parent)
    _do_all(removals)


def remove_dead_exports(backend: Backend, final: str) -> None:
    """Remove what exports of this name left whose processes ran on this machine and are gone: it is of any form.

    What has a COMMIT is an older checkpoint, which a save has replaced: it is for the next save to look at.

    Raises:
        StorageError: some of it could not be removed; the rest is.
    """
    parent, name = os.path.split(final)
    dead = [each for each in backend.list(parent) if each.kind == "directory" and _dead_tag(each, name) is not None]
    paths = [os.path.join(parent, each.name) for each in dead]
    no_steps = [path for path in paths if all(each.name != COMMIT_NAME for each in listed(backend, path))]
    _do_all([functools.partial(backend.remove, path) for path in no_steps])


def _dead_tag(entry: Entry, name: str) -> str | None:
    """The tag of the process that attempted to make `name` there, if it is surely gone."""
    match = _ATTEMPT.fullmatch(entry.name)
    is_of_the_dead = match is not None and match["final"] == name and is_dead_tag(match["tag"])
    return match["tag"] if match is not None and is_of_the_dead else None


def _do_all(removals: Sequence[Callable[[], None]]) -> None:
    """Do all of them; raises the first StorageError at the end."""
    refused = [error for remove in removals if (error := _refusal(remove))]
    if refused:
        raise refused[0]


def _refusal(remove: Callable[[], None]) -> StorageError | None:
    """Remove it; why that was refused, if it was: the others go all the same."""
    try:
        remove()
    except StorageError as error:
        return error
    return None


def _remove_left(backend: Backend, entry: Entry, final: str, may_be_torn: bool) -> None:
    path = os.path.join(os.path.dirname(final), entry.name)
    if entry.kind == "directory":
        remove_stale_temporary(backend, path, final, may_be_torn=may_be_torn)
    else:
        remove_replaced(backend, path, final)


def _remove_aside(backend: Backend, entry: Entry, final: str) -> None:
    """Remove the older checkpoint of an exchange that was cut, and nothing else that has its side name.

    It gets the name of an attempt before it goes: half of it could not be told from nobody's under the side name.
    """
    aside = side_name(final)
    found = first_untracked_files(backend, aside) if entry.kind == "directory" else []
    is_checkpoint = is_committed(backend, aside)  # after the look, as another process may have moved it meanwhile
    if found and is_checkpoint:
        keep(backend, aside, final, found)
    elif not found and (is_checkpoint or entry.kind == "directory"):
        moved = renamed(backend, aside, attempt_paths(final))
        if moved is not None:
            sync_directory(backend, os.path.dirname(final))
            remove_replaced(backend, moved, final)
