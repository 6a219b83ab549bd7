"""The way of shares on one machine: each process looks at what the others have read, where they have read it.

Two ways of shares to those who need them: to all processes alike, or to each only what it needs.

Moves bytes between the processes of a job: by collectives of XLA, over one device of each process.

Reads windows of a feed ahead, on other threads, while the thread that wants them does something else.
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
from jaxckpt_train.store.threads import LOOK_S
from jaxckpt_train.store.timeouts import BackgroundCall, StallDetector, abandon_call, start_call

LEAST_ROW_BYTES = 4096
"""Of a row: the sum over so many makes XLA's CPU client return from the call before the program has run."""
STEPS = 8
"""Rows are of at most so many lengths: each is another program to compile."""
LEAST_PLACES = 3  # one that is read, one that is taken, and one for whoever is faster


@dataclasses.dataclass(eq=False)
class _Begun:
    """A window, and how many reads are missing to it."""

    window: Window
    left: int


class FeedAhead:
    """Who has ordered windows looks now and then what has become of them, and waits only for files to be opened.

    The reads go on from one window to the next: a disk that has to wait for the end of each window stands still while
    what it gave is digested.

    Args:
        feed: which.
        threads: how many reads are under way at a time.
        then: called after each read, from any thread.
    """

    def __init__(self, feed: ShardReader, threads: int, then: Callable[[], object]) -> None:
        self._feed, self._threads, self._then = feed, threads, then
        self._ordered = deque[tuple[_Begun, Callable[[], object]]]()
        self._asked = list[tuple[_Begun, BackgroundCall[object]]]()
        self._begun = deque[_Begun]()
        self._patience, self._looked_at = StallDetector(feed.directory), time.monotonic()

    def order(self, target: np.ndarray, start: int, stop: int) -> None:
        """As `ShareFeed.begin`.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: with the first one the files are opened.
        """
        window, reads = self._feed.begin(target, start, stop)
        begun = _Begun(window, len(reads))
        self._begun.append(begun)
        self._ordered.extend((begun, read) for read in reads)

    def look(self) -> int:
        """Go on, and tell how many windows are complete that were not at the last look.

        Raises:
            CorruptCheckpointError, StorageError: what a read raised.
            CheckpointTimeoutError: the disk has not answered for ten minutes.
        """
        self._take_answers()
        while self._ordered and len(self._asked) < self._threads:
            begun, read = self._ordered.popleft()
            self._asked.append((begun, start_call(self._question(read))))
        complete = 0
        while self._begun and not self._begun[0].left:
            self._feed.finish(self._begun.popleft().window)
            complete += 1
        return complete

    def close(self) -> None:
        """Read nothing more, and close the feed."""
        self._feed.close()
        for _, question in self._asked:
            abandon_call(question)

    def _question(self, read: Callable[[], object]) -> BackgroundCall[object]:
        return BackgroundCall(lambda _: read(), then=self._then)

    def _take_answers(self) -> None:
        for each in [each for each in self._asked if each[1].is_done.is_open()]:
            self._asked.remove(each)  # first: an error leaves the others here, to be left by `close`
            begun, question = each
            question.take()
            begun.left -= 1
        now = time.monotonic()
        if self._asked:
            self._patience.waited(min(now - self._looked_at, LOOK_S), self._feed.reads)
        self._looked_at = now


class JobTransfer:
    """Between all processes. Each of them orders the same transfers, of rows of the same length.

    Two small programs do all of it: what is moved is bytes, whatever they mean.

    Args:
        process: number of this one.
    """

    def __init__(self, process: int) -> None:
        of_process: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            of_process.setdefault(device.process_index, device)
        self._here = process
        self._mesh = Mesh(np.array([of_process[number] for number in sorted(of_process)]), ("process",))

    def gather(self, row: np.ndarray) -> Moving:
        """Have all processes get the rows of all; `row` is aligned, and belongs to the transfer from now on."""
        return self._move(row[None], _gather(self._mesh))

    def exchange(self, rows: np.ndarray) -> Moving:
        """Give row number i to process i, and get the rows that they give; `rows` belongs to the transfer."""
        return self._move(rows[None], _exchange(self._mesh))

    def _move(self, mine: np.ndarray, move: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> Moving:
        sharding = NamedSharding(self._mesh, _spec("process"))
        alone = jax.sharding.SingleDeviceSharding(self._mesh.devices[self._here])
        shape = (self._mesh.size, *mine.shape[1:])
        given = jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(mine, alone)])
        with without_caller_settings():
            return Moving(move(given)[0])


class Moving:
    """One transfer under way."""

    def __init__(self, moved: jax.Array) -> None:
        self._moved = moved

    def is_over(self) -> bool:
        """Whether it has ended, well or not; does not wait."""
        return bool(self._moved.is_ready())  # type: ignore[attr-defined]

    def failure(self) -> jax.errors.JaxRuntimeError | None:
        """Why it failed, once it is over."""
        try:
            self._moved.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            return error
        return None

    def rows(self) -> np.ndarray:
        """What has come from each process: uint8, not writable."""
        (shard,) = self._moved.addressable_shards
        data = np.asarray(shard.data)
        return data.reshape(-1, data.shape[-1])


def _with_sum(moved: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array, and of each process's row a sum that nobody needs.

    XLA's CPU client runs what takes fewer than about a thousand operations within the call, a collective too; then it
    could not be seen from outside that another process is gone.
    """
    rows = moved.reshape(moved.shape[0], -1)
    return moved, jnp.sum(rows[:, :LEAST_ROW_BYTES].astype(jnp.uint32), axis=1)


def _spec(*axes: str | None) -> PartitionSpec:
    spec: PartitionSpec = PartitionSpec(*axes)  # type: ignore[no-untyped-call]
    return spec


@functools.cache
def _gather(mesh: Mesh) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    everywhere, one_each = NamedSharding(mesh, _spec()), NamedSharding(mesh, _spec("process"))
    return jax.jit(_with_sum, out_shardings=(everywhere, one_each))


@functools.cache
def _exchange(mesh: Mesh) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    columns = NamedSharding(mesh, _spec(None, "process"))
    one_each = NamedSharding(mesh, _spec("process"))
    return jax.jit(_with_sum, out_shardings=(columns, one_each))


class Shared(NamedTuple):
    """One array that the processes read once.

    Attributes:
        number: of it in the load.
        array: its record.
        needs: what each process needs of it.
        numbers: of the boxes that this process needs, in the load.
    """

    number: int
    array: ArrayRecord
    needs: Requirements
    numbers: Sequence[int]


def assembly_of(shared: Sequence[Shared], process: int) -> Assembly:
    """Where a process puts together what it needs; boxes are numbered as in `needs`, by which all of them know them."""
    return Assembly([each.array for each in shared], [each.needs[process] for each in shared])


class Gathering:
    """Everybody gets everything: for what most processes need nearly all of.

    Args:
        shared: the arrays.
        streams: what each process reads.
        window_bytes: how much of each stream goes at a time.
        transfer: what moves it.
        process: number of this one.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
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
        """From where to where it goes in each stream."""
        start = number * self._window_bytes
        return start, start + in_steps(min(self._window_bytes, self._end - start), self._window_bytes)

    def send(self, number: int, window: np.ndarray) -> Moving | None:
        """Give what this process has read of a window."""
        return self._transfer.gather(window)

    def land(self, number: int, rows: np.ndarray) -> None:
        """Take from what has come what this process needs."""
        start, stop = self.window(number)
        for stream, row in zip(self._streams, rows, strict=True):
            for cut in stream.within(start, stop):
                self.assembly.add_cut(cut, row)


class Exchange:
    """Each process gets what it needs: for arrays that are cut up among them.

    Args:
        shared: the arrays.
        streams: what each process reads.
        window_bytes: how much of each stream goes at a time.
        transfer: what moves it.
        process: number of this one.
        rows: of each window the length of the longest row that any process sends to another.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
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
        """From where to where it goes in each stream."""
        return number * self._window_bytes, (number + 1) * self._window_bytes

    def send(self, number: int, window: np.ndarray) -> Moving | None:
        """Give the others what they need of what this process has read, and take what it needs itself."""
        cuts = list(self._streams[self._process].within(*self.window(number)))
        moving = None
        if self._rows[number]:
            rows = aligned_buffer(len(self._streams) * self._rows[number]).reshape(len(self._streams), -1)
            for process in range(len(rows)):
                at = 0
                for cut in cuts if process != self._process else ():
                    boxes = self._needs[cut.wanted][process]
                    at = pack(cut, window, self._dtypes[cut.wanted], boxes, rows[process], at)
            moving = self._transfer.exchange(rows)
        for cut in cuts:
            self.assembly.add_cut(cut, window)
        return moving

    def land(self, number: int, rows: np.ndarray) -> None:
        """Take what has come."""
        for process, (stream, row) in enumerate(zip(self._streams, rows, strict=True)):
            at = 0
            for cut in stream.within(*self.window(number)) if process != self._process else ():
                at = self.assembly.add_row(cut, row, at)


def longest_rows(shared: Sequence[Shared], streams: Sequence[Stream], process: int, window_bytes: int) -> list[int]:
    """Of each window the length of the longest row that this process sends to another in an `Exchange`."""
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
    """Not less than `length`, and one of few numbers up to `most`, which is whole rows of the least length."""
    step = -(-most // (STEPS * LEAST_ROW_BYTES)) * LEAST_ROW_BYTES
    return min(-(-length // step) * step, most) if length else 0


class SharedMemoryWindows:
    """Windows of all streams, in memory that all processes see, in turn in a few places of each.

    Nobody reads into a place before all have taken what they need of the window that lay there, nor takes anything of a
    window before all of it has been read and verified.

    Args:
        shared: the arrays.
        streams: what each process reads.
        memory: of `memory_bytes`, or whatever each process has of it.
        block_bytes: of the checkpoint.
        waiting: called now and then, with whether it is others that this process waits for, not its own disk; what it
            raises ends it.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
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
        self._begun = self._given = self._taken = 0
        self._left = set(range(len(streams)))  # of whose window number `_taken` this process has taken nothing

    def read(self, feed: ShardReader, threads: int, hand_over: Callable[[], None]) -> None:
        """Read the own stream on other threads, and take what this process needs of all of them.

        Args:
            feed: of the own stream; it is closed.
            threads: on which it is read: few, as all processes read from one disk, and one while the others digest.
            hand_over: called after each window, for what is complete in the assembly.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: of the own stream, as `iter_boxes`.
        """
        with contextlib.closing(FeedAhead(feed, threads, self._memory.wake)) as ahead:
            while self._taken < self._windows or self._memory.has_unnotified():
                while self._begun < min(self._windows, self._memory.all_have_taken() + self._places):
                    ahead.order(self._place(self._memory.process, self._begun), *self._span(self._begun))
                    self._begun += 1
                self._have_given(ahead.look())
                process = self._next()
                if process is None:
                    self._memory.wait()
                else:
                    self._take(process)
                    if not self._left:
                        self._have_taken()
                        hand_over()
                self._waiting(self._given == self._begun or self._given > self._taken)

    def _have_given(self, windows: int) -> None:
        if windows:
            self._given += windows
            self._memory.announce(self._given, self._taken)

    def _next(self) -> int | None:
        """Whose window can be taken next."""
        return next((process for process in self._left if self._memory.has_given(process) > self._taken), None)

    def _take(self, process: int) -> None:
        place = self._place(process, self._taken)
        for cut in self._streams[process].within(*self._span(self._taken)):
            self.assembly.add_cut(cut, place)
        self._left.discard(process)

    def _have_taken(self) -> None:
        self._taken, self._left = self._taken + 1, set(range(len(self._streams)))
        self._memory.announce(self._given, self._taken)

    def _span(self, number: int) -> tuple[int, int]:
        """From where to where a window goes in each stream."""
        return number * self._window_bytes, (number + 1) * self._window_bytes

    def _place(self, process: int, number: int) -> np.ndarray:
        start = number % self._places * self._window_bytes
        return self._memory.data[process][start : start + self._window_bytes]


def memory_bytes(budget_bytes: int, threads: int, block_bytes: int) -> int:
    """How much memory for windows a process has of this budget, to read on so many threads."""
    wanted = (threads + LEAST_PLACES) * parts_bytes(block_bytes)
    return max(LEAST_PLACES * ALIGNMENT, min(wanted, budget_bytes // 2))
