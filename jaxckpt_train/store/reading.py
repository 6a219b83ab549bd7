"""What one load reads: runs of bytes into aligned memory, digests checked, boxes as views or copies of it."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import box_elements, box_shape, element_span, slices_within
from jaxckpt_train.store.digests import HEX_DIGITS, HexDigest, digest_function
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ChunkRecord
from jaxckpt_train.store.read_budget import ReadBudget, owner_of
from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT, ChunkRead, Run, Use, Wanted, step_bytes
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.sources import Sources
from jaxckpt_train.store.staging import Arena, aligned_buffer, empty_array
from jaxckpt_train.store.straight_reads import straight_target
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.store.warm_memory import WarmMemory

PIECE_BLOCKS = 4
LARGE_BYTES = 64 << 10


class ReadBox(NamedTuple):
    """Box number `box` of wanted array number `wanted`."""

    wanted: int
    box: int
    data: np.ndarray


class _Room:
    """Aligned memory for pieces of a run that cannot stay where they were read: one allocation for thousands.

    Attributes:
        stays: whether aligned pieces can: a view of one keeps no memory that should be free by then.
        memory: for the others; None while there were none.
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


class Reading:
    """Reads of one load under way: destinations, and what all threads share.

    Args:
        sources: of the segments.
        committed: the opened checkpoint.
        wanted: which boxes of which arrays.
        settings: verification.
        progress: as of `iter_boxes`.
        budget: what the reading memory is counted in.
        warm: what is only copied from is read into.

    Attributes:
        reads: another number after each.
    """

    def __init__(
        self,
        sources: Sources,
        committed: Committed,
        wanted: Sequence[Wanted],
        settings: StoreSettings,
        progress: Callable[[int], None] | None,
        budget: ReadBudget,
        warm: WarmMemory,
    ) -> None:
        self._manifest, self._settings, self._wanted = committed.manifest, settings, wanted
        self._digest = digest_function(self._manifest.digest) if settings.verify_on_load else None
        self._budget = budget
        self._progress = progress
        self._parts: dict[tuple[int, int], tuple[np.ndarray, int]] = {}  # begun boxes, and their missing elements
        self._lock = threading.Lock()
        self._directory, self._sources = committed.directory, sources
        self._arena, self._warm = Arena(0), warm
        self.reads = 0

    def read_run(self, run: Run) -> list[ReadBox]:
        """Read and check one run on the calling thread; returns the boxes that it completed.

        Raises:
            CorruptCheckpointError: a segment is missing, has another size, or its bytes differ from their digest.
            StorageError: the file system refused.
        """
        size = run.stop - run.start
        if run.is_destination and not run.passing:
            return self._read_into(run, self._arena.take(size))
        if run.is_parts:
            place = straight_target(run, self._wanted)
            if place is not None:
                return self._read_straight(run, place)
            with self._counted(size), self._warm.lent(size) as memory:
                return self._read_into(run, memory)
        if not run.passing:
            with self._counted(size):
                return self._read_into(run, aligned_buffer(size))
        self._budget.take(size + run.moved_bytes)
        try:
            memory = aligned_buffer(size)
            weakref.finalize(memory, self._budget.give, size).atexit = False
            with self._budget.at_work():
                return self._read_into(run, memory)
        except BaseException:
            self._budget.lift()  # the error's traceback keeps the memory, and others wait for it
            raise

    def read_one_less(self, run: Run) -> list[ReadBox]:
        """As `read_run`; and tell the sources that one of the reads that they expect is over."""
        completed = self.read_run(run)
        self._sources.done(run.segment)
        return completed

    @contextlib.contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        self._budget.take(size)
        try:
            with self._budget.at_work():
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
        room, completed = _Room(run), list[ReadBox]()
        for read in run.reads:
            self._hand_out(read, memory[read.start - run.start : read.stop - run.start], room, completed)
        if run.passing and room.memory is not None:
            weakref.finalize(owner_of(room.memory), self._budget.give, run.moved_bytes).atexit = False
        return completed

    def _read_and_verify(self, run: Run, memory: np.ndarray) -> None:
        at = run.start
        for start, stop in _pieces(run, self._manifest.block_bytes):
            at = self._read_up_to(run, memory, at, stop)
            self._verify_all(run, memory, start, stop)
            if self._progress is not None:
                self._progress(stop - start)

    def _read_up_to(self, run: Run, memory: np.ndarray, at: int, stop: int) -> int:
        """Read whole pages from `at` on, until `stop` is there; no page twice, since what was verified must stay."""
        high = min(-(-stop // ALIGNMENT) * ALIGNMENT, run.stop)
        if high > at:
            needed = min(high, run.start + run.needed) - at
            self._sources.read_into(run.segment, at, memory[at - run.start : high - run.start], needed)
            self.reads += 1
        return high

    def _verify_all(self, run: Run, memory: np.ndarray, start: int, stop: int) -> None:
        if self._digest is not None:
            for read in run.reads:
                if read.start < stop and read.stop > start and read.chunk.digests:  # what is made has none
                    self._verify(self._digest, read, run, memory, max(start, read.start), min(stop, read.stop))

    def _verify(self, digest: HexDigest, read: ChunkRead, run: Run, memory: np.ndarray, start: int, stop: int) -> None:
        width, block_bytes = HEX_DIGITS[self._manifest.digest], self._manifest.block_bytes
        for at in range(start, stop, block_bytes):
            block = (at - read.chunk.offset) // block_bytes
            end = min(at + block_bytes, read.stop)
            found = digest(memoryview(memory[at - run.start : end - run.start]))
            if found != read.chunk.digests[block * width : (block + 1) * width]:
                raise self._damaged(read, at, end)

    def _damaged(self, read: ChunkRead, start: int, stop: int) -> CorruptCheckpointError:
        name = self._wanted[read.uses[0].wanted].array.name
        file = self._manifest.segments[read.chunk.segment].file
        return CorruptCheckpointError(
            f"{self._directory}/{file}: bytes {start} to {stop} of leaf {name!r} are not what was saved "
            f"({self._manifest.digest} differs)"
        )

    def _hand_out(self, read: ChunkRead, data: np.ndarray, room: _Room, completed: list[ReadBox]) -> None:
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
                if (read.start + start) % VIEW_ALIGNMENT or not room.stays:
                    piece = room.copy(piece)
                completed.append(ReadBox(use.wanted, use.box, piece.view(dtype).reshape(box_shape(box))))
            else:
                self._copy_part(use, _part(piece, dtype, use, read.chunk), completed)

    def moved(self) -> int:
        """For who waits: another number after each read. A progress may raise here, to end the load."""
        if self._progress is not None:
            self._progress(0)
        return self.reads

    def hand_over(self, completed: list[ReadBox]) -> Generator[ReadBox]:
        """One box after the other, of which the consumer holds only one."""
        with self._budget.at_work():
            while completed:
                yield completed.pop()

    def give_up(self) -> None:
        """Let the reading threads end although nobody takes what they read."""
        self._budget.lift()

    def prepare(self, runs: Sequence[Run]) -> None:
        """Reserve the memory of all large results that stay in host memory in one piece."""
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

    def _copy_part(self, use: Use, part: np.ndarray, completed: list[ReadBox]) -> None:
        want = self._wanted[use.wanted]
        target = self._begin_part(use, want, part.dtype)
        target[slices_within(use.common, want.boxes[use.box])] = part
        self._end_part(use, want, part.size, completed)

    def _begin_part(self, use: Use, want: Wanted, dtype: np.dtype) -> np.ndarray:
        """The box that a part belongs to."""
        key, box = (use.wanted, use.box), want.boxes[use.box]
        with self._lock:
            if key not in self._parts:
                self._parts[key] = self._new_box(want, box_shape(box), dtype), box_elements(box)
            return self._parts[key][0]

    def _end_part(self, use: Use, want: Wanted, elements: int, completed: list[ReadBox]) -> None:
        """So many elements of the box are there."""
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


def _pieces(run: Run, block_bytes: int) -> Generator[tuple[int, int]]:
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
