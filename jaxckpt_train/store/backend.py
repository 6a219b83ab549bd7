"""The contract of a storage back end: what the store asks of a file system, an object store or memory."""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Hashable
from typing import Literal, Protocol, runtime_checkable

import numpy as np

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
