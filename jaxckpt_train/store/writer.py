"""Writes the segments of one checkpointable: windows of them, on a few threads."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.digests import digest_function
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.layout import ArraySource, plan_segments
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, SegmentRecord
from jaxckpt_train.store.quiet_gc import paused_collection
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.segment_writer import SegmentWriter
from jaxckpt_train.store.shardings import Shardings
from jaxckpt_train.store.staging import shared_pool
from jaxckpt_train.store.workers import shared_workers
from jaxckpt_train.store.write_depth import write_depth_of

# While all writes that the disk is given at a time are under way, so many threads fill the next buffers.
FILLING_THREADS = 1

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class WrittenArrays:
    """What the manifest will say of the arrays of one checkpointable."""

    segments: tuple[SegmentRecord, ...]
    arrays: tuple[ArrayRecord, ...]

    @property
    def data_bytes(self) -> int:
        """Size of the files, with their headers."""
        return sum(segment.bytes for segment in self.segments)


def write_arrays(
    backend: Backend,
    directory: str,
    part: str,
    arrays: Sequence[ArraySource],
    settings: StoreSettings,
    *,
    first_segment: int,
    progress: Progress | None = None,
    process: int = 0,
    give_up: Callable[[], None] = lambda: None,
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
        process: number of the process that writes, which the names of its files tell.
        give_up: called at an interrupt: may set free who waits for what is to be written.

    Raises:
        StorageError: the first refusal of the file system; nothing more is written after it.
    """
    digest = digest_function(settings.digest)
    with paused_collection():
        layouts = list(plan_segments(arrays, settings.segment_bytes))
    files = [f"{part}/p{process:05d}-s{number:03d}.safetensors" for number in range(len(layouts))]
    writers = [
        SegmentWriter(
            layout,
            functools.partial(backend.create, f"{directory}/{file}", direct=settings.direct_io),
            digest,
            settings.durability != "none",
        )
        for layout, file in zip(layouts, files, strict=True)
    ]
    write_segments(backend, directory, writers, settings, progress, give_up)
    segments = tuple(
        SegmentRecord(file, layout.size, len(layout.head), digest(layout.head))
        for file, layout in zip(files, layouts, strict=True)
    )
    with paused_collection():
        records = _records(arrays, writers, first_segment)
    return WrittenArrays(segments, records)


def write_segments(
    backend: Backend,
    directory: str,
    writers: Sequence[SegmentWriter],
    settings: StoreSettings,
    progress: Progress | None = None,
    give_up: Callable[[], None] = lambda: None,
) -> None:
    """Write files whose layout is known; on an error they are closed as they are.

    Args:
        backend, directory: where, which says how many writes are under way at a time.
        writers: one for each file.
        settings: how.
        progress: called with the number of bytes, from several threads, as windows reach the disk.
        give_up: as of `write_arrays`.

    Raises:
        StorageError: the first refusal of the file system; nothing more is written after it.
    """
    try:
        run = _Run(writers, settings.staging_bytes, progress, give_up)
        if settings.io_threads == "auto":
            depth = write_depth_of((backend.volume(directory), settings.direct_io), settings.staging_bytes)
            depth.run(sum(writer.layout.size for writer in writers), run.write, run.pool.touch)
        else:
            run.write(settings.io_threads, None)
    finally:
        for writer in writers:
            writer.abandon()


class _Run:
    """The writing of all segments, in turns that may differ in how many writes are under way at a time."""

    def __init__(
        self,
        writers: Sequence[SegmentWriter],
        staging_bytes: int,
        progress: Progress | None,
        give_up: Callable[[], None],
    ) -> None:
        self._writers, self._staging_bytes, self._progress = writers, staging_bytes, progress
        self._give_up = give_up
        self.pool = shared_pool(staging_bytes)

    def write(self, depth: int, most_bytes: int | None) -> int:
        """Write the next windows, about `most_bytes` (None: all that are left); returns how many bytes they were."""
        threads, disk = depth + FILLING_THREADS, threading.Semaphore(depth)
        buffer_bytes = max(self._staging_bytes // threads // ALIGNMENT, 1) * ALIGNMENT

        def work(job: tuple[SegmentWriter, tuple[int, int]]) -> None:
            done = job[0].write(job[1], self.pool, buffer_bytes, disk)
            if self._progress is not None:
                self._progress(done)

        jobs = _cut(self._writers, buffer_bytes, most_bytes)
        shared_workers(threads, "jaxckpt-write", polite=True).run_all(work, jobs, give_up=self._give_up)
        return sum(stop - start for _, (start, stop) in jobs)


def _cut(
    writers: Sequence[SegmentWriter], buffer_bytes: int, most_bytes: int | None
) -> list[tuple[SegmentWriter, tuple[int, int]]]:
    """The next windows, in the order of the files; the first ones smaller, so that the disk begins at once."""
    jobs, total = [], 0
    width = max(buffer_bytes // 4 // ALIGNMENT, 1) * ALIGNMENT
    for writer in writers:
        while most_bytes is None or total < most_bytes:
            window = writer.next_window(width)
            if window is None:
                break
            jobs.append((writer, window))
            total += window[1] - window[0]
            width = min(2 * width, buffer_bytes)
    return jobs


def _records(
    arrays: Sequence[ArraySource], writers: Sequence[SegmentWriter], first_segment: int
) -> tuple[ArrayRecord, ...]:
    chunks: list[list[ChunkRecord]] = [[] for _ in arrays]
    for number, writer in enumerate(writers, first_segment):
        for (array, source, offset, length), blocks in zip(writer.layout.chunks, writer.blocks, strict=True):
            digests = blocks[0] if len(blocks) == 1 else "".join(blocks)
            chunks[array].append(ChunkRecord(source.box, number, offset, length, digests))
    shardings = Shardings()
    return tuple(
        [
            ArrayRecord(
                array.name, array.shape, dtype_name(array.dtype), tuple(found), shardings.storable(array.sharding)
            )
            for array, found in zip(arrays, chunks, strict=True)
        ]
    )
