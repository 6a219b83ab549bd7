"""What a reader does about a checkpoint that is replaced or removed while it is read.

Says why a directory is no checkpoint, to who wanted to read one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

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
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    NOT_JSON,
    Manifest,
    check_version,
    shown,
)
from jaxckpt_train.store.manifest_decoding import decode_manifest
from jaxckpt_train.store.process_identity import process_tag
from jaxckpt_train.store.timeouts import call_with_timeout

_STEP = re.compile(r"step-[0-9]{10,16}(\.g[0-9]+)?")
T = TypeVar("T")
LOOKS = 10
UNREADABLE = (NotACheckpointError, CorruptCheckpointError, FormatVersionError, StorageError)
"""What is raised for a checkpoint that cannot be opened; not for a disk that does not answer."""


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of COMMIT: which manifest it stands for."""

    format: str
    format_version: int
    manifest_bytes: int
    manifest_sha256: str


@dataclasses.dataclass(frozen=True)
class Committed:
    """A committed checkpoint.

    Attributes:
        directory: where.
        manifest: validated; of a process that did not commit it itself without segments and chunks.
        manifest_sha256: of the manifest's bytes as stored.
        told_bytes: what `manifest` does not say then.
    """

    directory: str
    manifest: Manifest
    manifest_sha256: str
    recorded_bytes: int | None = None

    @property
    def data_bytes(self) -> int:
        """Size of all data."""
        if self.recorded_bytes is not None:
            return self.recorded_bytes
        segments = sum(segment.bytes for segment in self.manifest.segments)
        return segments + sum(file.bytes for part in self.manifest.parts for file in part.files)


def attempt_paths(final: str) -> Iterator[str]:
    """Where this process may write a checkpoint, or remove one: the first that is free is taken."""
    (parent, name), tag = os.path.split(final), process_tag()
    return (os.path.join(parent, f".{name}.tmp-{tag}-{number}") for number in itertools.count())


def is_committed(backend: Backend, directory: str) -> bool:
    """Whether the directory holds a COMMIT; a cheap look that validates nothing."""
    try:
        backend.open(directory, COMMIT_NAME, direct=False).close()
    except StorageError as error:
        if error.errno in MISSING:
            return False
        raise
    return True


def is_gone(backend: Backend, directory: str) -> bool:
    """Whether there surely is no COMMIT; a disk that refuses to tell leaves it in doubt."""
    try:
        return not is_committed(backend, directory)
    except StorageError:
        return False


def open_committed(backend: Backend, directory: str) -> Committed:
    """Read and validate COMMIT and the manifest of a checkpoint.

    Raises:
        NotACheckpointError: nothing is there, or it is a file, or a directory of something else.
        IncompleteCheckpointError: there is a manifest or data but no COMMIT.
        CorruptCheckpointError: COMMIT or the manifest is damaged.
        FormatVersionError: written by a newer version.
    """
    directory = _recover(backend, directory)
    found = read_committed(backend, directory)
    if found is None:
        raise diagnose_uncommitted(backend, directory)
    data, sha256 = found
    return Committed(directory, decode_manifest(data, f"{directory}/{MANIFEST_NAME}"), sha256)


def which_committed(backend: Backend, directory: str) -> tuple[str, str] | None:
    """Where the checkpoint lies now, and the SHA-256 of its manifest; None: there is none. Cheaper than to open it.

    Raises:
        CorruptCheckpointError, FormatVersionError, StorageError: as `open_committed`.
    """
    directory = _recover(backend, directory)
    found = read_committed(backend, directory)
    return None if found is None else (directory, found[1])


def read_committed(backend: Backend, directory: str) -> tuple[bytes | bytearray, str] | None:
    """The manifest that COMMIT stands for, not decoded, and its SHA-256; None: there is no COMMIT.

    Raises:
        CorruptCheckpointError, FormatVersionError, StorageError: as `open_committed`.
    """
    commit_file = f"{directory}/{COMMIT_NAME}"
    raw = read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    if raw is None:
        return None
    _check_commit_version(backend, directory, raw)
    try:
        commit = msgspec.json.decode(raw, type=CommitRecord)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{commit_file}: not valid: {shown(error)}") from error
    manifest_file = f"{directory}/{MANIFEST_NAME}"
    data = read_or_none(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES, size=commit.manifest_bytes)
    if data is None:
        if read_or_none(backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES) is None:
            return None  # all of it was removed meanwhile
        raise CorruptCheckpointError(f"{manifest_file}: missing, but COMMIT stands for it")
    if hashlib.sha256(data).hexdigest() != commit.manifest_sha256:
        raise CorruptCheckpointError(f"{manifest_file}: changed since it was committed (SHA-256 differs)")
    return data, commit.manifest_sha256


def _check_commit_version(backend: Backend, directory: str, commit: bytes | bytearray) -> None:
    """A newer version is one only if the manifest says so too: a flipped bit must not pass for what cannot be read."""
    try:
        check_version(commit, f"{directory}/{COMMIT_NAME}")
    except FormatVersionError as error:
        data = read_or_none(backend, directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        if data is None:
            raise
        check_version(data, f"{directory}/{MANIFEST_NAME}")  # raises the same for what is newer
        raise CorruptCheckpointError(
            f"{directory}/{COMMIT_NAME}: not valid: its manifest is of an older one"
        ) from error


def _recover(backend: Backend, directory: str) -> str:
    """The directory, or its side name if a crash fell between the two renames of an exchange."""
    aside = side_name(directory)
    return aside if not is_committed(backend, directory) and is_committed(backend, aside) else directory


def diagnose_uncommitted(backend: Backend, directory: str) -> NotACheckpointError:
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


def refuse_changed(files: Opener, committed: Committed, *, may_be_gone: bool) -> None:
    """Make sure that what was read since it was opened is of this checkpoint.

    Args:
        files: where.
        committed: the opened checkpoint.
        may_be_gone: whether it may have been removed since.

    Raises:
        CorruptCheckpointError: another one has taken its place.
        NotACheckpointError: it has been removed.
    """
    raw = read_or_none(files, committed.directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    if raw is None:
        if may_be_gone:
            return
        raise removed(committed.directory)
    if not _is_of(raw, committed):
        raise CorruptCheckpointError(f"{committed.directory}: was replaced while it was being read")


def is_still(files: Opener, committed: Committed) -> bool:
    """Whether it is this checkpoint that is there now, and not another one or none."""
    raw = read_or_none(files, committed.directory, COMMIT_NAME, MAX_COMMIT_BYTES)
    return raw is not None and _is_of(raw, committed)


def _is_of(raw: bytes | bytearray, committed: Committed) -> bool:
    with contextlib.suppress(*NOT_JSON):
        return msgspec.json.decode(raw, type=CommitRecord).manifest_sha256 == committed.manifest_sha256
    return False


def opened(backend: Backend, directory: str, progress: Callable[[int], object] | None = None) -> Committed:
    """As `open_committed`, on a disk that may not answer.

    Raises:
        CheckpointTimeoutError: it has not answered for ten minutes.
        What `progress` raises, which is called with 0 now and then.
    """
    return call_with_timeout(directory, lambda moved: open_committed(backend, directory), progress)


def use_committed(
    backend: Backend,
    directory: str,
    use: Callable[[Committed], T],
    progress: Callable[[int], object] | None = None,
) -> T:
    """Open a checkpoint and call `use` with it; once more whenever another one took its place meanwhile.

    `progress` is called with 0 while it is waited for; what it raises ends that.

    Raises:
        As `open_committed`, and what `use` raises.
    """
    seen = None
    while True:
        try:
            committed = opened(backend, directory, progress)
            seen = _which(committed)
            return use(committed)
        except (CorruptCheckpointError, NotACheckpointError, StorageError) as error:
            # Where names are not swapped at once, one look may fall between those of one replacement and of the next.
            looks = 1 if isinstance(error, StorageError) else LOOKS
            now = call_with_timeout(directory, functools.partial(_there, backend, directory, looks), progress)
            if now is None and seen is not None and is_removed(backend, directory, progress):
                raise removed(directory) from error
            if now is None or now == seen:
                raise
            seen = now


def _which(committed: Committed) -> tuple[str, str]:
    """What tells a checkpoint from another that replaces it, and where it lies from where it lies meanwhile."""
    return committed.directory, committed.manifest_sha256


def removed(directory: str) -> NotACheckpointError:
    """The error of who reads what retention, or somebody, has removed."""
    return NotACheckpointError(
        f"{directory}: was removed while it was being read; a run keeps steps that it has pinned, or as many as its "
        "preservation policy says"
    )


def is_removed(backend: Backend, directory: str, progress: Callable[[int], object] | None = None) -> bool:
    """As `is_gone`, on a disk that may not answer; raises as `opened` then."""
    return call_with_timeout(directory, lambda moved: is_gone(backend, directory), progress)


def _there(backend: Backend, directory: str, looks: int, moved: Callable[[], None]) -> tuple[str, str] | None:
    """Which checkpoint is there now, by the first of so many looks that finds one; None: none that can be opened."""
    for _ in range(looks):
        moved()
        with contextlib.suppress(*UNREADABLE):
            if (found := which_committed(backend, directory)) is not None:
                return found
    return None
