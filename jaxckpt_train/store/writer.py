"""Writes the segments of one checkpointable: staging, digests and disk in turn, on a few threads."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, Sink
from jaxckpt_train.store.digests import HexDigest, digest_function
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.layout import ArraySource, PlacedChunk, SegmentLayout, plan_segments
from jaxckpt_train.store.manifest import BLOCK_BYTES, ArrayRecord, ChunkRecord, SegmentRecord
from jaxckpt_train.store.quiet_gc import paused_collection
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.staging import StagingPool, shared_pool
from jaxckpt_train.store.workers import shared_workers

SMALL_BYTES = 1 << 20
# While all writes that the disk is given at a time are under way, so many threads fill the next buffers.
FILLING_THREADS = 1

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
        self._flat_left: dict[int, int] = {}
        self._flat_lock = threading.Lock()
        self.blocks = [[""] * -(-chunk.length // BLOCK_BYTES) for chunk in layout.chunks]
        self._windows_left = 0
        self._lock = threading.Lock()

    def windows(self, window_bytes: int) -> list[tuple[int, int]]:
        """The windows that cover the file, in file order; the first ones smaller, so that the disk begins at once."""
        cuts, start = [], 0
        width = max(window_bytes // 4 // ALIGNMENT, 1) * ALIGNMENT
        while start < self.layout.size:
            stop = min(start + min(width, window_bytes), self.layout.size)
            cuts.append((start, stop))
            start, width = stop, 2 * width
        self._windows_left = len(cuts)
        return cuts

    def write(self, window: tuple[int, int], pool: StagingPool, disk: threading.Semaphore) -> int:
        """Fill a staging buffer with one window, digest the blocks that begin in it, and write it when `disk` lets."""
        start, stop = window
        with self._lock:
            sink = self._sink = self._sink or self._create()
        with pool.buffer() as buffer:
            if start < len(self.layout.head):
                _copy_overlap(np.frombuffer(self.layout.head, np.uint8), 0, start, buffer[: stop - start])
            self._fill(start, stop, buffer)
            padded = -(-(stop - start) // sink.alignment) * sink.alignment
            buffer[stop - start : padded] = 0
            with disk:
                sink.write_at(start, buffer[:padded])
        self._finish_after_last(sink)
        return stop - start

    def _fill(self, start: int, stop: int, buffer: np.ndarray) -> None:
        """Put what lies in [start, stop) of the file into the buffer."""
        chunks = self.layout.chunks
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        end = bisect.bisect_left(self._starts, stop)
        small: list[int] = []
        most = min(SMALL_BYTES, BLOCK_BYTES)  # so that each has one digest
        for index in range(first, end):
            chunk = chunks[index]
            if chunk.length <= most and start <= chunk.offset and chunk.offset + chunk.length <= stop:
                small.append(index)
            elif chunk.offset + chunk.length > start:
                self._take(index, chunk, start, stop, buffer)
        if small:
            self._take_small(small, start, buffer)

    def _take_small(self, indices: Sequence[int], start: int, buffer: np.ndarray) -> None:
        """Copy chunks that lie whole in the window, runs of neighbours in one call each."""
        chunks, digest = self.layout.chunks, self._digest
        view = memoryview(buffer)
        for run in _neighbours(indices):
            low = chunks[run[0]].offset - start
            high = chunks[run[-1]].offset + chunks[run[-1]].length - start
            np.concatenate([self._bytes(index, chunks[index]) for index in run], out=buffer[low:high])
            for index in run:
                at = chunks[index].offset - start
                self.blocks[index][0] = digest(view[at : at + chunks[index].length])
                self._let_go(index, chunks[index], chunks[index].length)

    def abandon(self) -> None:
        """Close the file after a failure; nothing happens if it is finished."""
        if self._sink is not None:
            self._sink.abandon()

    def _take(self, index: int, chunk: PlacedChunk, start: int, stop: int, buffer: np.ndarray) -> None:
        """Copy what a chunk has in the window; block by block, so that the digest finds it in the processor's cache."""
        flat = self._bytes(index, chunk)
        low, high = max(start, chunk.offset), min(stop, chunk.offset + chunk.length)
        for block in range((low - chunk.offset) // BLOCK_BYTES, -(-(high - chunk.offset) // BLOCK_BYTES)):
            data = flat[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            _copy_overlap(data, chunk.offset + block * BLOCK_BYTES, start, buffer[: stop - start])
            if chunk.offset + block * BLOCK_BYTES >= start:
                self.blocks[index][block] = self._digest(memoryview(data))
        self._let_go(index, chunk, high - low)

    def _bytes(self, index: int, chunk: PlacedChunk) -> np.ndarray:
        """The chunk as row-major, little-endian, flat bytes; fetched or converted once if it is not that yet."""
        data = chunk.source.data
        if isinstance(data, np.ndarray) and data.flags.c_contiguous and data.dtype.isnative:
            return data.reshape(-1).view(np.uint8)
        with self._flat_lock:
            if index not in self._flat:
                here = data if isinstance(data, np.ndarray) else data.fetch()
                flat = np.ascontiguousarray(here, here.dtype.newbyteorder("=")).reshape(-1).view(np.uint8)
                self._flat[index] = flat
                self._flat_left[index] = chunk.length
            return self._flat[index]

    def _let_go(self, index: int, chunk: PlacedChunk, taken: int) -> None:
        """Drop what was fetched or converted once all windows have taken their share of it."""
        if index in self._flat:
            with self._flat_lock:
                self._flat_left[index] -= taken
                if self._flat_left[index] == 0:
                    del self._flat[index], self._flat_left[index]

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
    pool = shared_pool(settings.staging_bytes, settings.io_threads + FILLING_THREADS)
    with paused_collection():
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
    with paused_collection():
        records = _records(arrays, writers, first_segment)
    return WrittenArrays(segments, records, sum(each.size - len(each.head) for each in layouts))


def _run(writers: Sequence[_SegmentWriter], pool: StagingPool, threads: int, progress: Progress | None) -> None:
    disk = threading.Semaphore(threads)

    def work(job: tuple[_SegmentWriter, tuple[int, int]]) -> None:
        done = job[0].write(job[1], pool, disk)
        if progress is not None:
            progress(done)

    jobs = [(writer, window) for writer in writers for window in writer.windows(pool.buffer_bytes)]
    shared_workers(threads + FILLING_THREADS, "jaxckpt-write", polite=True).run_all(work, jobs)


def _records(
    arrays: Sequence[ArraySource], writers: Sequence[_SegmentWriter], first_segment: int
) -> tuple[ArrayRecord, ...]:
    chunks: list[list[ChunkRecord]] = [[] for _ in arrays]
    for number, writer in enumerate(writers, first_segment):
        for (array, source, offset, length), blocks in zip(writer.layout.chunks, writer.blocks, strict=True):
            digests = blocks[0] if len(blocks) == 1 else "".join(blocks)
            chunks[array].append(ChunkRecord(source.box, number, offset, length, digests))
    return tuple(
        [
            ArrayRecord(array.name, array.shape, dtype_name(array.dtype), tuple(found), array.sharding)
            for array, found in zip(arrays, chunks, strict=True)
        ]
    )


def _neighbours(indices: Sequence[int]) -> Iterator[list[int]]:
    """Cut rising numbers into runs without a gap."""
    run: list[int] = []
    for index in indices:
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _copy_overlap(source: np.ndarray, source_start: int, window_start: int, window: np.ndarray) -> None:
    """Copy what a run of bytes that begins at `source_start` in the file shares with a window of the file."""
    low = max(source_start, window_start)
    high = min(source_start + len(source), window_start + len(window))
    if low < high:
        window[low - window_start : high - window_start] = source[low - source_start : high - source_start]
