"""The commit protocol: write an attempt, publish it under its final name, or remove it.

A checkpoint exists if its directory holds COMMIT and COMMIT matches the manifest. Only this module makes that true. A
save writes an attempt: a hidden directory next to the final name. Crash safety rests on this order:

1. Write every file, COMMIT last.
2. Sync every file and every directory of the attempt, several at a time, so that their data and names are durable
   before the rename.
3. Rename the attempt to its final name.
4. Sync the parent directory. Only then is the save acknowledged.

On object stores nothing is renamed (`ObjectAttempt`): an attempt is written under its final, unguessable prefix, COMMIT
last. A step then exists if the record of its run names it; a single checkpoint, if a small object at its URL, a COMMIT
with the name of the prefix, refers to it. Both are changed only by conditional puts.

`atomic_directory` publishes exports for other tools in the same way, without COMMIT; on object stores it writes them
under their final names, and the caller writes last the file without which other tools do not find the others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedLeafError,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import (
    Backend,
    Entry,
    Sharing,
    Sink,
    is_removed_in_use,
    objects_of,
    sync_directory,
)
from jaxckpt_train.store.backends.local import side_name
from jaxckpt_train.store.committed import (
    MAX_LOOKUPS,
    CommitRecord,
    Committed,
    attempt_paths,
    is_committed,
    is_data_folder,
    new_data_folder,
    read_pointer,
)
from jaxckpt_train.store.files import copy_file, file_exists, file_record, read_or_none
from jaxckpt_train.store.manifest import (
    BLOCK_BYTES,
    COMMIT_NAME,
    FORMAT,
    MANIFEST_NAME,
    MAX_ARRAYS,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    block_digests,
    digest_function,
    encode_manifest,
    is_plain_name,
    plain_name_rule,
)
from jaxckpt_train.store.removal import (
    MAX_LISTED,
    TAKEN,
    first_untracked_files,
    list_entries,
    remove_dead_exports,
    remove_replaced,
    remove_without_commit,
    untracked_files,
)
from jaxckpt_train.store.threads import shared_workers
from jaxckpt_train.store.timeouts import time_limited

SYNCS_AT_ONCE = 4
_log = logging.getLogger("jaxckpt_train")
MOVE_IT_AWAY = "move it away, or choose another path"
"""Advice in the error about a taken name, for commands that never replace anything."""


class Attempt:
    """The files that one process writes and syncs in an attempt; a `Transaction` makes them a checkpoint.

    Attributes:
        tier: names the threads that write it, so that those of a slow storage do not hold up those of a fast one.
    """

    tier = ""

    def __init__(self, backend: Backend, directory: str, settings: StoreSettings) -> None:
        self._backend, self.directory, self._settings = backend, directory, settings
        self._sync = settings.durability != "none" and not is_url(directory)  # a put object is durable
        self._sync_directories = self._sync and settings.durability == "full"
        self._folders: list[str] = []
        self._files: list[str] = []  # not synced yet

    def add_folder(self, name: str) -> str:
        """Create the folder of one checkpointable and return its path."""
        path = f"{self.directory}/{name}"
        self._backend.make_directory(path, parents=False, sync=False)
        self._folders.append(path)
        return path

    def add_folders(self, names: Iterable[str]) -> None:
        """Create these folders and those that they are in."""
        paths = [name.split("/") for name in names]
        for name in sorted({"/".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}):
            self.add_folder(name)

    def create_file(self, name: str, direct: bool | Literal["auto"] = False) -> Sink:
        """Create a file, to be finished by the caller and synced by the commit."""
        path = f"{self.directory}/{name}"
        sink = self._backend.create(path, direct=direct)
        self._files.append(path)
        return sink

    def share_file(self, source: str, name: str) -> bool:
        """Create a file that shares the blocks of another one, to be synced by the commit; False: it cannot."""
        path = f"{self.directory}/{name}"
        is_shared = isinstance(self._backend, Sharing) and self._backend.share(source, path)
        if is_shared:
            self._files.append(path)
        return is_shared

    def take_files(self, directory: str, files: Mapping[str, tuple[str, int]]) -> set[str]:
        """Give files of the checkpoint in `directory` names in the attempt, to be synced by the commit.

        `files`: by these names, those that they have there, and their sizes. Returns the names of those that were
        taken; not every storage can do that.
        """
        taken = set[str]()
        for name, (source, size) in files.items():
            path = f"{self.directory}/{name}"
            if self._backend.clone(f"{directory}/{source}", path, size):
                self._files.append(path)
                taken.add(name)
        return taken

    def drop_file(self, name: str) -> None:
        """Remove a file of the attempt."""
        path = f"{self.directory}/{name}"
        self._files.remove(path)
        self._backend.remove(path)

    def write_file(self, name: str, data: bytes) -> FileRecord:
        """Write a small file, to be synced by the commit, and return its record for the manifest."""
        sink = self.create_file(name)
        try:
            content = np.frombuffer(data, np.uint8)
            if data:
                sink.write_at(0, content)
            sink.finish(len(data), sync=False)
        finally:
            sink.abandon()
        return FileRecord(name, len(data), block_digests(content, BLOCK_BYTES, digest_function(self._settings.digest)))

    def adopt_folder(self, name: str, progress: Callable[[int], None]) -> tuple[FileRecord, ...]:
        """Digest the files that other code wrote into a folder of the attempt, and have the commit sync them.

        Raises UnsupportedLeafError: a file or directory has a name that a load would refuse; CorruptCheckpointError: an
        entry is neither a regular file nor a directory.
        """
        return tuple(
            file_record(self._backend, self.directory, path, self._settings.digest, progress)
            for path, entry in self._track(name)
            if _is_storable(self.directory, path, entry)
        )

    def upload_folder(self, local: str, name: str, progress: Callable[[int], None]) -> tuple[FileRecord, ...]:
        """Copy the files that other code wrote into the folder `name` of a local directory to the attempt.

        Raises as `adopt_folder`.
        """
        records: list[FileRecord] = []
        for path, entry in _walk(self._backend, local, name):
            if not _is_storable(local, path, entry):
                self.add_folder(path)
            else:
                with contextlib.closing(self._backend.open(local, path, direct=False)) as source:
                    digests = copy_file(source, self.create_file(path), self._settings.digest, progress)
                records.append(FileRecord(path, source.size, digests))
        return tuple(records)

    def track_files(self, names: Iterable[str]) -> None:
        """Have the commit sync these files, too."""
        self._files += sorted({f"{self.directory}/{name}" for name in names}.difference(self._files))

    def track_folder(self, name: str) -> None:
        """Have the commit sync the files that other code wrote into a folder of the attempt, without reading them."""
        if self._sync:
            list(self._track(name))

    def _track(self, name: str) -> Iterator[tuple[str, Entry]]:
        """Yield what is below a folder with its path in the attempt, and have the commit sync it."""
        for path, entry in _walk(self._backend, self.directory, name):
            (self._folders if entry.kind == "directory" else self._files).append(f"{self.directory}/{path}")
            yield path, entry

    def sync(self, progress: Callable[[int], object] | None = None) -> None:
        """Sync everything that is not synced yet, several files at a time: a journal writes them together.

        `progress` is called from several threads, with 0, after each file.
        """
        folders = [*reversed(self._folders), self.directory] if self._sync_directories else []
        paths = [*self._files, *folders] if self._sync else []
        sync_path = self._backend.sync

        def sync(path: str) -> None:
            sync_path(path)
            if progress is not None:
                progress(0)

        shared_workers(SYNCS_AT_ONCE, f"jaxckpt-sync{self.tier}").run_all(sync, paths)


def _walk(backend: Backend, directory: str, name: str) -> Iterator[tuple[str, Entry]]:
    """Yield what is below the folder `name` of a directory, with its path in the directory."""
    for entry in backend.list(f"{directory}/{name}"):
        path = f"{name}/{entry.name}"
        if is_removed_in_use(entry.name):
            continue
        yield path, entry
        if entry.kind == "directory":
            yield from _walk(backend, directory, path)


def _is_storable(directory: str, path: str, entry: Entry) -> bool:
    """Whether this is a file. Raises UnsupportedLeafError or CorruptCheckpointError if it cannot be stored."""
    if not is_plain_name(entry.name):
        raise UnsupportedLeafError(f"file {path!r} has a name that cannot be stored: expected {plain_name_rule()}")
    if entry.kind == "other":
        raise CorruptCheckpointError(f"{directory}/{path}: expected a file, found a link or device")
    return entry.kind == "file"


class Transaction(Attempt):
    """One attempt to write one checkpoint: begin, write files, then commit or abort.

    `final` is the absolute path of the checkpoint. `before_publishing` is called when everything is written, right
    before the rename; its error aborts the commit.

    Attributes:
        may_be_published: whether the final name may hold this attempt even though the save failed.
        was_not_removed: whether the file system refused to remove the attempt after the save failed.
        manifest_bytes: the size of the manifest, once it is written.
    """

    def __init__(
        self, backend: Backend, final: str, settings: StoreSettings, before_publishing: Callable[[], None] | None = None
    ) -> None:
        self._before_publishing = before_publishing
        self.final, self._parent = final, os.path.dirname(final)
        super().__init__(backend, self._begin(backend, settings), settings)
        self._commit, self.manifest_bytes = b"", 0
        self._is_publishing = False  # once set, the attempt's directory may hold the older checkpoint
        self.may_be_published = self.was_not_removed = False
        self._if_taken = "pass overwrite=True to replace it"

    def _begin(self, backend: Backend, settings: StoreSettings) -> str:
        """Create the directory of the attempt, and return its path."""
        backend.make_directory(self._parent, parents=True, sync=settings.durability == "full")
        return begin_attempt(backend, self.final)

    @property
    def committed_at(self) -> str:
        """The directory of the checkpoint once it is published."""
        return self.final

    def commit(self, manifest: Manifest, *, replace: bool = False, if_taken: str | None = None) -> Committed:
        """Complete the attempt, and publish it under its final name. Raises as `complete` and `publish`."""
        committed = self.complete(manifest)
        self.publish(replace=replace, if_taken=if_taken)
        return committed

    def complete(self, manifest: Manifest) -> Committed:
        """Write the manifest and COMMIT, and sync everything. Returns the checkpoint as it will be published.

        Raises UnsupportedLeafError: there are more arrays than a load accepts; StorageError.
        """
        committed = self.write_manifest(manifest)
        self.write_file(COMMIT_NAME, self._commit)
        self.sync()
        return committed

    def write_manifest(self, manifest: Manifest) -> Committed:
        """Write the manifest. Raises as `complete`."""
        arrays = sum(len(part.arrays) for part in manifest.parts)
        if arrays > MAX_ARRAYS:
            raise UnsupportedLeafError(f"{self.final}: {arrays:,} arrays, expected at most {MAX_ARRAYS:,}: stack them")
        data = encode_manifest(manifest)
        if len(data) > MAX_MANIFEST_BYTES:
            raise StorageError(
                errno.EFBIG, f"manifest of {len(data)} bytes, expected at most {MAX_MANIFEST_BYTES}", self.final
            )
        return self.keep_manifest(data, manifest)

    def keep_manifest(self, data: bytes, manifest: Manifest) -> Committed:
        """Write an encoded manifest, to which COMMIT will refer."""
        self.manifest_bytes = self.write_file(MANIFEST_NAME, data).bytes
        sha256 = hashlib.sha256(data).hexdigest()
        self._commit = msgspec.json.encode(CommitRecord(FORMAT, manifest.format_version, len(data), sha256))
        return Committed(self.committed_at, manifest, sha256)

    def publish(self, *, replace: bool = False, if_taken: str | None = None) -> None:
        """Give the complete attempt its final name.

        With `replace`, an existing checkpoint of that name is exchanged for this one and then removed. `if_taken` is
        the advice in the error about a taken name; None: to pass overwrite=True.

        Raises CheckpointExistsError and StorageError. Then nothing is visible, unless the file system also refused to
        undo the rename; a note on the error says so.
        """
        if self._before_publishing is not None:
            self._before_publishing()
        self._is_publishing = self.may_be_published = True
        self._if_taken = if_taken or self._if_taken
        self._publish(replace)

    def _publish(self, replace: bool) -> None:
        outcome = self._claim_name(replace)
        if self._sync_directories:
            try:
                self._backend.sync(self._parent)
            except BaseException as error:
                if outcome != "in place":  # then the older checkpoint is gone, and there is nothing to go back to
                    self._withdraw(outcome == "exchanged", error)
                raise
        if outcome == "exchanged":
            try:
                remove_replaced(self._backend, self.directory, self.final)
            except StorageError as error:  # only logged, because the new checkpoint is committed
                _log.warning("%s is saved, but the checkpoint that it replaced was not removed: %s", self.final, error)

    def _claim_name(self, replace: bool) -> Literal["free", "exchanged", "in place"]:
        """Claim the final name.

        After "exchanged", the older checkpoint has the attempt's name; after "in place", it is gone.
        """
        try:
            self._backend.rename(self.directory, self.final)
        except StorageError as error:
            if error.errno not in TAKEN:
                raise
            if not replace:
                self.may_be_published = False
                raise CheckpointExistsError(f"{self.final}: already exists; {self._if_taken}") from error
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
        """Replace a checkpoint whose directory cannot be renamed, such as one in a lower layer of overlayfs.

        The attempt gets the side name first. Readers find it there as soon as the older checkpoint has no COMMIT.
        """
        found, aside = first_untracked_files(self._backend, self.final), side_name(self.final)
        if found:
            message = f"its directory cannot be renamed, and holds files of other programs: {', '.join(found)}"
            raise StorageError(errno.EXDEV, f"cannot replace the checkpoint: {message}; move them away", self.final)
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
        """Undo a rename that could not be made durable, unless another save or owner has taken the name since."""
        try:
            if self._before_publishing is not None:
                self._before_publishing()
            if not self._is_own(self.final):
                return
            if exchanged:
                self._backend.exchange(self.directory, self.final, sync=self._sync_directories)
            else:
                self._backend.rename(self.final, self.directory)
        except CheckpointError as second:
            error.add_note(f"the new checkpoint could not be removed from {self.final}: {second}")
            if exchanged:
                error.add_note(f"the replaced checkpoint is in {self.directory}; move it or a later save may remove it")

    def _is_own(self, directory: str) -> bool:
        """Whether the directory holds this attempt."""
        return read_or_none(self._backend, directory, COMMIT_NAME, MAX_COMMIT_BYTES) == self._commit

    def abort(self) -> None:
        """Remove the attempt, unless its directory may hold the older checkpoint now."""
        if self._is_publishing:
            if not self._is_own(self.directory):
                return
            self.may_be_published = False
            if self._sync_directories:  # the undone rename may not be on the disk yet
                sync_directory(self._backend, self._parent)
        if self._commit:  # first, so that a partly removed attempt is recognised as an attempt
            self._backend.remove(f"{self.directory}/{COMMIT_NAME}")
        self._backend.remove(self.directory)

    def abort_after(self, error: BaseException) -> None:
        """Remove the attempt of a failed save; if that fails too, add a note to the original error."""
        try:
            self.abort()
        except OSError as second:
            self.was_not_removed = True
            error.add_note(f"the unfinished save {self.directory} could not be removed: {second}")


class HostAttempt(Transaction):
    """What one host has of an attempt at a step of the fast tier, whose files are spread over the hosts of a job.

    Each host publishes its own directory, once every file of the step has its copies: so the step exists as soon as
    one host has a COMMIT. `directory` is the attempt of this host, which several of its processes may create.
    """

    tier = "-fast"

    def __init__(
        self,
        backend: Backend,
        final: str,
        settings: StoreSettings,
        directory: str | None = None,
        before_publishing: Callable[[], None] | None = None,
    ) -> None:
        self._given = directory
        super().__init__(backend, final, settings, before_publishing)

    def check_before_publishing(self) -> None:
        """Raise what would prevent the publication, before any host publishes."""
        if self._before_publishing is not None:
            self._before_publishing()

    def _begin(self, backend: Backend, settings: StoreSettings) -> str:
        if self._given is None:
            return super()._begin(backend, settings)
        backend.make_directory(self._given, parents=True, sync=settings.durability == "full")
        return self._given

    def add_folder(self, name: str) -> str:
        """Create a folder, unless this or another process of this host has."""
        path = f"{self.directory}/{name}"
        if path not in self._folders:
            self._backend.make_directory(path, parents=True, sync=False)
            self._folders.append(path)
        return path

    def finish(self) -> None:
        """Make the step exist, as far as this host is concerned. Raises as `publish`."""
        self._files = []  # synced before, as all others were
        self.write_file(COMMIT_NAME, self._commit)
        self.sync()
        self.publish()


class StepAttempt(Transaction):
    """An attempt at a step of a run on an object store, under its final name, which contains a token.

    `before_publishing` writes the step into the record of the run, which makes it a step.
    """

    def _begin(self, backend: Backend, settings: StoreSettings) -> str:
        return self.final

    def publish(self, *, replace: bool = False, if_taken: str | None = None) -> None:
        """Commit the complete attempt."""
        # Set first: a put that seems to fail may have its effect, even later, if its response or itself was delayed.
        self.may_be_published = True
        super().publish(replace=replace, if_taken=if_taken)

    def _publish(self, replace: bool) -> None:
        """Do nothing more."""

    def abort(self) -> None:
        """Remove the attempt, unless it may be committed: then the run removes it once the record is known."""
        if not self.may_be_published:
            self._remove()

    def _remove(self) -> None:
        if self._commit:
            self._backend.remove(f"{self.directory}/{COMMIT_NAME}")
        self._backend.remove(self.directory)


class ObjectAttempt(StepAttempt):
    """An attempt at a single checkpoint on an object store: its own prefix below the URL, to which COMMIT refers.

    If it is not known whether COMMIT refers to it, it stays until the next save there.
    """

    _before: bytes | None = None  # the COMMIT at the URL when this attempt began
    _others: Sequence[str] = ()  # the prefixes at that time

    def _begin(self, backend: Backend, settings: StoreSettings) -> str:
        objects_of(backend).probe(self.final)
        # A save that began before this one and publishes first makes this one fail. So what is there now can be removed
        # once this one is published. What others begin later must stay.
        self._others = [each.name for each in list_entries(backend, self.final) if is_data_folder(each.name)]
        self._before = read_pointer(backend, self.final)
        return f"{self.final}/{new_data_folder()}"

    @property
    def committed_at(self) -> str:
        """The prefix of this attempt."""
        return self.directory

    def _publish(self, replace: bool) -> None:
        objects, commit = objects_of(self._backend), f"{self.final}/{COMMIT_NAME}"
        record = msgspec.json.decode(self._commit, type=CommitRecord)
        pointer = msgspec.json.encode(msgspec.structs.replace(record, folder=os.path.basename(self.directory)))
        if self._before is None:
            is_done = objects.write_new(commit, pointer)
        else:
            is_done = replace and objects.replace(commit, pointer, self._before)
        if not is_done:
            self.may_be_published = False
            raise CheckpointExistsError(f"{self.final}: another checkpoint was saved there meanwhile; {self._if_taken}")
        for name in self._others:
            try:
                objects.remove_objects([f"{self.final}/{name}/{COMMIT_NAME}"])
                self._backend.remove(f"{self.final}/{name}")
            except StorageError as error:
                _log.warning("%s is saved, but %s of an earlier save was not removed: %s", self.final, name, error)


def begin(
    backend: Backend,
    final: str,
    settings: StoreSettings,
    before_publishing: Callable[[], None] | None = None,
    *,
    is_step: bool = False,
) -> Transaction:
    """Begin to write a checkpoint; `is_step`: as a step of a run."""
    kind = (StepAttempt if is_step else ObjectAttempt) if is_url(final) else Transaction
    return kind(backend, final, settings, before_publishing)


def begin_attempt(backend: Backend, final: str) -> str:
    """Create an attempt's directory next to the final name, and return its path."""
    paths = attempt_paths(final)
    while True:
        directory = next(paths)
        try:
            backend.make_directory(directory, parents=False, sync=False)
            return directory
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise


@contextlib.contextmanager
def atomic_directory(
    backend: Backend, final: str, settings: StoreSettings, only_file: str | None = None
) -> Iterator[Attempt]:
    """Write a directory that appears under its final name when the block ends, or not at all if the block raises.

    With `only_file`, the name of `final`, a single file of that name is published instead. On an object store, each
    file appears as soon as it is written, and all are removed if the block raises.

    Raises CheckpointExistsError: something exists at `final`; StorageError: the file system refused.
    """
    refuse_existing_name(backend, final)
    parent = os.path.dirname(final)
    if is_url(final):
        with _objects_in_place(backend, final):
            yield Attempt(backend, final if only_file is None else parent, settings)
        return
    backend.make_directory(parent, parents=True, sync=settings.durability == "full")
    try:
        remove_dead_exports(backend, final)
    except StorageError as error:
        _log.warning("%s: leftovers of an earlier export could not be removed: %s", final, error)
    attempt = Attempt(backend, begin_attempt(backend, final), settings)
    try:
        yield attempt
        attempt.sync()
        try:
            backend.rename(attempt.directory if only_file is None else f"{attempt.directory}/{only_file}", final)
        except StorageError as error:
            if error.errno not in TAKEN:
                raise
            raise _exists(final) from error
    except BaseException as error:
        _remove_after(backend, attempt.directory, error)
        raise
    if settings.durability == "full":
        backend.sync(parent)
    if only_file is not None:
        try:
            backend.remove(attempt.directory)
        except StorageError as error:
            _log.warning("%s is written, but %s could not be removed: %s", final, attempt.directory, error)


@contextlib.contextmanager
def _objects_in_place(backend: Backend, final: str) -> Iterator[None]:
    """Remove what the block has written at a URL if it raises, unless another process has written there, too."""
    try:
        yield
    except StorageError as error:
        if error.errno == errno.EEXIST:
            raise _exists(final) from error
        _remove_after(backend, final, error)
        raise
    except BaseException as error:
        _remove_after(backend, final, error)
        raise


def _remove_after(backend: Backend, path: str, error: BaseException) -> None:
    """Remove what a failed export has written; if that fails too, add a note to the original error."""
    try:
        backend.remove(path)
    except StorageError as second:
        error.add_note(f"the unfinished {path} could not be removed: {second}")


def refuse_existing_name(backend: Backend, final: str) -> None:
    """Raise CheckpointExistsError if anything exists at this path."""
    if file_exists(backend, final):
        raise _exists(final)


def _exists(final: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{final}: already exists; {MOVE_IT_AWAY}")


@time_limited
def refuse_existing(backend: Backend, final: str, replace: bool, how: str = "pass overwrite=True") -> None:
    """Raise CheckpointExistsError unless the name is free, or only holds a checkpoint that is to be replaced."""
    if is_url(final):
        _refuse_existing_object(backend, final, replace, how)
        return
    if not file_exists(backend, final):
        return
    # A single look may see a directory that another process has just replaced and is removing, so look again.
    # A partly removed directory counts as a checkpoint if a crash interrupted its replacement in place: then the new
    # checkpoint has the side name.
    names = (final, side_name(final))
    if not any(
        any(is_committed(backend, name) for name in names) or not file_exists(backend, final)
        for _ in range(MAX_LOOKUPS)
    ):
        raise CheckpointExistsError(f"{final}: already exists and is not a checkpoint; choose another path")
    if not replace:
        raise CheckpointExistsError(f"{final}: already exists; {how} to replace it, or choose another path")
    for _ in range(MAX_LOOKUPS):
        others = list(itertools.islice(untracked_files(backend, final, certain=False), MAX_LISTED))
        if not others:
            return
    raise CheckpointExistsError(
        f"{final}: cannot replace a checkpoint whose directory holds other files: {', '.join(others)}; move them away, "
        "or choose another path"
    )


def _refuse_existing_object(backend: Backend, final: str, replace: bool, how: str) -> None:
    """As `refuse_existing`; on an object store, leftovers of earlier attempts are no obstacle."""
    names = [entry.name for entry in list_entries(backend, final)]
    others = [name for name in names if name != COMMIT_NAME and not is_data_folder(name)]
    if others and COMMIT_NAME not in names:
        raise CheckpointExistsError(f"{final}: already exists and is not a checkpoint; choose another path")
    if COMMIT_NAME in names and not replace:
        raise CheckpointExistsError(f"{final}: already exists; {how} to replace it, or choose another path")
    if others:
        raise CheckpointExistsError(
            f"{final}: cannot replace a checkpoint next to other objects: {', '.join(others[:MAX_LISTED])}; move them "
            "away, or choose another path"
        )
