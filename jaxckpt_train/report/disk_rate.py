"""How fast the disk of a run takes bytes: measured by writing some into its directory, and removing them."""

from __future__ import annotations

import dataclasses
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxckpt_train.store.backend import HALF_MADE, Files, Sink
from jaxckpt_train.store.staging import aligned_buffer

BLOCK_BYTES = 8 << 20
BYTES = 256 << 20
TRIES = 3
THREADS = 2


@dataclasses.dataclass(frozen=True)
class DiskRate:
    """The fastest of some writes of one file, each synced.

    Attributes:
        bytes_per_s: of the fastest.
        bytes: that each wrote.
        tries: how many there were.
    """

    bytes_per_s: float
    bytes: int
    tries: int


def measure_disk(files: Files, directory: str, nbytes: int = BYTES, tries: int = TRIES) -> DiskRate:
    """Write a file and sync it, again and again; it is removed whatever happens.

    Args:
        files: where.
        directory: that the file is put into.
        nbytes: how large it is, in whole blocks.
        tries: how often.

    Raises:
        StorageError: the file system refused, such as for want of space.
    """
    block = _block()
    blocks = max(1, nbytes // BLOCK_BYTES)
    seconds = min(_seconds(files, directory, block, blocks) for _ in range(tries))
    return DiskRate(blocks * BLOCK_BYTES / seconds, blocks * BLOCK_BYTES, tries)


def _block() -> np.ndarray:
    """Bytes that nothing compresses, where direct I/O takes them from."""
    block = aligned_buffer(BLOCK_BYTES)
    block[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
    return block


def _seconds(files: Files, directory: str, block: np.ndarray, blocks: int) -> float:
    path = f"{directory}/{HALF_MADE[0]}{secrets.token_hex(8)}"
    began = time.perf_counter()
    try:
        sink: Sink = files.create(path, direct="auto")
        try:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="jaxckpt-disk") as pool:
                list(pool.map(lambda number: sink.write_at(number * BLOCK_BYTES, block), range(blocks)))
        except BaseException:
            sink.abandon()
            raise
        sink.finish(blocks * BLOCK_BYTES, sync=True)
        return time.perf_counter() - began
    finally:
        files.remove(path)
