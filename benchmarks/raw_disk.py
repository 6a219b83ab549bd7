"""The subject `raw`: the fastest that the same bytes can go to and from the disk with plain system calls."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
from pathlib import Path

import jax
import numpy as np

from benchmarks import page_cache
from benchmarks.sample import Moment, Sample
from benchmarks.workloads import Tree, as_bytes

NAME = "raw"
BLOCKS_BYTES = (64 << 20, 16 << 20)
ALIGNMENT_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One write or one read of the whole file."""

    block_bytes: int
    wall_s: float
    cpu_s: float
    direct: bool


def measure(directory: Path, tree: Tree) -> Sample:
    """Write the bytes of `tree` to one file and read them back, for every block size; the faster one counts.

    Memory is aligned, on huge pages where there are any, and faulted in before the clock starts. A write ends with
    `fdatasync`. `O_DIRECT` is used where the file system takes it, and the sample's notes say whether it did.
    """
    directory.mkdir()
    source = _gather(tree)
    destination = _allocate(source.size)
    writes = [_write(directory / str(block), source, block) for block in BLOCKS_BYTES]
    dropped = page_cache.drop(directory)
    reads = []
    for block in BLOCKS_BYTES:
        destination[:] = 0
        reads.append(_read(directory / str(block), destination, block))
        if not np.array_equal(source, destination):
            raise ValueError(f"{directory / str(block)}: bytes read differ from those written")
    return _sample(writes, reads, source.size, dropped)


def _sample(writes: list[_Pass], reads: list[_Pass], stored_bytes: int, dropped: str) -> Sample:
    write = min(writes, key=lambda one: one.wall_s)
    read = min(reads, key=lambda one: one.wall_s)
    notes: dict[str, float | str | bool] = {
        "direct_io": all(one.direct for one in (*writes, *reads)),
        "caches": dropped,
    }
    notes |= {f"write_{one.block_bytes >> 20}_mib_s": one.wall_s for one in writes}
    notes |= {f"read_{one.block_bytes >> 20}_mib_s": one.wall_s for one in reads}
    return Sample(
        blocking_s=None,
        finished_s=write.wall_s,
        durable_s=write.wall_s,
        load_s=read.wall_s,
        lazy_s=0.0,
        blocking_cpu_s=None,
        finished_cpu_s=write.cpu_s,
        durable_cpu_s=write.cpu_s,
        load_cpu_s=read.cpu_s,
        stored_bytes=stored_bytes,
        stored_files=1,
        notes=notes,
    )


def _gather(tree: Tree) -> np.ndarray:
    leaves = [as_bytes(leaf) for leaf in jax.tree.leaves(tree)]
    size = sum(leaf.size for leaf in leaves)
    buffer = _allocate(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    np.concatenate(leaves, out=buffer[:size])
    return buffer


def _allocate(size: int) -> np.ndarray:
    """`size` bytes of zeroed, page-aligned memory that is really there."""
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as refused:
        if refused.errno != errno.EINVAL:  # EINVAL: a kernel without transparent huge pages
            raise
    buffer = np.frombuffer(memory, np.uint8)
    buffer[:] = 0
    return buffer[:size]


def _open(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as refused:
        if refused.errno != errno.EINVAL:  # EINVAL: the file system does not know O_DIRECT
            raise
    return os.open(path, flags, 0o644), False


def _write(path: Path, source: np.ndarray, block_bytes: int) -> _Pass:
    page_cache.settle()
    view = memoryview(source)
    start = Moment.now()
    fd, direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        offset = 0
        while offset < len(view):
            offset += os.pwrite(fd, view[offset : offset + block_bytes], offset)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    end = Moment.now()
    return _Pass(block_bytes, end.wall_s - start.wall_s, end.cpu_s - start.cpu_s, direct)


def _read(path: Path, destination: np.ndarray, block_bytes: int) -> _Pass:
    view = memoryview(destination)
    start = Moment.now()
    fd, direct = _open(path, os.O_RDONLY)
    try:
        offset = 0
        while offset < len(view):
            count = os.preadv(fd, [view[offset : offset + block_bytes]], offset)
            if count == 0:
                raise ValueError(f"{path}: ended at byte {offset}, expected {len(view)}")
            offset += count
    finally:
        os.close(fd)
    end = Moment.now()
    return _Pass(block_bytes, end.wall_s - start.wall_s, end.cpu_s - start.cpu_s, direct)
