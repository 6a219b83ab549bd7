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
_OBJECT_STORES = re.compile(r"s3fs|gcsfuse|rclone|goofys|blobfuse|mountpoint-s3|ossfs|cosfs")
_UNSYNCED = {"volatile", "nobarrier", "barrier=0"}
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
