"""Makes durable what was written without being synced: a committed checkpoint, names in a directory.

The contract of a storage back end: what the store asks of a file system, an object store or memory.

What is told when the file system refuses something: the reason, and what to do about it.

Calls again what a signal interrupted: Python does so for reads, writes and syncs, but not for calls on names.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from collections.abc import Callable, Collection, Hashable
from typing import Literal, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np

from jaxckpt_train.errors import StorageError

_LOOKS = 3
P = ParamSpec("P")
T = TypeVar("T")
# What a system says of a name that is not there. ESTALE: a network file system had seen it, and another machine has
# removed it since.
GONE = {errno.ENOENT, errno.ESTALE}
# What opening says of a file that is gone, or is a link, a directory or a device instead. Anything else (no permission,
# too many open files) is not the checkpoint's fault.
MISSING = {*GONE, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO}
# How the names of files begin that a back end makes for a moment; what a crash leaves of them means nothing.
HALF_MADE = (".jaxckpt-new-", ".jaxckpt-now-")
# Names that NFS, SMB and FUSE clients give to files that were removed and that somebody has open still.
_IN_USE = re.compile(r"\.(nfs|smb|fuse_hidden)[0-9A-Fa-f]{4,}|\.smbdelete[0-9A-Za-z.]+")
# What a system says that does not offer an operation.
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
# Sandboxes answer EPERM to a call that their profile does not list. Where a call has a substitute, that one is tried.
NOT_OFFERED = UNSUPPORTED | {errno.EPERM}


def again(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of the call, made until it is not interrupted (EINTR, of network and user-space file systems).

    A name that a network file system calls stale is looked up anew, a few times.

    Raises:
        FileNotFoundError: it stays stale (ESTALE): another machine has removed it.
    """
    looks = 1
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue  # Python has run the signal's handler by now; one that raises ends this
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            if looks == _LOOKS:
                raise FileNotFoundError(errno.ESTALE, error.strerror, error.filename) from error
            looks += 1


_ADVICE = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "your quota is used up: free some space or choose another directory",
    errno.EACCES: "this user may not do that there: choose another directory or change its permissions",
    errno.EPERM: "this user may not do that there: choose another directory or change its permissions",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.ENOTDIR: "a file is where a directory should be: choose another path (or is it a link to nothing?)",
    errno.ELOOP: "it is a symbolic link, none of which is followed to a file: put the file itself in its place",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.EFBIG: "a file may not be that large: raise `ulimit -f`, or set a smaller `segment_bytes`",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EIO: "the disk or its connection failed: do not trust it further",
}


def refusal(code: int, action: str, path: str, said: str | None = None) -> StorageError:
    """What to raise when the file system refused: the action, the reason by its number, and what to do."""
    advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
    return StorageError(code, f"cannot {action}: {said or os.strerror(code)}{advice}", path)


def is_in_use(name: str) -> bool:
    """Whether a file of this name was removed, and goes when the last reader closes it."""
    return _IN_USE.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name in a directory, and what the directory says that it is ("other": a link, a pipe, a device)."""

    name: str
    kind: Literal["file", "directory", "other"]


def is_refusal(error: BaseException) -> bool:
    """Whether an error only says that a storage refused, failed or did not answer: what it holds may be whole."""
    return isinstance(error, OSError) and error.errno not in MISSING


class Sink(Protocol):
    """A file being written. The caller keeps every buffer and may reuse it as soon as a call returns.

    Attributes:
        alignment: offsets, lengths and buffer addresses of `write_at` must be multiples of this.
    """

    alignment: int

    def write_at(self, offset: int, data: np.ndarray) -> None:
        """Write all of a flat uint8 array at this offset. May be called from several threads at once."""

    def finish(self, size: int, *, sync: bool) -> None:
        """Cut the file to `size` bytes, sync its data where asked, and close it."""

    def abandon(self) -> None:
        """Close it as it is, without error."""


class Source(Protocol):
    """A file being read; `size` is in bytes. Stays readable when the file is removed meanwhile.

    Attributes:
        alignment: reads whose offset, length and address are multiples of this go straight to the caller's memory.
    """

    size: int
    alignment: int

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """Fill a flat uint8 array from this offset; only the first `needed` bytes must exist.

        Raises:
            CorruptCheckpointError: the file ends before `needed` bytes.
        """

    def close(self) -> None:
        """Release the file."""


class Opener(Protocol):
    """What files are read from. Every refusal of the system is a StorageError with its errno."""

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> Source:
        """Open a regular file; `name` is relative to `directory` and no link is followed on its way."""


class Files(Opener, Protocol):
    """Files and directories, named by absolute paths. Every refusal of the system is a StorageError with its errno."""

    def create(self, path: str, *, direct: bool | Literal["auto"]) -> Sink:
        """Create a file that must not exist."""

    def list(self, path: str) -> list[Entry]:
        """The entries of a directory, sorted by name."""

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        """Create a directory. With `parents`, missing parents too and no error if it exists; else it must not exist."""

    def volume(self, path: str) -> Hashable:
        """What tells the disk or service that holds this directory from others."""

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all it holds. Nothing there is no error."""


class Publishing(Protocol):
    """What makes a finished attempt visible, in the order that `transaction.py` decides."""

    def sync(self, path: str) -> None:
        """Sync one file's data, or one directory's entries."""

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory to a name that must not exist, atomically; FileExistsError's errno otherwise."""

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        """Swap two existing names, atomically where the system can.

        Where it takes several steps, and with `sync`, each is on the disk before the next one begins.
        """


class Records(Protocol):
    """Small files beside the checkpoints: locks, pins, the history."""

    def write_new(self, path: str, data: bytes) -> bool:
        """Create a file with this content, atomically; False if the name is taken."""

    def append(self, path: str, data: bytes) -> None:
        """Add bytes to the end of a file, creating it if need be, in one write."""

    def touch(self, path: str) -> None:
        """Set a file's modification time to now."""

    def modified_ns(self, path: str) -> int:
        """The modification time of a file, in nanoseconds, as the storage knows it now.

        Which clock it is of differs: that of the storage, or of the machine that made the change. To decide something,
        compare two of one file for equality only.
        """


class Backend(Files, Publishing, Records, Protocol):
    """A whole back end."""


@runtime_checkable
class Linking(Protocol):
    """What file systems offer beyond that: names that stand for others."""

    def point(self, path: str, target: str | None) -> None:
        """Have a name stand for another one in its directory, in place of what it stood for; None: for nothing.

        What is there and is no link stays, and is a StorageError with EEXIST.
        """


def make_durable(backend: Backend, directory: str) -> None:
    """Sync all files and directories of a checkpoint that was committed without, and its parent.

    A file system that cannot sync directories at all is taken as it is: whoever saves without is there for that reason.

    Raises:
        StorageError: the file system refused; nothing is known of what is on the disk.
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


def sync_directory(backend: Backend, directory: str, tolerated: Collection[int] = ()) -> None:
    """Sync the names in a directory, on a file system that can; `tolerated` are codes of other refusals that may be.

    Raises:
        StorageError: the file system refused.
    """
    try:
        backend.sync(directory)
    except StorageError as error:
        if error.errno not in {*UNSUPPORTED, *tolerated}:
            raise
