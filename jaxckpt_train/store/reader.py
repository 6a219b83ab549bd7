"""Reads boxes of arrays: runs of bytes into aligned memory, digests checked, boxes as views or copies of it."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, Source
from jaxckpt_train.store.boxes import box_shape, element_span, slices_within
from jaxckpt_train.store.digests import HEX_DIGITS, digest_function
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ChunkRecord
from jaxckpt_train.store.read_plan import ChunkRead, Run, Use, Wanted, plan_reads
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.staging import aligned_buffer
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.store.workers import shared_workers

PIECE_BLOCKS = 4
VIEW_ALIGNMENT = 64
# A reading thread waits for the disk about half of its time; the other half it touches fresh memory and digests.
READS_PER_THREAD = 2
# What opening says of a file that is gone, or is a link, a directory or a device instead. Anything else (no permission,
# too many open files) is not the checkpoint's fault.
MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO}

Progress = Callable[[int], None]


class _Budget:
    """A number of bytes that may be in use at once; one request larger than all of it waits until it is alone."""

    def __init__(self, total: int) -> None:
        self._total, self._used, self._changed = total, 0, threading.Condition()

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._total)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


class _Room:
    """Aligned memory for those pieces of a run that lie unaligned in it: one allocation for thousands of leaves."""

    def __init__(self, run: Run) -> None:
        self._needed = sum(read.stop - read.start + len(read.uses) * VIEW_ALIGNMENT for read in run.reads)
        self._memory: np.ndarray | None = None
        self._used = 0

    def copy(self, piece: np.ndarray) -> np.ndarray:
        if self._memory is None:
            self._memory = aligned_buffer(self._needed)
        if self._used + len(piece) > len(self._memory):  # boxes of one chunk may overlap
            return _aligned_copy(piece)
        target = self._memory[self._used : self._used + len(piece)]
        target[:] = piece
        self._used += -(-len(piece) // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        return target


def _aligned_copy(piece: np.ndarray) -> np.ndarray:
    target = empty_array(piece.shape, piece.dtype)
    target[:] = piece
    return target


class _Reading:
    """One load under way: open segments, destinations, and what all threads share."""

    def __init__(
        self, backend: Backend, committed: Committed, wanted: Sequence[Wanted], settings: StoreSettings
    ) -> None:
        self._manifest, self._settings, self._wanted = committed.manifest, settings, wanted
        self._digest = digest_function(self._manifest.digest)
        self._budget = _Budget(settings.read_budget_bytes)
        self.results: list[list[np.ndarray | None]] = [[None] * len(want.boxes) for want in wanted]
        self._results_lock = threading.Lock()
        self._backend, self._directory = backend, committed.directory
        self.sources: dict[int, Source] = {}

    def open(self, segments: Sequence[int]) -> None:
        """Open all segments before the first read, so that a retention that removes the step does no harm."""
        for number in segments:
            record = self._manifest.segments[number]
            path = f"{self._directory}/{record.file}"
            try:
                source = self._backend.open(self._directory, record.file, direct=self._settings.direct_io)
            except StorageError as error:
                if error.errno not in MISSING:
                    raise
                raise CorruptCheckpointError(f"{path}: the manifest names this segment, but: {error}") from error
            self.sources[number] = source
            if source.size != record.bytes:
                raise CorruptCheckpointError(f"{path}: {source.size} bytes, but the manifest says {record.bytes}")

    def read_run(self, run: Run, progress: Progress | None) -> None:
        """Read, check and hand out one run on the calling thread."""
        held = contextlib.nullcontext() if run.only_views else self._budget.hold(run.stop - run.start)
        with held:
            self._read_held(run, progress)  # a call of its own: its memory is free before the budget is given back

    def _read_held(self, run: Run, progress: Progress | None) -> None:
        memory = aligned_buffer(run.stop - run.start)
        for start, stop in _pieces(run, self._manifest.block_bytes):
            self._read_piece(run, memory, start, stop)
            if progress is not None:
                progress(stop - start)
        room = _Room(run)
        for read in run.reads:
            self._hand_out(read, memory[read.start - run.start : read.stop - run.start], room)

    def _read_piece(self, run: Run, memory: np.ndarray, start: int, stop: int) -> None:
        low, high = start // ALIGNMENT * ALIGNMENT, min(-(-stop // ALIGNMENT) * ALIGNMENT, run.stop)
        self.sources[run.segment].read_into(low, memory[low - run.start : high - run.start], stop - low)
        if self._settings.verify_on_load:
            for read in run.reads:
                if read.start < stop and read.stop > start:
                    self._verify(read, run, memory, max(start, read.start), min(stop, read.stop))

    def _verify(self, read: ChunkRead, run: Run, memory: np.ndarray, start: int, stop: int) -> None:
        width, block_bytes = HEX_DIGITS[self._manifest.digest], self._manifest.block_bytes
        for at in range(start, stop, block_bytes):
            block = (at - read.chunk.offset) // block_bytes
            end = min(at + block_bytes, read.stop)
            found = self._digest(memoryview(memory[at - run.start : end - run.start]))
            if found != read.chunk.digests[block * width : (block + 1) * width]:
                raise self._damaged(read, at, end)

    def _damaged(self, read: ChunkRead, start: int, stop: int) -> CorruptCheckpointError:
        name = self._wanted[read.uses[0].wanted].array.name
        file = self._manifest.segments[read.chunk.segment].file
        return CorruptCheckpointError(
            f"{self._directory}/{file}: bytes {start} to {stop} of leaf {name!r} are not what was saved "
            f"({self._manifest.digest} differs)"
        )

    def _hand_out(self, read: ChunkRead, data: np.ndarray, room: _Room) -> None:
        skipped = read.first_block * self._manifest.block_bytes
        for use in read.uses:
            want = self._wanted[use.wanted]
            dtype, box = DTYPES[want.array.dtype], want.boxes[use.box]
            first, last = element_span(use.common, read.chunk.box)
            piece = data[first * dtype.itemsize - skipped : last * dtype.itemsize - skipped]
            if use.whole:
                if (read.start + first * dtype.itemsize - skipped) % VIEW_ALIGNMENT:
                    piece = room.copy(piece)
                self.results[use.wanted][use.box] = piece.view(dtype).reshape(box_shape(box))
            else:
                target = self._destination(use, dtype)
                target[slices_within(use.common, box)] = _part(piece, dtype, use, read.chunk)

    def _destination(self, use: Use, dtype: np.dtype) -> np.ndarray:
        with self._results_lock:
            target = self.results[use.wanted][use.box]
            if target is None:
                shape = box_shape(self._wanted[use.wanted].boxes[use.box])
                target = self.results[use.wanted][use.box] = empty_array(shape, dtype)
        return target


def read_boxes(
    backend: Backend,
    committed: Committed,
    wanted: Sequence[Wanted],
    settings: StoreSettings,
    progress: Progress | None = None,
) -> list[list[np.ndarray]]:
    """Read boxes of arrays of one committed checkpoint.

    Args:
        backend: where.
        committed: the opened checkpoint.
        wanted: which boxes of which arrays.
        settings: threads, budget, verification.
        progress: called with numbers of bytes read, from several threads.

    Returns:
        For every wanted array one writable, 64-byte aligned, row-major numpy array per box.

    Raises:
        CorruptCheckpointError: a segment is missing, has another size, or its bytes differ from their digest.
        StorageError: the file system refused.
    """
    reading = _Reading(backend, committed, wanted, settings)
    threads = READS_PER_THREAD * settings.io_threads
    runs = plan_reads(committed.manifest, wanted, max(1, settings.read_budget_bytes // (2 * threads)))
    try:
        reading.open(sorted({run.segment for run in runs}))
        workers = shared_workers(threads, "jaxckpt-read")
        workers.run_all(lambda run: reading.read_run(run, progress), runs)
    finally:
        for source in reading.sources.values():
            source.close()
    return [
        [_or_empty(array, want, number) for number, array in enumerate(found)]
        for want, found in zip(wanted, reading.results, strict=True)
    ]


def empty_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised, 64-byte aligned, writable, row-major array."""
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if size >= ALIGNMENT:
        return aligned_buffer(size).view(dtype).reshape(shape)
    room = np.empty(size + VIEW_ALIGNMENT, np.uint8)
    skip = -room.ctypes.data % VIEW_ALIGNMENT
    return room[skip : skip + size].view(dtype).reshape(shape)


def _or_empty(array: np.ndarray | None, want: Wanted, number: int) -> np.ndarray:
    return empty_array(box_shape(want.boxes[number]), DTYPES[want.array.dtype]) if array is None else array


def _pieces(run: Run, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts of a run for single read calls: a run of one chunk in groups of whole blocks, a coalesced one whole."""
    first, end = run.reads[0].start, run.reads[-1].stop
    step = PIECE_BLOCKS * block_bytes if len(run.reads) == 1 else end - first
    for start in range(first, end, step):
        yield start, min(start + step, end)


def _part(piece: np.ndarray, dtype: np.dtype, use: Use, chunk: ChunkRecord) -> np.ndarray:
    """The common box as an array over the span of bytes that holds it, with the chunk's strides."""
    strides, step = [], dtype.itemsize
    for size in reversed(box_shape(chunk.box)):
        strides.append(step)
        step *= size
    return np.ndarray(box_shape(use.common), dtype, buffer=piece.data, strides=tuple(reversed(strides)))
