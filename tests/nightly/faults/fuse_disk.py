"""A file system in user space that forwards all requests to a directory, and can stop responding: `FuseDisk`.

It uses the protocol of the kernel (`/dev/fuse`, version 7.31), so it needs only root. It is a separate process, which
reads settings from shared memory before each reply: whether to reply at all, how long to wait per written MiB, and how
many of a thousand changing requests to refuse with EIO.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import random
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ANSWER, WEDGED = 0, 1
CONTROL = struct.Struct("=IIdI")
_CHANGES = {4, 9, 10, 11, 12, 13, 16, 20, 30, 35, 45}
LOOK_S = 0.005
MOST_WRITE = 1 << 17
_HEADER, _REPLY = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=6Q10I")
_FORGET, _INTERRUPT, _BATCH_FORGET = 2, 36, 42  # these need no reply
_DETACH = 2  # MNT_DETACH
_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_not() -> str | None:
    """Return why this machine cannot mount such a disk, or None."""
    if sys.platform != "linux" or not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse"
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        return f"needs /dev/fuse: {error.strerror}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _mount(device, folder)
        except OSError as error:
            return f"needs the right to mount: {error.strerror}"
        finally:
            os.close(device)
        _libc.umount2(os.fsencode(folder), _DETACH)
    return None


def _mount(device: int, path: str) -> None:
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"jaxckpt", os.fsencode(path), b"fuse.jaxckpt", 0, options) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot mount {path}: {os.strerror(code)}")


class Server:
    """Reply to the requests of the kernel. A node is an open handle of a file or directory below the backing one."""

    def __init__(self, device: int, backing: Path, control: mmap.mmap) -> None:
        self._device, self._control, self._chance = device, control, random.Random(0)
        root = os.open(backing, os.O_PATH)
        self._nodes = {1: root}
        self._numbers = {os.fstat(root).st_ino: 1}
        self._lookups = {1: 1}
        self._next = 2
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 9: self._mkdir, 10: self._unlink, 11: self._rmdir,
            12: self._rename, 13: self._link, 14: self._open, 15: self._read, 16: self._write, 17: self._statfs,
            18: self._release, 20: self._fsync, 25: self._nothing, 26: self._init, 27: self._open, 28: self._readdir,
            29: self._release, 30: self._fsync, 35: self._create, 38: self._nothing, 45: self._rename2,
        }  # fmt: skip

    def serve(self) -> None:
        """Serve until it is unmounted."""
        while True:
            try:
                request = os.read(self._device, MOST_WRITE + (1 << 16))
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
            while CONTROL.unpack_from(self._control)[0] == WEDGED:
                time.sleep(LOOK_S)
            if opcode == _FORGET:
                self._forget(node, struct.unpack_from("=Q", request, _HEADER.size)[0])
            elif opcode == _BATCH_FORGET:
                (count,) = struct.unpack_from("=I", request, _HEADER.size)
                for number in range(count):
                    self._forget(*struct.unpack_from("=2Q", request, _HEADER.size + 8 + 16 * number))
            elif opcode != _INTERRUPT:
                self._answer(unique, opcode, node, request[_HEADER.size :])

    def _answer(self, unique: int, opcode: int, node: int, body: bytes) -> None:
        code, data = 0, b""
        try:
            if opcode not in self._answers:
                raise OSError(errno.ENOSYS, "not implemented")
            if opcode in _CHANGES and self._chance.randrange(1000) < CONTROL.unpack_from(self._control)[3]:
                raise OSError(errno.EIO, "refused")
            data = self._answers[opcode](node, body)
        except OSError as error:
            code = error.errno or errno.EIO
        with contextlib.suppress(FileNotFoundError):  # the caller is gone
            os.write(self._device, _REPLY.pack(_REPLY.size + len(data), -code, unique) + data)

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node]}"

    def _found(self, folder: int, name: bytes) -> bytes:
        """Return the entry of a name, with a node for it."""
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[folder])
        inode = os.fstat(handle).st_ino
        if inode in self._numbers:
            os.close(handle)
        else:
            self._numbers[inode], self._next = self._next, self._next + 1
            self._nodes[self._numbers[inode]] = handle
        number = self._numbers[inode]
        self._lookups[number] = self._lookups.get(number, 0) + 1
        return struct.pack("=4Q2I", number, 0, 0, 0, 0, 0) + self._attributes(number)

    def _forget(self, node: int, lookups: int) -> None:
        self._lookups[node] -= lookups
        if self._lookups[node] == 0:
            handle = self._nodes.pop(node)
            del self._lookups[node], self._numbers[os.fstat(handle).st_ino]
            os.close(handle)

    def _attributes(self, node: int) -> bytes:
        found = os.fstat(self._nodes[node])
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return _ATTRIBUTES.pack(
            found.st_ino, found.st_size, found.st_blocks, *(each // 10**9 for each in times),
            *(each % 10**9 for each in times), found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _init(self, node: int, body: bytes) -> bytes:
        async_read, big_writes, max_pages = 1, 1 << 5, 1 << 22
        flags = (async_read | big_writes | max_pages) & struct.unpack_from("=4I", body)[3]
        return struct.pack(
            "=4I2H2I2H8I", 7, 31, 1 << 16, flags, 16, 12, MOST_WRITE, 1, MOST_WRITE // 4096, 0, *([0] * 8)
        )

    def _nothing(self, node: int, body: bytes) -> bytes:
        return b""

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._found(node, body[:-1])

    def _getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("=Q2I", 0, 0, 0) + self._attributes(node)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode = struct.unpack_from("=2I6Q4I", body)
        if valid & 1:
            os.chmod(self._path(node), stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(self._path(node), size)
        if valid & (128 | 256):
            os.utime(self._path(node))
        elif valid & (16 | 32):
            os.utime(self._path(node), ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns))
        return self._getattr(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, umask = struct.unpack_from("=2I", body)
        os.mkdir(body[8:-1], mode & ~umask, dir_fd=self._nodes[node])
        return self._found(node, body[8:-1])

    def _unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(body[:-1], dir_fd=self._nodes[node])
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(body[:-1], dir_fd=self._nodes[node])
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._move(node, struct.unpack_from("=Q", body)[0], body[8:], 0)

    def _rename2(self, node: int, body: bytes) -> bytes:
        target, flags = struct.unpack_from("=QI", body)
        return self._move(node, target, body[16:], flags)

    def _move(self, node: int, target: int, names: bytes, flags: int) -> bytes:
        old, new = names[:-1].split(b"\0")
        if _libc.renameat2(self._nodes[node], old, self._nodes[target], new, flags) != 0:
            raise OSError(ctypes.get_errno(), "renameat2")
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        (old,) = struct.unpack_from("=Q", body)
        os.link(self._path(old), body[8:-1], dst_dir_fd=self._nodes[node], follow_symlinks=True)
        return self._found(node, body[8:-1])

    def _open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("=I", body)[0] & (os.O_ACCMODE | os.O_TRUNC)
        return struct.pack("=Q2I", os.open(self._path(node), flags), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, umask = struct.unpack_from("=3I", body)
        wanted = (flags & (os.O_ACCMODE | os.O_TRUNC | os.O_EXCL)) | os.O_CREAT
        handle = os.open(body[16:-1], wanted, mode & ~umask, dir_fd=self._nodes[node])
        return self._found(node, body[16:-1]) + struct.pack("=Q2I", handle, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=2QI", body)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("=2QI", body)
        per_mib_s = CONTROL.unpack_from(self._control)[2]
        if per_mib_s:
            time.sleep(per_mib_s * size / (1 << 20))
        return struct.pack("=2I", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self._path(1))
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("=5Q10I", *counts, found.f_bsize, found.f_namemax, found.f_frsize, *([0] * 7))

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("=Q", body)[0])
        return b""

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("=Q", body)[0])
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=2QI", body)
        data = b""
        for number, name in enumerate(
            [b".", b"..", *sorted(os.fsencode(each) for each in os.listdir(self._path(node)))]
        ):
            entry = struct.pack("=2Q2I", 1, number + 1, len(name), 0) + name
            entry += bytes(-len(entry) % 8)
            if number >= offset:
                if len(data) + len(entry) > size:
                    break
                data += entry
        return data


class FuseDisk:
    """The file system, mounted at `path` and served by a process that runs `module`."""

    def __init__(self, folder: Path, module: str = __spec__.name) -> None:
        self.path, self.backing, self._file = folder / "fuse", folder / "behind", folder / "control"
        for each in (self.path, self.backing):
            each.mkdir()
        self._file.write_bytes(bytes(mmap.PAGESIZE))
        with self._file.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        command = [sys.executable, "-m", module, self.path, self.backing, self._file]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "mounted\n"

    def set(self, state: int = ANSWER, per_mib_s: float = 0.0, refused_per_mille: int = 0) -> None:
        """Set whether it responds, how long it takes per written MiB, and how many changes it refuses."""
        CONTROL.pack_into(self._control, 0, state, 0, per_mib_s, refused_per_mille)

    def die(self) -> None:
        """Kill the server; pending and later requests are refused."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the server, and unmount it."""
        self.die()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._control.close()
        _libc.umount2(os.fsencode(self.path), _DETACH)


@contextlib.contextmanager
def fuse_disk(folder: Path, module: str = __spec__.name) -> Iterator[FuseDisk]:
    """Yield a disk, and unmount it at the end."""
    disk = FuseDisk(folder, module)
    try:
        yield disk
    finally:
        disk.close()


def main(path: str, backing: str, control: str, server: type[Server] = Server) -> None:
    """Mount and serve."""
    device = os.open("/dev/fuse", os.O_RDWR)
    _mount(device, path)
    print("mounted", flush=True)
    with open(control, "r+b") as file:
        server(device, Path(backing), mmap.mmap(file.fileno(), mmap.PAGESIZE)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
