"""The content of a disk (inodes and names), and the operations that change it."""

from __future__ import annotations

import dataclasses
import hashlib

ROOT = 0


@dataclasses.dataclass(frozen=True)
class Link:
    """A name is given to a file or directory; a previous file of that name is replaced."""

    folder: int
    name: str
    inode: int
    is_directory: bool


@dataclasses.dataclass(frozen=True)
class Unlink:
    """A name is removed."""

    folder: int
    name: str


@dataclasses.dataclass(frozen=True)
class Rename:
    """A file or directory gets another name, atomically."""

    source: int
    name: str
    target: int
    new_name: str
    inode: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Two names are exchanged, atomically."""

    first: tuple[int, str, int]
    second: tuple[int, str, int]


@dataclasses.dataclass(frozen=True)
class Write:
    """Bytes of a file are written; the file grows if necessary."""

    inode: int
    offset: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class Truncate:
    """A file gets another size; new bytes are zero."""

    inode: int
    size: int


@dataclasses.dataclass(frozen=True)
class Sync:
    """The bytes of a file, or the names in a directory, become durable."""

    inode: int


@dataclasses.dataclass(frozen=True)
class FailedSync:
    """A sync of a file fails. The system drops its dirty blocks.

    A later sync succeeds, and writes only the blocks that were changed since.
    """

    inode: int


NameChange = Link | Unlink | Rename | Exchange
DataChange = Write | Truncate
Operation = NameChange | DataChange | Sync | FailedSync


def folders_of(change: NameChange) -> tuple[int, ...]:
    """Return the directories whose names an operation changes."""
    match change:
        case Rename():
            return (change.source, change.target)
        case Exchange():
            return (change.first[0], change.second[0])
        case _:
            return (change.folder,)


class Image:
    """Files and directories by inode. Inodes without a name stay in the tables, which is harmless.

    Attributes:
        lost: inodes that have a name but never reached the disk, and whether each was a directory; every use of such
            a name is refused.
    """

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {ROOT: {}}
        self.files: dict[int, bytearray] = {}
        self.lost: dict[int, bool] = {}

    def copy(self) -> Image:
        """Return another image with the same content."""
        other = Image()
        other.folders = {inode: dict(names) for inode, names in self.folders.items()}
        other.files = {inode: bytearray(data) for inode, data in self.files.items()}
        other.lost = dict(self.lost)
        return other

    def make(self, inode: int, is_directory: bool) -> None:
        """Create an empty file or directory, unless the inode exists."""
        if is_directory:
            self.folders.setdefault(inode, {})
        else:
            self.files.setdefault(inode, bytearray())

    def apply(self, operation: Operation) -> None:
        """Apply an operation; a change of a missing name or file is no error."""
        match operation:
            case Link(folder, name, inode, is_directory):
                self._names(folder)[name] = inode
                self.make(inode, is_directory)
            case Unlink(folder, name):
                self._names(folder).pop(name, None)
            case Rename():
                self._forget(operation.source, operation.name, operation.inode)
                self._names(operation.target)[operation.new_name] = operation.inode
            case Exchange((first, name, inode), (second, other, to)):
                self._names(first)[name], self._names(second)[other] = to, inode
            case Write(inode, offset, data):
                file = self.files.setdefault(inode, bytearray())
                file.extend(bytes(max(0, offset + len(data) - len(file))))
                file[offset : offset + len(data)] = data
            case Truncate(inode, size):
                file = self.files.setdefault(inode, bytearray())
                del file[size:]
                file.extend(bytes(size - len(file)))
            case Sync() | FailedSync():
                pass

    def _names(self, folder: int) -> dict[str, int]:
        return self.folders.setdefault(folder, {})

    def _forget(self, folder: int, name: str, inode: int) -> None:
        if self._names(folder).get(name) == inode:
            del self._names(folder)[name]

    def find(self, path: str) -> int | None:
        """Return the inode of an absolute path, or None."""
        inode = ROOT
        for name in path.split("/"):
            if name:
                names = self.folders.get(inode)
                if names is None or name not in names:
                    return None
                inode = names[name]
        return inode

    def digest(self, suffix: bytes = b"", inode: int = ROOT) -> bytes:
        """Return a digest of the tree below the root, or below `inode`, and of `suffix`."""
        return hashlib.blake2b(_digest(self, inode) + suffix, digest_size=16).digest()


def _digest(image: Image, inode: int) -> bytes:
    names = image.folders.get(inode)
    if inode in image.lost:
        return b"lost directory" if image.lost[inode] else b"lost file"
    if names is None:
        return hashlib.blake2b(b"file" + bytes(image.files.get(inode, b"")), digest_size=16).digest()
    whole = hashlib.blake2b(b"folder", digest_size=16)
    for name in sorted(names):
        whole.update(name.encode() + b"\0" + _digest(image, names[name]))
    return whole.digest()
