"""Write the segments of one checkpointable: cut into windows, which a few threads fill, digest and write.

`write_arrays` is the entry. `SegmentWriter` writes the windows of one file, in any order.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import functools
import logging
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from jaxckpt_train.errors import SettingsError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend, Opener, Sink
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.manifest import BLOCK_BYTES, ArrayRecord, ChunkRecord, SegmentRecord, digest_function
from jaxckpt_train.store.reuse import APART_BYTES, NOTHING_KNOWN, Candidate, Sources, Unchanged
from jaxckpt_train.store.segment import (
    ALIGNMENT,
    ArraySource,
    PlacedChunk,
    SegmentLayout,
    Shardings,
    StableChunkSource,
    dtype_name,
    fetched_bytes,
    flat_bytes,
    plan_segments,
)
from jaxckpt_train.store.threads import Latch, PerProcess, Workers, paused_collection, shared_workers
from jaxckpt_train.store.verify import segment_problem

_log = logging.getLogger("jaxckpt_train")
WARN_S = 60.0
SMALL_BYTES = 1 << 20
MIN_IN_PLACE_BYTES = 2 << 20
# Threads that fill the next buffers while all permitted writes are running.
FILLING_THREADS = 1
Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class WrittenArrays:
    """The manifest's records of the arrays of one checkpointable; the first `taken` segments were not written."""

    segments: tuple[SegmentRecord, ...]
    arrays: tuple[ArrayRecord, ...]
    taken: int = 0

    @property
    def data_bytes(self) -> int:
        """The size of the written files, including their headers."""
        return sum(segment.bytes for segment in self.segments[self.taken :])

    @property
    def taken_bytes(self) -> int:
        """The size of the files that were taken over."""
        return sum(segment.bytes for segment in self.segments[: self.taken])


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
    give_up: Callable[[], None] | None = None,
    known: Unchanged = NOTHING_KNOWN,
    whole_apart: bool = False,
    taken_from: Opener | None = None,
) -> WrittenArrays:
    """Write all arrays of one checkpointable below `directory/part/`; they must not change until this returns.

    `first_segment` is the number of segments that the manifest has already. `progress` is called with numbers of bytes,
    from several threads. `give_up` is called at an interrupt; it may unblock threads that wait for data to write.
    Segments in which nothing has changed, as far as it is `known`, are taken over from the checkpoint before; if
    `taken_from` opens them, only those that are intact. With `whole_apart`, no segment that is written holds both whole
    arrays and parts of arrays.

    Raises StorageError: the first error of the file system; nothing more is written after it.
    """
    digest, start = digest_function(settings.digest), segment_prefix(part, process)
    sources = Sources(arrays, known, settings.digest, _workers(settings))
    taken, following = _take_over(backend, directory, start, sources, known, settings, taken_from)
    sources.look_for_steady_arrays()
    with paused_collection():
        apart, changing = sources.divided()
        sizes = (min(APART_BYTES, settings.segment_bytes), settings.segment_bytes)
        layouts = [
            layout
            for several, segment_bytes in zip((apart, changing), sizes, strict=True)
            for some in (_whole_and_parts(several) if whole_apart else (several,))
            for layout in plan_segments(some, segment_bytes)
        ]
    files = [_file_name(start, number) for number in range(following, following + len(layouts))]
    writers = [
        SegmentWriter(backend, f"{directory}/{file}", layout, settings)
        for file, layout in zip(files, layouts, strict=True)
    ]
    write_segments(backend, directory, writers, settings, progress, give_up)
    segments = [
        SegmentRecord(file, layout.size, len(layout.head), digest(layout.head))
        for file, layout in zip(files, layouts, strict=True)
    ]
    with paused_collection():
        records = _records(arrays, taken, writers, first_segment)
        return WrittenArrays((*(each.segment for each in taken), *segments), records, len(taken))


def _whole_and_parts(arrays: Sequence[ArraySource]) -> tuple[Sequence[ArraySource], Sequence[ArraySource]]:
    """Divide arrays: each is in its place in both, and empty in one of them."""
    is_whole = [all(chunk.box == full_box(array.shape) for chunk in array.chunks) for array in arrays]
    pairs = list(zip(arrays, is_whole, strict=True))
    empty = [array._replace(chunks=()) for array in arrays]
    whole = [array if yes else none for (array, yes), none in zip(pairs, empty, strict=True)]
    return whole, [none if yes else array for (array, yes), none in zip(pairs, empty, strict=True)]


def segment_prefix(part: str, process: int) -> str:
    """The start of the names of the segments that a process writes of a checkpointable."""
    return f"{part}/p{process:05d}-"


def _file_name(start: str, number: int) -> str:
    return f"{start}s{number:03d}.safetensors"


def _take_over(
    backend: Backend,
    directory: str,
    start: str,
    sources: Sources,
    known: Unchanged,
    settings: StoreSettings,
    taken_from: Opener | None,
) -> tuple[list[Candidate], int]:
    """Give the segments of before in which nothing has changed a name in this checkpoint, too.

    Returns these, and the number of the next segment: a service may still make a copy that it has not confirmed, and
    would replace what has its name by then.
    """
    taken, following = list[Candidate](), 0
    before = "" if known.before is None else known.before.directory
    for candidate in sources.candidates():
        if not sources.is_same(candidate):
            continue
        if taken_from is not None and not _is_intact(taken_from, before, sources, candidate, settings):
            continue
        name, segment = _file_name(start, following), candidate.segment
        following += 1
        if backend.clone(f"{before}/{segment.file}", f"{directory}/{name}", segment.bytes):
            if settings.durability != "none":
                backend.sync(f"{directory}/{name}")
            sources.take(candidate)
            taken.append(candidate._replace(segment=msgspec.structs.replace(segment, file=name)))
    return taken, following


def _is_intact(files: Opener, before: str, sources: Sources, candidate: Candidate, settings: StoreSettings) -> bool:
    """Whether a segment still has the bytes that were saved; all of it is read."""
    try:
        files.open(before, candidate.segment.file, direct=False).close()
    except StorageError:
        return False  # it is not here, as for a checkpoint on an object store or another host
    try:
        problem = segment_problem(files, before, settings.digest, candidate.segment, sources.records(candidate))
    except StorageError as error:
        problem = str(error)
    if problem is not None:
        _log.warning("%s/%s is written again: %s", before, candidate.segment.file, problem)
    return problem is None


def _workers(settings: StoreSettings) -> Workers:
    return shared_workers(settings.io_threads + FILLING_THREADS, "jaxckpt-write", polite=True)


def _records(
    arrays: Sequence[ArraySource], taken: Sequence[Candidate], writers: Sequence[SegmentWriter], first_segment: int
) -> tuple[ArrayRecord, ...]:
    chunks: list[list[ChunkRecord]] = [[] for _ in arrays]
    for number, candidate in enumerate(taken, first_segment):
        for index, _, record in candidate.chunks:
            chunks[index].append(msgspec.structs.replace(record, segment=number))
    for number, writer in enumerate(writers, first_segment + len(taken)):
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


def write_segments(
    backend: Backend,
    directory: str,
    writers: Sequence[SegmentWriter],
    settings: StoreSettings,
    progress: Progress | None,
    give_up: Callable[[], None] | None,
) -> None:
    """Write files whose layout is known. After an error, close them as they are."""
    depth, pool = settings.io_threads, shared_pool(settings.staging_bytes)
    threads, disk = depth + FILLING_THREADS, threading.Semaphore(depth)
    buffer_bytes = max(settings.staging_bytes // threads // ALIGNMENT, 1) * ALIGNMENT
    calls = [
        functools.partial(writer.write, window, pool, buffer_bytes, disk, progress)
        for writer, window in _cut(writers, buffer_bytes)
    ]
    try:
        _workers(settings).run_all(operator.call, calls, give_up=give_up)
    finally:
        for writer in writers:
            writer.abandon()


def _cut(writers: Sequence[SegmentWriter], buffer_bytes: int) -> Iterator[tuple[SegmentWriter, tuple[int, int]]]:
    """The windows in file order; the first ones are smaller, so that the disk starts early."""
    width = max(buffer_bytes // 4 // ALIGNMENT, 1) * ALIGNMENT
    for writer in writers:
        while (window := writer.next_window(width)) is not None:
            yield writer, window
            width = min(2 * width, buffer_bytes)


class SegmentWriter:
    """Writes one segment file: `next_window` cuts it from start to end, and `write` writes the windows in any order.

    `blocks` are the digests of the blocks of each chunk, complete when all windows are written.
    """

    def __init__(self, backend: Backend, path: str, layout: SegmentLayout, settings: StoreSettings) -> None:
        self._path = path
        self.layout, self._sync = layout, settings.durability != "none"
        self._create = functools.partial(backend.create, path, direct=settings.direct_io)
        self._digest = digest_function(settings.digest)
        self._sink: Sink | None = None
        self._starts = [chunk.offset for chunk in layout.chunks]
        self._fetched: dict[int, _Fetched] = {}
        self._fetched_lock = threading.Lock()
        self._failure: BaseException | None = None  # of a fetch, which must not be repeated
        self._cut_blocks: dict[tuple[int, int], _CutBlock] = {}
        self._cut_lock = threading.Lock()
        self.blocks = [[""] * -(-chunk.length // BLOCK_BYTES) for chunk in layout.chunks]
        self._cut = 0
        self._left = layout.size
        self._lock = threading.Lock()
        self._turns: dict[int, Latch] = {}  # of a sink that is written in order: by the offset that comes next
        self._is_broken = False

    def next_window(self, width: int) -> tuple[int, int] | None:
        """Cut the next window of at most `width` bytes; None: the file is cut."""
        if self._cut == self.layout.size:
            return None
        start, self._cut = self._cut, self._end_of_window(self._cut, min(self._cut + width, self.layout.size))
        return start, self._cut

    def _end_of_window(self, start: int, stop: int) -> int:
        """Where a window ends: between two digest blocks if it keeps half of its length, or is larger than a block."""
        at = bisect.bisect_right(self._starts, stop) - 1
        if stop == self.layout.size or at < 0:
            return stop
        offset = self._starts[at]
        between = offset + (stop - offset) // BLOCK_BYTES * BLOCK_BYTES
        is_enough = between > start if stop - start >= BLOCK_BYTES else 2 * (between - start) >= stop - start
        return between if is_enough and between % ALIGNMENT == 0 else stop

    def write(
        self,
        window: tuple[int, int],
        pool: StagingPool,
        buffer_bytes: int,
        disk: threading.Semaphore,
        progress: Progress | None = None,
    ) -> None:
        """Fill a staging buffer with one window, digest its blocks, and write it when the semaphore `disk` permits.

        Every window of a save borrows the same `buffer_bytes`, so that the pool has no gaps.
        """
        try:
            self._write(window, pool, buffer_bytes, disk, progress)
        except BaseException:
            with self._lock:
                self._is_broken = True
                turns = list(self._turns.values())
            for turn in turns:
                turn.open()
            raise

    def _write(
        self,
        window: tuple[int, int],
        pool: StagingPool,
        buffer_bytes: int,
        disk: threading.Semaphore,
        progress: Progress | None,
    ) -> None:
        start, stop = window
        with self._lock:
            sink = self._sink = self._sink or self._create()
        pieces = self._in_place(start, stop, sink.alignment)
        if pieces is not None:
            with self._permit(sink, window, disk):
                for at, piece in pieces:
                    sink.write_at(at, piece)
        else:
            with pool.buffer(buffer_bytes) as buffer:
                if start < len(self.layout.head):
                    _copy_overlap(np.frombuffer(self.layout.head, np.uint8), 0, start, buffer[: stop - start])
                self._fill(start, stop, buffer)
                alignment = sink.alignment  # read again, because another thread may have left direct I/O
                padded = -(-(stop - start) // alignment) * alignment
                buffer[stop - start : padded] = 0
                with self._permit(sink, window, disk):
                    sink.write_at(start, buffer[:padded])
        with self._lock:
            self._left -= stop - start
            is_last = self._left == 0
        if is_last:
            sink.finish(self.layout.size, sync=self._sync)
        if progress is not None:
            progress(stop - start)

    @contextlib.contextmanager
    def _permit(self, sink: Sink, window: tuple[int, int], disk: threading.Semaphore) -> Iterator[None]:
        """Wait until a window may be written. The threads take the windows in order, so one of them is always next."""
        if not sink.in_order:
            with disk:
                yield
            return
        start, stop = window
        if start:
            self._turn(start).wait()
        if self._is_broken:
            raise StorageError(errno.ECANCELED, "not written, because an earlier part failed", self._path)
        yield
        self._turn(stop).open()

    def _turn(self, offset: int) -> Latch:
        with self._lock:
            turn = self._turns.setdefault(offset, Latch())
            if self._is_broken:
                turn.open()
            return turn

    def _in_place(self, start: int, stop: int, alignment: int) -> list[tuple[int, np.ndarray]] | None:
        """The digested pieces of a window with their offsets in the file; None if a buffer is needed to assemble it."""
        if start < len(self.layout.head):
            return None
        found: list[tuple[int, int, np.ndarray]] = []
        for index in self._chunks_between(start, stop):
            low = max(start, self._starts[index])
            piece = self._piece(index, low, stop, alignment)
            if piece is None:
                return None
            found.append((index, low, piece))
        for index, low, piece in found:
            first = (low - self._starts[index]) // BLOCK_BYTES
            for at in range(0, len(piece), BLOCK_BYTES):
                self.blocks[index][first + at // BLOCK_BYTES] = self._digest(memoryview(piece[at : at + BLOCK_BYTES]))
        return [(low, piece) for _, low, piece in found]

    def _piece(self, index: int, low: int, stop: int, alignment: int) -> np.ndarray | None:
        """The part of a chunk between two file offsets, if it can be written from where it is."""
        chunk = self.layout.chunks[index]
        begin, end = low - chunk.offset, min(stop - chunk.offset, chunk.length)
        if end - begin < MIN_IN_PLACE_BYTES or not isinstance(chunk.source, StableChunkSource):
            return None
        if begin % BLOCK_BYTES or (end != chunk.length and end % BLOCK_BYTES):
            return None  # a block spans another window too
        flat = flat_bytes(chunk.source)
        if flat is None:
            return None
        piece = flat[begin:end]
        is_aligned = not any(number % alignment for number in (low, len(piece), piece.ctypes.data))
        return piece if is_aligned else None

    def _chunks_between(self, start: int, stop: int) -> range:
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        return range(first, bisect.bisect_left(self._starts, stop))

    def _fill(self, start: int, stop: int, buffer: np.ndarray) -> None:
        """Copy the bytes [start, stop) of the file into the buffer."""
        small: list[int] = []  # consecutive chunks, each with a single digest
        for index in self._chunks_between(start, stop):
            chunk = self.layout.chunks[index]
            end = chunk.offset + chunk.length
            if chunk.length <= min(SMALL_BYTES, BLOCK_BYTES) and start <= chunk.offset and end <= stop:
                small.append(index)
                continue
            self._take_small(small, start, buffer)
            small = []
            if end > start:
                self._take(index, chunk, start, stop, buffer)
        self._take_small(small, start, buffer)

    def _take_small(self, run: Sequence[int], start: int, buffer: np.ndarray) -> None:
        """Copy consecutive chunks that are entirely in the window in one call."""
        if not run:
            return
        chunks, digest = self.layout.chunks, self._digest
        view = memoryview(buffer)
        low = chunks[run[0]].offset - start
        high = chunks[run[-1]].offset + chunks[run[-1]].length - start
        np.concatenate([self._bytes(index, chunks[index]) for index in run], out=buffer[low:high])
        for index in run:
            at = chunks[index].offset - start
            self.blocks[index][0] = digest(view[at : at + chunks[index].length])
            self._release(index, chunks[index].length)

    def abandon(self) -> None:
        """Close the file unless it is finished."""
        self._failure = None  # its traceback refers to this writer
        if self._sink is not None:
            self._sink.abandon()

    def _take(self, index: int, chunk: PlacedChunk, start: int, stop: int, buffer: np.ndarray) -> None:
        """Copy a chunk's part of the window block by block, so that each block is digested while it is cached.

        The digest is computed from the copy that is written. If the source changes meanwhile, which its owner must not
        do, the checkpoint has mixed values but can be loaded.
        """
        flat = self._bytes(index, chunk)
        low, high = max(start, chunk.offset), min(stop, chunk.offset + chunk.length)
        for block in range((low - chunk.offset) // BLOCK_BYTES, -(-(high - chunk.offset) // BLOCK_BYTES)):
            data = flat[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            at = chunk.offset + block * BLOCK_BYTES
            if start <= at and at + len(data) <= stop:
                target = buffer[at - start : at - start + len(data)]
                target[...] = data
                self.blocks[index][block] = self._digest(memoryview(target))
            else:
                self._take_of_cut_block(index, block, data, at, start, buffer[: stop - start])
        self._release(index, high - low)

    def _take_of_cut_block(
        self, index: int, block: int, data: np.ndarray, at: int, start: int, window: np.ndarray
    ) -> None:
        """Copy a window's part of a block that spans several windows, from one shared copy unless it is stable."""
        if index in self._fetched or isinstance(self.layout.chunks[index].source, StableChunkSource):
            _copy_overlap(data, at, start, window)
            if at >= start:
                self.blocks[index][block] = self._digest(memoryview(data))
            return
        with self._cut_lock:
            cut = self._cut_blocks.setdefault((index, block), _CutBlock(len(data)))
        with cut.lock:
            if cut.flat is None:
                cut.flat = data.copy()
                self.blocks[index][block] = self._digest(memoryview(cut.flat))
        _copy_overlap(cut.flat, at, start, window)
        with self._cut_lock:
            cut.left -= min(start + len(window), at + len(data)) - max(start, at)
            if cut.left == 0:
                del self._cut_blocks[index, block]

    def _bytes(self, index: int, chunk: PlacedChunk) -> np.ndarray:
        """The chunk as row-major, little-endian, flat bytes; fetched or converted once if necessary."""
        flat = flat_bytes(chunk.source)
        if flat is not None:
            return flat
        with self._fetched_lock:
            if self._failure is not None:
                raise self._failure
            fetched = self._fetched.get(index)
            if fetched is None:
                try:
                    fetched = self._fetched[index] = _Fetched(fetched_bytes(chunk.source), chunk.length)
                except BaseException as error:
                    self._failure = error
                    raise
            return fetched.flat

    def _release(self, index: int, taken: int) -> None:
        """Drop a fetched or converted chunk once all of it has been taken."""
        if index in self._fetched:
            with self._fetched_lock:
                self._fetched[index].left -= taken
                if self._fetched[index].left == 0:
                    del self._fetched[index]


class StagingPool:
    """One area of `budget_bytes`, allocated at the first use and lent in pieces of any size, in order of requests."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._area: np.ndarray | None = None
        self._lent: list[tuple[int, int]] = []
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def buffer(self, size: int) -> Iterator[np.ndarray]:
        """Borrow `size` bytes of the budget at a page boundary, with arbitrary content; waits until they are free."""
        piece = self._borrow(-(-size // ALIGNMENT) * ALIGNMENT)
        try:
            assert self._area is not None
            yield self._area[piece[0] : piece[0] + size]
        finally:
            with self._changed:
                self._lent.remove(piece)
                self._changed.notify_all()

    def _borrow(self, size: int) -> tuple[int, int]:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or (start := self._gap(size)) is None:
                    if not self._changed.wait(WARN_S):
                        _log.warning(
                            "no staging memory was returned for %.0f s; check whether the disk responds", WARN_S
                        )
                if self._area is None:
                    self._area = self._allocated()
                self._lent.append((start, start + size))
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        return start, start + size

    def _allocated(self) -> np.ndarray:
        try:
            return aligned_buffer(self.budget_bytes)
        except MemoryError as error:
            raise SettingsError(f"StoreSettings.staging_bytes: {error}; choose a smaller value") from error

    def _gap(self, size: int) -> int | None:
        """The start of the first gap of this size: the first pages are the most likely to have been touched before."""
        start = 0
        for low, high in sorted(self._lent):
            if low - start >= size:
                return start
            start = high
        return start if self.budget_bytes - start >= size else None


_pools = PerProcess(StagingPool)


def shared_pool(budget_bytes: int) -> StagingPool:
    """The pool of this process for a budget, the same one at every call."""
    return _pools.get(max(budget_bytes // ALIGNMENT, 1) * ALIGNMENT)


@dataclasses.dataclass
class _Fetched:
    """A chunk that had to be fetched or converted; `left` bytes of it are still to be written."""

    flat: np.ndarray
    left: int


class _CutBlock:
    """A digest block that spans several windows: one copy, made and digested by the first thread that needs it."""

    def __init__(self, size: int) -> None:
        self.left, self.lock = size, threading.Lock()
        self.flat: np.ndarray | None = None


def _copy_overlap(source: np.ndarray, source_start: int, window_start: int, window: np.ndarray) -> None:
    """Copy the bytes that start at `source_start` in the file, as far as they are in a window of the file."""
    low = max(source_start, window_start)
    high = min(source_start + len(source), window_start + len(window))
    if low < high:
        window[low - window_start : high - window_start] = source[low - source_start : high - source_start]
