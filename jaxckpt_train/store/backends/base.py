"""The contract of a storage backend: what the store asks of a file system, an object store or memory.

Also here: the errno groups that callers distinguish, the advice in a StorageError, and helpers on top of the contract.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from jaxckpt_train.errors import SettingsError, StorageError

if TYPE_CHECKING:  # `jaxckpt --help` imports this module, and needs no numpy
    import numpy as np

# A name that does not exist. ESTALE: another machine has removed a file that this network file system had seen.
GONE = {errno.ENOENT, errno.ESTALE}
# Opening fails with one of these if the file is gone, or is a link, a directory or a device. Any other errno (no
# permission, too many open files) says nothing about the checkpoint.
MISSING = {*GONE, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO}
# A damaged or vanished file. Any other errno (no permission, no memory, a network) says nothing about the checkpoint.
DAMAGE = {
    *GONE,
    errno.EIO,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EBADMSG,
    errno.EILSEQ,
    errno.ENODATA,  # what a direct read of a bad sector may give
    *(getattr(errno, name) for name in ("EUCLEAN", "EREMOTEIO") if hasattr(errno, name)),  # not on macOS
}
# Prefixes of a backend's short-lived temporary files; a crash may leave such files, and they have no meaning.
TEMPORARY_PREFIXES = (".jaxckpt-new-", ".jaxckpt-now-")
# Names that NFS, SMB and FUSE clients give to files that were removed while a process had them open.
_IN_USE = re.compile(r"\.(nfs|smb|fuse_hidden)[0-9A-Fa-f]{4,}|\.smbdelete[0-9A-Za-z.]+")
# The system or file system does not offer an operation.
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
# Sandboxes return EPERM for a call that their profile does not list. Where a call has a substitute, we try that.
UNAVAILABLE = UNSUPPORTED | {errno.EPERM}

_ADVICE = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "your quota is used up: free some space or choose another directory",
    errno.EACCES: "this user has no permission: choose another directory or change its permissions",
    errno.EPERM: "this user has no permission: choose another directory or change its permissions",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOTDIR: "a file, or a broken link, is where a directory is expected: choose another path",
    errno.ELOOP: "it is a symbolic link, and links to files are not followed: put the file itself in its place",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.EFBIG: "the file is larger than the limit: raise `ulimit -f`, or set a smaller `segment_bytes`",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EIO: "the disk or its connection failed: do not rely on it",
}


def storage_error(code: int, action: str, path: str, reason: str | None = None) -> StorageError:
    """A StorageError for a failed action, with the reason and what to do about it."""
    advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
    return StorageError(code, f"cannot {action}: {reason or os.strerror(code)}{advice}", path)


def is_removed_in_use(name: str) -> bool:
    """Whether this is the name of a removed file that disappears when its last reader closes it."""
    return _IN_USE.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a directory; its kind is "other" for a link, a pipe or a device."""

    name: str
    kind: Literal["file", "directory", "other"]


@dataclasses.dataclass(frozen=True)
class StoredRecord:
    """One version of a record; `problem` says why its content could not be read.

    `refreshed_ns` is the time of the last write or refresh by the clock of the storage, or None if even that could not
    be read. To decide anything, only compare two of one version for equality.
    """

    version: int
    data: bytes
    refreshed_ns: int | None
    problem: str | None = None


def is_storage_failure(error: BaseException) -> bool:
    """Whether an error says only that the storage failed or did not respond, so that the data may be intact."""
    return isinstance(error, OSError) and error.errno not in MISSING


def is_damage(error: BaseException) -> bool:
    """Whether an error says that a checkpoint is damaged or gone, and not that it could not be read this time."""
    return not isinstance(error, OSError) or error.errno in DAMAGE


class Sink(Protocol):
    """A file that is being written. The caller may reuse a buffer as soon as a call returns.

    Attributes:
        alignment: pieces whose offset, length and address are multiples of this go directly to the medium.
        in_order: whether each `write_at` must continue where the last one ended.
    """

    alignment: int
    in_order: bool

    def write_at(self, offset: int, data: np.ndarray) -> None:
        """Write all of a flat uint8 array at this offset. Unless `in_order`, several threads may call it at once."""

    def finish(self, size: int, *, sync: bool) -> None:
        """Truncate the file to `size` bytes, sync its data if `sync`, and close it."""

    def abandon(self) -> None:
        """Close the file without raising."""


class Source(Protocol):
    """A file that is being read; `size` is in bytes. It stays readable if it is removed meanwhile.

    Attributes:
        modified_ns: the time of the last change, by the clock of the storage.
        alignment: reads whose offset, length and address are multiples of this go directly to the caller's memory.
    """

    size: int
    modified_ns: int
    alignment: int

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """Fill a flat uint8 array. Raises CorruptCheckpointError: the file ends before `needed` of its bytes."""

    def close(self) -> None:
        """Release the file."""


@runtime_checkable
class Divided(Protocol):
    """An optional ability of sources: a long read is divided into requests, which run at the same time.

    Attributes:
        piece_bytes: how much one read should ask for, if so much is wanted.
    """

    piece_bytes: int


@runtime_checkable
class Identified(Protocol):
    """An optional ability of sources: several names of one file are recognised.

    Attributes:
        identity: the same for all names of a file until it is written to; None: it has no other name.
    """

    identity: tuple[int, ...] | None


@runtime_checkable
class Replicated(Protocol):
    """An optional ability of sources: the file has further copies, for bytes that prove to be wrong.

    Attributes:
        copies: how many there are, with this one, which has the number 0.
    """

    copies: int

    def read_copy(self, number: int, offset: int, data: np.ndarray) -> None:
        """Fill a flat uint8 array from another copy. Raises StorageError or CorruptCheckpointError: it cannot."""


class Opener(Protocol):
    """Opens files for reading. Every failure of the system is a StorageError with its errno."""

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> Source:
        """Open a regular file; `name` is relative to `directory`, and no link in `name` is followed."""


@runtime_checkable
class Spread(Protocol):
    """An optional ability of openers: they also find files on other hosts, to which no path leads here."""

    def here(self) -> Opener:
        """Opens only what is on this host."""


class Files(Opener, Protocol):
    """Files that never change and directories, by absolute paths. Every failure is a StorageError with its errno."""

    def create(self, path: str, *, direct: bool | Literal["auto"]) -> Sink:
        """Create a file that must not exist."""

    def write_new(self, path: str, data: bytes) -> bool:
        """Create a small file with this content, atomically and durably; False if the name is taken."""

    def clone(self, source: str, target: str, size: int) -> bool:
        """Make a file with the content of another, without reading it.

        False: that is not possible here, or the file is known to have another size.
        """

    def list(self, path: str) -> list[Entry]:
        """The entries of a directory, sorted by name."""

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        """What is at a path, after following links; "other" for a broken link, and None for nothing."""

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        """Create a directory. With `parents`, also create missing parents, and accept an existing directory."""

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with everything in it. A missing path is not an error."""

    def sync(self, path: str) -> None:
        """Make the data of one file, or the names in one directory, durable."""


class Records(Protocol):
    """Small mutable records, which are changed only by compare-and-swap."""

    def read_record(self, path: str) -> StoredRecord | None:
        """The newest version of a record; None: there is none.

        Raises StorageError: the storage failed before it was known which version is the newest.
        """

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        """Replace this version of a record (None: create it, in a durable directory), and return the new version.

        What it returns is durable. Each write needs a content that no other write has. Returns None if another writer
        was faster, or has replaced the new version already: read the record again, as after an error.
        """

    def refresh_record(self, path: str, version: int) -> None:
        """Show that the writer of this version is alive: change its `refreshed_ns`, if it is still the newest."""


class Storage(Files, Records, Protocol):
    """What every kind of storage offers: files that never change, and records."""


class Objects(Storage, Protocol):
    """An object store. Its paths are URLs; `make_directory` and `sync` do nothing there."""

    def replace(self, path: str, data: bytes, before: bytes) -> bool:
        """Replace the content `before` of a small object atomically; False: it has other content, or is gone."""

    def remove_objects(self, paths: Sequence[str]) -> None:
        """Remove objects of one bucket, many in one request. Missing ones are not an error."""

    def kvstore(self, directory: str) -> dict[str, Any]:
        """Describe a prefix for TensorStore, which has clients of its own. Raises SettingsError: it cannot reach it."""

    def probe(self, directory: str) -> None:
        """Raise StorageError if the endpoint ignores the conditions of puts, or refuses to write."""


class Backend(Storage, Protocol):
    """A file system, and object stores for paths that are URLs.

    Only the modules that `test_layering.py` lists use what is defined here.
    """

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory atomically to a free name; raises with EEXIST if the name is taken."""

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        """Swap two existing names, atomically if the system can.

        If that takes several steps and `sync` is true, each step is durable before the next one.
        """

    def append(self, path: str, data: bytes) -> None:
        """Append bytes to a file in one write, and create the file if it is missing."""

    def touch(self, path: str) -> None:
        """Set a file's modification time to now."""


@runtime_checkable
class WithObjects(Protocol):
    """A backend that reaches object stores, too."""

    objects: Objects


def objects_of(backend: Backend) -> Objects:
    """The object stores that a backend reaches. Raises SettingsError: it reaches none."""
    if not isinstance(backend, WithObjects):
        raise SettingsError(f"{type(backend).__name__}: reaches no object store")
    return backend.objects


@runtime_checkable
class Linking(Protocol):
    """An optional ability of file systems: symbolic links."""

    def point(self, path: str, target: str | None) -> None:
        """Make a symbolic link to another name in the same directory, replacing an older link; None removes the link.

        Raises StorageError with EEXIST if the path exists and is not a link.
        """


@runtime_checkable
class Sharing(Protocol):
    """An optional ability of file systems: files that share blocks, which are copied when one of them is changed."""

    def share(self, source: str, target: str) -> bool:
        """Make a file with the content of another one by sharing its blocks; False: that is not possible here."""


def make_durable(backend: Backend, directory: str) -> None:
    """Sync all files and directories of a checkpoint that was committed without syncs, and its parent directory.

    A file system that cannot sync directories is accepted, because users choose `durability="none"` for such systems.
    Raises StorageError: the file system refused; the data may or may not be on the disk.
    """
    _sync_tree(backend, directory)
    sync_directory(backend, os.path.dirname(directory))


def _sync_tree(backend: Backend, directory: str) -> None:
    for entry in backend.list(directory):
        path = f"{directory}/{entry.name}"
        if entry.kind == "directory":
            _sync_tree(backend, path)
        elif entry.kind == "file":
            backend.sync(path)
    sync_directory(backend, directory)


def sync_directory(backend: Files, directory: str, tolerated: Collection[int] = ()) -> None:
    """Sync the entries of a directory, if the file system can; `tolerated` are further errno values to ignore."""
    try:
        backend.sync(directory)
    except StorageError as error:
        if error.errno not in {*UNSUPPORTED, *tolerated}:
            raise
