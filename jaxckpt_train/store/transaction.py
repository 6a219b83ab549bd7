"""Whether a checkpoint may get a name: what has it already, and what dead saves have left beside it.

A directory for other tools that appears under its name at once, when all that is in it is written.

The transaction: the only file that decides that a checkpoint exists.

A checkpoint is a directory that holds COMMIT, and COMMIT fits its manifest. An attempt is written beside the final
name, in a hidden directory. The order, which crash safety rests on:

1. every file is written, COMMIT last;
2. every file and every directory of the attempt is synced, several at a time, so that their bytes and names are on the
   disk before the rename;
3. the attempt is renamed to its final name;
4. the parent directory is synced; only then is the save acknowledged.

One attempt to write a checkpoint: the files in its directory, as one process writes and syncs them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import numpy as np

from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    SettingsError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import GONE, Backend, is_in_use, sync_directory
from jaxckpt_train.store.backends.local import file_exists, side_name
from jaxckpt_train.store.committed import LOOKS, CommitRecord, Committed, attempt_paths, is_committed
from jaxckpt_train.store.files import block_digests, digest_function, file_record, read_or_none
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    COMMIT_NAME,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_ARRAYS,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    encode_manifest,
    is_plain_name,
    what_is_a_plain_name,
)
from jaxckpt_train.store.removal import (
    MAX_LISTED,
    first_untracked_files,
    is_temporary_name,
    remove_dead_attempts,
    remove_dead_exports,
    remove_replaced,
    remove_without_commit,
    untracked_files,
)
from jaxckpt_train.store.threads import shared_workers

SYNCS_AT_ONCE = 4
_log = logging.getLogger("jaxckpt_train")
MOVE_IT_AWAY = "move it away, or choose another path"
"""What is to be done about a name that is taken, where nothing is ever replaced."""


class Attempt:
    """What a process writes below the directory of an attempt; only a `Transaction` makes a checkpoint of it.

    Args:
        backend: where.
        directory: of the attempt; it exists.
        settings: how durable.

    Attributes:
        directory: as given.
    """

    def __init__(self, backend: Backend, directory: str, settings: StoreSettings) -> None:
        self._backend, self.directory, self._settings = backend, directory, settings
        self._sync = settings.durability != "none"
        self._sync_directories = settings.durability == "full"
        self._folders: list[str] = []
        self._files: list[str] = []  # whose data is not synced yet

    def add_folder(self, name: str) -> str:
        """Create the folder of one checkpointable; returns its path."""
        path = f"{self.directory}/{name}"
        self._backend.make_directory(path, parents=False, sync=False)
        self._folders.append(path)
        return path

    def write_file(self, name: str, data: bytes) -> FileRecord:
        """Write a small file, which the commit syncs, and return what the manifest says of it."""
        path = f"{self.directory}/{name}"
        sink = self._backend.create(path, direct=False)
        try:
            content = np.frombuffer(data, np.uint8)
            if data:
                sink.write_at(0, content)
            sink.finish(len(data), sync=False)
        finally:
            sink.abandon()
        self._files.append(path)
        return FileRecord(name, len(data), block_digests(content, BLOCK_BYTES, digest_function(self._settings.digest)))

    def adopt_folder(self, name: str, progress: Callable[[int], None]) -> tuple[FileRecord, ...]:
        """Digest the files that someone else wrote into a folder of the attempt; the commit syncs them.

        `progress` is told of each block.

        Raises:
            UnsupportedLeafError: a file or directory whose name a load would refuse.
            CorruptCheckpointError: something there is neither a plain file nor a directory.
        """
        records: list[FileRecord] = []
        for entry in self._backend.list(f"{self.directory}/{name}"):
            path = f"{name}/{entry.name}"
            if is_in_use(entry.name):
                continue
            if not is_plain_name(entry.name):
                raise UnsupportedLeafError(
                    f"file {path!r}: its name cannot be stored; expected {what_is_a_plain_name()}"
                )
            if entry.kind == "directory":
                self._folders.append(f"{self.directory}/{path}")
                records.extend(self.adopt_folder(path, progress))
            elif entry.kind == "file":
                self._files.append(f"{self.directory}/{path}")
                records.append(file_record(self._backend, self.directory, path, self._settings.digest, progress))
            else:
                raise CorruptCheckpointError(f"{self.directory}/{path}: expected a plain file, found a link or device")
        return tuple(records)

    def take_in(self, name: str) -> None:
        """Have the commit sync what somebody else has written into a folder of the attempt; it is not looked at."""
        for entry in self._backend.list(f"{self.directory}/{name}"):
            path = f"{self.directory}/{name}/{entry.name}"
            if is_in_use(entry.name):
                continue
            if entry.kind == "directory":
                self._folders.append(path)
                self.take_in(f"{name}/{entry.name}")
            else:
                self._files.append(path)

    def sync(self) -> None:
        """Sync all that is not synced yet, several at a time: a journal brings them to the disk together."""
        paths = list(self._files) if self._sync else []
        if self._sync_directories:
            paths += [*reversed(self._folders), self.directory]
        shared_workers(SYNCS_AT_ONCE, "jaxckpt-sync").run_all(self._backend.sync, paths)


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
        found, aside = first_untracked_files(self._backend, self.final), side_name(self.final)
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


@contextlib.contextmanager
def appearing(backend: Backend, final: str, settings: StoreSettings, only_file: str | None = None) -> Iterator[Attempt]:
    """Within: a directory to write into; afterwards it has its name, or is gone if anything has failed.

    Args:
        backend: where.
        final: the absolute path that it is to have; nothing may be there.
        settings: how durable it is made.
        only_file: the name of the one file in it that gets the path `final` instead; None: the whole directory does.

    Raises:
        CheckpointExistsError: something is there.
        StorageError: the file system refused.
    """
    refuse_existing_name(final)
    parent = os.path.dirname(final)
    backend.make_directory(parent, parents=True, sync=settings.durability == "full")
    _remove_dead(backend, final)
    attempt = Attempt(backend, begin_attempt(backend, final), settings)
    try:
        yield attempt
        attempt.sync()
        _publish(backend, attempt.directory if only_file is None else f"{attempt.directory}/{only_file}", final)
    except BaseException as error:
        try:
            backend.remove(attempt.directory)
        except StorageError as second:
            error.add_note(f"and what was written of it, {attempt.directory}, could not be removed: {second}")
        raise
    if settings.durability == "full":
        backend.sync(parent)
    if only_file is not None:
        try:
            backend.remove(attempt.directory)
        except StorageError as error:
            _log.warning("%s: is written, but %s could not be removed: %s", final, attempt.directory, error)


def refuse_existing_name(final: str) -> None:
    """Raise CheckpointExistsError if anything has this name."""
    if file_exists(final):
        raise _exists(final)


def _remove_dead(backend: Backend, final: str) -> None:
    """Make room; what stays is no reason not to go on."""
    try:
        remove_dead_exports(backend, final)
    except StorageError as error:
        _log.warning("%s: what an earlier export left could not be removed: %s", final, error)


def _publish(backend: Backend, directory: str, final: str) -> None:
    try:
        backend.rename(directory, final)
    except StorageError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise _exists(final) from error


def _exists(final: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{final}: exists; {MOVE_IT_AWAY}")


def refuse_temporary_name(final: str) -> None:
    """Raise SettingsError if later saves would clean up what has this name."""
    if is_temporary_name(os.path.basename(final)):
        raise SettingsError(
            f"path: {final}: expected a name that no unfinished save may have: later saves clean up `.NAME.aside` and "
            "`.NAME.tmp-...`; choose another one"
        )


def refuse_existing(backend: Backend, final: str, replace: bool, how: str = "pass overwrite=True") -> None:
    """Raise CheckpointExistsError unless nothing has this name, or a checkpoint alone that is to be replaced.

    Args:
        backend: where.
        final: the name.
        replace: whether it is.
        how: what to do to have it replaced.
    """
    if not file_exists(final):
        return
    # One look may meet what another process has just replaced, and is removing: the next one sees the new.
    # What is half removed is a checkpoint if a crash cut its replacement in place: the new one has the side name then.
    names = (final, side_name(final))
    if not any(any(is_committed(backend, name) for name in names) or not file_exists(final) for _ in range(LOOKS)):
        raise CheckpointExistsError(f"{final}: exists and is no checkpoint; it is not replaced. Choose another path")
    if not replace:
        raise CheckpointExistsError(f"{final}: exists; {how} to replace it, or choose another path")
    for _ in range(LOOKS):
        others = list(itertools.islice(untracked_files(backend, final, certain=False), MAX_LISTED))
        if not others:
            return
    raise CheckpointExistsError(
        f"{final}: expected nothing but a checkpoint to replace, found also {', '.join(others)}; move that away, or "
        "choose another path"
    )


def remove_stale_temporaries(backend: Backend, final: str) -> None:
    """Make room; left-overs that stay are no reason not to save. Where there is no directory there are none."""
    try:
        remove_dead_attempts(backend, final)
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            return
        _log.warning("%s: what an earlier attempt left could not be removed: %s", final, error)
