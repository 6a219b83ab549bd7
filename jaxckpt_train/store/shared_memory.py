"""Shared memory: what one process has read, where other processes of its machine may look at it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys

import msgspec
import numpy as np

from jaxckpt_train.store.machine import descriptor_path
from jaxckpt_train.store.segment import ALIGNMENT

NAME = "jaxckpt"
TOKEN_BYTES = 16


class _Address(msgspec.Struct, array_like=True):
    pid: int
    descriptor: int
    size: int
    token: bytes


class SharedMemory:
    """Anonymous memory (Linux's memfd). It is nowhere in a file system, and goes when the last process lets go of it.

    Who may open another process's descriptors under /proc, as processes of one user may, can look at it, but neither
    change its size nor, as it is given out here, what is in it.

    Args:
        size: bytes.

    Attributes:
        data: flat uint8, writable, at a page boundary.
        address: by which others find it, as long as it is not hidden.

    Raises:
        OSError: this system has no such memory, or gives none.
    """

    _descriptor = -1

    def __init__(self, size: int) -> None:
        self._descriptor = _sealed_memory(ALIGNMENT + size)
        area = mmap.mmap(self._descriptor, ALIGNMENT + size)
        token = os.urandom(TOKEN_BYTES)
        area[:TOKEN_BYTES] = token
        self.data = np.frombuffer(area, np.uint8, size, ALIGNMENT)
        self.address = msgspec.msgpack.encode(_Address(os.getpid(), self._descriptor, size, token))

    def hide(self) -> None:
        """Nobody finds it any more; who has, keeps it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = hide  # an error or an interrupt may lose it on its way to who made it

    def let_go(self) -> None:
        """This process has it no more, unless somebody uses `data` still; who has found it keeps it."""
        self.data = np.empty(0, np.uint8)


def _sealed_memory(size: int) -> int:
    """A descriptor of memory whose size stays."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    raise OSError(errno.ENOSYS, "no memory that others can look at on this system")


def seen(address: bytes) -> np.ndarray:
    """The memory of another process: flat uint8, not writable.

    Raises:
        OSError: it cannot be seen from here, as from another container.
    """
    there = msgspec.msgpack.decode(address, type=_Address)
    path = descriptor_path(there.pid, there.descriptor, f"/memfd:{NAME}")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != ALIGNMENT + there.size:
            raise OSError(errno.ENOENT, "other memory than was told", path)
        area = mmap.mmap(descriptor, ALIGNMENT + there.size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if area[:TOKEN_BYTES] != there.token:
        raise OSError(errno.ENOENT, "other memory than was told", path)
    return np.frombuffer(area, np.uint8, there.size, ALIGNMENT)
