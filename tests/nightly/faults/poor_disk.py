"""A file system in user space without some features: `poor_disk(folder, *flaws)`; see `FLAWS`."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.nightly.faults.fuse_disk import FuseDisk, Server, fuse_disk, main

FLAWS = {
    "no links": "os.link is refused, as on FAT, exFAT and mounted buckets",
    "no rename flags": "names cannot be exchanged, or renamed without replacing, as on most FUSE file systems",
    "no cuts": "files are never truncated, as on s3fs",
    "no direct I/O": "a file opened for direct I/O refuses all bytes, also after its flags change, as on mergerfs",
    "hides files in use": "a removed file that is open has another name until it is closed, as on NFS, SMB, libfuse",
    "no times": "modification times are not set",
    "copies": "a renamed directory also stays under its old name",
}


class PoorServer(Server):
    """Refuse or ignore requests according to the flaws."""

    flaws: frozenset[str] = frozenset()

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._direct, self._hidden = set[int](), dict[int, tuple[int, bytes]]()
        self._open_inodes: dict[int, int] = {}  # the inode of each open handle

    def _opened(self, handle: int, flags: int) -> None:
        self._open_inodes[handle] = os.fstat(handle).st_ino
        if flags & os.O_DIRECT:
            self._direct.add(handle)

    def _open(self, node: int, body: bytes) -> bytes:
        answer = super()._open(node, body)
        self._opened(struct.unpack_from("=Q", answer)[0], struct.unpack_from("=I", body)[0])
        return answer

    def _create(self, node: int, body: bytes) -> bytes:
        answer = super()._create(node, body)
        self._opened(struct.unpack_from("=Q", answer, len(answer) - 16)[0], struct.unpack_from("=I", body)[0])
        return answer

    def _release(self, node: int, body: bytes) -> bytes:
        (handle,) = struct.unpack_from("=Q", body)
        self._direct.discard(handle)
        inode = self._open_inodes.pop(handle)
        if inode not in self._open_inodes.values() and inode in self._hidden:
            folder, name = self._hidden.pop(inode)
            os.unlink(name, dir_fd=folder)
            os.close(folder)
        return super()._release(node, body)

    def _refuse_direct(self, body: bytes) -> None:
        if "no direct I/O" in self.flaws and struct.unpack_from("=Q", body)[0] in self._direct:
            raise OSError(errno.EINVAL, "opened for direct I/O")

    def _read(self, node: int, body: bytes) -> bytes:
        self._refuse_direct(body)
        return super()._read(node, body)

    def _write(self, node: int, body: bytes) -> bytes:
        self._refuse_direct(body)
        return super()._write(node, body)

    def _link(self, node: int, body: bytes) -> bytes:
        if "no links" in self.flaws:
            raise OSError(errno.EPERM, "no links")
        return super()._link(node, body)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("=2I2Q", body)
        if "no cuts" in self.flaws and valid & 8 and size < os.stat(self._path(node)).st_size:
            valid &= ~8
        if "no times" in self.flaws:
            valid &= ~(16 | 32 | 128 | 256)
        return super()._setattr(node, struct.pack("=I", valid) + body[4:])

    def _unlink(self, node: int, body: bytes) -> bytes:
        folder, name = self._nodes[node], body[:-1]
        inode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
        if "hides files in use" not in self.flaws or inode not in self._open_inodes.values():
            return super()._unlink(node, body)
        hidden = f".fuse_hidden{inode:08x}{len(self._hidden):08x}".encode()
        if inode not in self._hidden:
            os.rename(name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
            self._hidden[inode] = os.open(".", os.O_RDONLY, dir_fd=folder), hidden
        return b""

    def _move(self, node: int, target: int, names: bytes, flags: int) -> bytes:
        if "no rename flags" in self.flaws and flags:
            raise OSError(errno.ENOSYS, "no flags")
        name = names.split(b"\0")[0]
        path = os.path.realpath(f"{self._path(node)}/{name.decode()}")
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
        answer = super()._move(node, target, names, flags)
        if "copies" in self.flaws and is_folder:
            os.mkdir(name, dir_fd=self._nodes[node])
        return answer


@contextlib.contextmanager
def poor_disk(folder: Path, *flaws: str) -> Iterator[FuseDisk]:
    """Yield a disk with these flaws, and unmount it at the end."""
    assert FLAWS.keys() >= {*flaws}
    (folder / "flaws").write_text("\n".join(flaws))
    with fuse_disk(folder, __spec__.name) as disk:
        yield disk


if __name__ == "__main__":
    PoorServer.flaws = frozenset(Path(sys.argv[3]).with_name("flaws").read_text().split("\n"))
    main(*sys.argv[1:], PoorServer)
