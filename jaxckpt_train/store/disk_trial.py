"""A trial of a disk: whether direct I/O works there, and how fast it writes, syncs and reads."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backend import HALF_MADE, Backend, Sink, Source
from jaxckpt_train.store.late_sync import sync_directory
from jaxckpt_train.store.staging import aligned_buffer

BLOCK_BYTES = 16 << 20
THREADS = 2  # calls under way at a time, as saves begin with
SMALL_BYTES = 4096
SMALL_FILES = 5


@dataclasses.dataclass(frozen=True)
class DiskTrial:
    """What was measured.

    Attributes:
        nbytes: of the file.
        direct_write, direct_read: whether the disk takes direct I/O.
        write_s: until all was written, and synced.
        sync_s: of that the sync at the end.
        read_s: until all was read again; without direct reads out of memory.
        small_s: the median for one file of 4 KiB: made, written and synced with its name.
    """

    nbytes: int
    direct_write: bool
    direct_read: bool
    write_s: float
    sync_s: float
    read_s: float
    small_s: float

    @property
    def write_bytes_per_s(self) -> float:
        """Of a synced write."""
        return self.nbytes / self.write_s

    @property
    def read_bytes_per_s(self) -> float:
        """Of a read."""
        return self.nbytes / self.read_s


def try_disk(
    backend: Backend, directory: str, nbytes: int, progress: Callable[[int], object] = lambda done: None
) -> DiskTrial:
    """Write a file of random bytes, sync it, read and compare it.

    The file has no name while it is written and read: nothing is left of it, however this process ends.

    Args:
        backend: where.
        directory: in which the file lies.
        nbytes: how large it is, at least one block of 4 KiB; made a multiple of that.
        progress: called with numbers of bytes as they are written and read; what it raises ends the trial.

    Raises:
        StorageError: the disk refuses.
        CorruptCheckpointError: it gives other bytes than were written.
    """
    size = max(nbytes // SMALL_BYTES, 1) * SMALL_BYTES
    direct_write, direct_read = _takes_direct(backend, directory)
    block = aligned_buffer(min(size, BLOCK_BYTES))
    block.view(np.uint64)[:] = np.random.default_rng().integers(0, 1 << 63, len(block) // 8, np.uint64)
    with _nameless(backend, directory, direct=direct_write, read_direct=direct_read) as (sink, source):
        write_s, sync_s = _write(sink, block, size, progress)
        read_s = _read(source, block, size, directory, progress)
    small = [_small_s(backend, directory) for _ in range(SMALL_FILES)]
    return DiskTrial(size, direct_write, direct_read, write_s, sync_s, read_s, statistics.median(small))


@contextlib.contextmanager
def _nameless(
    backend: Backend, directory: str, *, direct: bool, read_direct: bool | Literal["auto"]
) -> Iterator[tuple[Sink, Source]]:
    """A new file to write and to read, whose name goes before a byte is written."""
    name = HALF_MADE[0] + secrets.token_hex(8)
    path, held = os.path.join(directory, name), contextlib.ExitStack()
    with held:
        try:
            sink = backend.create(path, direct=direct)
            held.callback(sink.abandon)
            source = backend.open(directory, name, direct=read_direct)
            held.callback(source.close)
        finally:
            backend.remove(path)
        yield sink, source


def _takes_direct(backend: Backend, directory: str) -> tuple[bool, bool]:
    """Whether the disk takes direct writes, and direct reads."""
    taken = [False, False]
    memory = aligned_buffer(SMALL_BYTES)
    for which in (0, 1):
        try:
            with _nameless(backend, directory, direct=which == 0, read_direct=which == 1) as (sink, source):
                sink.write_at(0, memory)
                sink.finish(SMALL_BYTES, sync=False)
                source.read_into(0, memory, SMALL_BYTES)
            taken[which] = True
        except StorageError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    return taken[0], taken[1]


def _in_blocks(size: int, block_bytes: int, work: Callable[[int, int, int], object]) -> float:
    """Call `work` with each block's offset and size and the number of the thread; returns the seconds it took."""
    is_ended = False

    def run(thread: int) -> None:
        for at in range(thread * block_bytes, size, THREADS * block_bytes):
            if is_ended:
                return
            work(at, min(block_bytes, size - at), thread)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="jaxckpt-trial") as pool:
        began = time.perf_counter()
        try:
            for future in [pool.submit(run, thread) for thread in range(THREADS)]:
                future.result()
        finally:
            is_ended = True
    return time.perf_counter() - began


def _write(sink: Sink, block: np.ndarray, size: int, progress: Callable[[int], object]) -> tuple[float, float]:
    def write(at: int, nbytes: int, thread: int) -> None:
        sink.write_at(at, block[:nbytes])
        progress(nbytes)

    write_s = _in_blocks(size, len(block), write)
    began = time.perf_counter()
    sink.finish(size, sync=True)
    sync_s = time.perf_counter() - began
    return write_s + sync_s, sync_s


def _read(source: Source, block: np.ndarray, size: int, directory: str, progress: Callable[[int], object]) -> float:
    buffers = [aligned_buffer(len(block)) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = 0  # its pages are there before the time is taken
    filled = [0] * THREADS

    def read(at: int, nbytes: int, thread: int) -> None:
        source.read_into(at, buffers[thread][:nbytes], nbytes)
        filled[thread] = nbytes
        progress(nbytes)

    read_s = _in_blocks(size, len(block), read)
    if not all(np.array_equal(buffer[:last], block[:last]) for buffer, last in zip(buffers, filled, strict=True)):
        raise CorruptCheckpointError(f"{directory}: the disk gives other bytes than were written to it a moment ago")
    return read_s


def _small_s(backend: Backend, directory: str) -> float:
    """Seconds to make one small file durable, with its name."""
    path = os.path.join(directory, HALF_MADE[0] + secrets.token_hex(8))
    began = time.perf_counter()
    try:
        sink = backend.create(path, direct=False)
        try:
            sink.write_at(0, aligned_buffer(SMALL_BYTES))
            sink.finish(SMALL_BYTES, sync=True)
        finally:
            sink.abandon()
        sync_directory(backend, directory)
        return time.perf_counter() - began
    finally:
        backend.remove(path)
