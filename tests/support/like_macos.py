"""A pytest plugin that imitates macOS: it removes features of Linux and adds those of macOS.

`pytest -p tests.support.like_macos tests/unit/store`

It is loaded before the package. Modules that differ on macOS are imported first. `/proc` and `/sys` cannot be read,
but tests may list `/proc/self/fd` to count descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from typing import Any

import jax

_IMPORTED_FIRST = (asyncio, multiprocessing, subprocess, jax)
_LACKING: dict[Any, str] = {
    errno: "EBADFD EHWPOISON EISNAM EKEYEXPIRED EMEDIUMTYPE ENOMEDIUM ENOTUNIQ EREMCHG EREMOTEIO ERESTART ESTRPIPE "
    "EUCLEAN",
    os: "O_DIRECT O_LARGEFILE O_NOATIME O_PATH copy_file_range eventfd fdatasync getrandom memfd_create waitid "
    "pipe2 posix_fadvise posix_fallocate preadv pwritev sched_getaffinity sched_setaffinity splice",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_GROW F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_WRITE F_GETPIPE_SZ F_SETPIPE_SZ",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_POPULATE_WRITE MAP_POPULATE",
    select: "epoll",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
}
_FULL_SYNC = 51
_renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
full_syncs: list[int] = []
"""The size of each file that was synced to the medium."""


def _renamex_np(source: bytes, target: bytes, flags: int) -> int:
    """Implement the call of macOS with renameat2: RENAME_SWAP is 2, RENAME_EXCL is 4."""
    return int(_renameat2(-100, source, -100, target, {2: 2, 4: 1}[flags]))


def _fcntl(descriptor: int, command: int, argument: Any = 0) -> Any:
    if command != _FULL_SYNC:
        return _real_fcntl(descriptor, command, argument)
    full_syncs.append(os.fstat(descriptor).st_size)
    os.fsync(descriptor)
    return 0


def _without_proc(module: Any, name: str) -> None:
    real = getattr(module, name)

    def call(path: Any, *more: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return real(path, *more, **named)

    setattr(module, name, call)


_real_fcntl = fcntl.fcntl
for _module, _names in _LACKING.items():
    for _name in _names.split():
        with contextlib.suppress(AttributeError):
            delattr(_module, _name)
fcntl.F_FULLFSYNC = _FULL_SYNC  # type: ignore[attr-defined]
fcntl.fcntl = _fcntl  # type: ignore[assignment]
for _module, _name in ((os, "open"), (os, "readlink"), (os, "scandir"), (io, "open")):
    _without_proc(_module, _name)
sys.platform = "darwin"

from jaxckpt_train.store.backends import local_names  # noqa: E402

local_names._c_function = {"renamex_np": _renamex_np}.get  # type: ignore[assignment]
