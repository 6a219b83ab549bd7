"""Open committed checkpoints: validate COMMIT and the manifest, and say why a directory is not a checkpoint.

A checkpoint may be replaced or removed while it is read. `use_committed` then reads the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
)
from jaxckpt_train.store.backends.base import MISSING, Backend, Entry, Opener
from jaxckpt_train.store.backends.local import side_name
from jaxckpt_train.store.files import read_or_none
from jaxckpt_train.store.index_files import IndexFiles
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    NOT_JSON,
    Manifest,
    check_version,
    decode_manifest,
    shown,
)
from jaxckpt_train.store.process_identity import process_tag
from jaxckpt_train.store.timeouts import report_progress, time_limited

_STEP = re.compile(r"step-[0-9]{10,16}(\.(g[0-9]+|[0-9a-f]{16}))?")
_DATA_FOLDER = re.compile("data-[0-9a-f]{16}")
T = TypeVar("T")
MAX_LOOKUPS = 10
RECORD_NAME = "record"
"""The record of a run, in its directory."""
_NUMBERS = itertools.count()  # of all attempts of this process
UNREADABLE = (NotACheckpointError, CorruptCheckpointError, FormatVersionError, StorageError)
"""The errors of a checkpoint that cannot be opened, except for storage that does not respond."""


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of COMMIT, which identifies the manifest."""

    format: str
    format_version: int
    manifest_bytes: int
    manifest_sha256: str
    folder: str = ""  # where the checkpoint is, below the directory of this COMMIT; empty: in that directory


class _Pointer(msgspec.Struct):
    folder: str = ""


class _Links(msgspec.Struct):
    links: dict[str, str] = {}


class _RunRecord(msgspec.Struct):
    """The part of a run record that says where links lead."""

    record: _Links


@dataclasses.dataclass(frozen=True)
class Committed:
    """A committed checkpoint.

    Attributes:
        manifest: validated. In a process that did not commit it itself, it has no segments and chunks. With an index,
            the parts of arrays are missing; `index_files` has them.
        recorded_bytes: the size of all data, if `manifest` has no segments; else None.
    """

    directory: str
    manifest: Manifest
    manifest_sha256: str
    recorded_bytes: int | None = None

    @property
    def data_bytes(self) -> int:
        """The size of all data."""
        if self.recorded_bytes is not None:
            return self.recorded_bytes
        segments = sum(segment.bytes for segment in self.manifest.segments)
        if self.manifest.index is not None:
            segments += self.manifest.index.data_bytes
        return segments + sum(file.bytes for part in self.manifest.parts for file in part.files)


def folders_of(manifest: Manifest) -> list[str]:
    """The folders with files of a checkpoint; those of index files are among them."""
    files = [each.file for each in manifest.segments] + [each.file for part in manifest.parts for each in part.files]
    return [*(part.name for part in manifest.parts), *(os.path.dirname(each) for each in files)]


def attempt_paths(final: str) -> Iterator[str]:
    """The paths where this process may write or remove a checkpoint; the caller takes the first free one.

    No path appears twice, so one that was noted for removal is never that of another attempt.
    """
    (parent, name), tag = os.path.split(final), process_tag()
    return (os.path.join(parent, f".{name}.tmp-{tag}-{number}") for number in _NUMBERS)


def new_data_folder() -> str:
    """A name that no other attempt has, for the objects of a single checkpoint on an object store."""
    return f"data-{secrets.token_hex(8)}"


def is_data_folder(name: str) -> bool:
    """Whether `new_data_folder` may have returned this name."""
    return _DATA_FOLDER.fullmatch(name) is not None


def is_step_folder(name: str) -> bool:
    """Whether a run may give a step this name."""
    return _STEP.fullmatch(name) is not None


def checkpoint_path(directory: str) -> str:
    """The path by which users know the checkpoint in a directory: without the folder that its COMMIT names."""
    parent, name = os.path.split(directory)
    return parent if is_url(directory) and is_data_folder(name) else directory


def read_pointer(backend: Backend, directory: str) -> bytes | None:
    """The content of a COMMIT; None: there is none."""
    found = read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    return None if found is None else bytes(found)


def is_committed(backend: Backend, directory: str) -> bool:
    """Whether the directory has a COMMIT; nothing is validated."""
    try:
        backend.open(directory, COMMIT_NAME, direct=False).close()
    except StorageError as error:
        if error.errno in MISSING:
            return False
        raise
    return True


@time_limited
def is_gone(backend: Backend, directory: str) -> bool:
    """Whether there is certainly no COMMIT; False if the storage refuses to say."""
    try:
        return not is_committed(backend, directory)
    except StorageError:
        return False


@time_limited
def open_committed(backend: Backend, directory: str, *, is_complete: bool = True) -> Committed:
    """Read and validate COMMIT and the manifest of a checkpoint; if it `is_complete`, with all of its index files.

    Raises NotACheckpointError, IncompleteCheckpointError: as `diagnose_uncommitted` returns them;
    CorruptCheckpointError: COMMIT or the manifest is damaged; FormatVersionError: a newer version of this library wrote
    it; CheckpointTimeoutError: the storage has not responded for ten minutes.
    """
    directory, commit = _locate(backend, directory)
    found = read_committed(backend, directory, commit)
    if found is None:
        raise diagnose_uncommitted(backend, directory)
    data, sha256 = found
    committed = Committed(directory, decode_manifest(data, f"{directory}/{MANIFEST_NAME}"), sha256)
    return completed(backend, committed) if is_complete else committed


def index_files(files: Opener, committed: Committed) -> IndexFiles | None:
    """The index files of a checkpoint; None: it has none, or all of them have been read."""
    manifest = committed.manifest
    return None if manifest.index is None else IndexFiles(files, committed.directory, manifest, manifest.index)


@time_limited
def completed(files: Opener, committed: Committed) -> Committed:
    """The checkpoint with all chunks in its manifest. Raises CorruptCheckpointError: an index file is damaged."""
    indexes = index_files(files, committed)
    return committed if indexes is None else dataclasses.replace(committed, manifest=indexes.complete())


@time_limited
def with_chunks_of(files: Opener, committed: Committed, process: int) -> Committed:
    """The checkpoint with the chunks that a process of this number wrote, if they are in an index file.

    Raises CorruptCheckpointError: an index file is damaged.
    """
    indexes = index_files(files, committed)
    entry = None if indexes is None else next((each for each in indexes.all() if each.process == process), None)
    if indexes is None or entry is None:
        return committed
    return dataclasses.replace(committed, manifest=indexes.manifest_of(indexes.contents([entry])))


def committed_identity(backend: Backend, directory: str) -> tuple[str, str] | None:
    """The current directory of the checkpoint and the SHA-256 of its manifest, without decoding it; or None."""
    directory, commit = _locate(backend, directory)
    found = read_committed(backend, directory, commit)
    return None if found is None else (directory, found[1])


def read_committed(
    backend: Backend, directory: str, commit: bytes | None = None
) -> tuple[bytes | bytearray, str] | None:
    """The encoded manifest that COMMIT identifies, and its SHA-256; None: there is no COMMIT.

    `commit` is the content of COMMIT, if it has been read.
    """
    commit_file = f"{directory}/{COMMIT_NAME}"
    raw = commit or read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    if raw is None:
        return None
    _check_commit_version(backend, directory, raw)
    try:
        record = msgspec.json.decode(raw, type=CommitRecord)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{commit_file}: not valid: {shown(error)}") from error
    manifest_file = f"{directory}/{MANIFEST_NAME}"
    data = read_or_none(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES, size=record.manifest_bytes)
    if data is None:
        if read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES) is None:
            return None  # the checkpoint was removed meanwhile
        raise CorruptCheckpointError(f"{manifest_file}: missing, but COMMIT refers to it")
    if hashlib.sha256(data).hexdigest() != record.manifest_sha256:
        raise CorruptCheckpointError(f"{manifest_file}: damaged: its SHA-256 differs from the one in COMMIT")
    return data, record.manifest_sha256


def _check_commit_version(backend: Backend, directory: str, commit: bytes | bytearray) -> None:
    """Check the version; believe a newer one only if the manifest states it too, because a bit may have flipped."""
    subject = f"{directory}/{COMMIT_NAME}"
    try:
        check_version(commit, subject)
    except FormatVersionError as error:
        data = read_or_none(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        if data is None:
            raise
        check_version(data, f"{directory}/{MANIFEST_NAME}")  # raises FormatVersionError for a newer version
        raise CorruptCheckpointError(f"{subject}: not valid: the manifest states an older format version") from error


def _locate(backend: Backend, directory: str) -> tuple[str, bytes | None]:
    """Where the checkpoint of a directory is, and its COMMIT if that has been read.

    A COMMIT may name a folder. On an object store, the record of a run may have a link of this name. On a disk, it is
    the side name if a crash interrupted an exchange between its two renames.
    """
    with contextlib.suppress(CorruptCheckpointError):  # raised again by the reader of COMMIT
        commit = read_pointer(backend, directory)
        if commit is not None:
            return _folder_of(directory, commit), commit
    if is_url(directory):
        return _linked_step(backend, directory) or directory, None
    aside = side_name(directory)
    if not is_committed(backend, directory) and is_committed(backend, aside):
        return aside, None
    return directory, None


def _linked_step(backend: Backend, path: str) -> str | None:
    """The step that a link in a run on an object store leads to; None: there is no such link."""
    run, name = os.path.split(path)
    if not name.isidentifier() or not is_url(run):
        return None
    stored = backend.read_record(f"{run}/{RECORD_NAME}")
    with contextlib.suppress(*NOT_JSON):
        target = None if stored is None else msgspec.json.decode(stored.data, type=_RunRecord).record.links.get(name)
        if target is not None and is_step_folder(target):
            return f"{run}/{target}"
    return None


def _folder_of(directory: str, commit: bytes) -> str:
    """The folder that a COMMIT names, or its directory."""
    with contextlib.suppress(*NOT_JSON):  # raised again by the reader of COMMIT
        folder = msgspec.json.decode(commit, type=_Pointer).folder
        if is_data_folder(folder):
            return f"{directory}/{folder}"
    return directory


def diagnose_uncommitted(backend: Backend, directory: str) -> NotACheckpointError:
    """The error that explains why a directory without COMMIT is not a checkpoint."""
    try:
        names = [entry.name for entry in backend.list(directory)]
    except StorageError as error:
        found = "a file" if error.errno == errno.ENOTDIR else "nothing"
        return NotACheckpointError(f"{directory}: expected a checkpoint directory, found {found}")
    folders = [] if MANIFEST_NAME in names else names
    contents = {name: _list_or_empty(backend, f"{directory}/{name}") for name in folders}
    files = {name: [entry.name for entry in entries if entry.kind == "file"] for name, entries in contents.items()}
    if MANIFEST_NAME in names or any(name.startswith("p00000") for found in files.values() for name in found):
        return IncompleteCheckpointError(f"{directory}: has no {COMMIT_NAME}: never committed, or copied only in part")
    committed = [name for name in names if not name.startswith(".") and COMMIT_NAME in files[name]]
    if committed:
        is_run = any(map(is_step_folder, committed))
        of_run = f"; jaxckpt_train.StepManager({directory!r}).load() reads the latest valid step"
        return NotACheckpointError(
            f"{directory}: expected a checkpoint, found a directory of {len(committed)}; pass one of them, such as "
            f"{directory}/{committed[-1]}{of_run if is_run else ''}"
        )
    listing = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "an empty directory"
    return NotACheckpointError(
        f"{directory}: not a checkpoint: expected {COMMIT_NAME} and {MANIFEST_NAME}, found {listing}"
    )


def _list_or_empty(backend: Backend, folder: str) -> Sequence[Entry]:
    """The entries of a folder; empty if it cannot be listed, such as `lost+found`."""
    try:
        return backend.list(folder)
    except StorageError:
        return ()


@time_limited
def check_unchanged(files: Opener, committed: Committed, *, may_be_gone: bool) -> None:
    """Raise CorruptCheckpointError if another checkpoint has replaced this one, NotACheckpointError if it is gone.

    On an object store its names have never been those of another one, and stay for a while after its COMMIT.
    """
    found = _committed_sha256(files, committed.directory)
    if found is None and not may_be_gone and not is_url(committed.directory):
        raise removed_error(committed.directory)
    if found not in (None, committed.manifest_sha256):
        raise CorruptCheckpointError(f"{committed.directory}: the checkpoint was replaced while it was being read")


def is_unchanged(files: Opener, committed: Committed) -> bool:
    """Whether the directory still holds this checkpoint."""
    return _committed_sha256(files, committed.directory) == committed.manifest_sha256


def _committed_sha256(files: Opener, directory: str) -> str | None:
    """The SHA-256 in COMMIT, empty if that is damaged; None: there is no COMMIT."""
    raw = read_or_none(files, directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    try:
        return None if raw is None else msgspec.json.decode(raw, type=CommitRecord).manifest_sha256
    except NOT_JSON:
        return ""


def use_committed(backend: Backend, directory: str, use: Callable[[Committed], T], *, is_complete: bool = True) -> T:
    """Open a checkpoint and call `use` with it; do so again whenever another checkpoint replaces it meanwhile."""
    seen = None
    while True:
        try:
            committed = open_committed(backend, directory, is_complete=is_complete)
            seen = committed.directory, committed.manifest_sha256
            return use(committed)
        except (CorruptCheckpointError, NotACheckpointError, StorageError) as error:
            # If the system cannot swap two names atomically, a single attempt may see the gap of a replacement.
            attempts = 1 if isinstance(error, StorageError) else MAX_LOOKUPS
            now = _current_identity(backend, directory, attempts)
            if now is None and seen is not None and is_gone(backend, directory):
                raise removed_error(directory) from error
            if now is None or now == seen:
                raise
            seen = now


def removed_error(directory: str) -> NotACheckpointError:
    """The error of reading a checkpoint that retention, or a user, has removed."""
    return NotACheckpointError(
        f"{directory}: the checkpoint was removed while it was being read; a run keeps pinned steps and those that its "
        "preservation policy selects"
    )


@time_limited
def _current_identity(backend: Backend, directory: str, attempts: int) -> tuple[str, str] | None:
    """The identity of the current checkpoint, found within this number of attempts; None: none can be opened."""
    for _ in range(attempts):
        report_progress()
        with contextlib.suppress(*UNREADABLE):
            if (found := committed_identity(backend, directory)) is not None:
                return found
    return None
