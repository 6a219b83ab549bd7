"""A backend in memory: the reference model of the contract."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Literal

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import Entry, StoredRecord
from jaxckpt_train.store.backends.records import add_next_version, read_newest_version, refresh_version

Names = list[str]  # inside the class below, `list` is a method


class _File:
    def __init__(self, changed: int) -> None:
        self.data = bytearray()
        self.changed = changed


class _MemorySink:
    alignment = 1
    in_order = False

    def __init__(self, file: _File) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: np.ndarray) -> None:
        with self._lock:
            held = self._file.data
            if len(held) < offset + len(data):
                held.extend(bytes(offset + len(data) - len(held)))
            held[offset : offset + len(data)] = data.tobytes()

    def finish(self, size: int, *, sync: bool) -> None:
        del self._file.data[size:]

    def abandon(self) -> None:
        pass


class _MemorySource:
    alignment = 1

    def __init__(self, path: str, file: _File) -> None:
        self._path, self._file = path, file
        self.size, self.modified_ns = len(file.data), file.changed

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        found = self._file.data[offset : offset + len(data)]
        if len(found) < needed:
            raise CorruptCheckpointError(f"{self._path}: ends at byte {offset + len(found)}, expected more")
        data[: len(found)] = np.frombuffer(found, np.uint8)

    def close(self) -> None:
        pass


class MemoryBackend:
    """A tree of directories and files in memory."""

    def __init__(self) -> None:
        self._nodes: dict[str, _File | None] = {"/": None}  # None marks a directory
        self._now = 0
        self._lock = threading.RLock()

    def create(self, path: str, *, direct: bool | Literal["auto"]) -> _MemorySink:
        """Create a file that must not exist."""
        with self._lock:
            self._need_parent(path)
            if path in self._nodes:
                raise _storage_error(errno.EEXIST, "create the file", path)
            file = self._nodes[path] = _File(self._tick())
            return _MemorySink(file)

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> _MemorySource:
        """Open a file below a directory."""
        path = os.path.join(directory, name)
        return _MemorySource(path, self._file(path, "open the file"))

    def clone(self, source: str, target: str, size: int) -> bool:
        """Give a file a second name."""
        with self._lock:
            self._need_parent(target)
            node = self._nodes.get(source)
            if node is None:
                return False
            if target in self._nodes:
                raise _storage_error(errno.EEXIST, "clone", target)
            self._nodes[target] = node
            return True

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        """What is at a path."""
        with self._lock:
            if path not in self._nodes:
                return None
            return "directory" if self._nodes[path] is None else "file"

    def list(self, path: str) -> list[Entry]:
        """The entries of a directory, sorted by name."""
        with self._lock:
            self._need_directory(path, "list the directory")
            found = [(os.path.basename(p), node) for p, node in self._nodes.items() if os.path.dirname(p) == path != p]
        return sorted(
            (Entry(n, "directory" if f is None else "file") for n, f in found),
            key=lambda entry: entry.name,
        )

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        """Create a directory; with `parents`, also its missing parents."""
        with self._lock:
            if parents:
                if isinstance(self._nodes.get(path), _File):
                    raise _storage_error(errno.ENOTDIR, "create the directory", path)
                if path not in self._nodes:
                    self.make_directory(os.path.dirname(path), parents=True, sync=sync)
                    self._nodes[path] = None
                return
            self._need_parent(path)
            if path in self._nodes:
                raise _storage_error(errno.EEXIST, "create the directory", path)
            self._nodes[path] = None

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with everything in it."""
        with self._lock:
            for inner in self._tree(path):
                del self._nodes[inner]

    def sync(self, path: str) -> None:
        """Do nothing, because memory needs no sync; the path must exist."""
        if path not in self._nodes:
            raise _storage_error(errno.ENOENT, "sync", path)

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory to a free name."""
        with self._lock:
            if target in self._nodes:
                raise _storage_error(errno.EEXIST, f"rename to {target}", source)
            self._need_parent(target)
            moved = {path: self._nodes.pop(path) for path in self._tree(source)}
            if not moved:
                raise _storage_error(errno.ENOENT, f"rename to {target}", source)
            self._nodes.update({target + path[len(source) :]: node for path, node in moved.items()})

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        """Swap two existing names."""
        with self._lock:
            for path in (first, second):
                self.sync(path)  # raises if a name is missing, before either moves
            aside = second + "\0"
            self.rename(second, aside)
            self.rename(first, second)
            self.rename(aside, first)

    def write_new(self, path: str, data: bytes) -> bool:
        """Create a file with this content; False if the name is taken."""
        with self._lock:
            if path in self._nodes:
                return False
            self.create(path, direct=False).write_at(0, np.frombuffer(data, np.uint8))
            return True

    def append(self, path: str, data: bytes) -> None:
        """Append bytes to a file, and create it if it is missing."""
        with self._lock:
            if path not in self._nodes:
                self.create(path, direct=False)
            file = self._file(path, "append to the file")
            file.data.extend(data)
            file.changed = self._tick()

    def touch(self, path: str) -> None:
        """Set a file's modification time to now."""
        self._file(path, "touch the file").changed = self._tick()

    def read_record(self, path: str) -> StoredRecord | None:
        """The newest version of a record; None: there is none."""
        return read_newest_version(self, path)

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        """Replace this version of a record; None: another writer was faster."""
        return add_next_version(self, path, data, version)

    def refresh_record(self, path: str, version: int) -> None:
        """Change the time of a version, if it is still the newest."""
        refresh_version(self, path, version)

    def _tick(self) -> int:
        self._now = max(self._now + 1, time.time_ns())
        return self._now

    def _tree(self, path: str) -> Names:
        return [p for p in self._nodes if p == path or p.startswith(path + "/")]

    def _file(self, path: str, action: str) -> _File:
        with self._lock:
            if path not in self._nodes:
                below_a_file = isinstance(self._nodes.get(os.path.dirname(path)), _File)
                raise _storage_error(errno.ENOTDIR if below_a_file else errno.ENOENT, action, path)
            node = self._nodes[path]
            if node is None:
                raise _storage_error(errno.EISDIR, action, path)
            return node

    def _need_directory(self, path: str, action: str) -> None:
        if path not in self._nodes:
            raise _storage_error(errno.ENOENT, action, path)
        if self._nodes[path] is not None:
            raise _storage_error(errno.ENOTDIR, action, path)

    def _need_parent(self, path: str) -> None:
        self._need_directory(os.path.dirname(path), "create in the directory")


def _storage_error(code: int, action: str, path: str) -> StorageError:
    return StorageError(code, f"cannot {action}: {os.strerror(code)}", path)
