"""Read boxes of arrays of one checkpoint on several threads, and yield each box as soon as it is complete.

`iter_boxes` is the entry. A plan (`read_plan.py`) turns the boxes into runs of bytes; `Reading` reads the runs into
aligned memory, verifies the digests and completes the boxes, as views or copies. `Sources` shares the open segments.
`PreopenedFiles` opens the files of several checkpointables early, so that retention may remove the step meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import CheckpointTimeoutError, CorruptCheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Divided, Opener, Source
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, element_span, slices_within
from jaxckpt_train.store.buffers import Arena, BufferPool, ReadBudget, aligned_buffer, empty_array, owner_of
from jaxckpt_train.store.committed import Committed, check_unchanged
from jaxckpt_train.store.files import has_digest, open_recorded, read_intact
from jaxckpt_train.store.manifest import HEX_DIGITS, ArrayRecord, ChunkRecord, HexDigest, PartRecord, digest_function
from jaxckpt_train.store.read_plan import (
    VIEW_ALIGNMENT,
    ChunkRead,
    Run,
    Use,
    Wanted,
    plan_reads,
    step_bytes,
    straight_target,
)
from jaxckpt_train.store.segment import ALIGNMENT, DTYPES
from jaxckpt_train.store.threads import Workers, interruptible, shared_workers
from jaxckpt_train.store.timeouts import close_files, report_progress, time_limited

OPEN_AT_ONCE = 256  # a process is often limited to 1,024 open files
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
Direct = bool | Literal["auto"]
PIECE_BLOCKS = 4
LARGE_BYTES = 64 << 10
# A reading thread waits for the disk about half of the time; otherwise it touches fresh memory and computes digests.
READS_PER_THREAD = 2
ReadProgress = Callable[[int], None]  # called with numbers of bytes read, from several threads
T = TypeVar("T")
R = TypeVar("R")


def iter_boxes(
    files: Opener,
    committed: Committed,
    wanted: Sequence[Wanted],
    settings: StoreSettings,
    progress: ReadProgress | None = None,
    budget: ReadBudget | None = None,
) -> Generator[ReadBox]:
    """Read boxes of arrays of one committed checkpoint, and yield each box as soon as it is complete.

    Use `contextlib.closing` around the iterator: it holds open files and running threads until it ends.

    Boxes come in any order, as writable, row-major numpy arrays, 64-byte aligned unless they have a target. `progress`
    is called with numbers of bytes read, from several threads; its error ends the load, as that of `interruptible`.
    `budget` counts the memory of the load; None: a new one, as the settings say.

    Raises CorruptCheckpointError: a segment is missing, has another size, or its data does not match its digest;
    StorageError: the file system refused; CheckpointTimeoutError: the storage has not responded for ten minutes.
    """
    runs = plan_reads(committed.manifest, wanted, band_bytes(settings))
    sources = Sources(files, committed, settings, [run.segment for run in runs])
    budget = budget or ReadBudget(settings.read_budget_bytes)
    reading = Reading(sources, committed, wanted, settings, progress, budget, BufferPool())
    try:
        yield from _empty_boxes(wanted)
        reading.prepare(runs)
        sources.open()
        each = run_reads(
            committed.directory,
            settings,
            reading.read_and_release,
            runs,
            give_up=budget.lift,
            moved=lambda: reading.reads,
        )
        with contextlib.closing(each) as results:
            for completed in results:
                yield from reading.hand_over(completed)
    finally:
        close_files(sources.end())


def read_boxes(
    files: Opener, committed: Committed, wanted: Sequence[Wanted], settings: StoreSettings
) -> list[list[np.ndarray]]:
    """Read boxes as `iter_boxes`, and return all of them: for each wanted array, one numpy array per box."""
    found: list[dict[int, np.ndarray]] = [{} for _ in wanted]
    with contextlib.closing(iter_boxes(files, committed, wanted, settings)) as boxes:
        for read in boxes:
            found[read.wanted][read.box] = read.data
    return [[arrays[number] for number in range(len(arrays))] for arrays in found]


def read_box(
    files: Opener, committed: Committed, array: ArrayRecord, box: Box, target: np.ndarray, settings: StoreSettings
) -> None:
    """Read one box of one array on the calling thread, without a time limit; raises as `iter_boxes`."""
    if not len(target):
        return
    wanted = [Wanted(array, [box], target=target)]
    runs = plan_reads(committed.manifest, wanted, band_bytes(settings))
    sources = Sources(files, committed, settings, [run.segment for run in runs])
    budget = ReadBudget(settings.read_budget_bytes)
    reading = Reading(sources, committed, wanted, settings, None, budget, BufferPool())
    try:
        for run in runs:
            reading.read_run(run)
    finally:
        for source in sources.end():
            source.close()


def band_bytes(settings: StoreSettings) -> int:
    """How much memory one read may use in addition to its destination, so that all reads stay within the budget."""
    return max(1, settings.read_budget_bytes // (2 * _threads(settings)))


def run_reads(
    directory: str,
    settings: StoreSettings,
    read: Callable[[T], R],
    items: Sequence[T],
    *,
    give_up: Callable[[], None],
    moved: Callable[[], object],
) -> Generator[R]:
    """Run reads on the reading threads and yield their results, as `Workers.run_each`.

    Raises CheckpointTimeoutError: there was no progress for ten minutes; the message names the directory.
    """
    readers = _readers(directory, settings)
    try:
        with contextlib.closing(readers.run_each(read, items, give_up=give_up, moved=moved)) as results:
            yield from results
    except CheckpointTimeoutError as error:
        raise CheckpointTimeoutError(f"{directory}: {error}") from None


def polling(progress: ReadProgress | None) -> contextlib.AbstractContextManager[None]:
    """Within the context, waits of this thread call `progress(0)`, as `interruptible`; None: no further check."""
    return contextlib.nullcontext() if progress is None else interruptible(functools.partial(progress, 0))


def _threads(settings: StoreSettings) -> int:
    return READS_PER_THREAD * settings.io_threads


def _readers(directory: str, settings: StoreSettings) -> Workers:
    """The reading threads; for an object store, at least as many as requests that run at the same time."""
    least = settings.object_store.concurrency if is_url(directory) else 0
    return shared_workers(max(_threads(settings), least), "jaxckpt-read")


def _empty_boxes(wanted: Sequence[Wanted]) -> Generator[ReadBox]:
    for number, want in enumerate(wanted):
        for index, box in enumerate(want.boxes):
            if box_elements(box) == 0:
                yield ReadBox(number, index, empty_array(box_shape(box), DTYPES[want.array.dtype]))


class ReadBox(NamedTuple):
    """Box number `box` of wanted array number `wanted`."""

    wanted: int
    box: int
    data: np.ndarray


class Reading:
    """The state of one load: its destinations, and what its threads share; `reads` counts the reads."""

    def __init__(
        self,
        sources: Sources,
        committed: Committed,
        wanted: Sequence[Wanted],
        settings: StoreSettings,
        progress: Callable[[int], None] | None,
        budget: ReadBudget,
        warm: BufferPool,
    ) -> None:
        self._manifest, self._settings, self._wanted = committed.manifest, settings, wanted
        self._digest = digest_function(self._manifest.digest) if settings.verify_on_load else None
        self._budget = budget
        self._progress = progress
        self._parts: dict[tuple[int, int], tuple[np.ndarray, int]] = {}  # incomplete boxes and their missing elements
        self._lock = threading.Lock()
        self._directory, self._sources = committed.directory, sources
        self._arena, self._warm = Arena(0), warm
        self.reads = 0

    def read_run(self, run: Run) -> list[ReadBox]:
        """Read and verify one run on the calling thread; returns the boxes that it completed."""
        size = run.stop - run.start
        if run.is_destination and not run.passing:
            return self._read_into(run, self._arena.take(size))
        if run.is_parts:
            place = straight_target(run, self._wanted)
            if place is not None:
                return self._read_straight(run, place)
            with self._counted(size), self._warm.borrow(size) as memory:
                return self._read_into(run, memory)
        if not run.passing:
            with self._counted(size):
                return self._read_into(run, aligned_buffer(size))
        self._budget.take(size + run.moved_bytes)
        try:
            memory = aligned_buffer(size)
            weakref.finalize(memory, self._budget.give, size).atexit = False
            with self._budget.working():
                return self._read_into(run, memory)
        except BaseException:
            self._budget.lift()  # the error's traceback keeps the memory that other threads wait for
            raise

    def read_and_release(self, run: Run) -> list[ReadBox]:
        """As `read_run`, and report the end of the read."""
        completed = self.read_run(run)
        self._sources.done(run.segment)
        return completed

    @contextlib.contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        self._budget.take(size)
        try:
            with self._budget.working():
                yield
        finally:
            self._budget.give(size)

    def _read_straight(self, run: Run, place: np.ndarray) -> list[ReadBox]:
        self._read_and_verify(run, place)
        (use,) = run.reads[0].uses
        want, completed = self._wanted[use.wanted], list[ReadBox]()
        dtype = DTYPES[want.array.dtype]
        self._begin_part(use, want, dtype)
        self._end_part(use, want, place.size // dtype.itemsize, completed)
        return completed

    def _read_into(self, run: Run, memory: np.ndarray) -> list[ReadBox]:
        self._read_and_verify(run, memory)
        space, completed = _CopySpace(run), list[ReadBox]()
        for read in run.reads:
            self._hand_out(read, memory[read.start - run.start : read.stop - run.start], space, completed)
        if run.passing and space.memory is not None:
            weakref.finalize(owner_of(space.memory), self._budget.give, run.moved_bytes).atexit = False
        return completed

    def _read_and_verify(self, run: Run, memory: np.ndarray) -> None:
        at = run.start
        for start, stop in self._pieces(run):
            at = self._read_up_to(run, memory, at, stop)
            self._verify_all(run, memory, start, stop)
            if self._progress is not None:
                self._progress(stop - start)

    def _pieces(self, run: Run) -> Generator[tuple[int, int]]:
        """Cut a run into read calls: a run of one chunk into groups of whole blocks, a coalesced run not at all."""
        first, end, block_bytes = run.reads[0].start, run.reads[-1].stop, self._manifest.block_bytes
        step = PIECE_BLOCKS * block_bytes if len(run.reads) == 1 else end - first
        if step < end - first:
            step = max(step, self._sources.piece_bytes(run.segment) // block_bytes * block_bytes)
        for start in range(first, end, step):
            yield start, min(start + step, end)

    def _read_up_to(self, run: Run, memory: np.ndarray, at: int, stop: int) -> int:
        """Read whole pages from `at` to at least `stop`; no page twice, because verified memory must not change."""
        high = min(-(-stop // ALIGNMENT) * ALIGNMENT, run.stop)
        if high > at:
            needed = min(high, run.start + run.needed) - at
            self._sources.read_into(run.segment, at, memory[at - run.start : high - run.start], needed)
            self.reads += 1
        return high

    def _verify_all(self, run: Run, memory: np.ndarray, start: int, stop: int) -> None:
        if self._digest is not None:
            for read in run.reads:
                if read.start < stop and read.stop > start and read.chunk.digests:  # generated data has no digests
                    self._verify(self._digest, read, run, memory, max(start, read.start), min(stop, read.stop))

    def _verify(self, digest: HexDigest, read: ChunkRead, run: Run, memory: np.ndarray, start: int, stop: int) -> None:
        width, block_bytes = HEX_DIGITS[self._manifest.digest], self._manifest.block_bytes
        for at in range(start, stop, block_bytes):
            block = (at - read.chunk.offset) // block_bytes
            end = min(at + block_bytes, read.stop)
            data, expected = memory[at - run.start : end - run.start], read.chunk.digests[block * width :][:width]
            is_intact = functools.partial(has_digest, digest, data, expected)
            if not is_intact() and not self._sources.read_intact(run.segment, at, data, is_intact):
                name = self._wanted[read.uses[0].wanted].array.name
                raise CorruptCheckpointError(
                    f"{self._directory}/{self._manifest.segments[run.segment].file}: bytes {at} to {end} of leaf "
                    f"{name!r} are not what was saved ({self._manifest.digest} differs)"
                )

    def _hand_out(self, read: ChunkRead, data: np.ndarray, space: _CopySpace, completed: list[ReadBox]) -> None:
        skipped = read.first_block * step_bytes(self._manifest)
        for use in read.uses:
            want = self._wanted[use.wanted]
            dtype, box = DTYPES[want.array.dtype], want.boxes[use.box]
            start, stop = 0, len(data)
            if use.common != read.chunk.box:
                first, last = element_span(use.common, read.chunk.box)
                start, stop = first * dtype.itemsize - skipped, last * dtype.itemsize - skipped
            piece = data[start:stop]
            if use.whole:
                if (read.start + start) % VIEW_ALIGNMENT or not space.stays:
                    piece = space.copy(piece)
                completed.append(ReadBox(use.wanted, use.box, piece.view(dtype).reshape(box_shape(box))))
            else:
                part, target = _part(piece, dtype, use, read.chunk), self._begin_part(use, want, dtype)
                target[slices_within(use.common, box)] = part
                self._end_part(use, want, part.size, completed)

    def hand_over(self, completed: list[ReadBox]) -> Generator[ReadBox]:
        """Yield the boxes without keeping a reference to them."""
        with self._budget.working():
            while completed:
                yield completed.pop()

    def prepare(self, runs: Sequence[Run]) -> None:
        """Reserve one area of memory for all large results that stay in host memory."""
        kept = [run for run in runs if not run.passing]
        sizes = [run.stop - run.start for run in kept if run.is_destination]
        parts = {(use.wanted, use.box) for run in kept for read in run.reads for use in read.uses if not use.whole}
        for wanted, box in parts:
            array = self._wanted[wanted].array
            if self._wanted[wanted].target is not None:
                continue
            size = box_elements(self._wanted[wanted].boxes[box]) * DTYPES[array.dtype].itemsize
            sizes.append(size if size >= LARGE_BYTES else 0)
        self._arena = Arena(sum(map(Arena.room_for, sizes)))

    def _new_box(self, want: Wanted, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if want.target is not None:
            return want.target.view(dtype).reshape(shape)
        size = dtype.itemsize * math.prod(shape)
        if size < LARGE_BYTES or want.passing:
            return empty_array(shape, dtype)
        return self._arena.take(size).view(dtype).reshape(shape)

    def _begin_part(self, use: Use, want: Wanted, dtype: np.dtype) -> np.ndarray:
        """The array of the box that a part belongs to; created at its first part."""
        key, box = (use.wanted, use.box), want.boxes[use.box]
        with self._lock:
            if key not in self._parts:
                self._parts[key] = self._new_box(want, box_shape(box), dtype), box_elements(box)
            return self._parts[key][0]

    def _end_part(self, use: Use, want: Wanted, elements: int, completed: list[ReadBox]) -> None:
        """Count elements of a box as read, and complete the box after the last."""
        key = (use.wanted, use.box)
        with self._lock:
            target, left = self._parts[key]
            left -= elements
            self._parts[key] = target, left
            if left == 0:
                completed.append(ReadBox(*key, target))
                del self._parts[key]
                if want.passing:
                    self._budget.charge(target)


class _CopySpace:
    """Aligned memory for pieces of a run that cannot stay where they were read: one allocation for thousands of pieces.

    If `stays`, aligned pieces can stay, because a view of them keeps no memory alive that should be free by then.
    """

    def __init__(self, run: Run) -> None:
        self._needed = run.moved_bytes
        self.memory: np.ndarray | None = None
        self._used = 0
        self.stays = run.passing or run.is_destination

    def copy(self, piece: np.ndarray) -> np.ndarray:
        if self.memory is None:
            self.memory = empty_array((self._needed,), np.dtype(np.uint8))
        target = self.memory[self._used : self._used + len(piece)]
        target[:] = piece
        self._used += -(-len(piece) // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        return target


def _part(piece: np.ndarray, dtype: np.dtype, use: Use, chunk: ChunkRecord) -> np.ndarray:
    """The part of a chunk that a box needs, as an array with the chunk's strides over the bytes that contain it."""
    shape = box_shape(chunk.box)
    strides = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return np.ndarray(box_shape(use.common), dtype, buffer=piece.data, strides=strides)


class Sources:
    """Open segments, shared by reading threads.

    Segments that are opened before the first read stay readable if retention removes the step meanwhile. If there are
    more than `OPEN_AT_ONCE`, the others are opened when they are needed.
    """

    def __init__(self, files: Opener, committed: Committed, settings: StoreSettings, segments: Iterable[int]) -> None:
        self._files, self._committed, self.directory = files, committed, committed.directory
        self._direct, self._is_verified = settings.direct_io, settings.verify_on_load
        self._concurrency = settings.object_store.concurrency
        self._left = Counter(segments)
        self._open: dict[int, Source] = {}
        self._in_use: Counter[int] = Counter()
        self._is_closed = False
        self._lock = threading.Lock()  # never held during a storage call, which may not return

    @time_limited
    def open(self) -> None:
        """Open the segments, or the first of them."""
        numbers = sorted(self._left)[:OPEN_AT_ONCE]
        if is_url(self.directory):  # each takes a request
            openers = shared_workers(self._concurrency, "jaxckpt-open")
            openers.run_all(lambda number: self._share(number, self._open_segment(number)), numbers)
        else:
            for number in numbers:
                self._share(number, self._open_segment(number))
                report_progress()
        if self._left:
            self._check_unchanged()

    def read_into(self, segment: int, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`, from a segment."""
        with self._acquired(segment) as source:
            source.read_into(offset, data, needed)

    def read_intact(self, segment: int, offset: int, data: np.ndarray, is_intact: Callable[[], bool]) -> bool:
        """Read bytes that are wrong from other copies of the segment, until they are intact; False: none is."""
        with self._acquired(segment) as source:
            return read_intact(source, offset, data, is_intact)

    def piece_bytes(self, segment: int) -> int:
        """As `Divided.piece_bytes`, of a segment; 0: its reads are not divided."""
        with self._acquired(segment) as source:
            return source.piece_bytes if isinstance(source, Divided) else 0

    @contextlib.contextmanager
    def _acquired(self, segment: int) -> Iterator[Source]:
        source = self._acquire(segment)
        try:
            yield source
        finally:
            with self._lock:
                self._in_use[segment] -= 1
            self._close_unused(segment)

    def done(self, segment: int) -> None:
        """Report the end of a read; a segment is closed after its last one."""
        with self._lock:
            self._left[segment] -= 1
        self._close_unused(segment)

    def end(self) -> list[Source]:
        """Forbid new reads and return the segments to close; those in use are closed when their reads end."""
        with self._lock:
            self._is_closed = True
            return [self._open.pop(number) for number in list(self._open) if not self._in_use[number]]

    def _close_unused(self, number: int) -> None:
        with self._lock:
            is_over = self._is_closed or not self._left[number]
            unused = self._open.pop(number, None) if is_over and not self._in_use[number] else None
        if unused is not None:
            unused.close()

    def _acquire(self, number: int) -> Source:
        """The open segment, opened now if necessary."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise StorageError(errno.EBADF, "the load has ended", self.directory)
                if number in self._open:
                    self._in_use[number] += 1
                    return self._open[number]
            opened = self._open_segment(number)
            try:
                self._check_unchanged()
            except BaseException:
                opened.close()
                raise
            self._share(number, opened)

    def _share(self, number: int, opened: Source) -> None:
        """Share an open segment, unless another thread was faster or the load has ended."""
        with self._lock:
            is_wanted = not self._is_closed and number not in self._open
            if is_wanted:
                self._open[number] = opened
        if not is_wanted:
            opened.close()

    def _check_unchanged(self) -> None:
        """Make sure that the segment does not belong to a checkpoint that has replaced this one meanwhile.

        If this checkpoint is gone by now, the digests will reveal a replacement. On an object store, where another
        checkpoint has another prefix, they suffice.
        """
        if is_url(self.directory) and self._is_verified:
            return
        check_unchanged(self._files, self._committed, may_be_gone=self._is_verified)

    def _open_segment(self, number: int) -> Source:
        record = self._committed.manifest.segments[number]
        return open_recorded(
            self._files, self.directory, record.file, record.bytes, direct=self._direct, subject="segment"
        )


class PreopenedFiles:
    """Opens files in advance, and hands them over later without another lookup of their names."""

    def __init__(self, files: Opener, committed: Committed, direct: Direct) -> None:
        self._files, self._committed, self._direct = files, committed, direct
        self.directory = committed.directory
        self._held: dict[tuple[str, Direct], Source] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # never held during a storage call, which may not return

    @time_limited
    def open_ahead(self, parts: Sequence[PartRecord]) -> None:
        """Open the segments and single-file values of these parts, in this order.

        If there are more than `OPEN_AT_ONCE`, the others are opened when they are needed. A file that cannot be opened
        is reported then.
        """
        names = {part.name: place for place, part in enumerate(parts)}
        files = [each.file for each in self._committed.manifest.segments if each.file.partition("/")[0] in names]
        segments = sorted(files, key=lambda file: names[file.partition("/")[0]])
        values = [part.files[0].file for part in parts if len(part.files) == 1]
        wanted: list[tuple[str, Direct]] = [(name, False) for name in values]
        wanted += [(name, self._direct) for name in segments]
        for name, direct in wanted[:OPEN_AT_ONCE]:
            try:
                source = self._files.open(self.directory, name, direct=direct)
            except StorageError as error:
                if error.errno not in _TOO_MANY:
                    continue
                self._release()  # leave descriptors for other code
                return
            with self._lock:
                is_wanted = not self._is_closed
                if is_wanted:
                    self._held[name, direct] = source
            if not is_wanted:
                source.close()
                return
            report_progress()

    def open(self, directory: str, name: str, *, direct: Direct) -> Source:
        """As `Opener.open`; hands over the file if it is open already."""
        with self._lock:
            held = self._held.pop((name, direct), None) if directory == self.directory else None
        if held is not None:
            return held
        try:
            return self._files.open(directory, name, direct=direct)
        except StorageError as error:
            if error.errno not in _TOO_MANY or not self._release():
                raise
        return self._files.open(directory, name, direct=direct)

    def _release(self) -> bool:
        """Close all held files; returns whether there were any."""
        left = self._take_all()
        for source in left:
            source.close()
        return bool(left)

    def _take_all(self) -> list[Source]:
        with self._lock:
            left = list(self._held.values())
            self._held.clear()
        return left

    def end(self) -> list[Source]:
        """Stop holding files, and return those that were not used, to be closed."""
        with self._lock:
            self._is_closed = True
        return self._take_all()
