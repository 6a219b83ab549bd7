"""A real file system on a loop device, whose power can be cut."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

# An ioctl of ext4 and xfs: nothing more reaches the disk, except the journal if it is flushed.
_SHUTDOWN = 0x8004587D
Cut = Literal["journal flushed", "nothing flushed"]
_FLAGS: dict[Cut, int] = {"journal flushed": 1, "nothing flushed": 2}
SIZES_MIB = {"ext4": 64, "xfs": 320}
_MKFS = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
UNMOUNT_S = 30.0


@functools.cache
def why_not(kind: str) -> str | None:
    """Return why this machine cannot mount such a disk, or None."""
    for tool in (_MKFS[kind][0], "mount", "umount"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    if not Path("/dev/loop-control").exists():
        return "needs loop devices"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with loop_disk(Path(folder), kind) as disk:
                disk.make_new()
        except OSError as error:
            return f"needs the right to mount {kind} on a loop device: {str(error).splitlines()[-1]}"
    return None


class LoopDisk:
    """One file system, mounted at `path`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.path, self._image = kind, folder / "mounted", folder / f"{kind}.img"
        self._is_mounted = False  # an xfs that was shut down cannot be inspected
        self.path.mkdir()

    def make_new(self) -> None:
        """Create an empty file system, and mount it."""
        with contextlib.suppress(FileNotFoundError):
            self._image.unlink()
        make_image(self._image, self.kind)
        self.mount()

    def mount(self) -> None:
        """Mount it; the journal is replayed as after a power cut."""
        run_command("mount", "-o", "loop", self._image, self.path)
        self._is_mounted = True

    def cut_power(self, cut: Cut = "nothing flushed") -> None:
        """Shut down the file system: nothing reaches the disk, and all calls are refused.

        Args:
            cut: whether earlier changes of names reach the disk, without unsynced data.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _FLAGS[cut]))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Unmount it, once it is unused."""
        if self._is_mounted:
            unmount(self.path)
            self._is_mounted = False


@contextlib.contextmanager
def loop_disk(folder: Path, kind: str) -> Iterator[LoopDisk]:
    """Yield a disk, and unmount it at the end."""
    disk = LoopDisk(folder, kind)
    try:
        yield disk
    finally:
        disk.unmount()


def unmount(path: Path) -> None:
    """Unmount a file system, once it is unused.

    Raises:
        OSError: it is still in use after half a minute.
    """
    until = time.monotonic() + UNMOUNT_S
    while (done := subprocess.run(["umount", path], capture_output=True, text=True, check=False)).returncode != 0:
        if time.monotonic() > until:
            raise OSError(f"umount {path}: {done.stderr.strip()}")


def make_image(path: Path, kind: str) -> None:
    """Create an empty file system in a new file."""
    with path.open("xb") as image:
        image.truncate(SIZES_MIB[kind] << 20)
    run_command(*_MKFS[kind], path)


def run_command(*command: str | os.PathLike[str]) -> str:
    """Run a command, and return its output.

    Raises:
        OSError: it failed; with its error output.
    """
    done = subprocess.run([os.fspath(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(map(os.fspath, command))}: {done.stderr.strip()}")
    return done.stdout
