"""Names on the local file system, for `local.py`: given to nothing else, removed, and what tells names made anew."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import secrets
import stat
from collections.abc import Callable, Iterator

from jaxckpt_train.store.backends.base import NOT_OFFERED, Entry, again

_RENAME_NOREPLACE, _RENAME_EXCHANGE, _AT_FDCWD = 1, 2, -100
_FLAGS_OF_MACOS = {_RENAME_NOREPLACE: 4, _RENAME_EXCHANGE: 2}
_MAX_HANDLE_BYTES = 128
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LEVELS = 50  # open at once while a tree is removed


def is_there(path: str) -> bool:
    """Whether something has this name, also a link to nothing. Unlike `os.path`, other refusals are told."""
    try:
        again(os.lstat, path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_directory(path: str) -> bool:
    """Whether this is a directory, or a link to one. Unlike `os.path`, refusals are told."""
    try:
        return stat.S_ISDIR(again(os.stat, path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def entries_of(path: str | int) -> list[Entry]:
    """What is in a directory, in no order.

    A file is not looked at: one that its disk tells nothing of is a file all the same, and hides no other.
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
    """Remove a directory with all it holds, however deep. What another process removes meanwhile is removed.

    Each level is open while those below it go: what is deeper than some levels moves up to the first one before.
    Files that another client has open stay, under names that the system gives: all else is removed, then ENOTEMPTY
    or EBUSY is raised.
    """
    top = again(os.open, path, _FOLDER)
    try:
        while _remove_inside(top, top, _LEVELS):
            pass
    finally:
        close_read(top)
    again(os.rmdir, path)


def _remove_inside(folder: int, top: int, levels: int) -> bool:
    """Remove what is in a directory; whether some of it is in the first one now."""
    has_moved, in_use = False, None
    for entry in again(entries_of, folder):
        try:
            has_moved |= _remove_entry(entry, folder, top, levels)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                raise
            in_use = error
    if in_use is not None:
        raise in_use
    return has_moved


def _remove_entry(entry: Entry, folder: int, top: int, levels: int) -> bool:
    """Remove a file or directory; whether some of it is in the first directory now."""
    if entry.kind != "directory":
        again(os.unlink, entry.name, dir_fd=folder)
        return False
    if not levels:
        return _moved(entry.name, folder, top)
    inner = again(os.open, entry.name, _FOLDER, dir_fd=folder)
    try:
        has_moved = _remove_inside(inner, top, levels - 1)
    finally:
        close_read(inner)
    again(os.rmdir, entry.name, dir_fd=folder)
    return has_moved


def _moved(name: str, folder: int, top: int) -> bool:
    """Whether a directory is in the first one now; else it is empty, may not be written to, and is gone."""
    try:
        # A plain name: should a crash leave it there, it is one that an object may have given.
        again(os.rename, name, f"deep-{secrets.token_hex(8)}", src_dir_fd=folder, dst_dir_fd=top)
    except FileNotFoundError:  # moved by a call that was told as interrupted, or removed by somebody else
        return True
    except PermissionError as refused:
        try:
            again(os.rmdir, name, dir_fd=folder)
        except OSError:
            raise refused from None
        return False
    return True


def close_read(descriptor: int) -> None:
    """Close what was only read."""
    with contextlib.suppress(OSError):  # nothing was written, so nothing can be lost
        os.close(descriptor)


def parents_on_volume(directory: str) -> Iterator[str]:
    """The directories above it, nearest first, as far as they are of the same file system."""
    volume = again(os.stat, directory).st_dev
    while (parent := os.path.dirname(directory)) != directory and again(os.stat, parent).st_dev == volume:
        yield parent
        directory = parent


def marks_of_way(directory: str) -> tuple[object, ...]:
    """What is something else once a directory, or one above it on its file system, was made anew, or came back.

    A new directory often has the inode number of one that was removed, and within some milliseconds the same times. The
    kernel's handle of a directory is given once; where there is none, the time of the last change beside it must do.
    """
    parents = list(parents_on_volume(directory))
    changed = [again(os.stat, parent).st_mtime_ns for parent in parents[:1]]  # of those above: others change them often
    return (*changed, *map(_identity, (directory, *parents)))


def _identity(path: str) -> tuple[int, int, bytes]:
    found = again(os.stat, path)
    return found.st_dev, found.st_ino, _handle_of(path)


class _Handle(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("content", ctypes.c_ubyte * _MAX_HANDLE_BYTES),
    )


def _handle_of(path: str) -> bytes:
    """What the kernel tells this inode from all others by, of before and after; empty where it does not tell."""
    call, handle, mount = _of_the_c_library("name_to_handle_at"), _Handle(length=_MAX_HANDLE_BYTES), ctypes.c_int()
    if call is None or call(_AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount), 0) != 0:
        return b""
    return bytes(handle.content[: handle.length])


def open_to_sync(path: str) -> int:
    """A file, never by a link; a directory also by one, as users have them for their runs."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP or not is_directory(path):
            raise
    return os.open(path, flags | os.O_DIRECTORY)


def rename_to_new(source: str, target: str) -> None:
    """Move a file or directory to a name that must not exist.

    A rename that was made twice, after a signal or by a network file system, finds its own work done: that is no error.
    """
    moved = again(os.lstat, source)
    try:
        if not again(_renameat2, source, target, _RENAME_NOREPLACE):
            if is_there(target):
                raise FileExistsError(errno.EEXIST, "exists")
            again(os.rename, source, target)
    except (FileExistsError, FileNotFoundError):
        if is_there(source) or not is_there(target):
            raise
        if not os.path.samestat(again(os.lstat, target), moved):
            raise


def give_name(source: str, target: str) -> bool | None:
    """Give a finished file a second name, or another one, that must be free; False: it is taken.

    None: this file system has neither hard links nor a rename that never replaces.
    """
    with contextlib.suppress(FileExistsError):
        try:
            again(os.link, source, target)
        except OSError as error:
            if error.errno not in {*NOT_OFFERED, errno.EMLINK}:
                raise
            return True if again(_renameat2, source, target, _RENAME_NOREPLACE) else None
        return True
    return False


def has_links(folder: str) -> bool:
    """Whether files can have two names there; two are made, and removed."""
    first, second = (os.path.join(folder, secrets.token_hex(8)) for _ in range(2))
    os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
    try:
        again(os.link, first, second)
    except OSError:
        return False
    finally:
        again(os.unlink, first)
    again(os.unlink, second)
    return True


def make_older(path: str, seconds: float) -> None:
    """Set a file's modification time back."""
    found = again(os.stat, path)
    again(os.utime, path, (found.st_atime, found.st_mtime - seconds))


def point_to(path: str, target: str | None) -> None:
    """Have the link `path` stand for `target`; None: remove it. FileExistsError: it is no link."""
    try:
        if again(os.readlink, path) == target:
            return
    except FileNotFoundError:
        if target is None:
            return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise FileExistsError(errno.EEXIST, "is there and is no link, so it stays: give it another name") from error
    if target is None:
        again(os.unlink, path)
        return
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.new")
    with contextlib.suppress(FileNotFoundError):  # a crash may have left it
        again(os.unlink, beside)
    again(os.symlink, target, beside)
    again(os.rename, beside, path)


def link_target(path: str) -> str | None:
    """What a link stands for, as it says; None: this is no link."""
    try:
        return again(os.readlink, path)
    except OSError:
        return None


def is_same_file(path: str, other: str) -> bool:
    """Whether two names lead to the same file or directory."""
    try:
        return os.path.samestat(again(os.stat, path), again(os.stat, other))
    except FileNotFoundError:
        return False


def remove_if_empty(path: str) -> None:
    """Remove a directory if nothing is in it; whatever the system says to that is fine."""
    with contextlib.suppress(OSError):
        again(os.rmdir, path)


def exchange_names(first: str, second: str) -> bool:
    """Swap two names atomically; False where the kernel or file system cannot."""
    was_first = again(os.lstat, first)
    while True:
        try:
            return _renameat2(first, second, _RENAME_EXCHANGE)
        except InterruptedError:  # was it done? A second time would undo it
            if os.path.samestat(again(os.lstat, second), was_first):
                return True


def rename_all(steps: list[tuple[str, str]], sync: Callable[[str], None] | None) -> None:
    """Rename one after the other, within one directory; a file system may else bring them to the disk in any order."""
    done: list[tuple[str, str]] = []
    try:
        for source, target in steps:
            if sync is not None and done:
                sync(os.path.dirname(source))
            again(os.rename, source, target)
            done.append((source, target))
    except OSError:
        for source, target in reversed(done):
            again(os.rename, target, source)
        raise


@functools.cache
def _of_the_c_library(name: str) -> Callable[..., int] | None:
    """A function; found once, as ctypes makes classes for each look, which only the collector frees."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def _renameat2(source: str, target: str, flags: int) -> bool:
    """Rename with flags of Linux; False where the kernel or file system does not offer it."""
    linux, macos = _of_the_c_library("renameat2"), _of_the_c_library("renamex_np")
    if linux is not None:
        result = linux(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    elif macos is not None:
        result = macos(os.fsencode(source), os.fsencode(target), _FLAGS_OF_MACOS[flags])
    else:
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code))


def real_path(path: str) -> str:
    """Where a path leads, links followed: caches of models have files of one name that are links to others."""
    return os.path.realpath(path)
