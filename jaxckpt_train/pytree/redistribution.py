"""Reads the blocks that one process of a job is assigned, and gives the processes what they need of all blocks.

`assign_reads` gives each process a `Stream` of whole digest blocks, so that no block is read twice, and a `ShardReader`
reads it window by window. `AllGather` and `AllToAll` move the windows over devices; `SharedMemoryWindows` lets the
processes of one machine read each other's memory. An `Assembly` puts the boxes that a process needs together.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt_train.distributed.shared_memory import ColocatedMemory
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.pytree._jax import without_caller_settings
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape, intersect, row_major_range, slices_within
from jaxckpt_train.store.buffers import BufferPool, ReadBudget, aligned_buffer, empty_array
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord
from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT, Wanted, parts_bytes, plan_reads
from jaxckpt_train.store.reader import ReadBox, Reading, ReadProgress, Sources, band_bytes, run_reads
from jaxckpt_train.store.segment import ALIGNMENT, DTYPES
from jaxckpt_train.store.threads import POLL_S, StallDetector
from jaxckpt_train.store.timeouts import BackgroundCall, abandon_call, close_files, start_call

ROOM = 16  # alignment of the parts in a row for another process: no element is longer
LEAST_ROW_BYTES = 4096  # summing so long a row makes XLA's CPU client return before the program has run
STEPS = 8  # number of distinct row lengths: each needs another compiled program
LEAST_PLACES = 3  # one being read, one being taken, and one for a process that is faster
Requirements = tuple[tuple[Box, ...], ...]  # for each process, the distinct boxes of an array that it needs, in order


class SharedArray(NamedTuple):
    """Array number `number` of a load, which the processes read once, and the boxes that this process needs of it."""

    number: int
    array: ArrayRecord
    needs: Requirements
    numbers: Sequence[int]


class Piece(NamedTuple):
    """Bytes [start, stop) of a chunk of array number `wanted`, at `at` in a process's stream, or in a window of it.

    In a stream, `at` is a multiple of 64 bytes, so that cutting the stream at such a multiple cuts no element.
    """

    wanted: int
    chunk: ChunkRecord
    start: int
    stop: int
    at: int


class Stream:
    """Everything that one process reads: pieces of whole digest blocks, their total size, and where the last ends."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.bytes = self.end = 0

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
        self.end = at + stop - start

    def within(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the parts of pieces in the window from `start` to `stop`."""
        first = max(0, bisect.bisect_right(self.pieces, start, key=operator.attrgetter("at")) - 1)
        for piece in itertools.islice(self.pieces, first, None):
            if piece.at >= stop:
                return
            low, high = max(start, piece.at), min(stop, piece.at + piece.stop - piece.start)
            if low < high:
                skipped = piece.start - piece.at
                yield Piece(piece.wanted, piece.chunk, skipped + low, skipped + high, low - start)


def assign_reads(
    arrays: Sequence[ArrayRecord], processes: int, block_bytes: int, order_of: Callable[[int], Sequence[int]]
) -> list[Stream]:
    """Assign the blocks of arrays to processes: equal bytes for each, up to a block or two, in long runs.

    Consecutive arrays in the files are assigned in groups that have at least one block per process, so that all arrays
    of a group are complete soon after their first byte is read. `order_of` returns the order in which processes take
    blocks, for the number of the largest array of a group.
    """
    streams, group, size = [Stream() for _ in range(processes)], list[int](), 0
    places = [min(((chunk.segment, chunk.offset) for chunk in array.chunks), default=(0, 0)) for array in arrays]
    for number in sorted(range(len(arrays)), key=places.__getitem__):
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


class _Part(NamedTuple):
    """The part that a cut shares with box number `box`. It is inside of `inner`, whose bytes start at `at`."""

    box: int
    common: Box
    inner: Box
    at: int


def _parts_of(cut: Piece, item: int, boxes: Sequence[Box]) -> Iterator[_Part]:
    """Yield the parts that boxes share with a cut, in a fixed order."""
    at = cut.at
    for inner in row_major_range(cut.chunk.box, cut.start // item, cut.stop // item):
        for number, box in enumerate(boxes):
            common = intersect(inner, box)
            if common is not None:
                yield _Part(number, common, inner, at)
        at += box_elements(inner) * item


def _data_of(part: _Part, window: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a part as a view of the window that holds it."""
    stop = part.at + box_elements(part.inner) * dtype.itemsize
    inner = window[part.at : stop].view(dtype).reshape(box_shape(part.inner))
    return inner[slices_within(part.common, part.inner)]


def row_bytes(cut: Piece, item: int, boxes: Sequence[Box]) -> int:
    """Return the bytes that the parts of a cut take in a row, including gaps."""
    return sum(_bytes_in_row(part, item) for part in _parts_of(cut, item, boxes))


def pack(cut: Piece, window: np.ndarray, dtype: np.dtype, boxes: Sequence[Box], row: np.ndarray, at: int) -> int:
    """Copy all parts of a cut into a row for another process, from `at` on; return where they end."""
    for part in _parts_of(cut, dtype.itemsize, boxes):
        _row_view(part, row, at, dtype)[...] = _data_of(part, window, dtype)
        at += _bytes_in_row(part, dtype.itemsize)
    return at


def _row_view(part: _Part, row: np.ndarray, at: int, dtype: np.dtype) -> np.ndarray:
    size = box_elements(part.common) * dtype.itemsize
    return row[at : at + size].view(dtype).reshape(box_shape(part.common))


def _bytes_in_row(part: _Part, item: int) -> int:
    return -(-box_elements(part.common) * item // ROOM) * ROOM


class Assembly:
    """Assembles the boxes that one process needs from parts in any order; the caller removes `completed` ones."""

    def __init__(self, shared: Sequence[SharedArray], process: int) -> None:
        self.completed: list[ReadBox] = []  # with the numbers of the load
        self._shared = shared
        self._dtypes = [DTYPES[each.array.dtype] for each in shared]
        self._boxes = [each.needs[process] for each in shared]
        self._incomplete: dict[tuple[int, int], tuple[np.ndarray, int]] = {}  # data and number of missing elements

    def add_cut(self, cut: Piece, window: np.ndarray) -> None:
        """Add what this process needs of a cut, from the window that holds it."""
        boxes, dtype = self._boxes[cut.wanted], self._dtypes[cut.wanted]
        if len(boxes) == 1 and boxes[0] == cut.chunk.box:  # copy the bytes regardless of dimensions
            data = window[cut.at : cut.at + cut.stop - cut.start]
            self._target(cut.wanted, 0).reshape(-1).view(np.uint8)[cut.start : cut.stop] = data
            self._count(cut.wanted, 0, len(data) // dtype.itemsize)
            return
        for part in _parts_of(cut, dtype.itemsize, boxes):
            self._add(cut.wanted, part, _data_of(part, window, dtype))

    def add_row(self, cut: Piece, row: np.ndarray, at: int) -> int:
        """Add what this process needs of a cut, as `pack` has put it into a row; return where it ends."""
        dtype = self._dtypes[cut.wanted]
        for part in _parts_of(cut, dtype.itemsize, self._boxes[cut.wanted]):
            self._add(cut.wanted, part, _row_view(part, row, at, dtype))
            at += _bytes_in_row(part, dtype.itemsize)
        return at

    def _add(self, wanted: int, part: _Part, data: np.ndarray) -> None:
        box = self._boxes[wanted][part.box]
        self._target(wanted, part.box)[slices_within(part.common, box)] = data
        self._count(wanted, part.box, box_elements(part.common))

    def _target(self, wanted: int, number: int) -> np.ndarray:
        if (wanted, number) not in self._incomplete:
            box = self._boxes[wanted][number]
            self._incomplete[wanted, number] = empty_array(box_shape(box), self._dtypes[wanted]), box_elements(box)
        return self._incomplete[wanted, number][0]

    def _count(self, wanted: int, number: int, elements: int) -> None:
        target, left = self._incomplete[wanted, number]
        if left > elements:
            self._incomplete[wanted, number] = target, left - elements
            return
        del self._incomplete[wanted, number]
        each = self._shared[wanted]
        self.completed.append(ReadBox(each.number, each.numbers[number], target))


class Window:
    """Bytes [start, stop) of a stream that are being read into `target`, which is flat uint8."""

    def __init__(self, target: np.ndarray, start: int, stop: int, left: Sequence[int]) -> None:
        self.target, self.start, self.stop = target, start, stop
        self.left, self.pending = left, 0  # segments of which nothing is read later; number of missing reads
        self.crossing = list[tuple[int, np.ndarray]]()  # pieces that end later, and their places in the stream

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
    """Reads a stream in order. The rest of the last block of a window is kept for the next window."""

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
        """Read bytes [start, stop) of the stream into `target`; each window starts where the last one ended."""
        window, reads = self.begin(target, start, stop)
        each = run_reads(
            self.directory, self._settings, operator.call, reads, give_up=self._budget.lift, moved=lambda: self.reads
        )
        with contextlib.closing(each) as results:
            for _ in results:
                pass
        self.finish(window)

    def begin(self, target: np.ndarray, start: int, stop: int) -> tuple[Window, list[Callable[[], object]]]:
        """Like `fill`, but only return the reads to call, on any threads, before `finish`. Several may have begun."""
        if not self._is_open:
            self._is_open = True
            self._sources.open()
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

    def _moved(self, done: int) -> None:
        if self._is_stopped:
            raise CheckpointError(f"{self.directory}: the read was cancelled")
        self.reads += 1
        if self._progress is not None:
            self._progress(done)

    def _wanted(self, piece: Piece, place: np.ndarray) -> Wanted:
        """Request a piece of a chunk as an array of bytes."""
        length = piece.chunk.length
        chunk = ChunkRecord(((0, length),), piece.chunk.segment, piece.chunk.offset, length, piece.chunk.digests)
        array = ArrayRecord(self._arrays[piece.wanted].name, (length,), "uint8", (chunk,))
        return Wanted(array, [((piece.start, piece.stop),)], target=place)

    def _unread_before(self, stop: int) -> tuple[list[Piece], list[int]]:
        """Return the whole blocks before `stop` in the stream that are not read yet, and the segments they finish."""
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


class Prefetcher:
    """Reads windows ahead on other threads, while the thread that orders them does something else.

    The reads continue from one window to the next, because a disk that waits for the end of each window is idle while
    its data is digested. `then` is called after each read, from any thread.
    """

    def __init__(self, reader: ShardReader, threads: int, then: Callable[[], object]) -> None:
        self._reader, self._threads, self._then = reader, threads, then
        self._ordered = deque[tuple[Window, Callable[[], object]]]()
        self._running = list[tuple[Window, BackgroundCall[object]]]()
        self._pending = deque[Window]()
        self._stall_detector, self._looked_at = StallDetector(reader.directory, reader.reads), time.monotonic()

    def order(self, target: np.ndarray, start: int, stop: int) -> None:
        """Order a window, as `ShardReader.begin`; the first order opens the files."""
        window, reads = self._reader.begin(target, start, stop)
        window.pending = len(reads)
        self._pending.append(window)
        self._ordered.extend((window, read) for read in reads)

    def look(self) -> int:
        """Start further reads, and return the number of windows that were completed since the last look."""
        for each in [each for each in self._running if each[1].is_done.is_open()]:
            self._running.remove(each)  # first: after an error, `close` leaves the others
            window, call = each
            call.take()
            window.pending -= 1
        now = time.monotonic()
        if self._running:
            self._stall_detector.waited(min(now - self._looked_at, POLL_S), self._reader.reads)
        self._looked_at = now
        while self._ordered and len(self._running) < self._threads:
            window, read = self._ordered.popleft()
            call = BackgroundCall(read, then=self._then)
            self._running.append((window, start_call(call)))
        complete = 0
        while self._pending and not self._pending[0].pending:
            self._reader.finish(self._pending.popleft())
            complete += 1
        return complete

    def close(self) -> None:
        """Stop reading, and close the reader."""
        self._reader.close()
        for _, call in self._running:
            abandon_call(call)


class JobTransfer:
    """Transfers bytes between all processes. Every process starts the same transfers, of rows of the same length."""

    def __init__(self, process: int) -> None:
        of_process: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            of_process.setdefault(device.process_index, device)
        self._here = process
        self._mesh = Mesh(np.array([of_process[number] for number in sorted(of_process)]), ("process",))

    def gather(self, row: np.ndarray) -> Transfer:
        """Send the row to all processes, and receive theirs; the transfer owns `row`, which is aligned."""
        return self._move(row[None], _spec())

    def exchange(self, rows: np.ndarray) -> Transfer:
        """Send row number i to process i, and receive a row from each; the transfer owns `rows`."""
        return self._move(rows[None], _spec(None, "process"))

    def _move(self, mine: np.ndarray, spec: PartitionSpec) -> Transfer:
        sharding = NamedSharding(self._mesh, _spec("process"))
        alone = jax.sharding.SingleDeviceSharding(self._mesh.devices[self._here])
        shape = (self._mesh.size, *mine.shape[1:])
        given = jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(mine, alone)])
        with without_caller_settings():
            return Transfer(_program(self._mesh, spec)(given)[0])


class Transfer:
    """A running transfer."""

    def __init__(self, moved: jax.Array) -> None:
        self._moved = moved

    def is_over(self) -> bool:
        """Return whether it has ended, with success or not; does not wait."""
        return bool(self._moved.is_ready())  # type: ignore[attr-defined]

    def failure(self) -> jax.errors.JaxRuntimeError | None:
        """Return the error of a transfer that is over; None: it succeeded."""
        try:
            self._moved.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            return error
        return None

    def rows(self) -> np.ndarray:
        """Return the row from each process: uint8, not writable."""
        (shard,) = self._moved.addressable_shards
        data = np.asarray(shard.data)
        return data.reshape(-1, data.shape[-1])


def _add_sum(moved: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the array, and an unused sum of each process's row.

    XLA's CPU client runs a program with fewer than about a thousand operations, even a collective, within the call. The
    caller could then not notice that another process is gone.
    """
    rows = moved.reshape(moved.shape[0], -1)
    return moved, jnp.sum(rows[:, :LEAST_ROW_BYTES].astype(jnp.uint32), axis=1)


def _spec(*axes: str | None) -> PartitionSpec:
    spec: PartitionSpec = PartitionSpec(*axes)  # type: ignore[no-untyped-call]
    return spec


@functools.cache
def _program(mesh: Mesh, spec: PartitionSpec) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    return jax.jit(_add_sum, out_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, _spec("process"))))


class AllGather:
    """Sends everything to all processes, which suits arrays that most processes need nearly whole."""

    def __init__(
        self, shared: Sequence[SharedArray], streams: Sequence[Stream], window_bytes: int, process: int
    ) -> None:
        self.assembly = Assembly(shared, process)
        self._streams, self._window_bytes, self._transfer = streams, window_bytes, JobTransfer(process)
        self._end = max(stream.end for stream in streams)
        self.windows = -(-self._end // window_bytes)

    def window(self, number: int) -> tuple[int, int]:
        """Return start and stop of a window in each stream."""
        start = number * self._window_bytes
        return start, start + in_steps(min(self._window_bytes, self._end - start), self._window_bytes)

    def send(self, number: int, window: np.ndarray) -> Transfer | None:
        """Send what this process has read of a window."""
        return self._transfer.gather(window)

    def land(self, number: int, rows: np.ndarray) -> None:
        """Take what this process needs from the received rows."""
        start, stop = self.window(number)
        for stream, row in zip(self._streams, rows, strict=True):
            for cut in stream.within(start, stop):
                self.assembly.add_cut(cut, row)


class AllToAll:
    """Sends each process what it needs, which suits arrays that are sharded among the processes."""

    def __init__(
        self,
        shared: Sequence[SharedArray],
        streams: Sequence[Stream],
        window_bytes: int,
        process: int,
        rows: Sequence[int],  # for each window, the longest from any process to another
    ) -> None:
        self.assembly = Assembly(shared, process)
        self._streams, self._window_bytes, self._transfer = streams, window_bytes, JobTransfer(process)
        self._process = process
        self._dtypes = [DTYPES[each.array.dtype] for each in shared]
        self._needs = [each.needs for each in shared]
        most = -(-max(rows) // LEAST_ROW_BYTES) * LEAST_ROW_BYTES
        self._rows = [in_steps(length, most) for length in rows]
        self.windows = len(rows)

    def window(self, number: int) -> tuple[int, int]:
        """Return start and stop of a window in each stream."""
        return number * self._window_bytes, (number + 1) * self._window_bytes

    def send(self, number: int, window: np.ndarray) -> Transfer | None:
        """Send the others what they need of what this process has read, and take what it needs itself."""
        cuts = list(self._streams[self._process].within(*self.window(number)))
        transfer = None
        if self._rows[number]:
            rows = aligned_buffer(len(self._streams) * self._rows[number]).reshape(len(self._streams), -1)
            for process in range(len(rows)):
                at = 0
                for cut in cuts if process != self._process else ():
                    boxes = self._needs[cut.wanted][process]
                    at = pack(cut, window, self._dtypes[cut.wanted], boxes, rows[process], at)
            transfer = self._transfer.exchange(rows)
        for cut in cuts:
            self.assembly.add_cut(cut, window)
        return transfer

    def land(self, number: int, rows: np.ndarray) -> None:
        """Take the received rows."""
        for process, (stream, row) in enumerate(zip(self._streams, rows, strict=True)):
            at = 0
            for cut in stream.within(*self.window(number)) if process != self._process else ():
                at = self.assembly.add_row(cut, row, at)


def longest_rows(
    shared: Sequence[SharedArray], streams: Sequence[Stream], process: int, window_bytes: int
) -> list[int]:
    """Return, for each window, the length of the longest row that this process sends in an `AllToAll`."""
    dtypes = [DTYPES[each.array.dtype] for each in shared]
    found = []
    for start in range(0, max(stream.end for stream in streams), window_bytes):
        lengths = [0] * len(streams)
        for cut in streams[process].within(start, start + window_bytes):
            for other, boxes in enumerate(shared[cut.wanted].needs):
                if other != process and boxes:
                    lengths[other] += row_bytes(cut, dtypes[cut.wanted].itemsize, boxes)
        found.append(max(lengths))
    return found


def in_steps(length: int, most: int) -> int:
    """Round a length up to one of a few steps up to `most`, a multiple of the minimum row length."""
    step = -(-most // (STEPS * LEAST_ROW_BYTES)) * LEAST_ROW_BYTES
    return min(-(-length // step) * step, most) if length else 0


class SharedMemoryWindows:
    """Reads windows of all streams into memory that all processes can read; each process has a few places in turn.

    A process reads into a place only after all have taken what they need of the window in it, and takes from a window
    only after all of it has been read and verified. `waiting` is called repeatedly with whether this process waits for
    others, and not for its own disk; its error ends the read.
    """

    def __init__(
        self,
        shared: Sequence[SharedArray],
        streams: Sequence[Stream],
        memory: ColocatedMemory,
        block_bytes: int,
        waiting: Callable[[bool], None],
    ) -> None:
        self.assembly = Assembly(shared, memory.process)
        self._streams, self._memory, self._waiting = streams, memory, waiting
        least = min(map(len, memory.data))
        self._window_bytes = min(parts_bytes(block_bytes), least // LEAST_PLACES // ALIGNMENT * ALIGNMENT)
        self._places = least // self._window_bytes
        self._windows = -(-max(stream.end for stream in streams) // self._window_bytes)
        self._ordered = self._given = self._taken = 0
        self._left = set(range(len(streams)))  # processes of whose window `_taken` this process has taken nothing

    def read(self, reader: ShardReader, threads: int, hand_over: Callable[[], None]) -> None:
        """Read the own stream, take what this process needs of all, `hand_over` after each window; close the reader."""
        with contextlib.closing(Prefetcher(reader, threads, self._memory.wake)) as ahead:
            while self._taken < self._windows or self._memory.has_unnotified():
                while self._ordered < min(self._windows, min(self._memory.taken) + self._places):
                    ahead.order(self._place(self._memory.process, self._ordered), *self._span(self._ordered))
                    self._ordered += 1
                if complete := ahead.look():
                    self._given += complete
                    self._memory.announce(self._given, self._taken)
                process = next((each for each in self._left if self._memory.given[each] > self._taken), None)
                if process is None:
                    self._memory.wait()
                else:
                    self._take(process)
                    if not self._left:
                        self._taken, self._left = self._taken + 1, set(range(len(self._streams)))
                        self._memory.announce(self._given, self._taken)
                        hand_over()
                self._waiting(self._given == self._ordered or self._given > self._taken)

    def _take(self, process: int) -> None:
        place = self._place(process, self._taken)
        for cut in self._streams[process].within(*self._span(self._taken)):
            self.assembly.add_cut(cut, place)
        self._left.discard(process)

    def _span(self, number: int) -> tuple[int, int]:
        """Return start and stop of a window in each stream."""
        return number * self._window_bytes, (number + 1) * self._window_bytes

    def _place(self, process: int, number: int) -> np.ndarray:
        start = number % self._places * self._window_bytes
        return self._memory.data[process][start : start + self._window_bytes]


def memory_bytes(budget_bytes: int, threads: int, block_bytes: int) -> int:
    """Return how much memory a process uses for windows, within its budget and for its number of threads."""
    wanted = (threads + LEAST_PLACES) * parts_bytes(block_bytes)
    return max(LEAST_PLACES * ALIGNMENT, min(wanted, budget_bytes // 2))
