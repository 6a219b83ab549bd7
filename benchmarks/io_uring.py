"""The least of io_uring that a measurement needs, by system calls alone; Linux on x86-64 or arm64."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence
from types import TracebackType

import numpy as np

_SETUP, _ENTER = 425, 426
_GET_EVENTS = 1
_READ, _WRITE = 22, 23
_SUBMISSIONS_AT = 0x10000000
_PARAMETERS = struct.Struct("10I 8IQ 8IQ")  # see struct io_uring_params in the kernel's linux/io_uring.h
_ENTRY_BYTES, _RESULT_BYTES = 64, 16

_libc = ctypes.CDLL(None, use_errno=True)


def _call(*arguments: object) -> int:
    result = int(_libc.syscall(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Ring:
    """A submission queue of `entries` (a power of two); to be used by one thread, on file descriptors and arrays.

    Raises:
        OSError: the kernel has no io_uring, or forbids it.
    """

    def __init__(self, entries: int) -> None:
        raw = ctypes.create_string_buffer(_PARAMETERS.size)
        self._descriptor = _call(_SETUP, entries, raw)
        found = _PARAMETERS.unpack(raw.raw)
        at, results_at = found[10:19], found[19:28]
        size = max(at[6] + 4 * found[0], results_at[5] + _RESULT_BYTES * found[1])
        self._map = mmap.mmap(self._descriptor, size)
        self._entries = mmap.mmap(self._descriptor, _ENTRY_BYTES * found[0], offset=_SUBMISSIONS_AT)
        words = np.frombuffer(self._map, np.uint32, size // 4)
        self._tail, self._mask, self._order = words[at[1] // 4 :], int(words[at[2] // 4]), words[at[6] // 4 :]
        self._results_head, self._results_tail = words[results_at[0] // 4 :], words[results_at[1] // 4 :]
        self._results_mask, self._results_at = int(words[results_at[2] // 4]), results_at[5]

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)

    def submit(self, moves: Sequence[tuple[int, int, np.ndarray]], *, write: bool) -> None:
        """Begin moves of (file descriptor, offset, array); each array must stay until its result is there."""
        for descriptor, offset, data in moves:
            tail = int(self._tail[0])
            slot = tail & self._mask
            entry = struct.pack(
                "BBHiQQIIQ",
                _WRITE if write else _READ,
                0,
                0,
                descriptor,
                offset,
                data.ctypes.data,
                len(data),
                0,
                len(data),
            )
            self._entries[slot * _ENTRY_BYTES : (slot + 1) * _ENTRY_BYTES] = entry.ljust(_ENTRY_BYTES, b"\0")
            self._order[slot] = slot
            self._tail[0] = tail + 1
        _call(_ENTER, self._descriptor, len(moves), 0, 0, None, 0)

    def wait(self) -> int:
        """Wait until at least one has ended; returns how many have.

        Raises:
            OSError: one failed, or moved fewer bytes than it should.
        """
        head = int(self._results_head[0])
        if head == int(self._results_tail[0]):
            _call(_ENTER, self._descriptor, 0, 1, _GET_EVENTS, None, 0)
        count = int(self._results_tail[0]) - head
        for number in range(head, head + count):
            start = self._results_at + (number & self._results_mask) * _RESULT_BYTES
            wanted, moved, _ = struct.unpack_from("QiI", self._map, start)
            if moved != wanted:
                raise OSError(-moved if moved < 0 else 0, f"moved {moved} of {wanted} bytes")
        self._results_head[0] = head + count
        return count
