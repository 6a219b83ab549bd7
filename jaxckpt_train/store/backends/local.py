"""The local file system backend, with direct I/O where the file system supports it, and facts about file systems.

All access to the local disk is in this module and in `local_names.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import (
    TEMPORARY_PREFIXES,
    UNAVAILABLE,
    UNSUPPORTED,
    Entry,
    Source,
    StoredRecord,
    storage_error,
    sync_directory,
)
from jaxckpt_train.store.backends.local_names import (
    close_read,
    exchange_names,
    is_directory,
    link_or_rename,
    name_exists,
    open_to_sync,
    parents_on_volume,
    path_marks,
    remove_tree,
    rename_all,
    rename_to_new,
    replace_symlink,
    retry_interrupted,
    scan_entries,
    share_blocks,
)
from jaxckpt_train.store.backends.records import add_next_version, read_newest_version, refresh_version

if TYPE_CHECKING:  # `jaxckpt --help` imports this module, and needs no numpy
    import numpy as np

MOUNTS = "/proc/self/mountinfo"
IN_MEMORY = {"tmpfs", "ramfs"}
_OBJECT_STORES = re.compile(r"s3fs|gcsfuse|rclone|goofys|blobfuse|mountpoint-s3|ossfs|cosfs")
_UNSYNCED = {"volatile", "nobarrier", "barrier=0"}
_ESCAPED = re.compile(r"\\([0-7]{3})")
DIRECT_ALIGNMENT = 4096
_EARLY_BYTES = 1 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # on macOS, fsync does not reach the medium
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follow no link, and do not wait for a pipe
_durable_paths: dict[str, tuple[object, ...]] = {}  # marks of directories whose names and parents' names are durable
_NO_DIRECT = (
    'direct_io=True requires direct I/O, which this system or file system does not support; use direct_io="auto"'
)


class LocalBackend:
    """Files on this machine or on a mounted network file system. Instances have no state."""

    def create(self, path: str, *, direct: bool | Literal["auto"]) -> _LocalSink:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _storage_errors("create the file", path):
            _refuse_without_direct(direct)
            if direct and _O_DIRECT:
                try:
                    return _LocalSink(path, os.open(path, flags | _O_DIRECT, 0o666), direct)
                except OSError as error:
                    if error.errno not in UNAVAILABLE:
                        raise
                    with contextlib.suppress(FileNotFoundError):
                        retry_interrupted(os.unlink, path)  # some file systems create the file and then refuse O_DIRECT
                    if direct is True:
                        raise OSError(errno.EOPNOTSUPP, _NO_DIRECT) from error
            return _LocalSink(path, os.open(path, flags, 0o666), direct=False)

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> Source:
        return open_local(directory, name, direct=direct)

    def clone(self, source: str, target: str, size: int) -> bool:
        """By a hard link, or by sharing the blocks where the file system offers that."""
        try:
            found = retry_interrupted(os.lstat, source)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:  # no reader follows a symbolic link
                return False
            retry_interrupted(os.link, source, target)
        except FileNotFoundError:
            return False
        except OSError:  # no links here, too many, or not for this user; a network may have lost the response
            with contextlib.suppress(OSError):
                retry_interrupted(os.unlink, target)
            return share_blocks(source, target)
        return True

    def share(self, source: str, target: str) -> bool:
        return share_blocks(source, target)

    def list(self, path: str) -> list[Entry]:
        with _storage_errors("list the directory", path):
            return sorted(retry_interrupted(scan_entries, path), key=lambda entry: entry.name)

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        with _storage_errors("create the directory", path):
            if not parents:
                retry_interrupted(os.mkdir, path)
                return
            missing, target = list[str](), path
            while not is_directory(path):
                if name_exists(path) and not is_directory(path):  # asked again: it may have been created in between
                    raise OSError(errno.ENOTDIR, "not a directory")
                missing.append(path)
                path = os.path.dirname(path)
            if missing:
                _forget_durable_below(os.path.realpath(missing[-1]))
            for folder in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    retry_interrupted(os.mkdir, folder)
            if sync:
                self._sync_parents_of(os.path.realpath(target))

    def _sync_parents_of(self, directory: str) -> None:
        """Make the names of a directory and its parents durable, once per directory.

        A directory that already existed may not be durable either, because its creator may not have synced it.
        """
        marks = path_marks(directory)  # taken before the sync, which may not cover later changes
        if _durable_paths.get(directory) != marks:
            for parent in parents_on_volume(directory):
                # A user may pass through a directory without permission to read and sync it.
                sync_directory(self, parent, tolerated=(errno.EACCES, errno.EPERM))
            _durable_paths[directory] = marks

    def remove(self, path: str) -> None:
        with _storage_errors("remove", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(retry_interrupted(os.lstat, path).st_mode):
                remove_tree(path)
            else:
                retry_interrupted(os.unlink, path)

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        with _storage_errors("look at the path", path):
            try:
                mode = retry_interrupted(os.stat, path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return "other" if name_exists(path) else None
        return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"

    def sync(self, path: str) -> None:
        with _storage_errors("sync", path):
            descriptor = open_to_sync(path)
            try:
                _sync(descriptor)
            finally:
                close_read(descriptor)

    def forget(self, path: str) -> None:
        """Free the page cache of a file that is synced and will not be read soon, as far as the system can."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                descriptor = open_to_sync(path)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    close_read(descriptor)

    def rename(self, source: str, target: str) -> None:
        with _storage_errors(f"rename to {target}", source):
            rename_to_new(source, target)

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        """Swap two names; without kernel support, through a side name that later saves recover from."""
        with _storage_errors(f"exchange with {second}", first):
            if exchange_names(first, second):
                return
            aside = side_name(second)
            if name_exists(second) and name_exists(aside):  # left by a crash, so it may hold anything
                raise OSError(errno.EBUSY, f"{aside} exists and is not part of this save: move it away")
            rename_all([(second, aside), (first, second), (aside, first)], self.sync if sync else None)

    def point(self, path: str, target: str | None) -> None:
        with _storage_errors("make the link", path):
            replace_symlink(path, target)

    def write_new(self, path: str, data: bytes) -> bool:
        """Create a file with this content, atomically; False if the name is taken.

        On a file system with neither hard links nor a rename that never replaces, the name appears before the content:
        a crash there may leave an empty or incomplete file.
        """
        with _storage_errors("create the file", path):
            draft = os.path.join(os.path.dirname(path), TEMPORARY_PREFIXES[0] + secrets.token_hex(8))
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _write_and_close(descriptor, data)
                is_new = link_or_rename(draft, path)
            finally:
                with contextlib.suppress(FileNotFoundError):  # link_or_rename may have renamed it
                    retry_interrupted(os.unlink, draft)
            return _create_whole(path, data) if is_new is None else is_new

    def append(self, path: str, data: bytes) -> None:
        with _storage_errors("append to the file", path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _PLAIN, 0o666)
            try:
                _check_regular(descriptor)
                _write_all(descriptor, data)
            finally:
                _close_written(descriptor)

    def touch(self, path: str) -> None:
        with _storage_errors("touch the file", path):
            retry_interrupted(os.utime, path)

    def read_record(self, path: str) -> StoredRecord | None:
        return read_newest_version(self, path)

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        return add_next_version(self, path, data, version)

    def refresh_record(self, path: str, version: int) -> None:
        refresh_version(self, path, version)


def side_name(path: str) -> str:
    """The path of the older directory during an exchange, if the system cannot swap two names atomically."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.aside")


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A new folder for code that needs local files, removed at the end."""
    import tempfile  # most processes never need it

    with _storage_errors("create a folder for temporary files", tempfile.gettempdir()):
        folder = tempfile.mkdtemp(prefix="jaxckpt-files-")
    try:
        yield folder
    finally:
        LocalBackend().remove(folder)


@contextlib.contextmanager
def _storage_errors(action: str, path: str) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the action, the path and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error.errno or errno.EIO, action, path, error.strerror) from error


class _LocalFile:
    """An open file; `_descriptor` uses direct I/O until `_leave_direct`."""

    _descriptor = -1
    _replaced: tuple[int, ...] = ()  # kept open, because other threads may be using them

    def __init__(self, path: str, descriptor: int, direct: bool | Literal["auto"]) -> None:
        self._path, self._descriptor, self._requires_direct = path, descriptor, direct is True
        self.alignment = DIRECT_ALIGNMENT if direct else 1
        self._fallback = threading.Lock()

    def _left_direct(self, error: OSError, *, was_direct: bool) -> bool:
        """Leave direct I/O if it was the reason of the error and the settings allow it; whether it was left."""
        if error.errno not in UNSUPPORTED or not was_direct:
            return False
        if self._requires_direct:
            raise OSError(errno.EOPNOTSUPP, _NO_DIRECT) from error
        self._leave_direct()
        return True

    def _leave_direct(self) -> None:
        with self._fallback:
            if self.alignment > 1:
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
                # A user-space file system does not see changed flags, so open the file again.
                with contextlib.suppress(OSError):
                    opened = os.open(f"/proc/self/fd/{self._descriptor}", flags & os.O_ACCMODE | os.O_CLOEXEC)
                    self._replaced += (self._descriptor,)
                    self._descriptor = opened
                self.alignment = 1

    def _take_descriptors(self) -> list[int]:
        """The descriptors to close; empty the second time."""
        taken = [each for each in (*self._replaced, self._descriptor) if each >= 0]
        self._replaced, self._descriptor = (), -1
        return taken


class _LocalSink(_LocalFile):
    in_order = False
    _plain = -1

    def write_at(self, offset: int, data: np.ndarray) -> None:
        view = memoryview(data)
        with _storage_errors(f"write {len(view)} bytes at {offset}", self._path):
            while view:
                is_aligned = (offset | len(view)) % self.alignment == 0
                was_direct = is_aligned and self.alignment > 1
                try:
                    done = os.pwrite(self._descriptor if is_aligned else self._buffered(), view, offset)
                except OSError as error:
                    if not self._left_direct(error, was_direct=was_direct):
                        raise
                    continue
                if done == 0:
                    raise OSError(errno.EIO, "the file system wrote no bytes")
                offset, view = offset + done, view[done:]
            if sys.platform == "linux" and self.alignment == 1 and len(data) >= _EARLY_BYTES:
                # The kernel begins to write what is dirty there, while more comes, and not only in `fsync`.
                os.posix_fadvise(self._descriptor, offset - len(data), len(data), os.POSIX_FADV_DONTNEED)

    def _buffered(self) -> int:
        """A descriptor for pieces that direct I/O refuses."""
        with self._fallback:
            if self._plain < 0:
                with contextlib.suppress(OSError):
                    path, flags = f"/proc/self/fd/{self._descriptor}", os.O_WRONLY | os.O_CLOEXEC
                    self._plain = os.open(path, flags)
                    self._replaced += (self._plain,)
        if self._plain < 0:
            self._leave_direct()
            return self._descriptor
        return self._plain

    def finish(self, size: int, *, sync: bool) -> None:
        with _storage_errors("finish writing", self._path):
            try:
                if os.fstat(self._descriptor).st_size != size:
                    os.ftruncate(self._descriptor, size)
                if sync:
                    for descriptor in (*self._replaced, self._descriptor):
                        _sync(descriptor, data_only=True)
            finally:
                self._close()
            with contextlib.suppress(FileNotFoundError):  # the file of a disk speed test has no name
                _check_size(self._path, size)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        with contextlib.ExitStack() as closing:
            for descriptor in self._take_descriptors():
                closing.callback(_close_written, descriptor)


class LocalSource(_LocalFile):
    """A file that is being read; a `Source`."""

    size = modified_ns = 0
    identity: tuple[int, ...] | None = None

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        view, filled = memoryview(data), 0
        with _storage_errors(f"read {needed} bytes at {offset}", self._path):
            while filled < needed:
                was_direct = self.alignment > 1
                try:
                    done = _read_at(self._descriptor, view[filled:], offset + filled)
                except OSError as error:
                    if not self._left_direct(error, was_direct=was_direct):
                        raise
                    continue
                if done == 0:
                    raise CorruptCheckpointError(f"{self._path}: ends at byte {offset + filled}, expected more")
                filled += done
                if filled < needed and filled % self.alignment:
                    self._leave_direct()

    def opened(self) -> io.FileIO:
        """The file, for `socket.sendfile`; to be closed before this source."""
        return open(self._descriptor, "rb", buffering=0, closefd=False)

    def close(self) -> None:
        """Close the file."""
        for descriptor in self._take_descriptors():
            close_read(descriptor)

    __del__ = close  # an interrupt may lose a source before its caller receives it


def open_local(directory: str, name: str, *, direct: bool | Literal["auto"] = False) -> LocalSource:
    """Open a file by its path in a directory, without following links there. Raises StorageError."""
    with _storage_errors("open the file", os.path.join(directory, name)):
        return retry_interrupted(_open_below, directory, name, direct)


def _open_below(directory: str, name: str, direct: bool | Literal["auto"]) -> LocalSource:
    descriptors = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        *folders, last = name.split("/")
        for folder in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptors.append(os.open(folder, flags, dir_fd=descriptors[-1]))
        return _open_regular(last, descriptors[-1], direct, os.path.join(directory, name))
    finally:
        while descriptors:
            close_read(descriptors.pop())


def _open_regular(name: str, folder: int, direct: bool | Literal["auto"], path: str) -> LocalSource:
    flags = os.O_RDONLY | _PLAIN
    descriptor, refusal = -1, None
    _refuse_without_direct(direct)
    if direct and _O_DIRECT:
        try:
            descriptor = os.open(name, flags | _O_DIRECT, dir_fd=folder)
        except OSError as error:
            if error.errno not in UNAVAILABLE:
                raise
            refusal = error
    is_direct = descriptor >= 0
    if descriptor < 0:
        descriptor = os.open(name, flags, dir_fd=folder)
    source = LocalSource(path, descriptor, is_direct and direct)
    try:
        found = _check_regular(descriptor)
        if refusal is not None and direct is True:
            raise OSError(errno.EOPNOTSUPP, _NO_DIRECT) from refusal
        source.size, source.modified_ns = found.st_size, found.st_mtime_ns
        if found.st_nlink > 1:  # without the time of the last change of the inode, which is that of the newest link
            source.identity = (found.st_dev, found.st_ino, found.st_mtime_ns)
        refusal = None  # the error's traceback would keep the source alive
        return source
    except BaseException:
        source.close()
        raise


def _refuse_without_direct(direct: bool | Literal["auto"]) -> None:
    if direct is True and not _O_DIRECT:
        raise OSError(errno.EOPNOTSUPP, _NO_DIRECT)


def _check_regular(descriptor: int) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(code, "not a regular file; move it away, or restore the file that was there")
    return found


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    data = os.pread(descriptor, len(view), offset)
    view[: len(data)] = data
    return len(data)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _write_and_close(descriptor: int, data: bytes) -> None:
    try:
        _write_all(descriptor, data)
        _sync(descriptor)
    finally:
        _close_written(descriptor)


def _close_written(descriptor: int) -> None:
    with contextlib.suppress(InterruptedError):  # it is closed; a second call could close another thread's file
        os.close(descriptor)


def _create_whole(path: str, data: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        _write_and_close(descriptor, data)
    except BaseException:
        retry_interrupted(os.unlink, path)  # this call created it
        raise
    return True


def _sync(descriptor: int, *, data_only: bool = False) -> None:
    """Sync a file or directory to the medium; with `data_only`, at least a file's data."""
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in {*UNSUPPORTED, errno.ENOTTY, errno.ENODEV}:  # network file systems have no such call
                raise
    if data_only and hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def _forget_durable_below(missing: str) -> None:
    """Forget that paths below a missing directory are durable: they will be created again."""
    for path in [each for each in list(_durable_paths) if f"{each}/".startswith(f"{missing}/")]:
        _durable_paths.pop(path, None)


def _check_size(path: str, size: int) -> None:
    """Make sure that a closed file has its size: some file systems lose data, or cannot truncate files (s3fs)."""
    found = retry_interrupted(os.lstat, path).st_size
    if found != size:
        raise OSError(
            errno.EIO,
            f"the closed file has {found} bytes, expected {size}, so this file system is not reliable; try "
            "StoreSettings(direct_io=False), or choose another directory",
        )


class FileSystem(NamedTuple):
    """The file system of a directory.

    Attributes:
        kind: the type, such as "ext4"; "unknown" if the system does not report it.
        free_bytes: what this user may still write.
        free_files: how many more files can be created; None: there is no such limit.
    """

    kind: str
    mount: str
    total_bytes: int
    free_bytes: int
    free_files: int | None


def file_system_of(directory: str) -> FileSystem:
    """The file system that a directory is on. Raises StorageError: it cannot be inspected."""
    try:
        found = os.statvfs(directory)
        there = os.path.realpath(directory, strict=True)
    except OSError as error:
        raise StorageError(error.errno, f"cannot inspect the file system: {error.strerror}", directory) from error
    at = _mount_at(there)
    free_files = found.f_favail if found.f_files else None
    return FileSystem(at.kind, at.mount, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, free_files)


def mount_warnings(directory: str) -> list[str]:
    """Warnings about guarantees that a directory's file system or its mount options do not give."""
    at, found = _mount_at(os.path.realpath(directory)), list[str]()
    if at.kind.startswith("fuse") and (store := _OBJECT_STORES.search(f"{at.kind} {at.source}")):
        found.append(
            f"{store[0]} at {at.mount} implements a rename as a copy: a commit takes as long as the save and is not "
            "atomic, a crash may leave part of it, and two machines may own a run at the same time"
        )
    if options := sorted(_UNSYNCED.intersection(at.options)):
        found.append(
            f"{at.kind} at {at.mount} is mounted with {', '.join(options)}: a power cut may lose synced data, and so "
            "committed steps"
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
    """The mount of a path: the last of the longest matching lines of `MOUNTS`."""
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
