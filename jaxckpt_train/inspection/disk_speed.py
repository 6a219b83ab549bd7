"""Tests a disk: which file-system operations work, and how fast it writes, syncs and reads."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Backend, Sink, Source, sync_directory
from jaxckpt_train.store.backends.local_names import backdate
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.files import read_whole

BLOCK_BYTES = 16 << 20
THREADS = 2  # concurrent calls, like a save at its start
SMALL_BYTES = 4096
SMALL_FILES = 5
Trial = Callable[[Backend, str], str | None]  # returns why an operation does not work


@dataclasses.dataclass(frozen=True)
class DiskTrial:
    """The measurements of a disk with a file of some bytes.

    Attributes:
        direct_write, direct_read: whether the disk supports direct I/O.
        write_bytes_per_s: the rate of a synced write.
        sync_s: the part of its time for the final sync.
        read_bytes_per_s: the rate of a read, from the page cache if direct reads are not supported.
        small_file_s: the median time to create, write and sync a file of 4 KiB and its name.
    """

    bytes: int
    direct_write: bool
    direct_read: bool
    write_bytes_per_s: float
    sync_s: float
    read_bytes_per_s: float
    small_file_s: float


def try_disk(backend: Backend, directory: str, nbytes: int, progress: Callable[[int], object]) -> DiskTrial:
    """Write a file of random bytes, sync it, read it, and compare it.

    The file has no name while it is used, so nothing remains when this process dies. Its size is a multiple of 4 KiB.
    An exception of `progress` ends the trial.

    Raises:
        StorageError: the file system reported an error.
        CorruptCheckpointError: the disk returned other bytes than were written.
    """
    size = max(nbytes // SMALL_BYTES, 1) * SMALL_BYTES
    block = aligned_buffer(min(size, BLOCK_BYTES))
    block.view(np.uint64)[:] = np.random.default_rng().integers(0, 1 << 63, len(block) // 8, np.uint64)
    name = TEMPORARY_PREFIXES[0] + secrets.token_hex(8)
    with contextlib.ExitStack() as opened:
        try:
            sink = backend.create(os.path.join(directory, name), direct="auto")
            opened.callback(sink.abandon)
            source = backend.open(directory, name, direct="auto")
            opened.callback(source.close)
        finally:
            backend.remove(os.path.join(directory, name))
        write_s, sync_s = _write(sink, block, size, progress)
        read_s = _read(source, block, size, directory, progress)
        direct_write, direct_read = sink.alignment > 1, source.alignment > 1  # 1 after a refusal of direct I/O
    small_s = statistics.median(_small_s(backend, directory) for _ in range(SMALL_FILES))
    return DiskTrial(size, direct_write, direct_read, size / write_s, sync_s, size / read_s, small_s)


def try_operations(backend: Backend, directory: str) -> dict[str, str | None]:
    """Try each operation that a run needs in a temporary directory. Return why each does not work, or None."""
    folder = os.path.join(directory, TEMPORARY_PREFIXES[0] + secrets.token_hex(8))
    backend.make_directory(folder, parents=False, sync=False)
    try:
        _put(backend, f"{folder}/plain", b"plain")
        return {name: _problem(trial, backend, folder) for name, trial in TRIALS.items()}
    finally:
        with contextlib.suppress(StorageError):
            backend.remove(folder)


def _problem(trial: Trial, backend: Backend, folder: str) -> str | None:
    try:
        return trial(backend, folder)
    except CheckpointError as error:
        return str(error)


def _put(backend: Backend, path: str, data: bytes, *, direct: bool | Literal["auto"] = False) -> None:
    sink = backend.create(path, direct=direct)
    try:
        memory = aligned_buffer(SMALL_BYTES if sink.alignment > 1 else len(data))
        memory[: len(data)] = np.frombuffer(data, np.uint8)
        sink.write_at(0, memory)
        sink.finish(len(data), sync=True)
    finally:
        sink.abandon()


def _put_folder(backend: Backend, folder: str, data: bytes) -> None:
    backend.make_directory(folder, parents=False, sync=False)
    _put(backend, f"{folder}/file", data)


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StorageError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return True
    return False


def _content_problem(path: str, data: bytes, backend: Backend) -> str | None:
    found = read_whole(backend, *os.path.split(path), limit=None).tobytes()
    return None if found == data else f"{path}: expected the {len(data)} bytes that were written, found {len(found)}"


def _creation(backend: Backend, folder: str) -> str | None:
    _put(backend, f"{folder}/exclusive", b"first")
    if not _is_refused(lambda: backend.create(f"{folder}/exclusive", direct=False).abandon()):
        return "creating a file that exists succeeds"
    return _content_problem(f"{folder}/exclusive", b"first", backend)


def _size(backend: Backend, folder: str) -> str | None:
    _put(backend, f"{folder}/size", b"x" * 100, direct="auto")
    return _content_problem(f"{folder}/size", b"x" * 100, backend)


def _append(backend: Backend, folder: str) -> str | None:
    for line in (b"one", b"two"):
        backend.append(f"{folder}/lines", line)
    return _content_problem(f"{folder}/lines", b"onetwo", backend)


def _rename(backend: Backend, folder: str) -> str | None:
    for name in ("attempt", "taken"):
        _put_folder(backend, f"{folder}/{name}", name.encode())
    if not _is_refused(lambda: backend.rename(f"{folder}/attempt", f"{folder}/taken")):
        return "renaming to a directory that exists replaces it"
    backend.rename(f"{folder}/attempt", f"{folder}/final")
    names = {entry.name for entry in backend.list(folder)}
    if "final" not in names or "attempt" in names:
        return "a renamed directory is not listed under its new name only"
    return _content_problem(f"{folder}/final/file", b"attempt", backend)


def _exchange(backend: Backend, folder: str) -> str | None:
    for name in ("old", "new"):
        _put_folder(backend, f"{folder}/{name}", name.encode())
    backend.exchange(f"{folder}/new", f"{folder}/old", sync=True)
    return _content_problem(f"{folder}/old/file", b"new", backend)


def _lock(backend: Backend, folder: str) -> str | None:
    path = f"{folder}/record"
    version = backend.swap_record(path, b"one", None)
    if version is None or backend.swap_record(path, b"two", None) is not None:
        return "a lock can be taken twice, or not at all"
    backdate(f"{path}/{backend.list(path)[0].name}", 1000)
    before = backend.read_record(path)
    backend.refresh_record(path, version)
    if backend.read_record(path) == before:
        return "touching a file does not change its modification time"
    return None


TRIALS: dict[str, Trial] = {
    "exclusive creation": _creation,
    "size after closing": _size,
    "append": _append,
    "rename": _rename,
    "exchange": _exchange,
    "sync of a file": lambda backend, folder: backend.sync(f"{folder}/plain"),
    "sync of a directory": lambda backend, folder: backend.sync(folder),
    "lock": _lock,
}


def _in_blocks(
    size: int, block_bytes: int, work: Callable[[int, int, int], object], progress: Callable[[int], object]
) -> float:
    """Call `work` with the offset, size and thread of each block. Return the elapsed seconds."""
    is_ended = False

    def run(thread: int) -> None:
        for at in range(thread * block_bytes, size, THREADS * block_bytes):
            if is_ended:
                return
            work(at, min(block_bytes, size - at), thread)
            progress(min(block_bytes, size - at))

    with ThreadPoolExecutor(THREADS, thread_name_prefix="jaxckpt-trial") as pool:
        start_s = time.perf_counter()
        try:
            for future in [pool.submit(run, thread) for thread in range(THREADS)]:
                future.result()
        finally:
            is_ended = True
    return time.perf_counter() - start_s


def _write(sink: Sink, block: np.ndarray, size: int, progress: Callable[[int], object]) -> tuple[float, float]:
    write_s = _in_blocks(size, len(block), lambda at, nbytes, _: sink.write_at(at, block[:nbytes]), progress)
    start_s = time.perf_counter()
    sink.finish(size, sync=True)
    sync_s = time.perf_counter() - start_s
    return write_s + sync_s, sync_s


def _read(source: Source, block: np.ndarray, size: int, directory: str, progress: Callable[[int], object]) -> float:
    buffers = [aligned_buffer(len(block)) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = 0  # allocates the pages before the measurement
    filled = [0] * THREADS

    def read(at: int, nbytes: int, thread: int) -> None:
        source.read_into(at, buffers[thread][:nbytes], nbytes)
        filled[thread] = nbytes

    read_s = _in_blocks(size, len(block), read, progress)
    if not all(np.array_equal(buffer[:last], block[:last]) for buffer, last in zip(buffers, filled, strict=True)):
        raise CorruptCheckpointError(f"{directory}: the disk returned other bytes than were just written to it")
    return read_s


def _small_s(backend: Backend, directory: str) -> float:
    path = os.path.join(directory, TEMPORARY_PREFIXES[0] + secrets.token_hex(8))
    start_s = time.perf_counter()
    try:
        _put(backend, path, bytes(SMALL_BYTES))
        sync_directory(backend, directory)
        return time.perf_counter() - start_s
    finally:
        backend.remove(path)
