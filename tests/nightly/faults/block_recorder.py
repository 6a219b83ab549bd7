"""A block device that records all writes and flushes: `recorded_disk`.

The file system is on a loop device, whose image is a file of a `FuseDisk`. The FUSE server appends each request of the
kernel to a list before it replies. Unlike `dm-log-writes`, this needs no kernel module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.nightly.faults import fuse_disk
from tests.nightly.faults.fuse_disk import FuseDisk, Server
from tests.nightly.faults.loop_disk import make_image, run_command, unmount

LIST, IMAGE = "list", "image"
FLUSH = 1 << 63
RECORD = struct.Struct("=QI")


class Recorder(Server):
    """Serve an image, and record its changes."""

    def __init__(self, device: int, backing: Path, control: mmap.mmap) -> None:
        super().__init__(device, backing, control)
        self._list = os.open(backing / LIST, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=2QI", body)
        os.write(self._list, RECORD.pack(offset, size) + body[40 : 40 + size])
        return super()._write(node, body)

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.write(self._list, RECORD.pack(FLUSH, 0))
        return b""


@dataclasses.dataclass(frozen=True)
class Change:
    """A write to the device, or a flush (`data` is None); `end` is the length of the list after it, in bytes."""

    end: int
    offset: int = 0
    data: bytes | None = None


class RecordedDisk:
    """A file system on a recorded device, mounted at `path`; `start` is the initial image."""

    def __init__(self, folder: Path, disk: FuseDisk, kind: str, start: Path | None) -> None:
        self.path, self._list = folder / "recorded", disk.backing / LIST
        self.path.mkdir()
        self.start = start or folder / f"{kind}.start"
        if start is None:
            make_image(self.start, kind)
        run_command("cp", "--sparse=always", self.start, disk.backing / IMAGE)
        self._device = attach(disk.path / IMAGE)
        try:
            run_command("mount", self._device, self.path)
        except OSError:
            detach(self._device)
            raise

    def written(self) -> int:
        """Return the length of the list, which identifies a moment."""
        return self._list.stat().st_size

    def changes(self) -> Iterator[Change]:
        """Yield all changes in order."""
        content, at = memoryview(self._list.read_bytes()), 0
        while at < len(content):
            offset, size = RECORD.unpack_from(content, at)
            at += RECORD.size + size
            yield Change(at) if offset == FLUSH else Change(at, offset, bytes(content[at - size : at]))

    def close(self) -> None:
        """Unmount it."""
        try:
            unmount(self.path)
        except OSError:
            run_command("umount", "--lazy", self.path)
        detach(self._device)


@contextlib.contextmanager
def recorded_disk(folder: Path, kind: str, start: Path | None = None) -> Iterator[RecordedDisk]:
    """Record the device of a file system, which is empty or starts from the image `start`."""
    with fuse_disk.fuse_disk(folder, __spec__.name) as disk:
        made = RecordedDisk(folder, disk, kind, start)
        try:
            yield made
        finally:
            made.close()


def attach(image: Path) -> str:
    """Attach a loop device to a file."""
    return run_command("losetup", "--find", "--show", image).strip()


def detach(device: str) -> None:
    """Detach a loop device."""
    run_command("losetup", "--detach", device)


if __name__ == "__main__":
    fuse_disk.main(*sys.argv[1:], server=Recorder)  # type: ignore[misc]
