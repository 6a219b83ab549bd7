"""What the system tells of the file system that a directory is on."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from jaxckpt_train.errors import StorageError

MOUNTS = "/proc/self/mountinfo"
IN_MEMORY = {"tmpfs", "ramfs"}
_ESCAPED = re.compile(r"\\([0-7]{3})")


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
    kind, mount = "unknown", "/"
    with contextlib.suppress(OSError):
        kind, mount = _mount_of(there, Path(MOUNTS).read_text(errors="surrogateescape"))
    free_files = found.f_favail if found.f_files else None
    return FileSystem(kind, mount, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, free_files)


def _mount_of(path: str, mounts: str) -> tuple[str, str]:
    """The kind of the file system of a path, and where it is mounted: of `MOUNTS` the last line that fits best."""
    best = ("unknown", "")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) < 5:
            continue
        mount = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        if f"{path}/".startswith(f"{mount.rstrip('/')}/") and len(mount) >= len(best[1]):
            best = (kinds[0], mount)
    return best
