"""Redistributes what the processes of a job have read: by collectives over devices, or through shared memory.

`AllGather` gives everything to all processes, `AllToAll` gives each process what it needs, and `SharedMemoryWindows`
lets the processes of one machine read each other's memory, filled by a `Prefetcher`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt_train.distributed.shared_memory import ColocatedMemory
from jaxckpt_train.pytree._jax import without_caller_settings
from jaxckpt_train.pytree.read_assignment import Assembly, Requirements, ShardReader, Stream, Window, pack, row_bytes
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_plan import parts_bytes
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.threads import POLL_S
from jaxckpt_train.store.timeouts import BackgroundCall, StallDetector, abandon_call, start_call

LEAST_ROW_BYTES = 4096
"""Minimum length of a row: summing so long a row makes XLA's CPU client return before the program has run."""
STEPS = 8
"""Number of distinct row lengths: each needs another compiled program."""
LEAST_PLACES = 3  # one being read, one being taken, and one for a process that is faster


@dataclasses.dataclass(eq=False)
class _PendingWindow:
    """A window, and the number of reads that are missing."""

    window: Window
    left: int


class Prefetcher:
    """Reads windows ahead on other threads, while the thread that orders them does something else.

    The ordering thread polls for completed windows, and waits only while files are opened. The reads continue from one
    window to the next, because a disk that waits for the end of each window is idle while its data is digested.

    Args:
        reader: reads the windows.
        threads: number of concurrent reads.
        then: called after each read, from any thread.
    """

    def __init__(self, reader: ShardReader, threads: int, then: Callable[[], object]) -> None:
        self._reader, self._threads, self._then = reader, threads, then
        self._ordered = deque[tuple[_PendingWindow, Callable[[], object]]]()
        self._running = list[tuple[_PendingWindow, BackgroundCall[object]]]()
        self._pending = deque[_PendingWindow]()
        self._stall_detector, self._looked_at = StallDetector(reader.directory), time.monotonic()

    def order(self, target: np.ndarray, start: int, stop: int) -> None:
        """Order a window, as `ShardReader.begin`.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: the first order opens the files.
        """
        window, reads = self._reader.begin(target, start, stop)
        pending = _PendingWindow(window, len(reads))
        self._pending.append(pending)
        self._ordered.extend((pending, read) for read in reads)

    def look(self) -> int:
        """Start further reads, and return the number of windows that were completed since the last look.

        Raises:
            CorruptCheckpointError, StorageError: a read raised it.
            CheckpointTimeoutError: the disk has not answered for ten minutes.
        """
        self._collect_results()
        while self._ordered and len(self._running) < self._threads:
            pending, read = self._ordered.popleft()
            self._running.append((pending, start_call(self._background_call(read))))
        complete = 0
        while self._pending and not self._pending[0].left:
            self._reader.finish(self._pending.popleft().window)
            complete += 1
        return complete

    def close(self) -> None:
        """Stop reading, and close the reader."""
        self._reader.close()
        for _, call in self._running:
            abandon_call(call)

    def _background_call(self, read: Callable[[], object]) -> BackgroundCall[object]:
        return BackgroundCall(lambda _: read(), then=self._then)

    def _collect_results(self) -> None:
        for each in [each for each in self._running if each[1].is_done.is_open()]:
            self._running.remove(each)  # first: after an error, `close` leaves the others
            pending, call = each
            call.take()
            pending.left -= 1
        now = time.monotonic()
        if self._running:
            self._stall_detector.waited(min(now - self._looked_at, POLL_S), self._reader.reads)
        self._looked_at = now


class JobTransfer:
    """Transfers bytes between all processes. Every process starts the same transfers, of rows of the same length.

    Two small programs do all of it, because they move bytes of any meaning.

    Args:
        process: number of this process.
    """

    def __init__(self, process: int) -> None:
        of_process: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            of_process.setdefault(device.process_index, device)
        self._here = process
        self._mesh = Mesh(np.array([of_process[number] for number in sorted(of_process)]), ("process",))

    def gather(self, row: np.ndarray) -> Transfer:
        """Send the row to all processes, and receive theirs; the transfer owns `row`, which is aligned."""
        return self._move(row[None], _gather(self._mesh))

    def exchange(self, rows: np.ndarray) -> Transfer:
        """Send row number i to process i, and receive a row from each; the transfer owns `rows`."""
        return self._move(rows[None], _exchange(self._mesh))

    def _move(self, mine: np.ndarray, move: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> Transfer:
        sharding = NamedSharding(self._mesh, _spec("process"))
        alone = jax.sharding.SingleDeviceSharding(self._mesh.devices[self._here])
        shape = (self._mesh.size, *mine.shape[1:])
        given = jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(mine, alone)])
        with without_caller_settings():
            return Transfer(move(given)[0])


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
def _gather(mesh: Mesh) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    everywhere, one_each = NamedSharding(mesh, _spec()), NamedSharding(mesh, _spec("process"))
    return jax.jit(_add_sum, out_shardings=(everywhere, one_each))


@functools.cache
def _exchange(mesh: Mesh) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    columns = NamedSharding(mesh, _spec(None, "process"))
    one_each = NamedSharding(mesh, _spec("process"))
    return jax.jit(_add_sum, out_shardings=(columns, one_each))


class SharedArray(NamedTuple):
    """An array that the processes read once.

    Attributes:
        number: of the array in the load.
        array: its record.
        needs: what each process needs of it.
        numbers: of the boxes that this process needs, in the load.
    """

    number: int
    array: ArrayRecord
    needs: Requirements
    numbers: Sequence[int]


def assembly_of(shared: Sequence[SharedArray], process: int) -> Assembly:
    """Create the assembly of a process; boxes are numbered as in `needs`, which is the same in all processes."""
    return Assembly([each.array for each in shared], [each.needs[process] for each in shared])


class AllGather:
    """Sends everything to all processes, which suits arrays that most processes need nearly whole.

    Args:
        shared: the arrays.
        streams: what each process reads.
        window_bytes: part of each stream that is sent at a time.
        transfer: moves the bytes.
        process: number of this process.
    """

    def __init__(
        self,
        shared: Sequence[SharedArray],
        streams: Sequence[Stream],
        window_bytes: int,
        transfer: JobTransfer,
        process: int,
    ) -> None:
        self.assembly = assembly_of(shared, process)
        self._streams, self._window_bytes, self._transfer = streams, window_bytes, transfer
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
    """Sends each process what it needs, which suits arrays that are sharded among the processes.

    Args:
        shared: the arrays.
        streams: what each process reads.
        window_bytes: part of each stream that is sent at a time.
        transfer: moves the bytes.
        process: number of this process.
        rows: for each window, the length of the longest row from any process to another.
    """

    def __init__(
        self,
        shared: Sequence[SharedArray],
        streams: Sequence[Stream],
        window_bytes: int,
        transfer: JobTransfer,
        process: int,
        rows: Sequence[int],
    ) -> None:
        self.assembly = assembly_of(shared, process)
        self._streams, self._window_bytes, self._transfer = streams, window_bytes, transfer
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
    only after all of it has been read and verified.

    Args:
        shared: the arrays.
        streams: what each process reads.
        memory: of `memory_bytes`, or less in some processes.
        block_bytes: of the checkpoint.
        waiting: called repeatedly with whether this process waits for others, and not for its own disk; an error that
            it raises ends the read.
    """

    def __init__(
        self,
        shared: Sequence[SharedArray],
        streams: Sequence[Stream],
        memory: ColocatedMemory,
        block_bytes: int,
        waiting: Callable[[bool], None],
    ) -> None:
        self.assembly = assembly_of(shared, memory.process)
        self._streams, self._memory, self._waiting = streams, memory, waiting
        least = min(map(len, memory.data))
        self._window_bytes = min(parts_bytes(block_bytes), least // LEAST_PLACES // ALIGNMENT * ALIGNMENT)
        self._places = least // self._window_bytes
        self._windows = -(-max(stream.end for stream in streams) // self._window_bytes)
        self._ordered = self._given = self._taken = 0
        self._left = set(range(len(streams)))  # processes of whose window `_taken` this process has taken nothing

    def read(self, reader: ShardReader, threads: int, hand_over: Callable[[], None]) -> None:
        """Read the own stream on other threads, and take what this process needs of all streams.

        Args:
            reader: reads the own stream; it is closed.
            threads: number of concurrent reads: few, because all processes read from one disk, and some digest.
            hand_over: called after each window, for completed boxes of the assembly.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: of the own stream, as `iter_boxes`.
        """
        with contextlib.closing(Prefetcher(reader, threads, self._memory.wake)) as ahead:
            while self._taken < self._windows or self._memory.has_unnotified():
                while self._ordered < min(self._windows, self._memory.all_have_taken() + self._places):
                    ahead.order(self._place(self._memory.process, self._ordered), *self._span(self._ordered))
                    self._ordered += 1
                self._announce_given(ahead.look())
                process = self._next()
                if process is None:
                    self._memory.wait()
                else:
                    self._take(process)
                    if not self._left:
                        self._announce_taken()
                        hand_over()
                self._waiting(self._given == self._ordered or self._given > self._taken)

    def _announce_given(self, windows: int) -> None:
        if windows:
            self._given += windows
            self._memory.announce(self._given, self._taken)

    def _next(self) -> int | None:
        """Return a process whose window can be taken next."""
        return next((process for process in self._left if self._memory.has_given(process) > self._taken), None)

    def _take(self, process: int) -> None:
        place = self._place(process, self._taken)
        for cut in self._streams[process].within(*self._span(self._taken)):
            self.assembly.add_cut(cut, place)
        self._left.discard(process)

    def _announce_taken(self) -> None:
        self._taken, self._left = self._taken + 1, set(range(len(self._streams)))
        self._memory.announce(self._given, self._taken)

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
