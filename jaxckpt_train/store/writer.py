"""Writes the segments of one checkpointable: staging, digests and disk in turn, on a few threads."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, Sink
from jaxckpt_train.store.digests import HexDigest, digest_function
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.layout import ArraySource, PlacedChunk, SegmentLayout, plan_segments
from jaxckpt_train.store.manifest import BLOCK_BYTES, ArrayRecord, ChunkRecord, SegmentRecord
from jaxckpt_train.store.staging import StagingPool, shared_pool
from jaxckpt_train.store.workers import shared_workers

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class WrittenArrays:
    """What the manifest will say of the arrays of one checkpointable."""

    segments: tuple[SegmentRecord, ...]
    arrays: tuple[ArrayRecord, ...]
    data_bytes: int


class _SegmentWriter:
    """Writes one segment: any window of the file can be filled, digested and written by any thread."""

    def __init__(self, layout: SegmentLayout, create: Callable[[], Sink], digest: HexDigest, sync: bool) -> None:
        self.layout, self._create, self._digest, self._sync = layout, create, digest, sync
        self._sink: Sink | None = None
        self._starts = [chunk.offset for chunk in layout.chunks]
        self._flat: dict[int, np.ndarray] = {}
        self._flat_lock = threading.Lock()
        self.blocks = [[""] * -(-chunk.length // BLOCK_BYTES) for chunk in layout.chunks]
        self._windows_left = 0
        self._lock = threading.Lock()

    def windows(self, window_bytes: int) -> list[tuple[int, int]]:
        """The windows that cover the file, in file order."""
        size = self.layout.size
        cuts = [(start, min(start + window_bytes, size)) for start in range(0, size, window_bytes)]
        self._windows_left = len(cuts)
        return cuts

    def write(self, window: tuple[int, int], pool: StagingPool) -> int:
        """Fill a staging buffer with one window, digest the blocks that begin in it, and write it."""
        start, stop = window
        with self._lock:
            sink = self._sink = self._sink or self._create()
        with pool.buffer() as buffer:
            if start < len(self.layout.head):
                _copy_overlap(np.frombuffer(self.layout.head, np.uint8), 0, start, buffer[: stop - start])
            first = max(0, bisect.bisect_right(self._starts, start) - 1)
            for index in range(first, len(self._starts)):
                chunk = self.layout.chunks[index]
                if chunk.offset >= stop:
                    break
                if chunk.offset + chunk.length > start:
                    self._take(index, chunk, start, stop, buffer)
            padded = -(-(stop - start) // sink.alignment) * sink.alignment
            buffer[stop - start : padded] = 0
            sink.write_at(start, buffer[:padded])
        self._finish_after_last(sink)
        return stop - start

    def abandon(self) -> None:
        """Close the file after a failure; nothing happens if it is finished."""
        if self._sink is not None:
            self._sink.abandon()

    def _take(self, index: int, chunk: PlacedChunk, start: int, stop: int, buffer: np.ndarray) -> None:
        flat = self._bytes(index, chunk)
        _copy_overlap(flat, chunk.offset, start, buffer[: stop - start])
        first = max(0, -(-(start - chunk.offset) // BLOCK_BYTES))
        last = min(-(-(stop - chunk.offset) // BLOCK_BYTES), len(self.blocks[index]))
        for block in range(first, last):
            self.blocks[index][block] = self._digest(memoryview(flat[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]))
        if chunk.offset + chunk.length <= stop:
            self._flat.pop(index, None)

    def _bytes(self, index: int, chunk: PlacedChunk) -> np.ndarray:
        """The chunk as row-major, little-endian, flat bytes; converted once if it is not."""
        data = chunk.source.data
        if data.flags.c_contiguous and data.dtype.isnative:
            return data.reshape(-1).view(np.uint8)
        with self._flat_lock:
            if index not in self._flat:
                self._flat[index] = np.ascontiguousarray(data, data.dtype.newbyteorder("=")).reshape(-1).view(np.uint8)
            return self._flat[index]

    def _finish_after_last(self, sink: Sink) -> None:
        with self._lock:
            self._windows_left -= 1
            last = self._windows_left == 0
        if last:
            sink.finish(self.layout.size, sync=self._sync)


def write_arrays(
    backend: Backend,
    directory: str,
    part: str,
    arrays: Sequence[ArraySource],
    settings: StoreSettings,
    *,
    first_segment: int,
    progress: Progress | None = None,
) -> WrittenArrays:
    """Write all arrays of one checkpointable below `directory/part/`.

    Args:
        backend: where.
        directory: the attempt; the folder `part` exists in it.
        part: name of the checkpointable.
        arrays: what; nothing may change it until this returns.
        settings: how.
        first_segment: number of segments that the manifest has already.
        progress: called with the number of bytes, from several threads, as windows reach the disk.

    Raises:
        StorageError: the first refusal of the file system; nothing more is written after it.
    """
    digest = digest_function(settings.digest)
    pool = shared_pool(settings.staging_bytes, settings.io_threads)
    layouts = list(plan_segments(arrays, settings.segment_bytes))
    files = [f"{part}/p00000-s{number:03d}.safetensors" for number in range(len(layouts))]
    writers = [
        _SegmentWriter(
            layout,
            functools.partial(backend.create, f"{directory}/{file}", direct=settings.direct_io),
            digest,
            settings.durability != "none",
        )
        for layout, file in zip(layouts, files, strict=True)
    ]
    try:
        _run(writers, pool, settings.io_threads, progress)
    finally:
        for writer in writers:
            writer.abandon()
    segments = tuple(
        SegmentRecord(file, layout.size, len(layout.head), digest(layout.head))
        for file, layout in zip(files, layouts, strict=True)
    )
    return WrittenArrays(
        segments, _records(arrays, writers, first_segment), sum(each.size - len(each.head) for each in layouts)
    )


def _run(writers: Sequence[_SegmentWriter], pool: StagingPool, threads: int, progress: Progress | None) -> None:
    def work(job: tuple[_SegmentWriter, tuple[int, int]]) -> None:
        done = job[0].write(job[1], pool)
        if progress is not None:
            progress(done)

    jobs = [(writer, window) for writer in writers for window in writer.windows(pool.buffer_bytes)]
    shared_workers(threads, "jaxckpt-write").run_all(work, jobs)


def _records(
    arrays: Sequence[ArraySource], writers: Sequence[_SegmentWriter], first_segment: int
) -> tuple[ArrayRecord, ...]:
    chunks: list[list[ChunkRecord]] = [[] for _ in arrays]
    for number, writer in enumerate(writers, first_segment):
        for placed, blocks in zip(writer.layout.chunks, writer.blocks, strict=True):
            record = ChunkRecord(placed.source.box, number, placed.offset, placed.length, "".join(blocks))
            chunks[placed.array].append(record)
    return tuple(
        ArrayRecord(array.name, array.shape, dtype_name(array.dtype), tuple(found), array.sharding)
        for array, found in zip(arrays, chunks, strict=True)
    )


def _copy_overlap(source: np.ndarray, source_start: int, window_start: int, window: np.ndarray) -> None:
    """Copy what a run of bytes that begins at `source_start` in the file shares with a window of the file."""
    low = max(source_start, window_start)
    high = min(source_start + len(source), window_start + len(window))
    if low < high:
        window[low - window_start : high - window_start] = source[low - source_start : high - source_start]
