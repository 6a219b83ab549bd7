"""A memory back end that requires aligned windows, as a disk does, and counts reads and held memory."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.store import read_plan
from jaxckpt_train.store import writer as segment_writer
from tests.support import checkpoints
from tests.support.memory_backend import MemoryBackend

PAGE = 4096
BLOCK = 4096


def small_sizes() -> Iterator[None]:
    """Allow tiny settings, blocks and runs, so that small arrays take every path of large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxckpt_train.settings.check_fields", lambda subject, settings: None)  # allows small sizes
        patch.setattr(segment_writer, "BLOCK_BYTES", BLOCK)
        patch.setattr(checkpoints, "BLOCK_BYTES", BLOCK)
        patch.setattr(read_plan, "COALESCE_BYTES", 12 * PAGE)
        patch.setattr(read_plan, "GAP_BYTES", 3 * PAGE)
        patch.setattr(read_plan, "APART_BYTES", 4 * PAGE)
        patch.setattr(read_plan, "PARTS_BYTES", 8 * PAGE)
        yield


class StrictBackend(MemoryBackend):
    """Requires aligned reads and writes of files opened for direct I/O.

    Attributes:
        reads: (path, offset, required bytes) of every read.
        most_held_bytes: the most memory filled by reads that was alive at one time.
        open_files: sinks and sources that were not closed.
        most_open_files: the most of them at one time.
        before_read: called at the start of every direct read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self.open_files = self.most_open_files = 0
        self._held: dict[int, int] = {}
        self.most_held_bytes = 0
        self.before_read: Callable[[], None] = lambda: None
        self.count_lock = threading.RLock()  # a finalizer may run while it is held

    def create(self, path: str, *, direct: Any) -> Any:
        return _StrictSink(self, super().create(path, direct=direct), PAGE if direct else 1)

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source = super().open(directory, name, direct=direct)
        return _StrictSource(self, f"{directory}/{name}", source) if direct else _Source(self, source)

    def count(self, difference: int) -> None:
        with self.count_lock:
            self.open_files += difference
            self.most_open_files = max(self.most_open_files, self.open_files)

    def hold(self, data: np.ndarray) -> None:
        """Count the memory that an array lies in until it is freed."""
        root: Any = data
        while not isinstance(root, mmap.mmap):
            root = root.obj if isinstance(root, memoryview) else root.base
            if root is None:
                return
        with self.count_lock:
            if id(root) not in self._held:
                self._held[id(root)] = len(root)
                weakref.finalize(root, self._release, id(root))
            self.most_held_bytes = max(self.most_held_bytes, sum(self._held.values()))

    def _release(self, number: int) -> None:
        with self.count_lock:
            self._held.pop(number, None)


class _StrictSink:
    in_order = False

    def __init__(self, backend: StrictBackend, inner: Any, alignment: int) -> None:
        self._backend, self._inner, self._open, self.alignment = backend, inner, True, alignment
        backend.count(+1)

    def write_at(self, offset: int, data: np.ndarray) -> None:
        assert not any(number % self.alignment for number in (offset, len(data), data.ctypes.data))
        self._inner.write_at(offset, data)

    def finish(self, size: int, *, sync: bool) -> None:
        self._inner.finish(size, sync=sync)
        self.abandon()

    def abandon(self) -> None:
        if self._open:
            self._open = False
            self._backend.count(-1)


class _Source:
    alignment = 1

    def __init__(self, backend: StrictBackend, inner: Any) -> None:
        self._backend, self._inner, self._open = backend, inner, True
        self.size, self.modified_ns = inner.size, inner.modified_ns
        backend.count(+1)

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        assert self._open
        self._inner.read_into(offset, data, needed)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._backend.count(-1)


class _StrictSource(_Source):
    alignment = PAGE

    def __init__(self, backend: StrictBackend, path: str, inner: Any) -> None:
        super().__init__(backend, inner)
        self._path = path

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        assert not any(number % PAGE for number in (offset, len(data), data.ctypes.data))
        self._backend.before_read()
        self._backend.hold(data)
        with self._backend.count_lock:
            self._backend.reads.append((self._path, offset, needed))
        super().read_into(offset, data, needed)
