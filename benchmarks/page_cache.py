"""The page cache: making files durable, quieting the disk, and dropping what was cached before a load."""

from __future__ import annotations

import concurrent.futures
import gc
import os
from pathlib import Path
from typing import Literal

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SYNC_THREADS = 4

Dropped = Literal["drop_caches", "fadvise"]


def files_below(root: Path) -> list[Path]:
    """All regular files below `root`."""
    return [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]


def sync_tree(root: Path) -> None:
    """fsync every file of `root`, then every directory deepest first, then the parent of `root`.

    Files are synced by a few threads, so that a subject is charged no more for the missing syncs than it must be.
    """
    with concurrent.futures.ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(_fsync, files_below(root)))
    directories = [path for path in root.rglob("*") if path.is_dir() and not path.is_symlink()]
    for directory in sorted(directories, key=lambda path: len(path.parts), reverse=True):
        _fsync(directory)
    _fsync(root)
    _fsync(root.parent)


def settle() -> None:
    """Free what is unreachable and let the disk finish what earlier work left to it, discards of deleted files too."""
    gc.collect()
    os.sync()


def drop(root: Path) -> Dropped:
    """Drop cached pages: machine-wide where permitted, else only those of the files below `root`.

    Pages that some process has mapped stay in memory either way.
    """
    settle()
    try:
        DROP_CACHES.write_text("3\n", encoding="ascii")
    except OSError:
        for path in files_below(root):
            _forget(path)
        return "fadvise"
    return "drop_caches"


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
