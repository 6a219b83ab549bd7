"""A trial of a disk: which operations work there, and how fast it writes, syncs and reads."""

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

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Backend, Sink, Source, sync_directory
from jaxckpt_train.store.backends.local_names import backdate, exchange_names, has_links
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.files import read_whole

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


@dataclasses.dataclass(frozen=True)
class Operation:
    """What was found of an operation.

    Attributes:
        name: what it does.
        problem: why it does not work; empty: it works.
        is_needed: whether no run works without it.
    """

    name: str
    problem: str
    is_needed: bool = True


def try_operations(backend: Backend, directory: str) -> list[Operation]:
    """Try each operation of a file system that a run uses, in a new directory that is removed afterwards.

    Raises:
        StorageError: not even a directory, or a file in it, can be made.
    """
    folder = os.path.join(directory, TEMPORARY_PREFIXES[0] + secrets.token_hex(8))
    backend.make_directory(folder, parents=False, sync=False)
    try:
        _put(backend, f"{folder}/plain", b"plain")
        found = [Operation(name, _problem(trial, backend, folder)) for name, trial in _NEEDED.items()]
        return found + [Operation(name, _problem(trial, backend, folder), False) for name, trial in _USED.items()]
    finally:
        with contextlib.suppress(StorageError):
            backend.remove(folder)


def _problem(trial: Callable[[Backend, str], str], backend: Backend, folder: str) -> str:
    try:
        return trial(backend, folder)
    except CheckpointError as error:
        return str(error)


def _put(backend: Backend, path: str, data: bytes, *, direct: bool | Literal["auto"] = False) -> None:
    sink = backend.create(path, direct=direct)
    try:
        memory = aligned_buffer(SMALL_BYTES)
        memory[: len(data)] = np.frombuffer(data, np.uint8)
        sink.write_at(0, memory)
        sink.finish(len(data), sync=True)
    finally:
        sink.abandon()


def _is_refused(call: Callable[[], object]) -> bool:
    """Whether a name that is taken is refused."""
    try:
        call()
    except StorageError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return True
    return False


def _expected(path: str, data: bytes, backend: Backend) -> str:
    folder, name = os.path.split(path)
    found = read_whole(backend, folder, name, limit=None).tobytes()
    return (
        ""
        if found == data
        else f"{path}: {len(found)} bytes are read again, expected the {len(data)} that were written"
    )


def _creation(backend: Backend, folder: str) -> str:
    _put(backend, f"{folder}/exclusive", b"first")
    if not _is_refused(lambda: backend.create(f"{folder}/exclusive", direct=False).abandon()):
        return "a file that exists is created again"
    return _expected(f"{folder}/exclusive", b"first", backend)


def _size(backend: Backend, folder: str) -> str:
    _put(backend, f"{folder}/size", b"x" * 100, direct="auto")
    return _expected(f"{folder}/size", b"x" * 100, backend)


def _lock(backend: Backend, folder: str) -> str:
    if not backend.write_new(f"{folder}/lock", b"one") or backend.write_new(f"{folder}/lock", b"two"):
        return "a lock can be taken twice, or not at all"
    return _expected(f"{folder}/lock", b"one", backend)


def _append(backend: Backend, folder: str) -> str:
    for line in (b"one", b"two"):
        backend.append(f"{folder}/lines", line)
    return _expected(f"{folder}/lines", b"onetwo", backend)


def _rename(backend: Backend, folder: str) -> str:
    for name in ("attempt", "taken"):
        backend.make_directory(f"{folder}/{name}", parents=False, sync=False)
        _put(backend, f"{folder}/{name}/file", name.encode())
    if not _is_refused(lambda: backend.rename(f"{folder}/attempt", f"{folder}/taken")):
        return "a directory that exists is replaced"
    backend.rename(f"{folder}/attempt", f"{folder}/final")
    names = {entry.name for entry in backend.list(folder)}
    if "final" not in names or "attempt" in names:
        return "a renamed directory is not listed under its new name alone"
    return _expected(f"{folder}/final/file", b"attempt", backend)


def _exchange(backend: Backend, folder: str) -> str:
    for name in ("old", "new"):
        backend.make_directory(f"{folder}/{name}", parents=False, sync=False)
        _put(backend, f"{folder}/{name}/file", name.encode())
    backend.exchange(f"{folder}/new", f"{folder}/old", sync=True)
    return _expected(f"{folder}/old/file", b"new", backend)


def _sync_file(backend: Backend, folder: str) -> str:
    backend.sync(f"{folder}/plain")
    return ""


def _sync_names(backend: Backend, folder: str) -> str:
    backend.sync(folder)
    return ""


def _time(backend: Backend, folder: str) -> str:
    """Of the heartbeat."""
    path = f"{folder}/time"
    _put(backend, path, b"")
    backdate(path, 1000)
    before_ns = backend.modified_ns(path)
    backend.touch(path)
    after_ns = backend.modified_ns(path)
    return "" if after_ns != before_ns else "the modification time of a file stays as it is when the file is touched"


def _removal(backend: Backend, folder: str) -> str:
    backend.make_directory(f"{folder}/read", parents=False, sync=False)
    _put(backend, f"{folder}/read/file", b"in use")
    source = backend.open(f"{folder}/read", "file", direct=False)
    try:
        backend.remove(f"{folder}/read")
        source.read_into(0, aligned_buffer(SMALL_BYTES), 6)
    finally:
        source.close()
    return ""


def _links(backend: Backend, folder: str) -> str:
    return "" if has_links(folder) else "there are none; the lock of a run is created and then written"


def _swap(backend: Backend, folder: str) -> str:
    for name in ("one", "two"):
        _put(backend, f"{folder}/{name}", b"")
    is_atomic = exchange_names(f"{folder}/one", f"{folder}/two")
    return "" if is_atomic else "there is none; `overwrite=True` replaces a checkpoint by three renames"


_NEEDED: dict[str, Callable[[Backend, str], str]] = {
    "exclusive creation": _creation,
    "size after closing": _size,
    "lock": _lock,
    "append": _append,
    "rename": _rename,
    "exchange": _exchange,
    "sync of a file": _sync_file,
    "sync of a directory": _sync_names,
    "modification time": _time,
}


_USED: dict[str, Callable[[Backend, str], str]] = {
    "removal of a file in use": _removal,
    "hard links": _links,
    "atomic exchange": _swap,
}


@contextlib.contextmanager
def _nameless(
    backend: Backend, directory: str, *, direct: bool, read_direct: bool | Literal["auto"]
) -> Iterator[tuple[Sink, Source]]:
    """A new file to write and to read, whose name goes before a byte is written."""
    name = TEMPORARY_PREFIXES[0] + secrets.token_hex(8)
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
    path = os.path.join(directory, TEMPORARY_PREFIXES[0] + secrets.token_hex(8))
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
