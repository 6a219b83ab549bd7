"""Remove what saves leave next to a checkpoint: replaced checkpoints, and attempts of processes that died.

What the names next to `NAME` may hold after a crash, and what becomes of it:

    NAME                    a checkpoint. Without COMMIT: what is left of one that a crash interrupted while it was
                            replaced or deleted in place, since its directory cannot be renamed
    .NAME.tmp-PROCESS-N     never read. Without COMMIT: an attempt, or a checkpoint that is being removed. With COMMIT:
                            an attempt before its rename, a checkpoint that was replaced, or a step that is deleted.
                            The next save of NAME, or the next owner of the run, removes it
    .NAME.aside             if NAME is committed: the other one of two checkpoints that were being exchanged, which the
                            next save removes. Otherwise the only complete one: loads read it, the next save renames it
    NAME.replaced-N         a replaced directory that holds untracked files. Nothing removes it
    .NAME.deleting          a step that an earlier version was deleting; the next owner removes it

Users may have put their own files, even a whole run, into a checkpoint's directory. These untracked files are never
removed: a directory that holds any is kept under another name, and a warning names it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.store.backends.base import (
    GONE,
    MISSING,
    Backend,
    Entry,
    is_damage,
    is_removed_in_use,
    sync_directory,
)
from jaxckpt_train.store.backends.local import side_name
from jaxckpt_train.store.committed import attempt_paths, is_committed, is_step_folder
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
from jaxckpt_train.store.process_identity import is_dead_tag

MAX_LISTED = 5
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)  # of a rename to a name that something has
_UNNAMED_FILE = re.compile(r"p[0-9]{5,}(-s[0-9]+\.safetensors|\.index)|index\.tables")  # if there are index files
_DATA_FILE = re.compile(rf"{_UNNAMED_FILE.pattern}|p[0-9]{{5,}}\.json")
_FORMAT_PREFIX = f'{{"format":"{FORMAT}"'.encode()  # the first bytes of COMMIT and of the manifest
_HEAD_BYTES = 4096
_MAX_UNSIZED_MANIFEST_BYTES = 64 << 20  # the limit for a manifest whose size COMMIT does not state
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


class _NamedFiles(msgspec.Struct):
    """The file names in a manifest; decoding skips everything else."""

    format: str
    segments: tuple[_File, ...]
    parts: tuple[_Part, ...]
    index: Any = None  # with index files, the manifest does not name the files of processes


def untracked_files(backend: Backend, directory: str, *, certain: bool) -> Iterator[str]:
    """Yield the files and directories in a checkpoint's directory that are not part of the checkpoint.

    Without `certain`, the manifest is read only if a file has a name that no save gives, or a directory is empty,
    because reading it takes long. If it is unusable, every file with a name that no save gives is untracked, and so are
    a COMMIT and a `manifest.json` of another program; without `certain`, only folders that no checkpointable can have
    written: folders that hold a hidden file or another checkpoint. Raises StorageError: the storage cannot be read.
    """
    top = list_entries(backend, directory)
    names = [entry.name for entry in top if entry.kind == "directory"]
    folders = {name: list_entries(backend, f"{directory}/{name}") for name in names}
    files_at_top = [entry.name for entry in top if entry.kind != "directory" and entry.name not in RESERVED_NAMES]
    others = [
        name
        for name, entries in folders.items()
        if not all(entry.kind == "file" and _DATA_FILE.fullmatch(entry.name) for entry in entries)
    ]
    if not certain and not files_at_top and not others and all(folders.values()):
        return
    yield from files_at_top
    manifest = _read_names(backend, directory)
    if manifest is None:
        for name in others:
            if certain or not _may_be_of_checkpointable(backend, f"{directory}/{name}"):
                yield name
        if certain and not any(folders.values()) and _is_of_other_program(backend, directory):
            yield from (entry.name for entry in top if entry.kind == "file" and entry.name in RESERVED_NAMES)
        return
    parts = {part.name for part in manifest.parts}
    yield from (name for name in folders if name not in parts)
    files = {file.file for named in (manifest.segments, *(part.files for part in manifest.parts)) for file in named}
    for name in folders:
        if name in parts:
            for path in _untracked_below(backend, directory, name, files):
                if manifest.index is None or _UNNAMED_FILE.fullmatch(path.removeprefix(f"{name}/")) is None:
                    yield path


def list_entries(backend: Backend, directory: str) -> list[Entry]:
    """The entries of a directory without removed files that are still open; empty if the directory is gone."""
    try:
        return [entry for entry in backend.list(directory) if not is_removed_in_use(entry.name)]
    except StorageError as error:
        if error.errno not in GONE:
            raise
        return []


def walk_directories(backend: Backend, directory: str) -> Iterator[tuple[str, list[Entry]]]:
    """Yield a directory and all directories below it, each with its entries."""
    waiting = [directory]
    while waiting:
        path = waiting.pop()
        entries = list_entries(backend, path)
        yield path, entries
        waiting += [f"{path}/{entry.name}" for entry in entries if entry.kind == "directory"]


def file_sizes(backend: Backend, directory: str, *, raises: bool = False) -> dict[str, int]:
    """The sizes of the files in a directory and below it, by their paths in it, without those that cannot be opened.

    `raises`: raise a StorageError that says nothing about the file, such as that of too many open files.
    """
    sizes, walked = dict[str, int](), walk_directories(backend, directory)
    for folder, name in [(path, entry.name) for path, entries in walked for entry in entries if entry.kind == "file"]:
        try:
            source = backend.open(folder, name, direct=False)
        except StorageError as error:
            if raises and not is_damage(error):
                raise
            continue
        source.close()
        sizes[f"{folder}/{name}".removeprefix(f"{directory}/")] = source.size
    return sizes


def _may_be_of_checkpointable(backend: Backend, folder: str) -> bool:
    """Whether a checkpointable may have written the whole folder: it holds no hidden file and no other checkpoint."""
    return all(is_plain_name(entry.name) for _, entries in walk_directories(backend, folder) for entry in entries)


def _read_names(backend: Backend, directory: str) -> _NamedFiles | None:
    """The names in the manifest, whose COMMIT may be missing or empty; None if there is no usable manifest."""
    size, limit = None, _MAX_UNSIZED_MANIFEST_BYTES
    try:
        commit = read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES)
        with contextlib.suppress(*NOT_JSON):
            if commit is not None:
                size, limit = msgspec.json.decode(commit, type=_Commit).manifest_bytes, MAX_MANIFEST_BYTES
        data = read_or_none(backend, directory, MANIFEST_NAME, limit, size=size)
        names = None if data is None else msgspec.json.decode(data, type=_NamedFiles)
    except (CorruptCheckpointError, *NOT_JSON):
        return None
    return names if names is not None and names.format == FORMAT else None


def _is_of_other_program(backend: Backend, directory: str) -> bool:
    """Whether COMMIT and `manifest.json`, as far as they exist, have content of another format.

    A power cut may replace all of their content, or all but the first bytes, by zeros. Zeros say nothing.
    """
    heads = [read_head(backend, directory, name, _HEAD_BYTES).strip(b"\0") for name in RESERVED_NAMES]
    found = [head.partition(b"\0")[0] for head in heads if head]
    return bool(found) and not any(_FORMAT_PREFIX in text or _FORMAT_PREFIX.startswith(text) for text in found)


def _untracked_below(backend: Backend, directory: str, part: str, files: set[str]) -> Iterator[str]:
    """Yield the files in the folder of a checkpointable, at any depth, that are not among `files`."""
    for path, entries in walk_directories(backend, f"{directory}/{part}"):
        folder = path.removeprefix(f"{directory}/")
        paths = (f"{folder}/{entry.name}" for entry in entries if entry.kind != "directory")
        yield from (path for path in paths if path not in files)


def remove_replaced(backend: Backend, directory: str, final: str) -> None:
    """Remove the checkpoint that the one at `final` has replaced; keep all of it if it holds untracked files.

    If `directory` is a link to a checkpoint, only the link is removed.
    """
    try:
        backend.open(*os.path.split(directory), direct=False).close()
    except StorageError as error:
        if error.errno == errno.EISDIR:
            _remove_or_keep(backend, directory, final)
            return
        if error.errno == errno.ELOOP:
            backend.remove(directory)
            return
        if error.errno in GONE:
            return
        if error.errno not in MISSING:
            raise
    set_aside(backend, directory, final, ["it is not a directory"])


def _remove_or_keep(backend: Backend, directory: str, final: str, *, was_committed: bool = False) -> None:
    found = first_untracked_files(backend, directory)
    if not found:
        backend.remove(f"{directory}/{COMMIT_NAME}")  # first: a directory without COMMIT is removed without a check
        backend.remove(directory)
    elif was_committed and not is_committed(backend, directory):
        return  # another process is removing it, so this one saw only part of it
    else:
        set_aside(backend, directory, final, found)


def remove_without_commit(backend: Backend, directory: str) -> None:
    """Remove a checkpoint that has no COMMIT any more; its manifest goes last, because it names the other files."""
    for entry in list_entries(backend, directory):
        if entry.name != MANIFEST_NAME:
            backend.remove(f"{directory}/{entry.name}")
    sync_directory(backend, directory)
    backend.remove(directory)


def first_untracked_files(backend: Backend, directory: str) -> list[str]:
    """The first few untracked files, for a message."""
    return list(itertools.islice(untracked_files(backend, directory, certain=True), MAX_LISTED))


def set_aside(backend: Backend, directory: str, final: str, found: Sequence[str]) -> None:
    """Give a replaced directory a name that no cleanup removes, and log a warning."""
    names = (f"{final}.replaced-{number}" for number in itertools.count(1))
    kept, caveat = rename_to_free(backend, directory, names), ""
    if kept is None:
        return  # another process renamed it
    try:
        sync_directory(backend, os.path.dirname(final))  # else a power cut restores the old name, which is cleaned up
    except StorageError as error:
        caveat = f" (a power cut may undo this rename: {error})"
    _log.warning(
        "%s: the directory that it replaced also held files that are not part of a checkpoint: %s. Nothing was "
        "removed; everything is now in %s%s. Move what you need and remove the rest",
        *(final, ", ".join(found), kept, caveat),
    )


def remove_stale_temporary(backend: Backend, directory: str, final: str) -> None:
    """Remove what a dead process left next to a checkpoint: an attempt, or the checkpoint that it had replaced."""
    top = {entry.name: entry.kind for entry in list_entries(backend, directory)}
    is_attempt = COMMIT_NAME not in top and all(
        kind != "directory" if name in RESERVED_NAMES else _may_be_of_attempt(backend, f"{directory}/{name}", kind)
        for name, kind in top.items()
    )
    is_foreign = False
    with contextlib.suppress(StorageError):  # a bad disk says nothing about an attempt, which has no COMMIT
        is_foreign = is_attempt and _is_of_other_program(backend, directory)
    if is_attempt and not is_foreign:
        backend.remove(directory)
    elif top:
        _remove_or_keep(backend, directory, final, was_committed=COMMIT_NAME in top)


def _may_be_of_attempt(backend: Backend, path: str, kind: str) -> bool:
    """Whether this is a folder in which a checkpointable may be writing, without another checkpoint inside."""
    if kind != "directory" or not is_plain_name(os.path.basename(path)):
        return False
    return all(
        entry.name not in RESERVED_NAMES and (entry.kind != "directory" or is_plain_name(entry.name))
        for _, entries in walk_directories(backend, path)
        for entry in entries
    )


def rename_to_free(backend: Backend, path: str, names: Iterable[str]) -> str | None:
    """Rename a file or directory to the first free name and return that name; None if it is gone."""
    for name in names:
        try:
            backend.rename(path, name)
            return name
        except StorageError as error:
            if error.errno in GONE:
                break
            if error.errno not in TAKEN:
                raise
    return None


def final_name(name: str, *, of_dead: bool = False) -> str | None:
    """The final name that an attempt is for; None: this is not the name of an attempt.

    With `of_dead`, also None unless the process of the attempt ran on this machine and has ended.
    """
    match = _ATTEMPT.fullmatch(name)
    if match is None or (of_dead and not is_dead_tag(match["tag"])):
        return None
    return match["final"]


def is_temporary_name(name: str) -> bool:
    """Whether this name is reserved for unfinished saves, which later saves remove."""
    return final_name(name) is not None or _ASIDE.fullmatch(name) is not None


def remove_dead_attempts(backend: Backend, final: str) -> None:
    """Remove what dead processes of this machine left of attempts at one checkpoint.

    An exchange that a crash interrupted between its renames is undone; or, if the newer checkpoint is in place, the
    older one is removed. The parent directory is synced before anything is removed, because the rename may not be on
    the disk yet. Checkpoints with untracked files are kept. Raises StorageError after all that can be removed was.
    """
    parent, name = os.path.split(final)
    removals = list[Callable[[], None]]()
    entries = backend.list(parent)
    for entry in entries:
        path = os.path.join(parent, entry.name)
        if final_name(entry.name, of_dead=True) == name:
            remove = remove_stale_temporary if entry.kind == "directory" else remove_replaced
            removals.append(functools.partial(remove, backend, path, final))
        elif path == side_name(final) and entry.kind != "file":  # an exchange moves directories and links to them
            if is_committed(backend, final):
                removals.append(functools.partial(_remove_aside, backend, entry, final))
            elif is_committed(backend, path):
                if Entry(name, "directory") in entries and not first_untracked_files(backend, final):
                    remove_without_commit(backend, final)  # a crash interrupted its replacement in place
                backend.rename(path, final)
    if removals:
        sync_directory(backend, parent)
    _run_all(removals)


def remove_dead_exports(backend: Backend, final: str) -> None:
    """Remove what dead processes of this machine left of exports to this name, in any format.

    A leftover with a COMMIT is an older checkpoint that a save has replaced; the next save handles it.
    """
    parent, name = os.path.split(final)
    folders = [each.name for each in backend.list(parent) if each.kind == "directory"]
    paths = [os.path.join(parent, each) for each in folders if final_name(each, of_dead=True) == name]
    no_steps = [path for path in paths if all(each.name != COMMIT_NAME for each in list_entries(backend, path))]
    _run_all([functools.partial(backend.remove, path) for path in no_steps])


def _run_all(removals: Sequence[Callable[[], None]]) -> None:
    """Run all removals, then raise the first StorageError."""
    refused = list[StorageError]()
    for remove in removals:
        try:
            remove()
        except StorageError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _remove_aside(backend: Backend, entry: Entry, final: str) -> None:
    """Remove the older checkpoint of an interrupted exchange, and nothing else that has its side name.

    It is renamed to an attempt's name first: a partly removed directory under the side name could not be recognised.
    """
    aside = side_name(final)
    found = first_untracked_files(backend, aside) if entry.kind == "directory" else []
    is_checkpoint = is_committed(backend, aside)  # checked last: another process may have moved it meanwhile
    if found and is_checkpoint:
        set_aside(backend, aside, final, found)
    elif not found and (is_checkpoint or entry.kind == "directory"):
        moved = rename_to_free(backend, aside, attempt_paths(final))
        if moved is not None:
            sync_directory(backend, os.path.dirname(final))
            remove_replaced(backend, moved, final)


def refuse_reserved_name(final: str) -> None:
    """Raise SettingsError if a later save would take this name for a leftover and remove it."""
    name = os.path.basename(final)
    if is_temporary_name(name):
        raise SettingsError(
            f"path: {final}: names like `.NAME.aside` and `.NAME.tmp-...` are reserved for unfinished saves, and later "
            "saves remove them; choose another name"
        )
    if is_url(final) and is_step_folder(name):
        raise SettingsError(
            f"path: {final}: expected a name unlike `step-0000000100`, which at a URL is reserved for the steps of a "
            "run: its record would not have this one, so the run would remove it. Choose another name; to add a step "
            "to a run, use StepManager or `jaxckpt cp`"
        )


def remove_stale_temporaries(backend: Backend, final: str) -> None:
    """Remove leftovers of earlier attempts; a refusal is only logged. On an object store, the commit removes them."""
    if is_url(final):
        return
    try:
        remove_dead_attempts(backend, final)
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:  # without a parent directory there are no leftovers
            return
        _log.warning("%s: leftovers of an earlier save could not be removed: %s", final, error)
