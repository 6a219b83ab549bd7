"""Assigns the blocks of shared arrays to the processes of a job, and reads the blocks of one process.

`assign_reads` gives each process a `Stream` of whole digest blocks, so that no block is read twice. A `ShardReader`
reads a stream window by window. `Assembly` puts the boxes that a process needs together from parts of windows.
`RepeatedReads` computes how much a job reads if every process reads what it needs itself.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, intersect, row_major_range, slices_within
from jaxckpt_train.store.buffers import BufferPool, ReadBudget, empty_array
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord
from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT, Wanted, is_read_by_bands, parts_bytes, plan_reads
from jaxckpt_train.store.reader import ReadBox, Reading, ReadProgress, Sources, band_bytes, run_reads
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.timeouts import call_with_timeout, close_files

ROOM = 16
"""Alignment of the parts in a row for another process: no element is longer."""
Requirements = tuple[tuple[Box, ...], ...]
"""For each process of a job, the distinct boxes of an array that it needs, in order."""


class Piece(NamedTuple):
    """Bytes [start, stop) of a chunk of array number `wanted` in whole digest blocks, at `at` in a process's stream.

    `at` is a multiple of 64 bytes, so that cutting a stream at such a multiple cuts no element.
    """

    wanted: int
    chunk: ChunkRecord
    start: int
    stop: int
    at: int


class Cut(NamedTuple):
    """Bytes [start, stop) of a chunk of array number `wanted`, at `at` in a window of a stream."""

    wanted: int
    chunk: ChunkRecord
    start: int
    stop: int
    at: int


class Stream:
    """Everything that one process reads, as a sequence of pieces.

    Attributes:
        pieces: in the order of reading.
        bytes: total size of the pieces.
        end: where the last piece ends, including the gaps between pieces.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.bytes = self.end = 0
        self._starts: list[int] = []

    def add(self, wanted: int, chunk: ChunkRecord, start: int, stop: int) -> None:
        """Append a block; it extends the last piece if it follows it in the chunk."""
        self.bytes += stop - start
        if self.pieces:
            last = self.pieces[-1]
            if last.chunk is chunk and last.stop == start:
                self.pieces[-1] = last._replace(stop=stop)
                self.end = last.at + stop - last.start
                return
        at = -(-self.end // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        self.pieces.append(Piece(wanted, chunk, start, stop, at))
        self._starts.append(at)
        self.end = at + stop - start

    def within(self, start: int, stop: int) -> Iterator[Cut]:
        """Yield the parts of pieces in the window from `start` to `stop`."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for piece in itertools.islice(self.pieces, first, None):
            if piece.at >= stop:
                return
            low, high = max(start, piece.at), min(stop, piece.at + piece.stop - piece.start)
            if low < high:
                skipped = piece.start - piece.at
                yield Cut(piece.wanted, piece.chunk, skipped + low, skipped + high, low - start)


def assign_reads(
    arrays: Sequence[ArrayRecord], processes: int, block_bytes: int, order_of: Callable[[int], Sequence[int]]
) -> list[Stream]:
    """Assign the blocks of arrays to processes: equal bytes for each, up to a block or two, in long runs.

    Consecutive arrays in the files are assigned in groups that have at least one block per process. So all arrays of a
    group are complete soon after their first byte is read, and small arrays are not spread over many processes.

    Args:
        arrays: the arrays.
        processes: number of processes.
        block_bytes: size of a digest block, which one process reads.
        order_of: returns the order in which processes take blocks, for the number of the largest array of a group.
    """
    streams = [Stream() for _ in range(processes)]
    group: list[int] = []
    size = 0
    for number in sorted(range(len(arrays)), key=lambda number: _place(arrays[number])):
        group.append(number)
        size += stored_bytes(arrays[number])
        if size >= processes * block_bytes:
            _distribute(arrays, group, size, streams, block_bytes, order_of)
            group, size = [], 0
    _distribute(arrays, group, size, streams, block_bytes, order_of)
    return streams


def stored_bytes(array: ArrayRecord) -> int:
    """Return the number of bytes of all chunks of an array."""
    return sum(chunk.length for chunk in array.chunks)


def _place(array: ArrayRecord) -> tuple[int, int]:
    return min(((chunk.segment, chunk.offset) for chunk in array.chunks), default=(0, 0))


def _distribute(
    arrays: Sequence[ArrayRecord],
    group: Sequence[int],
    size: int,
    streams: Sequence[Stream],
    block_bytes: int,
    order_of: Callable[[int], Sequence[int]],
) -> None:
    """Give each process one run of the group's blocks, longer for processes that have fewer bytes so far."""
    if not size:
        return
    order = order_of(max(group, key=lambda number: stored_bytes(arrays[number])))
    level = (sum(stream.bytes for stream in streams) + size) / len(streams)
    lacks = [max(0.0, level - streams[process].bytes) for process in order]
    edges = [size * lack / sum(lacks) for lack in itertools.accumulate(lacks)]
    done = 0
    for number in group:
        for chunk in arrays[number].chunks:
            for start in range(0, chunk.length, block_bytes):
                stop = min(start + block_bytes, chunk.length)
                middle = done + (stop - start) / 2
                turn = min(bisect.bisect_right(edges, middle), len(order) - 1)
                streams[order[turn]].add(number, chunk, start, stop)
                done += stop - start


class Part(NamedTuple):
    """The part that a cut shares with box number `box`. It is inside of `inner`, whose bytes start at `at`."""

    box: int
    common: Box
    inner: Box
    at: int


def parts_of(cut: Cut, item: int, boxes: Sequence[Box]) -> Iterator[Part]:
    """Yield the parts that boxes share with a cut, in a fixed order; `item`: bytes of an element."""
    at = cut.at
    for inner in row_major_range(cut.chunk.box, cut.start // item, cut.stop // item):
        for number, box in enumerate(boxes):
            common = intersect(inner, box)
            if common is not None:
                yield Part(number, common, inner, at)
        at += box_elements(inner) * item


def data_of(part: Part, window: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a part as a view of the window that holds it."""
    stop = part.at + box_elements(part.inner) * dtype.itemsize
    inner = window[part.at : stop].view(dtype).reshape(box_shape(part.inner))
    return inner[slices_within(part.common, part.inner)]


def row_bytes(cut: Cut, item: int, boxes: Sequence[Box]) -> int:
    """Return the bytes that the parts of a cut take in a row, including gaps."""
    return sum(_with_room(box_elements(part.common) * item) for part in parts_of(cut, item, boxes))


def pack(cut: Cut, window: np.ndarray, dtype: np.dtype, boxes: Sequence[Box], row: np.ndarray, at: int) -> int:
    """Copy all parts of a cut into a row for another process, from `at` on; return where they end."""
    for part in parts_of(cut, dtype.itemsize, boxes):
        _row_view(part, row, at, dtype)[...] = data_of(part, window, dtype)
        at += _with_room(box_elements(part.common) * dtype.itemsize)
    return at


def _row_view(part: Part, row: np.ndarray, at: int, dtype: np.dtype) -> np.ndarray:
    size = box_elements(part.common) * dtype.itemsize
    return row[at : at + size].view(dtype).reshape(box_shape(part.common))


def _with_room(size: int) -> int:
    return -(-size // ROOM) * ROOM


class Assembly:
    """Assembles the boxes that this process needs from parts in any order.

    Args:
        arrays: the arrays.
        boxes: for each array, the boxes that this process needs.

    Attributes:
        completed: boxes that are complete; the caller removes them.
    """

    def __init__(self, arrays: Sequence[ArrayRecord], boxes: Sequence[Sequence[Box]]) -> None:
        self.completed: list[ReadBox] = []
        self._dtypes, self._boxes = [DTYPES[array.dtype] for array in arrays], boxes
        self._incomplete: dict[tuple[int, int], tuple[np.ndarray, int]] = {}  # data and number of missing elements

    def add_cut(self, cut: Cut, window: np.ndarray) -> None:
        """Add what this process needs of a cut, from the window that holds it."""
        boxes, dtype = self._boxes[cut.wanted], self._dtypes[cut.wanted]
        if len(boxes) == 1 and boxes[0] == cut.chunk.box:  # copy the bytes regardless of dimensions
            data = window[cut.at : cut.at + cut.stop - cut.start]
            self._target(cut.wanted, 0).reshape(-1).view(np.uint8)[cut.start : cut.stop] = data
            self._count(cut.wanted, 0, len(data) // dtype.itemsize)
            return
        for part in parts_of(cut, dtype.itemsize, boxes):
            self._add(cut.wanted, part, data_of(part, window, dtype))

    def add_row(self, cut: Cut, row: np.ndarray, at: int) -> int:
        """Add what this process needs of a cut, as `pack` has put it into a row; return where it ends."""
        dtype = self._dtypes[cut.wanted]
        for part in parts_of(cut, dtype.itemsize, self._boxes[cut.wanted]):
            self._add(cut.wanted, part, _row_view(part, row, at, dtype))
            at += _with_room(box_elements(part.common) * dtype.itemsize)
        return at

    def _add(self, wanted: int, part: Part, data: np.ndarray) -> None:
        box = self._boxes[wanted][part.box]
        self._target(wanted, part.box)[slices_within(part.common, box)] = data
        self._count(wanted, part.box, box_elements(part.common))

    def _target(self, wanted: int, number: int) -> np.ndarray:
        found = self._incomplete.get((wanted, number))
        if found is None:
            box = self._boxes[wanted][number]
            found = empty_array(box_shape(box), self._dtypes[wanted]), box_elements(box)
            self._incomplete[wanted, number] = found
        return found[0]

    def _count(self, wanted: int, number: int, elements: int) -> None:
        target, left = self._incomplete[wanted, number]
        if left > elements:
            self._incomplete[wanted, number] = target, left - elements
            return
        del self._incomplete[wanted, number]
        self.completed.append(ReadBox(wanted, number, target))


class Window:
    """Bytes [start, stop) of a stream that are being read.

    Args:
        target: receives them: flat uint8.
        start: of the window.
        stop: of the window.
        left: segments of the pieces of which nothing is read after this window.

    Attributes:
        crossing: pieces that end after the window, with their places in the stream.
    """

    def __init__(self, target: np.ndarray, start: int, stop: int, left: Sequence[int]) -> None:
        self.target, self.start, self.stop, self.left = target, start, stop, left
        self.crossing = list[tuple[int, np.ndarray]]()

    def place_for(self, piece: Piece) -> np.ndarray:
        """Return the memory for a piece: in the window if all of the piece is inside, else its own."""
        at, size = piece.at - self.start, piece.stop - piece.start
        if at + size <= self.stop - self.start:
            return self.target[at : at + size]
        self.crossing.append((piece.at, np.empty(size, np.uint8)))
        return self.crossing[-1][1]

    def put(self, at: int, data: np.ndarray) -> bool:
        """Copy data at a place of the stream into the window, as far as inside; return whether it continues after."""
        low, high = max(at, self.start), min(at + len(data), self.stop)
        if low < high:
            self.target[low - self.start : high - self.start] = data[low - at : high - at]
        return at + len(data) > self.stop


class ShardReader:
    """Reads a stream in order. The rest of the last block of a window is kept for the next window.

    Args:
        files: opens the files.
        committed: the open checkpoint.
        arrays: to which the numbers in the pieces refer.
        stream: what to read.
        settings: threads, budget, verification.
        progress: as for `iter_boxes`.

    Attributes:
        directory: of the checkpoint.
        reads: changes after each read.
    """

    def __init__(
        self,
        files: Opener,
        committed: Committed,
        arrays: Sequence[ArrayRecord],
        stream: Stream,
        settings: StoreSettings,
        progress: ReadProgress | None,
    ) -> None:
        self.directory, self.reads = committed.directory, 0
        self._committed, self._arrays, self._settings, self._progress = committed, arrays, settings, progress
        self._is_open = self._is_stopped = False
        self._budget, self._warm = ReadBudget(settings.read_budget_bytes), BufferPool()
        self._pieces = stream.pieces
        self._sources = Sources(files, committed, settings, [piece.chunk.segment for piece in stream.pieces])
        self._next = (0, 0)  # number of the next piece, and its bytes that are read
        self._held: list[tuple[int, np.ndarray]] = []  # data for later windows, and its place in the stream

    def fill(self, target: np.ndarray, start: int, stop: int) -> None:
        """Read bytes [start, stop) of the stream into `target`; each window starts where the last one ended.

        Args:
            target: flat uint8.
            start: of the window.
            stop: of the window.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: as `iter_boxes`.
        """
        window, reads = self.begin(target, start, stop)
        each = run_reads(
            self.directory, self._settings, operator.call, reads, give_up=self._budget.lift, moved=self._count_reads
        )
        with contextlib.closing(each) as results:
            for _ in results:
                pass
        self.finish(window)

    def begin(self, target: np.ndarray, start: int, stop: int) -> tuple[Window, list[Callable[[], object]]]:
        """Like `fill`, but only return the reads to call, on any threads, before the window is finished.

        Windows are finished in order; several may have begun.
        """
        if not self._is_open:
            self._is_open = True
            call_with_timeout(f"{self.directory}: segments", self._sources.open, self._moved)
        pieces, left = self._unread_before(stop)
        window = Window(target, start, stop, left)
        wanted = [self._wanted(piece, window.place_for(piece)) for piece in pieces]
        runs = plan_reads(self._committed.manifest, wanted, band_bytes(self._settings), ALIGNMENT)
        reading = Reading(self._sources, self._committed, wanted, self._settings, self._moved, self._budget, self._warm)
        return window, [functools.partial(reading.read_run, run) for run in runs]

    def finish(self, window: Window) -> None:
        """Complete a window after all of its reads, and after all earlier windows."""
        crossing, self._held = [*self._held, *window.crossing], []
        window.crossing.clear()
        self._held.extend(each for each in crossing if window.put(*each))
        for segment in window.left:
            self._sources.done(segment)

    def close(self) -> None:
        """Make running reads fail soon, and close the files."""
        self._is_stopped = True
        close_files(self._sources.end())

    def _count_reads(self) -> int:
        """Return the number of reads; the progress callback may raise here, in the waiting thread."""
        self._moved(0)
        return self.reads

    def _moved(self, done: int) -> None:
        if self._is_stopped:
            raise CheckpointError(f"{self.directory}: the read was cancelled")
        if done:
            self.reads += 1
        if self._progress is not None:
            self._progress(done)

    def _wanted(self, piece: Piece, place: np.ndarray) -> Wanted:
        return Wanted(_flat(self._arrays[piece.wanted], piece.chunk), [((piece.start, piece.stop),)], target=place)

    def _unread_before(self, stop: int) -> tuple[list[Piece], list[int]]:
        """Return the whole blocks before `stop` in the stream that are not read yet, and the segments they finish.

        The bytes between these blocks in the files belong to other processes, or to no array.
        """
        block, chosen, left = self._committed.manifest.block_bytes, list[Piece](), list[int]()
        number, read = self._next
        while number < len(self._pieces) and self._pieces[number].at + read < stop:
            piece = self._pieces[number]
            length = piece.stop - piece.start
            end = min(length, -(-(stop - piece.at) // block) * block)
            within = (stop - piece.at) // block * block if piece.at + end > stop else end
            for low, high in ((read, within), (within, end)):
                if low < high:
                    chosen.append(piece._replace(start=piece.start + low, stop=piece.start + high, at=piece.at + low))
            if end == length:
                left.append(piece.chunk.segment)
            number, read = (number + 1, 0) if end == length else (number, end)
        self._next = number, read
        return chosen, left


def _flat(array: ArrayRecord, chunk: ChunkRecord) -> ArrayRecord:
    """Describe one chunk as an array of bytes."""
    alone = ChunkRecord(((0, chunk.length),), chunk.segment, chunk.offset, chunk.length, chunk.digests)
    return ArrayRecord(array.name, (chunk.length,), "uint8", (alone,))


class RepeatedReads:
    """Computes repeated reads; arrays that are stored and needed in the same way are computed once.

    Args:
        block_bytes: size of a digest block, which is read whole.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._known: dict[object, int] = {}

    def job_bytes(self, array: ArrayRecord, needs: Requirements) -> int:
        """Return the bytes that all processes read together, if each reads every block of which it needs a part.

        The result is never too small; where boxes of one process share blocks, it may be too large.
        """
        places = tuple((chunk.box, is_read_by_bands(chunk)) for chunk in array.chunks)
        key = needs, places, array.dtype
        found = self._known.get(key)
        if found is None:
            counts = Counter(needs)
            reads = _Reads(array, self._block_bytes)
            found = self._known[key] = sum(reads.of(each) * count for each, count in counts.items())
        return found


class _Common(NamedTuple):
    """The common part of a box and each chunk.

    Attributes:
        elements: of the box.
        low: for each chunk, the lower edges of the common part, relative to the chunk.
        high: for each chunk, the upper edges, relative to the chunk.
        is_any: whether they share anything.
    """

    elements: int
    low: np.ndarray
    high: np.ndarray
    is_any: np.ndarray


class _Reads:
    """The reads of one array."""

    def __init__(self, array: ArrayRecord, block_bytes: int) -> None:
        self._block_bytes, self._band_bytes = block_bytes, parts_bytes(block_bytes)
        self._lengths = {chunk.box: chunk.length for chunk in array.chunks}
        self._length = np.array([chunk.length for chunk in array.chunks], np.int64)
        shape = len(array.chunks), len(array.shape), 2
        self._edges = np.array([chunk.box for chunk in array.chunks], np.int64).reshape(shape)
        sizes = self._edges[:, :, 1] - self._edges[:, :, 0]
        self._elements = np.prod(sizes, axis=1)
        inner = np.cumprod(sizes[:, ::-1], axis=1)[:, ::-1]  # elements of this and all later dimensions
        self._strides = np.concatenate([inner[:, 1:], np.ones((len(sizes), 1), np.int64)], axis=1)[:, : sizes.shape[1]]
        self._item = self._length // np.maximum(self._elements, 1)
        self._by_bands = np.array([is_read_by_bands(chunk) for chunk in array.chunks], bool)

    def of(self, boxes: Sequence[Box]) -> int:
        """Return the bytes of all blocks that hold a part of these boxes."""
        if all(box in self._lengths for box in boxes):
            return sum(self._lengths[box] for box in boxes)
        common = [self._common(box) for box in boxes if box_elements(box)]
        if not common:
            return 0
        spans = [self._blocks(each) for each in common]
        first = np.minimum.reduce([low for low, _ in spans])
        last = np.maximum.reduce([high for _, high in spans])
        by_bands = self._by_bands & ~np.logical_or.reduce([self._lies_whole(each) for each in common])
        holes = np.sum([self._holes(each) for each in common], axis=0) * by_bands
        one_by_one = np.sum([np.maximum(high - low, 0) for low, high in spans], axis=0) - holes
        return int(np.minimum(one_by_one, np.maximum(last - first, 0)).sum())

    def _common(self, box: Box) -> _Common:
        edges = np.array(box, np.int64).reshape(len(box), 2)
        low = np.maximum(self._edges[:, :, 0], edges[:, 0]) - self._edges[:, :, 0]
        high = np.minimum(self._edges[:, :, 1], edges[:, 1]) - self._edges[:, :, 0]
        return _Common(box_elements(box), low, high, np.all(low < high, axis=1))

    def _lies_whole(self, common: _Common) -> np.ndarray:
        """Return for each chunk whether a box is contiguous in it."""
        elements, low, high, is_common = common
        span = ((high - low - 1) * self._strides).sum(axis=1) + 1
        is_whole: np.ndarray = is_common & (span == elements) & (np.prod(high - low, axis=1) == span)
        return is_whole

    def _holes(self, common: _Common) -> np.ndarray:
        """Return for each chunk the bytes between its first and last block that are skipped, as they hold no box.

        This happens only where one piece of the box ends at least a band before the next piece starts, which is so in
        few chunks, and in the same way there.
        """
        _, low, high, is_common = common
        spans = (high - low - 1) * self._strides
        behind = spans[:, ::-1].cumsum(axis=1)[:, ::-1] - spans + 1  # elements from first to last of a piece
        gaps = (self._strides - behind) * self._item[:, None]
        is_far = (gaps >= self._band_bytes) & (high - low > 1)
        found = np.zeros(len(low), np.int64)
        which = np.flatnonzero(is_far.any(axis=1) & is_common)
        if not len(which):
            return found
        geometry = np.concatenate([low, high, self._strides, is_far, self._item[:, None]], axis=1)[which]
        _, some, same = np.unique(geometry, axis=0, return_index=True, return_inverse=True)
        holes = [self._empty_bands(low[at], high[at], is_far[at], behind[at], at) for at in which[some]]
        found[which] = np.array(holes)[same.reshape(-1)] * self._band_bytes
        return found

    def _empty_bands(
        self, low: np.ndarray, high: np.ndarray, is_far: np.ndarray, behind: np.ndarray, chunk: int
    ) -> int:
        """Return how many bands of one chunk are between pieces of a box."""
        inner = int(np.flatnonzero(is_far)[-1])  # the pieces along this dimension are far apart
        starts = np.zeros(1, np.int64)
        for size, first, stride in zip((high - low)[: inner + 1], low, self._strides[chunk], strict=False):
            starts = (starts[:, None] + (first + np.arange(size)) * stride).reshape(-1)
        starts += (low[inner + 1 :] * self._strides[chunk][inner + 1 :]).sum()
        item = self._item[chunk]
        first_bands = starts * item // self._band_bytes
        last_bands = ((starts + behind[inner]) * item - 1) // self._band_bytes
        return int(np.maximum(first_bands[1:] - last_bands[:-1] - 1, 0).sum())

    def _blocks(self, common: _Common) -> tuple[np.ndarray, np.ndarray]:
        """Return for each chunk the byte range from its first to its last block that holds a part of a box.

        If there is none, the start is far behind the stop.
        """
        _, low, high, is_common = common
        first = (low * self._strides).sum(axis=1) * self._item
        last = (((high - 1) * self._strides).sum(axis=1) + 1) * self._item
        begin = first // self._block_bytes * self._block_bytes
        end = np.minimum(-(-last // self._block_bytes) * self._block_bytes, self._length)
        far = np.iinfo(np.int64).max // 4
        return np.where(is_common, begin, far), np.where(is_common, end, -far)
