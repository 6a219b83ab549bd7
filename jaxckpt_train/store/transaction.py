"""The transaction: the only file that decides that a checkpoint exists.

A checkpoint is a directory that holds COMMIT, and COMMIT fits its manifest. An attempt is written beside the final
name, in a hidden directory. The order, which crash safety rests on:

1. every file is written, COMMIT last;
2. every file and every directory of the attempt is synced, several at a time, so that their bytes and names are on the
   disk before the rename;
3. the attempt is renamed to its final name;
4. the parent directory is synced; only then is the save acknowledged.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    FormatVersionError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.attempt import Attempt
from jaxckpt_train.store.backend import MISSING, Backend
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.local import side_name
from jaxckpt_train.store.machine import process_tag
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_ARRAYS,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    NOT_JSON,
    Manifest,
    check_version,
    encode_manifest,
    shown,
)
from jaxckpt_train.store.manifest_decoding import decode_manifest
from jaxckpt_train.store.plain_files import read_or_none
from jaxckpt_train.store.removal import first_strangers, remove_replaced, remove_without_commit
from jaxckpt_train.store.why_not import why_not_committed

_log = logging.getLogger("jaxckpt_train")


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
    told_bytes: int | None = None

    @property
    def data_bytes(self) -> int:
        """Size of all data."""
        if self.told_bytes is not None:
            return self.told_bytes
        segments = sum(segment.bytes for segment in self.manifest.segments)
        return segments + sum(file.bytes for part in self.manifest.parts for file in part.files)


class Transaction(Attempt):
    """One attempt to write one checkpoint: begin, write files, commit or abort.

    Args:
        backend: where.
        final: the absolute path under which the checkpoint will appear.
        settings: how durable.
        before_publishing: called when all is written, right before it gets its name; what it raises is raised.

    Attributes:
        stays: whether it may lie under its final name, whatever becomes of it; of use to who knows that it has failed.
        is_left: whether the disk refused to remove what was written, after the save failed.

    Raises:
        StorageError: the attempt's directory cannot be made.
    """

    def __init__(
        self,
        backend: Backend,
        final: str,
        settings: StoreSettings,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_publishing = before_publishing
        self.final, self._parent = final, os.path.dirname(final)
        backend.make_directory(self._parent, parents=True, sync=settings.durability == "full")
        super().__init__(backend, begin_attempt(backend, final), settings)
        self._commit = b""
        self._is_publishing = False  # from then on it is not certain what lies in the attempt's directory
        self.stays = self.is_left = False
        self._if_taken = "pass overwrite=True to replace it"

    def commit(self, manifest: Manifest, *, replace: bool = False, if_taken: str | None = None) -> Committed:
        """Make the checkpoint exist under its final name.

        Args:
            manifest: everything that was written.
            replace: whether a checkpoint under the final name is exchanged for this one and then removed.
            if_taken: what the error says is to be done if something has the final name; None: to pass overwrite=True.

        Raises:
            CheckpointExistsError: something has the final name and `replace` is false.
            StorageError: the file system refused; nothing became visible, unless it also refused to take it back, as
                a note on the error says then.
            UnsupportedLeafError: more arrays than a load would take.
        """
        arrays = sum(len(part.arrays) for part in manifest.parts)
        if arrays > MAX_ARRAYS:
            raise UnsupportedLeafError(f"{self.final}: {arrays:,} arrays, expected at most {MAX_ARRAYS:,}: stack them")
        data = encode_manifest(manifest)
        if len(data) > MAX_MANIFEST_BYTES:
            raise StorageError(errno.EFBIG, f"manifest of {len(data)} bytes, limit {MAX_MANIFEST_BYTES}", self.final)
        self.write_file(MANIFEST_NAME, data)
        sha256 = hashlib.sha256(data).hexdigest()
        self._commit = msgspec.json.encode(CommitRecord(FORMAT, FORMAT_VERSION, len(data), sha256))
        self.write_file(COMMIT_NAME, self._commit)
        self.sync()
        self._before_publishing()
        self._is_publishing = self.stays = True  # until it is known that it does not
        self._if_taken = if_taken or self._if_taken
        self._publish(replace)
        return Committed(self.final, manifest, sha256)

    def _publish(self, replace: bool) -> None:
        taken = self._take_name(replace)
        if self._sync_directories:
            try:
                self._backend.sync(self._parent)
            except BaseException as error:
                if taken != "in place":  # else the older one is gone
                    self._withdraw(taken == "exchanged", error)
                raise
        if taken == "exchanged":
            self._remove_replaced()

    def _take_name(self, replace: bool) -> Literal["free", "exchanged", "in place"]:
        """Get the final name, which was free, or was that of an older checkpoint.

        An exchanged one has the name of the attempt now; one that was replaced in place is gone.
        """
        try:
            self._backend.rename(self.directory, self.final)
        except StorageError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not replace:
                self.stays = False
                raise CheckpointExistsError(f"{self.final}: exists; {self._if_taken}") from error
            try:
                self._backend.exchange(self.directory, self.final, sync=self._sync_directories)
            except StorageError as refused:
                if refused.errno != errno.EXDEV:
                    raise
                self._replace_in_place()
                return "in place"
            return "exchanged"
        return "free"

    def _replace_in_place(self) -> None:
        """Replace a checkpoint whose directory cannot be renamed, as one in a lower layer of overlayfs.

        The attempt gets the side name first: there readers find it as soon as the older checkpoint has no COMMIT.
        """
        found, aside = first_strangers(self._backend, self.final), side_name(self.final)
        if found:
            message = "cannot replace it: its directory cannot be renamed, and holds more than a checkpoint"
            raise StorageError(errno.EXDEV, f"{message}: {', '.join(found)}; move that away", self.final)
        self._backend.rename(self.directory, aside)
        try:
            if self._sync_directories:
                self._backend.sync(self._parent)
            self._backend.remove(f"{self.final}/{COMMIT_NAME}")
        except StorageError:
            if is_committed(self._backend, self.final):
                self._backend.rename(aside, self.directory)
            raise
        if self._sync_directories:
            self._backend.sync(self.final)
        remove_without_commit(self._backend, self.final)
        self._backend.rename(aside, self.final)

    def _withdraw(self, exchanged: bool, error: BaseException) -> None:
        """Take back what could not be made durable, unless another save or owner has taken its place meanwhile."""
        try:
            self._before_publishing()
            if not self._is_own(self.final):
                return
            if exchanged:
                self._backend.exchange(self.directory, self.final, sync=self._sync_directories)
            else:
                self._backend.rename(self.final, self.directory)
        except CheckpointError as second:
            error.add_note(f"and the new checkpoint could not be taken back from {self.final}: {second}")
            if exchanged:
                error.add_note(f"the one that it replaced is in {self.directory}; move it away, or it may be removed")

    def _is_own(self, directory: str) -> bool:
        """Whether it is this attempt that lies there."""
        return read_or_none(self._backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES) == self._commit

    def _remove_replaced(self) -> None:
        """Remove the older of the two; the newer is committed by now, so a refusal is no failure of the save."""
        try:
            remove_replaced(self._backend, self.directory, self.final)
        except StorageError as error:
            _log.warning("%s is saved, but what it replaced could not be removed: %s", self.final, error)

    def abort(self) -> None:
        """Remove the attempt; not if what is there now may be the older checkpoint, or what the disk knows of.

        Raises:
            StorageError: the file system refused.
        """
        if self._is_publishing:
            if not self._is_own(self.directory):
                return
            self.stays = False
            if self._sync_directories:  # that it was taken back may be known to memory only
                sync_directory(self._backend, self._parent)
        if self._commit:
            self._backend.remove(f"{self.directory}/{COMMIT_NAME}")  # first: half of it is an attempt's, to who comes
        self._backend.remove(self.directory)

    def abort_after(self, error: BaseException) -> None:
        """Remove the attempt of a save that failed; a disk that refuses even that must not hide why: it is noted."""
        try:
            self.abort()
        except OSError as second:
            self.is_left = True
            error.add_note(f"and the attempt {self.directory} could not be removed: {second}")


def begin_attempt(backend: Backend, final: str) -> str:
    """Make a directory beside a name for what is to have it."""
    for directory in attempt_paths(final):
        try:
            backend.make_directory(directory, parents=False, sync=False)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
        else:
            return directory
    raise AssertionError("unreachable: the count has no end")


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
        raise why_not_committed(backend, directory)
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
