"""A file system in memory that records its operations, so that a simulated crash can lose some of them.

`CrashDisk` is a backend that makes the same operations as `store/backends/local.py`, in the same order, as
`test_same_as_local.py` shows. A `Machine` is the state that outlives a process: the files, and the log of operations.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Entry, StoredRecord
from jaxckpt_train.store.backends.local import side_name
from jaxckpt_train.store.backends.records import add_next_version, read_newest_version, refresh_version
from tests.nightly.crash.image import (
    Exchange,
    FailedSync,
    Image,
    Link,
    Operation,
    Rename,
    Sync,
    Truncate,
    Unlink,
    Write,
)

PAGE = 4096
ANCIENT_S = 1e6


class Machine:
    """The state that outlives a process: the files, and all operations since the start of the machine.

    Args:
        image: the content of its disk at the start.
        can_exchange: whether names can be exchanged in one step.
    """

    def __init__(self, image: Image | None = None, *, can_exchange: bool = True) -> None:
        self.live = image or Image()
        self.can_exchange = can_exchange
        self.log: list[Operation] = []
        self.guard = threading.RLock()
        self.now_s = ANCIENT_S
        self.touched_s: dict[int, float] = {}
        self._next = 1 + max([*self.live.folders, *self.live.files, *self.live.lost], default=0)

    def do(self, operation: Operation) -> None:
        """Apply an operation to the files, and log it."""
        with self.guard:
            self.live.apply(operation)
            self.log.append(operation)

    def new_inode(self) -> int:
        """Return an unused inode number."""
        with self.guard:
            self._next += 1
            return self._next


class _Place(NamedTuple):
    """The directory of a path, the last name of the path, and the inode of that name if it exists."""

    inode: int
    name: str
    found: int | None


class CrashDisk:
    """The disk of a machine as one process sees it. Once `power` is off, every operation fails.

    A write is half done if it is refused or the process dies in it.

    Attributes:
        budget: the number of operations until the power goes off; None: no limit.
        refuse_in: the number of operations until one is refused; None: none is.
        has_refused: whether an operation was refused.
        deletes_in_place: whether some directories cannot be renamed, so that a crash may leave one without COMMIT.
    """

    deletes_in_place = False

    def __init__(self, machine: Machine) -> None:
        self.machine, self.power = machine, True
        self._durable_paths: dict[str, int] = {}  # the inode of each path when it was synced
        self.budget: int | None = None
        self.refuse_in: int | None = None
        self.has_refused = False

    def do(self, operation: Operation, path: str) -> None:
        """Make one operation, unless the process is dead."""
        with self.machine.guard:
            if self.power and self.budget is not None:
                self.power = self.budget > 0
                self.budget -= 1
                if not self.power:
                    self._half_do(operation)
            if not self.power:
                raise StorageError(errno.ENODEV, "cannot do it: the process is dead", path)
            if self.refuse_in is not None and not self.has_refused:
                self.refuse_in -= 1
                self.has_refused = self.refuse_in <= 0
                if self.has_refused:
                    self._half_do(operation)
                    if isinstance(operation, Sync) and operation.inode in self.machine.live.files:
                        self.machine.do(FailedSync(operation.inode))
                    raise StorageError(errno.EIO, "refused", path)
            self.machine.do(operation)

    def _half_do(self, operation: Operation) -> None:
        if isinstance(operation, Write):
            half = operation.data[: len(operation.data) // 2]
            self.machine.do(Write(operation.inode, operation.offset, half))

    def _at(self, action: str, path: str) -> _Place:
        """Find the directory and the inode of a path; the caller holds the lock of the machine."""
        if not self.power:
            raise StorageError(errno.ENODEV, f"cannot {action}: the process is dead", path)
        image = self.machine.live
        folder, _, name = path.rpartition("/")
        inode = image.find(folder)
        if inode is None:
            is_below_file = self._is_below_file(folder)
            raise _refusal(errno.ENOTDIR if is_below_file else errno.ENOENT, action, path)
        names = image.folders.get(inode)
        if names is None:
            raise _refusal(errno.EUCLEAN if inode in image.lost else errno.ENOTDIR, action, path)
        found = names.get(name) if name else inode
        if found in image.lost:
            raise _refusal(errno.EUCLEAN, action, path)
        return _Place(inode, name, found)

    def _existing(self, action: str, path: str) -> tuple[_Place, int]:
        """Find a path that must exist."""
        at = self._at(action, path)
        if at.found is None:
            raise _refusal(errno.ENOENT, action, path)
        return at, at.found

    def _new(self, action: str, path: str) -> _Place:
        """Find a path that must not exist."""
        at = self._at(action, path)
        if at.found is not None:
            raise _refusal(errno.EEXIST, action, path)
        return at

    def _is_below_file(self, path: str) -> bool:
        while path not in ("", "/"):
            found = self.machine.live.find(path)
            if found is not None:
                return found not in self.machine.live.folders
            path = os.path.dirname(path)
        return False

    def create(self, path: str, *, direct: Any) -> _Sink:
        with self.machine.guard:
            at, inode = self._new("create the file", path), self.machine.new_inode()
            self.do(Link(at.inode, at.name, inode, is_directory=False), path)
            return _Sink(self, path, inode, PAGE if direct else 1)

    def open(self, directory: str, name: str, *, direct: Any) -> _Source:
        path = f"{directory}/{name}"
        with self.machine.guard:
            _, found = self._existing("open the file", path)
            if found in self.machine.live.folders:
                raise _refusal(errno.EISDIR, "open the file", path)
            modified_ns = int(1e9 * self.machine.touched_s.get(found, 0.0))
            return _Source(self, path, self.machine.live.files[found], modified_ns, PAGE if direct else 1)

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        with self.machine.guard:
            found = self.machine.live.find(path)
            if found is None or found in self.machine.live.lost:
                return None
            return "directory" if found in self.machine.live.folders else "file"

    def list(self, path: str) -> list[Entry]:
        with self.machine.guard:
            _, found = self._existing("list the directory", path)
            image = self.machine.live
            if found not in image.folders:
                raise _refusal(errno.ENOTDIR, "list the directory", path)
            return [_entry(image, name, inode) for name, inode in sorted(image.folders[found].items())]

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        if not parents:
            self._make_one(path)
            return
        missing, target = list[str](), path
        while self._directory_at(path) is None:
            if self.machine.live.find(path) is not None:
                raise _refusal(errno.ENOTDIR, "create the directory", path)
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._make_one(folder)
        if sync:
            self._sync_parents_of(target)

    def _directory_at(self, path: str) -> int | None:
        found = self.machine.live.find(path)
        if found in self.machine.live.lost:
            raise _refusal(errno.EUCLEAN, "create the directory", path)
        return found if found in self.machine.live.folders else None

    def _sync_parents_of(self, directory: str) -> None:
        found = self._directory_at(directory)
        if found is not None and self._durable_paths.get(directory) != found:
            parent = directory
            while parent != "/":
                parent = os.path.dirname(parent)
                self.sync(parent)
            self._durable_paths[directory] = found

    def _make_one(self, path: str) -> None:
        with self.machine.guard:
            at = self._new("create the directory", path)
            self.do(Link(at.inode, at.name, self.machine.new_inode(), is_directory=True), path)

    def remove(self, path: str) -> None:
        try:
            with self.machine.guard:
                at = self._at("remove", path)
                if at.found is None:
                    return
                names = list(self.machine.live.folders.get(at.found, {}))
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return
            raise
        for name in sorted(names, key=_any_order):
            self.remove(f"{path}/{name}")
        self.do(Unlink(at.inode, at.name), path)

    def sync(self, path: str) -> None:
        with self.machine.guard:
            self.do(Sync(self._existing("sync", path)[1]), path)

    def rename(self, source: str, target: str) -> None:
        action = f"rename to {target}"
        with self.machine.guard:
            (old, found), new = self._existing(action, source), self._at(action, target)
            if new.found is not None:
                raise _refusal(errno.EEXIST, action, source)
            self.do(Rename(old.inode, old.name, new.inode, new.name, found), source)

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        action, aside = f"exchange with {second}", side_name(second)
        with self.machine.guard:
            (one, found), (two, other) = self._existing(action, first), self._existing(action, second)
            if self.machine.can_exchange:
                self.do(Exchange((one.inode, one.name, found), (two.inode, two.name, other)), first)
                return
            is_left = self._at(action, aside).found is not None
        if is_left:
            raise StorageError(errno.EBUSY, f"cannot {action}: {aside} exists", first)
        done = list[tuple[str, str]]()
        try:
            for source, target in [(second, aside), (first, second), (aside, first)]:
                if sync and done:
                    self.sync(os.path.dirname(source))
                self.rename(source, target)
                done.append((source, target))
        except StorageError:
            for source, target in reversed(done):
                self.rename(target, source)
            raise

    def clone(self, source: str, target: str, size: int) -> bool:
        with self.machine.guard:
            old, new = self._at("clone", source), self._new("clone", target)
            if old.found is None or len(self.machine.live.files.get(old.found, b"")) != size:
                return False
            self.do(Link(new.inode, new.name, old.found, is_directory=False), target)
            return True

    def write_new(self, path: str, data: bytes) -> bool:
        temporary = self._temporary(path, TEMPORARY_PREFIXES[0], "create the file")
        try:
            self.do(Write(temporary.inode, 0, data), path)
            self.do(Sync(temporary.inode), path)
            with self.machine.guard:
                at = self._at("create the file", path)
                if at.found is not None:
                    return False
                self.do(Link(at.inode, at.name, temporary.inode, is_directory=False), path)
                self.machine.touched_s[temporary.inode] = self.machine.now_s
                return True
        finally:
            self.do(Unlink(temporary.folder, temporary.name), path)

    def _temporary(self, path: str, prefix: str, action: str) -> Link:
        """Create a file of a new name in the same directory."""
        with self.machine.guard:
            inode, folder = self.machine.new_inode(), os.path.dirname(path)
            temporary = self._new(action, f"{folder}/{prefix}{inode}")
            link = Link(temporary.inode, temporary.name, inode, is_directory=False)
            self.do(link, path)
            return link

    def append(self, path: str, data: bytes) -> None:
        with self.machine.guard:
            at = self._at("append to the file", path)
            inode = at.found
            if inode is None:
                inode = self.machine.new_inode()
                self.do(Link(at.inode, at.name, inode, is_directory=False), path)
            if data:
                self.do(Write(inode, len(self.machine.live.files[inode]), data), path)

    def touch(self, path: str) -> None:
        with self.machine.guard:
            self.machine.touched_s[self._existing("touch the file", path)[1]] = self.machine.now_s

    def read_record(self, path: str) -> StoredRecord | None:
        return read_newest_version(self, path)

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        return add_next_version(self, path, data, version)

    def refresh_record(self, path: str, version: int) -> None:
        refresh_version(self, path, version)


def _entry(image: Image, name: str, inode: int) -> Entry:
    """Return the entry that a listing shows for a name."""
    if inode in image.lost:
        return Entry(name, "directory" if image.lost[inode] else "other")
    return Entry(name, "directory") if inode in image.folders else Entry(name, "file")


def _any_order(name: str) -> int:
    """A sort key for an arbitrary order, because a listing has no defined order."""
    return zlib.crc32(name.encode())


def _refusal(code: int, action: str, path: str) -> StorageError:
    return StorageError(code, f"cannot {action}: {os.strerror(code)}", path)


class _Sink:
    in_order = False

    def __init__(self, disk: CrashDisk, path: str, inode: int, alignment: int) -> None:
        self._disk, self._path, self._inode, self.alignment = disk, path, inode, alignment

    def write_at(self, offset: int, data: np.ndarray) -> None:
        self._disk.do(Write(self._inode, offset, data.tobytes()), self._path)

    def finish(self, size: int, *, sync: bool) -> None:
        if len(self._disk.machine.live.files[self._inode]) != size:
            self._disk.do(Truncate(self._inode, size), self._path)
        if sync:
            self._disk.do(Sync(self._inode), self._path)

    def abandon(self) -> None:
        pass


class _Source:
    def __init__(self, disk: CrashDisk, path: str, content: bytearray, modified_ns: int, alignment: int) -> None:
        self._disk, self._path, self._content = disk, path, bytes(content)
        self.size, self.modified_ns, self.alignment = len(content), modified_ns, alignment

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        if not self._disk.power:
            raise StorageError(errno.ENODEV, "cannot read: the process is dead", self._path)
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._path}: ends at byte {self.size}, expected more")
        found = np.frombuffer(self._content, np.uint8, min(len(data), self.size - offset), offset)
        data[: len(found)] = found

    def close(self) -> None:
        pass
