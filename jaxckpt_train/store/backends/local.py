"""The local file system: with `local_names.py` all that touches the disk; direct I/O where the file system takes it.

What the system tells of the file system that a directory is on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import HALF_MADE, NOT_OFFERED, UNSUPPORTED, Entry, again, refusal, sync_directory
from jaxckpt_train.store.backends.local_names import (
    close_read,
    entries_of,
    exchange_names,
    give_name,
    is_directory,
    is_there,
    marks_of_way,
    open_to_sync,
    parents_on_volume,
    point_to,
    remove_tree,
    rename_all,
    rename_to_new,
)
from jaxckpt_train.store.process_identity import open_below

MOUNTS = "/proc/self/mountinfo"
IN_MEMORY = {"tmpfs", "ramfs"}
_OBJECT_STORES = re.compile(r"s3fs|gcsfuse|rclone|goofys|blobfuse|mountpoint-s3|ossfs|cosfs")
_UNSYNCED = {"volatile", "nobarrier", "barrier=0"}
_ESCAPED = re.compile(r"\\([0-7]{3})")
DIRECT_ALIGNMENT = 4096
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # of macOS, where fsync does not reach the medium
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link is followed, and no pipe waited for
_COPY_BYTES = 16 << 20
_cannot_cut: set[int] = set()  # device numbers of file systems on which a file cannot be made shorter
_durable_ways: dict[str, tuple[object, ...]] = {}  # marks of directories that are on the disk with their names
_NO_DIRECT = 'this system or file system has no direct I/O, and direct_io=True asks for nothing else; use "auto"'


class FileSystem(NamedTuple):
    """The file system of a directory.

    Attributes:
        kind: such as "ext4"; "unknown": the system does not tell.
        mount: where it is mounted.
        total_bytes, free_bytes: of it; what this user may still write.
        free_files: how many more files may be made; None: there is no such limit.
    """

    kind: str
    mount: str
    total_bytes: int
    free_bytes: int
    free_files: int | None


def file_system_of(directory: str) -> FileSystem:
    """What is known of the file system that a directory is on.

    Raises:
        StorageError: it is not there, or its disk does not tell.
    """
    try:
        found = os.statvfs(directory)
        there = os.path.realpath(directory, strict=True)
    except OSError as error:
        raise StorageError(error.errno, f"cannot look at the file system: {error.strerror}", directory) from error
    at = _mount_at(there)
    free_files = found.f_favail if found.f_files else None
    return FileSystem(at.kind, at.mount, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, free_files)


def doubts_about(directory: str) -> list[str]:
    """What a run must not rely on there, though it works: by the kind of the file system, or how it is mounted."""
    at, found = _mount_at(os.path.realpath(directory)), list[str]()
    if at.kind.startswith("fuse") and (store := _OBJECT_STORES.search(f"{at.kind} {at.source}")):
        found.append(
            f"{store[0]} at {at.mount} copies what is renamed, and two machines may take a run at once: a commit takes "
            "as long as the save, is not atomic, and a crash may leave part of it"
        )
    if options := sorted(_UNSYNCED.intersection(at.options)):
        found.append(
            f"{at.kind} at {at.mount} is mounted with {', '.join(options)}: a power cut may lose what was synced, "
            "committed steps too"
        )
    return found


class _Mount(NamedTuple):
    kind: str
    mount: str
    source: str = ""
    options: tuple[str, ...] = ()


def _mount_at(path: str) -> _Mount:
    with contextlib.suppress(OSError):
        return _mount_of(path, Path(MOUNTS).read_text(errors="surrogateescape"))
    return _Mount("unknown", "/")


def _mount_of(path: str, mounts: str) -> _Mount:
    """The file system of a path, and where it is mounted: of `MOUNTS` the last line that fits best."""
    best = _Mount("unknown", "")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) < 5:
            continue
        mount = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        if f"{path}/".startswith(f"{mount.rstrip('/')}/") and len(mount) >= len(best.mount):
            options = (*fields[5:6], *kinds[2:3])
            best = _Mount(kinds[0], mount, "".join(kinds[1:2]), tuple(",".join(options).split(",")))
    return best


@contextlib.contextmanager
def _storage(action: str, path: str) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the action, the path and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise refusal(error.errno or errno.EIO, action, path, error.strerror) from error


@contextlib.contextmanager
def _said_to_be_open(directory: str) -> Iterator[None]:
    """Say what is open in a directory that cannot be renamed for that reason, as on SMB."""
    try:
        yield
    except OSError as error:
        may_write = os.access(os.path.dirname(directory), os.W_OK | os.X_OK)
        if error.errno not in (errno.EACCES, errno.EBUSY, errno.ETXTBSY) or not may_write:
            raise
        found = ", ".join(open_below(directory)) or "no process of this machine that this user can see"
        message = (
            f"{error.strerror}: some file systems (SMB) do not rename a directory while a file in it is open. Open: "
            f"{found}. Close such files, here and on other machines, and save again, or save under another name"
        )
        raise OSError(errno.EBUSY, message) from error


def _is_aligned(offset: int, view: memoryview) -> bool:
    """Whether direct I/O must take this; what it refuses otherwise is the caller's doing."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    return not any(number % DIRECT_ALIGNMENT for number in (offset, len(view), address))


class _LocalFile:
    """An open file; `_descriptor` is used for direct I/O until `_leave_direct`."""

    _descriptor = -1
    _replaced: tuple[int, ...] = ()  # other threads may be using these

    def __init__(self, path: str, descriptor: int, direct: bool | Literal["auto"]) -> None:
        self._path, self._descriptor, self._must = path, descriptor, direct is True
        self.alignment = DIRECT_ALIGNMENT if direct else 1
        self._fallback = threading.Lock()

    def _is_left(self, error: OSError, offset: int, view: memoryview, *, was_direct: bool) -> bool:
        """Leave direct I/O if that is what was refused, and may be left."""
        if error.errno not in UNSUPPORTED or not was_direct:
            return False
        if self._must and _is_aligned(offset, view):
            raise OSError(errno.EOPNOTSUPP, _NO_DIRECT) from error
        self._leave_direct()
        return True

    def _leave_direct(self) -> None:
        with self._fallback:
            if self.alignment > 1:
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
                # A file system in user space is not notified of changed flags: it has to be opened again.
                with contextlib.suppress(OSError):
                    opened = os.open(f"/proc/self/fd/{self._descriptor}", flags & os.O_ACCMODE | os.O_CLOEXEC)
                    self._replaced += (self._descriptor,)
                    self._descriptor = opened
                self.alignment = 1

    def _take_descriptors(self) -> list[int]:
        """All that are to be closed; none the second time."""
        taken = [each for each in (*self._replaced, self._descriptor) if each >= 0]
        self._replaced, self._descriptor = (), -1
        return taken


class _LocalSink(_LocalFile):
    def write_at(self, offset: int, data: np.ndarray) -> None:
        view = memoryview(data)
        with _storage(f"write {len(view)} bytes at {offset}", self._path):
            while view:
                was_direct = self.alignment > 1
                try:
                    done = os.pwrite(self._descriptor, view, offset)
                except OSError as error:
                    if not self._is_left(error, offset, view, was_direct=was_direct):
                        raise
                    continue
                if done == 0:
                    raise OSError(errno.EIO, "wrote nothing")
                offset, view = offset + done, view[done:]
                if view and done % self.alignment:
                    self._leave_direct()  # a short write left an offset that direct I/O refuses

    def finish(self, size: int, *, sync: bool) -> None:
        with _storage("finish writing", self._path):
            try:
                if os.fstat(self._descriptor).st_size != size:
                    os.ftruncate(self._descriptor, size)
                if sync:
                    for descriptor in (*self._replaced, self._descriptor):
                        _sync(descriptor, data_only=True)
            finally:
                self._close()
            with contextlib.suppress(FileNotFoundError):  # some files have no name, as that of a trial of the disk
                _check_size(self._path, size)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        with contextlib.ExitStack() as closing:
            for descriptor in self._take_descriptors():
                closing.callback(_close_written, descriptor)


class _LocalSource(_LocalFile):
    size = 0

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        view, filled = memoryview(data), 0
        with _storage(f"read {needed} bytes at {offset}", self._path):
            while filled < needed:
                was_direct, rest = self.alignment > 1, view[filled:]
                try:
                    done = _read_at(self._descriptor, rest, offset + filled, is_direct=was_direct)
                except OSError as error:
                    if not self._is_left(error, offset + filled, rest, was_direct=was_direct):
                        raise
                    continue
                if done == 0:
                    raise CorruptCheckpointError(f"{self._path}: ends at byte {offset + filled}, expected more")
                filled += done
                if filled < needed and filled % self.alignment:
                    self._leave_direct()

    def close(self) -> None:
        for descriptor in self._take_descriptors():
            close_read(descriptor)

    __del__ = close  # an interrupt may lose a source on its way to who asked for it


def _read_at(descriptor: int, view: memoryview, offset: int, *, is_direct: bool) -> int:
    """Read into memory at an offset. Python calls preadv2 on Linux, which some sandboxes refuse."""
    if hasattr(os, "preadv"):
        try:
            return os.preadv(descriptor, [view], offset)
        except OSError as error:
            if error.errno not in NOT_OFFERED or (is_direct and error.errno == errno.EINVAL):
                raise
    data = os.pread(descriptor, len(view), offset)
    view[: len(data)] = data
    return len(data)


def _sync(descriptor: int, *, data_only: bool = False) -> None:
    """Bring a file or the names of a directory to the medium; the data of a file at least."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in {*UNSUPPORTED, errno.ENOTTY, errno.ENODEV}:  # network file systems have no such call
                raise
    if data_only and hasattr(os, "fdatasync"):
        try:
            os.fdatasync(descriptor)
            return
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise
    os.fsync(descriptor)


def _check_size(path: str, size: int) -> None:
    """Make sure that a closed file has its size. A file system that ignores cuts (s3fs) gets a new, shorter file."""
    found = again(os.lstat, path)
    if found.st_size > size:
        _cannot_cut.add(found.st_dev)
        _write_anew(path, size)
        found = again(os.lstat, path)
    if found.st_size != size:
        raise OSError(
            errno.EIO,
            f"the closed file has {found.st_size} bytes, expected {size}: this file system loses what is written; try "
            "StoreSettings(direct_io=False), or choose another directory",
        )


def _is_without_cuts(path: str) -> bool:
    """Whether files there must not be padded, as direct I/O needs."""
    return bool(_cannot_cut) and again(os.stat, os.path.dirname(path)).st_dev in _cannot_cut


def _write_anew(path: str, size: int) -> None:
    """Put a file of the first bytes of this one in its place, and sync it."""
    descriptor, shorter = _create_beside(path, HALF_MADE[0])
    source = os.open(path, os.O_RDONLY | _PLAIN)
    try:
        at = 0
        while at < size and (data := os.pread(source, min(_COPY_BYTES, size - at), at)):
            _write_all(descriptor, data)
            at += len(data)
        _sync(descriptor)
    finally:
        close_read(source)
        _close_written(descriptor)
    again(os.unlink, path)
    again(os.rename, shorter, path)


def _sync_path(path: str) -> None:
    descriptor = open_to_sync(path)
    try:
        _sync(descriptor)
    finally:
        close_read(descriptor)


class LocalBackend:
    """Files of this machine, or of a network file system mounted on it. Instances keep no state."""

    def create(self, path: str, *, direct: bool | Literal["auto"]) -> _LocalSink:
        """Create a file that must not exist; see `backend.Files`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _storage("create the file", path):
            _refuse_without_direct(direct)
            if direct and _O_DIRECT and not (direct == "auto" and _is_without_cuts(path)):
                try:
                    return _LocalSink(path, os.open(path, flags | _O_DIRECT, 0o666), direct)
                except OSError as error:
                    if error.errno not in NOT_OFFERED:
                        raise
                    with contextlib.suppress(FileNotFoundError):
                        again(os.unlink, path)  # some file systems create the file before they refuse O_DIRECT
                    if direct is True:
                        raise OSError(errno.EOPNOTSUPP, _NO_DIRECT) from error
            return _LocalSink(path, os.open(path, flags, 0o666), direct=False)

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> _LocalSource:
        """Open a regular file below a directory, following no link; see `backend.Files`."""
        with _storage("open the file", os.path.join(directory, name)):
            return again(_open_below, directory, name, direct)

    def list(self, path: str) -> list[Entry]:
        """The entries of a directory, sorted by name."""
        with _storage("list the directory", path):
            return sorted(again(entries_of, path), key=lambda entry: entry.name)

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        """Create a directory; with `parents` all on the way to it, and `sync` makes their names durable, if it can."""
        with _storage("create the directory", path):
            if not parents:
                again(os.mkdir, path)
                return
            missing, target = list[str](), path
            while not is_directory(path):
                if is_there(path) and not is_directory(path):  # else made between the two looks
                    raise OSError(errno.ENOTDIR, "not a directory")
                missing.append(path)
                path = os.path.dirname(path)
            if missing:
                _forget_ways_below(os.path.realpath(missing[-1]))
            for folder in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    again(os.mkdir, folder)
            if sync:
                self._sync_way_to(os.path.realpath(target))

    def _sync_way_to(self, directory: str) -> None:
        """Make durable all names on the way to it; once, as whoever made them may not have."""
        marks = marks_of_way(directory)  # before the sync, which need not bring what is made meanwhile
        if _durable_ways.get(directory) != marks:
            for parent in parents_on_volume(directory):
                sync_directory(self, parent, tolerated=(errno.EACCES, errno.EPERM))  # one may pass it and not read it
            _durable_ways[directory] = marks

    def remove(self, path: str) -> None:
        """Remove a file or a whole directory; nothing there is no error."""
        with _storage("remove", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(again(os.lstat, path).st_mode):
                remove_tree(path)
            else:
                again(os.unlink, path)

    def volume(self, path: str) -> int:
        """The device number of the file system."""
        with _storage("look at the directory", path):
            return again(os.stat, path).st_dev

    def sync(self, path: str) -> None:
        """Sync one file's data, or one directory's entries."""
        with _storage("sync", path):
            _sync_path(path)

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory to a name that must not exist.

        A call that was made twice, after a signal or by a network file system, is not told as failed if it was done.
        """
        with _storage(f"rename to {target}", source):
            rename_to_new(source, target)

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        """Swap two names; without kernel support by way of a side name that `transaction.py` knows to recover from."""
        with _storage(f"exchange with {second}", first):
            with _said_to_be_open(second):
                if exchange_names(first, second):
                    return
            aside = side_name(second)
            if is_there(second) and is_there(aside):  # left by a crash, and not cleaned up: it may hold anything
                raise OSError(errno.EBUSY, f"{aside} is in the way, which is no part of this: move it away")
            with _said_to_be_open(second):
                rename_all([(second, aside), (first, second), (aside, first)], self.sync if sync else None)

    def point(self, path: str, target: str | None) -> None:
        """Have a link stand for another name in its directory."""
        with _storage("make the link", path):
            point_to(path, target)

    def write_new(self, path: str, data: bytes) -> bool:
        """Create a file with this content, atomically; False if the name is taken.

        A file system may have neither hard links nor a rename that never replaces. The name is made first there, and a
        crash leaves a file that is empty, or holds the first part of the content.
        """
        with _storage("create the file", path):
            descriptor, draft = _create_beside(path, HALF_MADE[0])
            try:
                _write_and_close(descriptor, data)
                is_new = give_name(draft, path)
            finally:
                with contextlib.suppress(FileNotFoundError):  # it was renamed
                    again(os.unlink, draft)
            return _create_whole(path, data) if is_new is None else is_new

    def append(self, path: str, data: bytes) -> None:
        """Add bytes to the end of a file, creating it if need be."""
        with _storage("append to the file", path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _PLAIN, 0o666)
            try:
                _check_regular(descriptor)
                _write_all(descriptor, data)
            finally:
                _close_written(descriptor)

    def touch(self, path: str) -> None:
        """Set a file's modification time to now."""
        with _storage("touch the file", path):
            again(os.utime, path)

    def modified_ns(self, path: str) -> int:
        """The modification time of a file; opened for it, as a network file system may else answer from its cache."""
        with _storage("look at the file", path):
            descriptor = again(os.open, path, os.O_RDONLY | _PLAIN)
            try:
                return _check_regular(descriptor).st_mtime_ns
            finally:
                close_read(descriptor)


def _forget_ways_below(missing: str) -> None:
    """What is not there is made anew: it will not be on the disk because one of before with its name was."""
    for way in [each for each in list(_durable_ways) if f"{each}/".startswith(f"{missing}/")]:
        _durable_ways.pop(way, None)


def _close_written(descriptor: int) -> None:
    with contextlib.suppress(InterruptedError):  # it is closed all the same: a second time could close another's
        os.close(descriptor)


def _create_whole(path: str, data: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        _write_and_close(descriptor, data)
    except BaseException:
        again(os.unlink, path)  # nobody else has made it
        raise
    return True


def _write_and_close(descriptor: int, data: bytes) -> None:
    try:
        _write_all(descriptor, data)
        _sync(descriptor)
    finally:
        _close_written(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _create_beside(path: str, prefix: str) -> tuple[int, str]:
    """A new file in the same directory, with the permissions of any other."""
    beside = os.path.join(os.path.dirname(path), prefix + secrets.token_hex(8))
    return os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), beside


def _check_regular(descriptor: int) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(code, "not a regular file; move it away, or bring the file back that was there")
    return found


def side_name(path: str) -> str:
    """Where the older of two exchanged directories waits when the system cannot swap them atomically."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.aside")


def _refuse_without_direct(direct: bool | Literal["auto"]) -> None:
    if direct is True and not _O_DIRECT:
        raise OSError(errno.EOPNOTSUPP, _NO_DIRECT)


def _open_below(directory: str, name: str, direct: bool | Literal["auto"]) -> _LocalSource:
    here = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        *folders, last = name.split("/")
        for folder in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            here.append(os.open(folder, flags, dir_fd=here[-1]))
        return _open_regular(last, here[-1], direct, os.path.join(directory, name))
    finally:
        while here:
            close_read(here.pop())


def _open_regular(name: str, folder: int, direct: bool | Literal["auto"], path: str) -> _LocalSource:
    flags = os.O_RDONLY | _PLAIN
    descriptor, refusal = -1, None
    _refuse_without_direct(direct)
    if direct and _O_DIRECT:
        try:
            descriptor = os.open(name, flags | _O_DIRECT, dir_fd=folder)
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise
            refusal = error
    is_direct = descriptor >= 0
    if descriptor < 0:
        descriptor = os.open(name, flags, dir_fd=folder)
    source = _LocalSource(path, descriptor, is_direct and direct)
    try:
        found = _check_regular(descriptor)
        if refusal is not None and direct is True:
            raise OSError(errno.EOPNOTSUPP, _NO_DIRECT) from refusal
        source.size, refusal = found.st_size, None  # its traceback would keep the source until it is collected
        return source
    except BaseException:
        source.close()
        raise


def is_file(path: str) -> bool:
    """Whether there is a regular file at this path."""
    return os.path.isfile(path)


def file_exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is something at this path; a network file system that does not answer counts as no."""
    try:
        return os.path.lexists(path)
    except OSError:
        return False
