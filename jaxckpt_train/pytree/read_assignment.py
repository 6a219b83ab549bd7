"""Repeated reads: how many bytes a job reads of an array if each process reads whatever it needs itself.

A feed: the share of this process read from its files, window after window, each digest block once.

Parts of shares: which bytes of a window become which parts of the boxes that a process needs.

Read shares: which process of a job reads which blocks of each array, so that no block is read twice.
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
"""In a row for one process each part begins at a multiple of this: no element is longer."""
Requirements = tuple[tuple[Box, ...], ...]
"""Of each process of a job, the distinct boxes of an array that it needs, lowest first."""


class Piece(NamedTuple):
    """Bytes [start, stop) of a chunk of array number `wanted`, whole digest blocks; at `at` in the stream of a process.

    `at` is a multiple of 64 bytes, so that no cut of a stream at such a multiple goes through an element.
    """

    wanted: int
    chunk: ChunkRecord
    start: int
    stop: int
    at: int


class Cut(NamedTuple):
    """Bytes [start, stop) of a chunk of array number `wanted`; at `at` in a window of a stream."""

    wanted: int
    chunk: ChunkRecord
    start: int
    stop: int
    at: int


class Stream:
    """All that one process reads, one piece after the other.

    Attributes:
        pieces: in the order in which they are read.
        bytes: of them.
        end: where the last one ends, with the room between them.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.bytes = self.end = 0
        self._starts: list[int] = []

    def add(self, wanted: int, chunk: ChunkRecord, start: int, stop: int) -> None:
        """One more block; it lengthens the last piece if it follows that."""
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
        """What of the pieces lies in the window from `start` to `stop`."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for piece in itertools.islice(self.pieces, first, None):
            if piece.at >= stop:
                return
            low, high = max(start, piece.at), min(stop, piece.at + piece.stop - piece.start)
            if low < high:
                skipped = piece.start - piece.at
                yield Cut(piece.wanted, piece.chunk, skipped + low, skipped + high, low - start)


def read_shares(
    arrays: Sequence[ArrayRecord], processes: int, block_bytes: int, order_of: Callable[[int], Sequence[int]]
) -> list[Stream]:
    """What each process reads of these arrays: the same number of bytes but for a block or two, in long runs.

    Arrays that follow each other in the files are handed out together, as many as have a block for each process; so
    all of them are complete soon after their first byte is there, and small ones are not read by turns.

    Args:
        arrays: which.
        processes: how many.
        block_bytes: of the digests: what is read by one.
        order_of: of the largest array of a group, by its number: in which order the processes take from it.
    """
    streams = [Stream() for _ in range(processes)]
    group: list[int] = []
    size = 0
    for number in sorted(range(len(arrays)), key=lambda number: _place(arrays[number])):
        group.append(number)
        size += stored_bytes(arrays[number])
        if size >= processes * block_bytes:
            _hand_out(arrays, group, size, streams, block_bytes, order_of)
            group, size = [], 0
    _hand_out(arrays, group, size, streams, block_bytes, order_of)
    return streams


def stored_bytes(array: ArrayRecord) -> int:
    """Bytes of all of its chunks."""
    return sum(chunk.length for chunk in array.chunks)


def _place(array: ArrayRecord) -> tuple[int, int]:
    return min(((chunk.segment, chunk.offset) for chunk in array.chunks), default=(0, 0))


def _hand_out(
    arrays: Sequence[ArrayRecord],
    group: Sequence[int],
    size: int,
    streams: Sequence[Stream],
    block_bytes: int,
    order_of: Callable[[int], Sequence[int]],
) -> None:
    """Give each process one run of the group's blocks, longer for those that have less so far."""
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
    """What a cut and box number `box` have in common. It lies in `inner`, whose bytes begin at `at` in the window."""

    box: int
    common: Box
    inner: Box
    at: int


def parts_of(cut: Cut, item: int, boxes: Sequence[Box]) -> Iterator[Part]:
    """The parts that boxes of an array have of a cut, always in one order; `item`: bytes of an element."""
    at = cut.at
    for inner in row_major_range(cut.chunk.box, cut.start // item, cut.stop // item):
        for number, box in enumerate(boxes):
            common = intersect(inner, box)
            if common is not None:
                yield Part(number, common, inner, at)
        at += box_elements(inner) * item


def data_of(part: Part, window: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A part as a view of the window that holds it."""
    stop = part.at + box_elements(part.inner) * dtype.itemsize
    inner = window[part.at : stop].view(dtype).reshape(box_shape(part.inner))
    return inner[slices_within(part.common, part.inner)]


def row_bytes(cut: Cut, item: int, boxes: Sequence[Box]) -> int:
    """How long the parts of a cut are in a row: each with the room after it."""
    return sum(_roomy(box_elements(part.common) * item) for part in parts_of(cut, item, boxes))


def pack(cut: Cut, window: np.ndarray, dtype: np.dtype, boxes: Sequence[Box], row: np.ndarray, at: int) -> int:
    """Put all parts of a cut into a row for another process, from `at` on; returns where they end."""
    for part in parts_of(cut, dtype.itemsize, boxes):
        _in_row(part, row, at, dtype)[...] = data_of(part, window, dtype)
        at += _roomy(box_elements(part.common) * dtype.itemsize)
    return at


def _in_row(part: Part, row: np.ndarray, at: int, dtype: np.dtype) -> np.ndarray:
    size = box_elements(part.common) * dtype.itemsize
    return row[at : at + size].view(dtype).reshape(box_shape(part.common))


def _roomy(size: int) -> int:
    return -(-size // ROOM) * ROOM


class Assembly:
    """The boxes that this process needs, put together of parts in any order.

    Args:
        arrays: which.
        boxes: of each, those that this process needs.

    Attributes:
        completed: boxes of which all parts have come; whoever takes them lets go of them here.
    """

    def __init__(self, arrays: Sequence[ArrayRecord], boxes: Sequence[Sequence[Box]]) -> None:
        self.completed: list[ReadBox] = []
        self._dtypes, self._boxes = [DTYPES[array.dtype] for array in arrays], boxes
        self._begun: dict[tuple[int, int], tuple[np.ndarray, int]] = {}  # with the number of missing elements

    def add_cut(self, cut: Cut, window: np.ndarray) -> None:
        """All that this process needs of a cut, of the window that holds it."""
        boxes, dtype = self._boxes[cut.wanted], self._dtypes[cut.wanted]
        if len(boxes) == 1 and boxes[0] == cut.chunk.box:  # bytes in their order, without looking at dimensions
            data = window[cut.at : cut.at + cut.stop - cut.start]
            self._target(cut.wanted, 0).reshape(-1).view(np.uint8)[cut.start : cut.stop] = data
            self._count(cut.wanted, 0, len(data) // dtype.itemsize)
            return
        for part in parts_of(cut, dtype.itemsize, boxes):
            self._add(cut.wanted, part, data_of(part, window, dtype))

    def add_row(self, cut: Cut, row: np.ndarray, at: int) -> int:
        """All that this process needs of a cut, as `pack` has put it into a row; returns where it ends."""
        dtype = self._dtypes[cut.wanted]
        for part in parts_of(cut, dtype.itemsize, self._boxes[cut.wanted]):
            self._add(cut.wanted, part, _in_row(part, row, at, dtype))
            at += _roomy(box_elements(part.common) * dtype.itemsize)
        return at

    def _add(self, wanted: int, part: Part, data: np.ndarray) -> None:
        box = self._boxes[wanted][part.box]
        self._target(wanted, part.box)[slices_within(part.common, box)] = data
        self._count(wanted, part.box, box_elements(part.common))

    def _target(self, wanted: int, number: int) -> np.ndarray:
        found = self._begun.get((wanted, number))
        if found is None:
            box = self._boxes[wanted][number]
            found = empty_array(box_shape(box), self._dtypes[wanted]), box_elements(box)
            self._begun[wanted, number] = found
        return found[0]

    def _count(self, wanted: int, number: int, elements: int) -> None:
        target, left = self._begun[wanted, number]
        if left > elements:
            self._begun[wanted, number] = target, left - elements
            return
        del self._begun[wanted, number]
        self.completed.append(ReadBox(wanted, number, target))


class Window:
    """Bytes [start, stop) of a stream that are being read.

    Args:
        target: where they go: flat uint8.
        start: of them.
        stop: of them.
        left: the segment of each piece of the stream of which nothing is to be read after this window.

    Attributes:
        crossing: of what is read with it, what goes on after its end, with its place in the stream.
    """

    def __init__(self, target: np.ndarray, start: int, stop: int, left: Sequence[int]) -> None:
        self.target, self.start, self.stop, self.left = target, start, stop, left
        self.crossing = list[tuple[int, np.ndarray]]()

    def place_for(self, piece: Piece) -> np.ndarray:
        """Where a piece is put when it is read: here, or, if not all of it lies here, in memory of its own."""
        at, size = piece.at - self.start, piece.stop - piece.start
        if at + size <= self.stop - self.start:
            return self.target[at : at + size]
        self.crossing.append((piece.at, np.empty(size, np.uint8)))
        return self.crossing[-1][1]

    def put(self, at: int, data: np.ndarray) -> bool:
        """Put what lies at a place of the stream here, as far as it lies in the window; whether it goes on after."""
        low, high = max(at, self.start), min(at + len(data), self.stop)
        if low < high:
            self.target[low - self.start : high - self.start] = data[low - at : high - at]
        return at + len(data) > self.stop


class ShardReader:
    """Reads a stream in order. What a window leaves of its last block is kept for the next one.

    Args:
        files: where.
        committed: the opened checkpoint.
        arrays: those whose numbers the pieces say.
        stream: what to read.
        settings: threads, budget, verification.
        progress: as of `iter_boxes`.

    Attributes:
        directory: of the checkpoint.
        reads: another number after each.
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
        self._committed, self._arrays, self._settings, self._told_progress = committed, arrays, settings, progress
        self._is_open = self._is_stopped = False
        self._budget, self._warm = ReadBudget(settings.read_budget_bytes), BufferPool()
        self._pieces = stream.pieces
        self._sources = Sources(files, committed, settings, [piece.chunk.segment for piece in stream.pieces])
        self._next = (0, 0)  # number of a piece, and bytes of it that are read
        self._held: list[tuple[int, np.ndarray]] = []  # what was read and not all given: its place in the stream

    def fill(self, target: np.ndarray, start: int, stop: int) -> None:
        """Bytes [start, stop) of the stream into `target`; each window begins where the last one ended.

        Args:
            target: flat uint8.
            start: of the window.
            stop: of the window.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: as `iter_boxes`.
        """
        window, reads = self.begin(target, start, stop)
        each = run_reads(
            self.directory, self._settings, operator.call, reads, give_up=self._budget.lift, moved=self._have_moved
        )
        with contextlib.closing(each) as results:
            for _ in results:
                pass
        self.finish(window)

    def begin(self, target: np.ndarray, start: int, stop: int) -> tuple[Window, list[Callable[[], object]]]:
        """As `fill`, but nothing is read yet: what is to be called, on any threads, before the window is finished.

        Windows are finished in their order, and several may be begun by then.
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
        """Complete a window of which all was read, after those before it."""
        crossing, self._held = [*self._held, *window.crossing], []
        window.crossing.clear()
        self._held.extend(each for each in crossing if window.put(*each))
        for segment in window.left:
            self._sources.done(segment)

    def close(self) -> None:
        """Have what is being read end soon, with an error, and the files closed."""
        self._is_stopped = True
        close_files(self._sources.end())

    def _have_moved(self) -> int:
        """For who waits. A progress may raise here."""
        self._moved(0)
        return self.reads

    def _moved(self, done: int) -> None:
        if self._is_stopped:
            raise CheckpointError(f"{self.directory}: nobody waits any more for what is read")
        if done:
            self.reads += 1
        if self._told_progress is not None:
            self._told_progress(done)

    def _wanted(self, piece: Piece, place: np.ndarray) -> Wanted:
        return Wanted(_flat(self._arrays[piece.wanted], piece.chunk), [((piece.start, piece.stop),)], target=place)

    def _unread_before(self, stop: int) -> tuple[list[Piece], list[int]]:
        """The whole blocks that begin before `stop` in the stream and are not read yet; the segments of what ends so.

        What lies between them in the files is another process's to read, or no array.
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
    """One chunk as an array of bytes, whatever is in it."""
    alone = ChunkRecord(((0, chunk.length),), chunk.segment, chunk.offset, chunk.length, chunk.digests)
    return ArrayRecord(array.name, (chunk.length,), "uint8", (alone,))


class RepeatedReads:
    """Counts them; arrays that are stored and needed alike are counted once.

    Args:
        block_bytes: of the digests: what is read whole.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._known: dict[object, int] = {}

    def job_bytes(self, array: ArrayRecord, needs: Requirements) -> int:
        """Bytes that all processes read together of the blocks that they need any of.

        Never too few; where the boxes of one process share blocks among each other, at times too many.
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
    """What a box has in common with each chunk.

    Attributes:
        elements: of the box.
        low: of each chunk the lower edges of it, from the chunk's own lower ones on.
        high: likewise the upper edges.
        is_any: whether there is anything.
    """

    elements: int
    low: np.ndarray
    high: np.ndarray
    is_any: np.ndarray


class _Reads:
    """What is read of one array."""

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
        """Bytes of all blocks that hold anything of these boxes."""
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
        """Of each chunk whether a box lies in it in one piece."""
        elements, low, high, is_common = common
        span = ((high - low - 1) * self._strides).sum(axis=1) + 1
        is_whole: np.ndarray = is_common & (span == elements) & (np.prod(high - low, axis=1) == span)
        return is_whole

    def _holes(self, common: _Common) -> np.ndarray:
        """Of each chunk the bytes between its first and last block that are not read, as they hold nothing of a box.

        Only where one piece of the box ends a band or more before the next one begins: in few chunks, and alike there.
        """
        _, low, high, is_common = common
        spans = (high - low - 1) * self._strides
        behind = spans[:, ::-1].cumsum(axis=1)[:, ::-1] - spans + 1  # elements from the first to the last of a piece
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
        """How many bands of one chunk lie between pieces of a box."""
        inner = int(np.flatnonzero(is_far)[-1])  # the pieces along this dimension lie far apart
        starts = np.zeros(1, np.int64)
        for size, first, stride in zip((high - low)[: inner + 1], low, self._strides[chunk], strict=False):
            starts = (starts[:, None] + (first + np.arange(size)) * stride).reshape(-1)
        starts += (low[inner + 1 :] * self._strides[chunk][inner + 1 :]).sum()
        item = self._item[chunk]
        first_bands = starts * item // self._band_bytes
        last_bands = ((starts + behind[inner]) * item - 1) // self._band_bytes
        return int(np.maximum(first_bands[1:] - last_bands[:-1] - 1, 0).sum())

    def _blocks(self, common: _Common) -> tuple[np.ndarray, np.ndarray]:
        """Of each chunk the bytes from the first to the last block that hold anything of a box; none: from far on."""
        _, low, high, is_common = common
        first = (low * self._strides).sum(axis=1) * self._item
        last = (((high - 1) * self._strides).sum(axis=1) + 1) * self._item
        begin = first // self._block_bytes * self._block_bytes
        end = np.minimum(-(-last // self._block_bytes) * self._block_bytes, self._length)
        far = np.iinfo(np.int64).max // 4
        return np.where(is_common, begin, far), np.where(is_common, end, -far)
