"""One attempt to write a checkpoint: the files in its directory, as one process writes and syncs them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, is_in_use
from jaxckpt_train.store.digests import block_digests, digest_function
from jaxckpt_train.store.manifest import BLOCK_BYTES, FileRecord, is_plain_name, what_is_a_plain_name
from jaxckpt_train.store.plain_files import file_record
from jaxckpt_train.store.workers import shared_workers

SYNCS_AT_ONCE = 4


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
