"""The subject `raw`: the fastest that the same bytes can go to and from the disk with plain system calls."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks import host_memory, huge_memory, page_cache
from benchmarks.process_figures import ResidentMeter, disk_read_bytes, release_memory, stolen_s
from benchmarks.sample import LoadSample, Moment, Resident, SaveSample
from benchmarks.workloads import Workload

NAME, NAME_FRESH = "raw", "raw_fresh"
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Way:
    """How many calls are under way at a time, and how large each is."""

    threads: int
    block_bytes: int

    def __str__(self) -> str:
        return f"{self.threads}x{self.block_bytes // MIB}_mib"


WAYS = (Way(1, 64 * MIB), Way(2, 64 * MIB))


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One write or one read of the whole file."""

    way: Way
    wall_s: float
    cpu_s: float
    direct: bool
    resident: Resident
    disk_bytes: int
    stolen_s: float


class RawTurns:
    """One file, written and read in every way; the faster one counts, and the notes have both.

    Memory on huge pages where there are any. `O_DIRECT` is used where the file system takes it, and the
    notes say whether it did. A write ends with `fdatasync`. Reads come twice: as `raw` into memory that is there
    already, and as `raw_fresh` into memory whose first touch is part of the time, as it is in a load into new arrays.
    For jobs, everything is done only in the last way, and reads come once, as `raw`.
    """

    packages = ("numpy",)

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._ways = WAYS if workload.processes == 1 else WAYS[-1:]

    def save(self, path: Path, seed: Sequence[int]) -> SaveSample:
        path.mkdir()
        source = huge_memory.gather(self._workload, seed)
        writes = [write_file(path / str(way), source, way, is_quick=self._workload.is_quick) for way in self._ways]
        del source
        release_memory()
        best = min(writes, key=lambda one: one.wall_s)
        return SaveSample(
            blocking_s=None,
            finished_s=best.wall_s,
            durable_s=best.wall_s,
            blocking_cpu_s=None,
            finished_cpu_s=best.cpu_s,
            durable_cpu_s=best.cpu_s,
            resident=best.resident,
            stored_bytes=self._workload.nbytes,
            stored_files=1,
            notes={"direct_io": all(one.direct for one in writes), "stolen_s": best.stolen_s}
            | _by_way("write", writes),
        )

    def load(self, path: Path, seed: Sequence[int], target: str) -> list[LoadSample]:
        """The leaves of `target` are the first of the file, so they are read from its beginning."""
        want = huge_memory.gather(self._workload, seed, target)
        nbytes = sum(leaf.nbytes for leaf in self._workload.wanted(target))
        ways = {NAME: huge_memory.touched}
        if self._workload.processes == 1:
            ways[NAME_FRESH] = huge_memory.fresh
        return [self._read_all(path, want, nbytes, target, row, allocate) for row, allocate in ways.items()]

    def close(self) -> None:
        """Nothing is kept."""

    def _read_all(
        self, path: Path, want: np.ndarray, nbytes: int, target: str, row: str, allocate: Callable[[int], np.ndarray]
    ) -> LoadSample:
        reads, dropped = [], ""
        for way in self._ways:
            dropped = page_cache.drop(path)
            host_memory.make_present(nbytes, is_quick=self._workload.is_quick)
            reads.append(read_file(path / str(way), want, nbytes, way, allocate))
            release_memory()
        best = min(reads, key=lambda one: one.wall_s)
        return LoadSample(
            target=target,
            row=row,
            load_s=best.wall_s,
            lazy_s=0.0,
            load_cpu_s=best.cpu_s,
            resident=best.resident,
            asked_bytes=nbytes,
            disk_bytes=best.disk_bytes,
            notes={"direct_io": all(one.direct for one in reads), "caches": dropped, "stolen_s": best.stolen_s}
            | _by_way("read", reads),
        )


def _by_way(what: str, passes: Sequence[_Pass]) -> dict[str, float | str | bool]:
    return {f"{what}_{one.way}_s": one.wall_s for one in passes}


def _for_each_block(way: Way, size: int, work: Callable[[int], None], pool: ThreadPoolExecutor) -> None:
    """Call `work` with the offset of every block, with this many calls at a time."""
    offsets = range(0, size, way.block_bytes)
    if way.threads == 1:
        for offset in offsets:
            work(offset)
    else:
        list(pool.map(work, offsets))


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """The file, and whether with `O_DIRECT`, which some file systems do not know."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as refused:
        if refused.errno != errno.EINVAL:  # EINVAL: the file system does not know O_DIRECT
            raise
    return os.open(path, flags, 0o644), False


def warn_if_buffered(folder: Path) -> None:
    """Say so on stderr if the file system of a directory does not know `O_DIRECT`."""
    path = folder / "direct"
    descriptor, direct = open_direct(path, os.O_WRONLY | os.O_CREAT)
    os.close(descriptor)
    path.unlink()
    if not direct:
        print(f"{folder}: this file system does not know O_DIRECT, so all is buffered", file=sys.stderr)


def write_file(path: Path, source: np.ndarray, way: Way, *, is_quick: bool) -> _Pass:
    """Write and sync a new file; `is_quick`: as of `host_memory.make_present`."""
    page_cache.settle()
    host_memory.make_present(len(source), is_quick=is_quick)
    view = memoryview(source)

    def write(offset: int) -> None:
        end = min(offset + way.block_bytes, len(view))
        while offset < end:
            offset += os.pwrite(fd, view[offset:end], offset)

    with _started(way) as pool:
        meter, stolen, start = ResidentMeter(), stolen_s(), Moment.now()
        fd, direct = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _for_each_block(way, len(view), write, pool)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        end, stolen = Moment.now(), stolen_s() - stolen
    return _Pass(way, end.wall_s - start.wall_s, end.cpu_s - start.cpu_s, direct, meter.read(), 0, stolen)


def _started(way: Way) -> ThreadPoolExecutor:
    """Threads that are running already."""
    pool = ThreadPoolExecutor(way.threads)
    list(pool.map(lambda _: None, range(way.threads)))
    return pool


def read_file(path: Path, want: np.ndarray, nbytes: int, way: Way, allocate: Callable[[int], np.ndarray]) -> _Pass:
    """Read as many bytes as `want` has, and compare the first `nbytes`: what follows belongs to other leaves."""
    destination = allocate(want.size) if allocate is huge_memory.touched else None

    def read(offset: int) -> None:
        end = min(offset + way.block_bytes, len(view))
        while offset < end:
            count = os.preadv(fd, [view[offset:end]], offset)
            if count == 0:
                raise ValueError(f"{path}: ended at byte {offset}, expected {len(view)}")
            offset += count

    with _started(way) as pool:
        meter, read_before, stolen = ResidentMeter(), disk_read_bytes(), stolen_s()
        start = Moment.now()
        if destination is None:
            destination = allocate(want.size)
        view = memoryview(destination)
        fd, direct = open_direct(path, os.O_RDONLY)
        try:
            _for_each_block(way, len(view), read, pool)
        finally:
            os.close(fd)
        end, stolen = Moment.now(), stolen_s() - stolen
    resident, disk_bytes = meter.read(), disk_read_bytes() - read_before
    if not np.array_equal(destination[:nbytes], want[:nbytes]):
        raise ValueError(f"{path}: bytes read differ from those written")
    return _Pass(way, end.wall_s - start.wall_s, end.cpu_s - start.cpu_s, direct, resident, disk_bytes, stolen)
