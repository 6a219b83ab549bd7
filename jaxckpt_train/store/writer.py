"""Writes the segments of one checkpointable: windows of them, on a few threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.digests import digest_function
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.layout import ArraySource, plan_segments
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, SegmentRecord
from jaxckpt_train.store.quiet_gc import paused_collection
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.segment_writer import SegmentWriter
from jaxckpt_train.store.staging import shared_pool
from jaxckpt_train.store.workers import shared_workers
from jaxckpt_train.store.write_depth import Turn, write_depth_of

# While all writes that the disk is given at a time are under way, so many threads fill the next buffers.
FILLING_THREADS = 1

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class WrittenArrays:
    """What the manifest will say of the arrays of one checkpointable."""

    segments: tuple[SegmentRecord, ...]
    arrays: tuple[ArrayRecord, ...]
    data_bytes: int


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
    with paused_collection():
        layouts = list(plan_segments(arrays, settings.segment_bytes))
    files = [f"{part}/p00000-s{number:03d}.safetensors" for number in range(len(layouts))]
    writers = [
        SegmentWriter(
            layout,
            functools.partial(backend.create, f"{directory}/{file}", direct=settings.direct_io),
            digest,
            settings.durability != "none",
        )
        for layout, file in zip(layouts, files, strict=True)
    ]
    try:
        total = sum(layout.size for layout in layouts)
        with contextlib.closing(_turns(backend, directory, settings, total)) as turns:
            _run(writers, turns, settings.staging_bytes, progress)
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


def _turns(backend: Backend, directory: str, settings: StoreSettings, total: int) -> Generator[Turn]:
    if settings.io_threads == "auto":
        yield from write_depth_of(backend.volume(directory)).turns(total)
    else:
        yield Turn(settings.io_threads)


def _run(
    writers: Sequence[SegmentWriter],
    turns: Iterator[Turn],
    staging_bytes: int,
    progress: Progress | None,
) -> None:
    """Write all windows, in turns that may differ in how many writes are under way at a time."""
    pool = shared_pool(staging_bytes)

    def work(job: tuple[SegmentWriter, tuple[int, int]]) -> None:
        done = job[0].write(job[1], pool, buffer_bytes, disk)
        if progress is not None:
            progress(done)

    for turn in turns:
        if turn.begins_measuring:
            pool.touch()  # else the first turn alone would pay for it
        disk = threading.Semaphore(turn.depth)
        threads = turn.depth + FILLING_THREADS
        buffer_bytes = max(staging_bytes // threads // ALIGNMENT, 1) * ALIGNMENT
        jobs = _cut(writers, buffer_bytes, turn.most_bytes)
        shared_workers(threads, "jaxckpt-write", polite=True).run_all(work, jobs)


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
    return tuple(
        [
            ArrayRecord(array.name, array.shape, dtype_name(array.dtype), tuple(found), array.sharding)
            for array, found in zip(arrays, chunks, strict=True)
        ]
    )
