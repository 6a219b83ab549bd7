"""Operations on names of the local file system, for `local.py`: rename, exchange, link, list and remove."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from jaxckpt_train._validation import is_url
from jaxckpt_train.store.backends.base import UNAVAILABLE, Entry

_LOOKS = 3
P = ParamSpec("P")
T = TypeVar("T")
_RENAME_NOREPLACE, _RENAME_EXCHANGE, _AT_FDCWD = 1, 2, -100
_FICLONE = 0x40049409  # on Linux; an unknown request elsewhere
_FLAGS_OF_MACOS = {_RENAME_NOREPLACE: 4, _RENAME_EXCHANGE: 2}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LEVELS = 500  # of directories that are removed: half of Python's call stack


def retry_interrupted(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function and repeat the call if a signal interrupts it (EINTR).

    Python repeats interrupted reads, writes and syncs itself, but not calls on names, which network and user-space file
    systems may interrupt. A stale name (ESTALE) of a network file system is looked up again, a few times; if it stays
    stale, another machine has removed the file, and this raises FileNotFoundError.
    """
    looks = 1
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue  # Python has run the signal's handler by now, and it did not raise
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            if looks == _LOOKS:
                raise FileNotFoundError(errno.ESTALE, error.strerror, error.filename) from error
            looks += 1


def name_exists(path: str) -> bool:
    """Whether the name exists, even as a broken link. Unlike `os.path.lexists`, raises other errors."""
    try:
        retry_interrupted(os.lstat, path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_directory(path: str) -> bool:
    """Whether this is a directory or a link to one. Unlike `os.path.isdir`, raises other errors."""
    try:
        return stat.S_ISDIR(retry_interrupted(os.stat, path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def scan_entries(path: str | int) -> list[Entry]:
    """The entries of a directory, in no particular order.

    Files are not inspected with `stat`: one file with a damaged inode must not hide the others.
    """
    entries = []
    with os.scandir(path) as found:
        for item in found:
            if item.is_dir(follow_symlinks=False):
                entries.append(Entry(item.name, "directory"))
            else:
                entries.append(Entry(item.name, "file" if item.is_file(follow_symlinks=False) else "other"))
    return entries


def remove_tree(path: str) -> None:
    """Remove a directory with everything in it, even while another process removes parts of it.

    Files that another client of a network file system has open stay under names that the system gives, and so does what
    is more than `_MAX_LEVELS` deep. Everything else is removed, and then an OSError with ENOTEMPTY or EBUSY is raised.
    """
    _remove_contents(retry_interrupted(os.open, path, _FOLDER), _MAX_LEVELS)
    retry_interrupted(os.rmdir, path)


def _remove_contents(folder: int, levels: int) -> None:
    in_use = None
    try:
        for entry in retry_interrupted(scan_entries, folder):
            try:
                if entry.kind == "directory":
                    if not levels:
                        raise OSError(errno.ENOTEMPTY, "directories are nested too deep: remove them by hand")
                    _remove_contents(retry_interrupted(os.open, entry.name, _FOLDER, dir_fd=folder), levels - 1)
                    retry_interrupted(os.rmdir, entry.name, dir_fd=folder)
                else:
                    retry_interrupted(os.unlink, entry.name, dir_fd=folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                    raise
                in_use = error
    finally:
        close_read(folder)
    if in_use is not None:
        raise in_use


def shared_bytes(folders: Sequence[str]) -> int:
    """How much of the size of the data files of these checkpoints would not be freed with them, which may be gone.

    A file that has a name elsewhere, too, is not freed, and one with several names here only once.
    """
    found: dict[tuple[int, int], list[os.stat_result]] = {}
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names if place != folder else ():  # its manifest is no data
                with contextlib.suppress(FileNotFoundError):
                    each = os.lstat(os.path.join(place, name))
                    found.setdefault((each.st_dev, each.st_ino), []).append(each)
    return sum(each[0].st_size * (len(each) - (each[0].st_nlink <= len(each))) for each in found.values())


def close_read(descriptor: int) -> None:
    """Close a descriptor that was only read."""
    with contextlib.suppress(OSError):  # nothing was written, so no data can be lost
        os.close(descriptor)


def parents_on_volume(directory: str) -> Iterator[str]:
    """Yield the parents of a directory on the same file system, nearest first."""
    volume = retry_interrupted(os.stat, directory).st_dev
    while (parent := os.path.dirname(directory)) != directory and retry_interrupted(os.stat, parent).st_dev == volume:
        yield parent
        directory = parent


def path_marks(directory: str) -> tuple[object, ...]:
    """A value that changes if a directory, or one of its parents on the file system, is recreated or restored.

    A new directory often gets the inode number of a removed one, so the modification time of its parent counts, too.
    """
    parents = list(parents_on_volume(directory))
    found = [retry_interrupted(os.stat, each) for each in (directory, *parents)]
    changed = [each.st_mtime_ns for each in found[1:2]]  # others change often for other reasons
    return (*changed, *((each.st_dev, each.st_ino) for each in found))


def open_to_sync(path: str) -> int:
    """Open a path for a sync: a file without following a link, a directory also through a link."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP or not is_directory(path):
            raise
    return os.open(path, flags | os.O_DIRECTORY)


def rename_to_new(source: str, target: str) -> None:
    """Move a file or directory to a free name.

    If a signal or a network file system repeats the call, a rename that was already done is not an error.
    """
    moved = retry_interrupted(os.lstat, source)
    try:
        if not retry_interrupted(_renameat2, source, target, _RENAME_NOREPLACE):
            if name_exists(target):
                raise FileExistsError(errno.EEXIST, "exists")
            retry_interrupted(os.rename, source, target)
    except (FileExistsError, FileNotFoundError):
        if name_exists(source) or not name_exists(target):
            raise
        if not os.path.samestat(retry_interrupted(os.lstat, target), moved):
            raise


def link_or_rename(source: str, target: str) -> bool | None:
    """Give a finished file a second name, or rename it, if the name is free; False: the name is taken.

    None: this file system has neither hard links nor a rename that never replaces.
    """
    with contextlib.suppress(FileExistsError):
        try:
            retry_interrupted(os.link, source, target)
        except OSError as error:
            if error.errno not in {*UNAVAILABLE, errno.EMLINK}:
                raise
            return True if retry_interrupted(_renameat2, source, target, _RENAME_NOREPLACE) else None
        return True
    return False


def share_blocks(source: str, target: str) -> bool:
    """Make a file that shares the blocks of another, as btrfs and XFS can; False: this file system cannot."""
    with contextlib.suppress(OSError), open(source, "rb", opener=_open_plain) as old, open(target, "xb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        return True
    with contextlib.suppress(OSError):
        retry_interrupted(os.unlink, target)
    return False


def _open_plain(path: str, flags: int) -> int:
    """Open a file, but follow no link, and do not wait for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def backdate(path: str, seconds: float) -> None:
    """Set a file's modification time back."""
    found = retry_interrupted(os.stat, path)
    retry_interrupted(os.utime, path, (found.st_atime, found.st_mtime - seconds))


def replace_symlink(path: str, target: str | None) -> None:
    """Make `path` a symbolic link to `target`; None removes the link. Raises FileExistsError if it is not a link."""
    try:
        if retry_interrupted(os.readlink, path) == target:
            return
    except FileNotFoundError:
        if target is None:
            return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise FileExistsError(errno.EEXIST, "exists and is not a link, so it was kept: rename it") from error
    if target is None:
        retry_interrupted(os.unlink, path)
        return
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.new")
    with contextlib.suppress(FileNotFoundError):  # a crash may have left one
        retry_interrupted(os.unlink, temporary)
    retry_interrupted(os.symlink, target, temporary)
    retry_interrupted(os.rename, temporary, path)


def is_same_file(path: str, other: str) -> bool:
    """Whether two paths refer to the same file or directory; a URL has no other name."""
    if is_url(path) or is_url(other):
        return path == other
    try:
        return os.path.samestat(retry_interrupted(os.stat, path), retry_interrupted(os.stat, other))
    except FileNotFoundError:
        return False


def exchange_names(first: str, second: str) -> bool:
    """Swap two names atomically; False if the kernel or file system cannot."""
    was_first = retry_interrupted(os.lstat, first)
    while True:
        try:
            return _renameat2(first, second, _RENAME_EXCHANGE)
        except InterruptedError:  # check whether it was done, because a second call would undo it
            if os.path.samestat(retry_interrupted(os.lstat, second), was_first):
                return True


def rename_all(steps: list[tuple[str, str]], sync: Callable[[str], None] | None) -> None:
    """Rename several files in order, within one directory that `sync` syncs in between; undo all of it on an error."""
    done: list[tuple[str, str]] = []
    try:
        for source, target in steps:
            if sync is not None and done:
                sync(os.path.dirname(source))
            retry_interrupted(os.rename, source, target)
            done.append((source, target))
    except OSError:
        for source, target in reversed(done):
            retry_interrupted(os.rename, target, source)
        raise


@functools.cache
def _c_function(name: str) -> Callable[..., int] | None:
    """A function of the C library; cached, because each lookup creates classes that only the collector frees."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def _renameat2(source: str, target: str, flags: int) -> bool:
    """Rename with Linux flags; False if the kernel or file system does not support them."""
    linux, macos = _c_function("renameat2"), _c_function("renamex_np")
    if linux is not None:
        result = linux(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    elif macos is not None:
        result = macos(os.fsencode(source), os.fsencode(target), _FLAGS_OF_MACOS[flags])
    else:
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in UNAVAILABLE:
        return False
    raise OSError(code, os.strerror(code))


def real_path(path: str) -> str:
    """The path with all links resolved: model caches have files of one name that are links to others."""
    return path if is_url(path) else os.path.realpath(path)
