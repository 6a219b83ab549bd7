"""A file system in memory that writes down every operation on it, so that a crash can be made to lose some of them.

`CrashDisk` is a back end that does what `store/local.py` does, in the same order. A `Machine` is what stays when a
process dies: the files, and the list of what was done to them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backend import HALF_MADE, Entry
from jaxckpt_train.store.local import side_name
from tests.crash.image import Exchange, Image, Link, Operation, Rename, Sync, Truncate, Unlink, Write

PAGE = 4096
ANCIENT_S = 1e6


class Machine:
    """What outlives a process: the files as they are now, and all that was done since the machine was started.

    Args:
        image: what its disk held then.
        can_exchange: whether names can be exchanged in one step.
    """

    def __init__(self, image: Image | None = None, *, can_exchange: bool = True) -> None:
        self.live = image or Image()
        self.can_exchange = can_exchange
        self.log: list[Operation] = []
        self.guard = threading.RLock()
        self.now_s = ANCIENT_S
        self.touched_s: dict[int, float] = {}
        self._next = 1 + max([*self.live.folders, *self.live.files], default=0)

    def do(self, operation: Operation) -> None:
        """Change the files, and write it down."""
        with self.guard:
            self.live.apply(operation)
            self.log.append(operation)

    def new_inode(self) -> int:
        """A number that nothing had."""
        with self.guard:
            self._next += 1
            return self._next


class _Folder:
    """A directory that was found, and the name in it that is meant."""

    def __init__(self, inode: int, name: str, found: int | None) -> None:
        self.inode, self.name, self.found = inode, name, found


class CrashDisk:
    """A process's view of a machine's disk. Once `power` is off it does nothing more, whoever still calls it.

    Attributes:
        budget: how many more operations until the power goes off by itself; None: no limit.
        refuse_in: the how-manieth operation from now on is refused, one only; None: none is.
        has_refused: whether that was.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.power = machine, True
        self._durable_ways: set[str] = set()
        self.budget: int | None = None
        self.refuse_in: int | None = None
        self.has_refused = False

    def do(self, operation: Operation, path: str) -> None:
        """Do one operation, unless the process is dead."""
        with self.machine.guard:
            if self.budget is not None:
                self.power = self.power and self.budget > 0
                self.budget -= 1
            if not self.power:
                raise StorageError(errno.ENODEV, "cannot do it: the process is dead", path)
            if self.refuse_in is not None and not self.has_refused:
                self.refuse_in -= 1
                self.has_refused = self.refuse_in <= 0
                if self.has_refused:
                    raise StorageError(errno.EIO, "refused", path)
            self.machine.do(operation)

    @contextlib.contextmanager
    def _at(self, action: str, path: str) -> Iterator[_Folder]:
        """Find the directory of a path, under the machine's lock."""
        with self.machine.guard:
            if not self.power:
                raise StorageError(errno.ENODEV, f"cannot {action}: the process is dead", path)
            image = self.machine.live
            folder, name = os.path.split(path)
            inode = image.find(folder)
            if inode is None:
                is_below_file = self._is_below_file(folder)
                raise _refusal(errno.ENOTDIR if is_below_file else errno.ENOENT, action, path)
            if inode not in image.folders:
                raise _refusal(errno.ENOTDIR, action, path)
            yield _Folder(inode, name, image.folders[inode].get(name) if name else inode)

    def _is_below_file(self, path: str) -> bool:
        while path not in ("", "/"):
            found = self.machine.live.find(path)
            if found is not None:
                return found not in self.machine.live.folders
            path = os.path.dirname(path)
        return False

    def create(self, path: str, *, direct: Any) -> _Sink:
        with self._at("create the file", path) as at:
            if at.found is not None:
                raise _refusal(errno.EEXIST, "create the file", path)
            inode = self.machine.new_inode()
            self.do(Link(at.inode, at.name, inode, is_directory=False), path)
            return _Sink(self, path, inode, PAGE if direct else 1)

    def open(self, directory: str, name: str, *, direct: Any) -> _Source:
        path = f"{directory}/{name}"
        with self._at("open the file", path) as at:
            if at.found is None:
                raise _refusal(errno.ENOENT, "open the file", path)
            if at.found in self.machine.live.folders:
                raise _refusal(errno.EISDIR, "open the file", path)
            return _Source(self, path, self.machine.live.files[at.found], PAGE if direct else 1)

    def list(self, path: str) -> list[Entry]:
        with self._at("list the directory", path) as at:
            image = self.machine.live
            if at.found is None:
                raise _refusal(errno.ENOENT, "list the directory", path)
            if at.found not in image.folders:
                raise _refusal(errno.ENOTDIR, "list the directory", path)
            return [
                Entry(name, "directory") if inode in image.folders else Entry(name, "file", len(image.files[inode]))
                for name, inode in sorted(image.folders[at.found].items())
            ]

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        if not parents:
            self._make_one(path)
            return
        missing, target, path_given = list[str](), path, path
        while self.machine.live.find(path) not in self.machine.live.folders:
            if self.machine.live.find(path) is not None:
                raise _refusal(errno.ENOTDIR, "create the directory", path)
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._make_one(folder)
        if sync and path_given not in self._durable_ways:
            while target != "/":
                target = os.path.dirname(target)
                self.sync(target)
            self._durable_ways.add(path_given)

    def _make_one(self, path: str) -> None:
        with self._at("create the directory", path) as at:
            if at.found is not None:
                raise _refusal(errno.EEXIST, "create the directory", path)
            self.do(Link(at.inode, at.name, self.machine.new_inode(), is_directory=True), path)

    def remove(self, path: str) -> None:
        try:
            with self._at("remove", path) as at:
                if at.found is None:
                    return
                names = list(self.machine.live.folders.get(at.found, {}))
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return
            raise
        for name in names:
            self.remove(f"{path}/{name}")
        self.do(Unlink(at.inode, at.name), path)

    def volume(self, path: str) -> int:
        return 1

    def sync(self, path: str) -> None:
        with self._at("sync", path) as at:
            if at.found is None:
                raise _refusal(errno.ENOENT, "sync", path)
            self.do(Sync(at.found), path)

    def rename(self, source: str, target: str) -> None:
        action = f"rename to {target}"
        with self._at(action, source) as old, self._at(action, target) as new:
            if old.found is None:
                raise _refusal(errno.ENOENT, action, source)
            if new.found is not None:
                raise _refusal(errno.EEXIST, action, source)
            self.do(Rename(old.inode, old.name, new.inode, new.name, old.found), source)

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        action = f"exchange with {second}"
        with self._at(action, first) as one, self._at(action, second) as two:
            if one.found is None or two.found is None:
                raise _refusal(errno.ENOENT, action, first)
            if self.machine.can_exchange:
                self.do(Exchange((one.inode, one.name, one.found), (two.inode, two.name, two.found)), first)
                return
        aside = side_name(second)
        if self.machine.live.find(aside) is not None:
            if sync:
                self.sync(os.path.dirname(second))
            self.remove(aside)
        for source, target in [(second, aside), (first, second), (aside, first)]:
            if sync and source != second:
                self.sync(os.path.dirname(source))
            self.rename(source, target)

    def write_new(self, path: str, data: bytes) -> bool:
        with self.machine.guard:
            beside = self._beside(path, HALF_MADE[0], "create the file")
            self.do(Write(beside.inode, 0, data), path)
            self.do(Sync(beside.inode), path)
            try:
                with self._at("create the file", path) as at:
                    if at.found is not None:
                        return False
                    self.do(Link(at.inode, at.name, beside.inode, is_directory=False), path)
                    self.machine.touched_s[beside.inode] = self.machine.now_s
                    return True
            finally:
                self.do(Unlink(beside.folder, beside.name), path)

    def _beside(self, path: str, prefix: str, action: str) -> Link:
        """Create a file of a new name in the same directory."""
        with self._at(action, path) as at:
            inode = self.machine.new_inode()
            link = Link(at.inode, f"{prefix}{inode}", inode, is_directory=False)
            self.do(link, path)
            return link

    def append(self, path: str, data: bytes) -> None:
        with self._at("append to the file", path) as at:
            inode = at.found
            if inode is None:
                inode = self.machine.new_inode()
                self.do(Link(at.inode, at.name, inode, is_directory=False), path)
            if data:
                self.do(Write(inode, len(self.machine.live.files[inode]), data), path)

    def touch(self, path: str) -> None:
        with self._at("touch the file", path) as at:
            if at.found is None:
                raise _refusal(errno.ENOENT, "touch the file", path)
            self.machine.touched_s[at.found] = self.machine.now_s

    def age_s(self, path: str) -> float:
        with self._at("find the age of the file", path) as at:
            if at.found is None:
                raise _refusal(errno.ENOENT, "find the age of the file", path)
            probe = self._beside(path, HALF_MADE[1], "find the age of the file")
            self.do(Unlink(probe.folder, probe.name), path)
            return self.machine.now_s - self.machine.touched_s.get(at.found, 0.0)


def _refusal(code: int, action: str, path: str) -> StorageError:
    return StorageError(code, f"cannot {action}: {os.strerror(code)}", path)


class _Sink:
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
    def __init__(self, disk: CrashDisk, path: str, content: bytearray, alignment: int) -> None:
        self._disk, self._path, self._content = disk, path, bytes(content)
        self.size, self.alignment = len(content), alignment

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        if not self._disk.power:
            raise StorageError(errno.ENODEV, "cannot read: the process is dead", self._path)
        if offset + needed > self.size:
            raise CorruptCheckpointError(f"{self._path}: ends at byte {self.size}, expected more")
        found = np.frombuffer(self._content, np.uint8, min(len(data), self.size - offset), offset)
        data[: len(found)] = found

    def close(self) -> None:
        pass
