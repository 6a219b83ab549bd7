"""Which arrays of a load the processes of a job read once together, and through which coordinator they agree on it.

One load of a job: the processes read once what they share, and each gets what it needs of it.

Whether all processes of a job are about to load the same, asked before the first transfer between them.

What each process of a job needs of an array, as its sharding says: the same answer in all of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import msgspec
import numpy as np

from jaxckpt_train.distributed.coordinator import Coordinator, no_result
from jaxckpt_train.distributed.shared_memory import ColocatedMemory, ColocatedProcesses, find_colocated_processes
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, OtherProcessError
from jaxckpt_train.pytree.placing import spans_processes
from jaxckpt_train.pytree.read_assignment import (
    Assembly,
    RepeatedReads,
    Requirements,
    ShardReader,
    Stream,
    read_shares,
    stored_bytes,
)
from jaxckpt_train.pytree.redistribution import (
    LEAST_ROW_BYTES,
    Exchange,
    Gathering,
    JobTransfer,
    Moving,
    Shared,
    SharedMemoryWindows,
    longest_rows,
    memory_bytes,
)
from jaxckpt_train.pytree.target import Placement
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_from_index, full_box
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.reader import ReadBox, ReadProgress

SHOWN = 5
_DIFFERS = b"differs"
LEAST_WINDOW_BYTES = 16 * LEAST_ROW_BYTES
LEAST_NEED_BYTES = 16 << 10
"""An array of which the processes need less each goes to all of them: to pick it apart takes longer."""
LOOK_S, SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 0.0005, 0.02
GRACE_S = 30.0
"""So much longer than for another process a transfer is waited for: until then that process is named."""
Way = Gathering | Exchange
NOTICEABLE = 50
"""What would be read again is worth a transfer from a fiftieth of all on."""
WORTH_BYTES = 64 << 20
"""And from so many bytes on: less comes from most storages before the first transfer has begun."""


class JobRequirements:
    """Answers for one array after the other; most have their shape and sharding in common with others.

    Args:
        processes: of the job.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._known: dict[object, Requirements] = {}

    def of(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Requirements:
        """Of each process its distinct boxes."""
        found = self._known.get((shape, sharding))
        if found is None:
            boxes: list[set[Box]] = [set() for _ in range(self._processes)]
            places: Mapping[Any, Any] = sharding.devices_indices_map(shape)
            for device, index in places.items():
                box = full_box(shape) if index is None else box_from_index(index, shape)
                if box_elements(box):
                    boxes[device.process_index].add(box)
            found = self._known[shape, sharding] = tuple(tuple(sorted(each)) for each in boxes)
        return found


def holds_nearly_all(needs: Requirements, elements: int) -> bool:
    """Whether the processes need more than half of an array on average."""
    needed = sum(box_elements(box) for boxes in needs for box in boxes)
    return 2 * needed > len(needs) * elements


def in_order_of_needs(needs: Requirements) -> list[int]:
    """The processes by the first box of each, so that who reads a part often needs that part."""
    return sorted(range(len(needs)), key=lambda process: (not needs[process], needs[process][:1], process))


class _Begun(msgspec.Struct, array_like=True):
    """What a process is about to load."""

    directory: str
    sha256: str
    leaves: str
    budget_bytes: int


class JobAgreement(Protocol):
    """Does something in all processes of the job, as `Coordinator.exchange`."""

    def __call__(
        self, doing: str, act: Callable[[], bytes | None], merge: Callable[[Sequence[bytes]], bytes] = no_result
    ) -> bytes:
        """What `merge` makes of it in process 0."""


def agree(together: JobAgreement, committed: Committed, shared: Sequence[Shared], budget_bytes: int) -> int:
    """The least of the budgets of all processes.

    Raises:
        OtherProcessError: another one loads something else; names it, and what.
        CheckpointTimeoutError: another one did not come.
    """
    directory = committed.directory.encode(errors="backslashreplace").decode()
    leaves = _leaves(shared)
    mine = _Begun(directory, committed.manifest_sha256, _digest(leaves), budget_bytes)
    doing = f"beginning to load {directory}"
    told = together(doing, lambda: msgspec.msgpack.encode(mine), _agreed)
    if told == _DIFFERS:
        together(doing, lambda: msgspec.msgpack.encode(leaves), _refuse_differences)
    return int(told)


def _agreed(values: Sequence[bytes]) -> bytes:
    found = [msgspec.msgpack.decode(value, type=_Begun) for value in values]
    for process, each in enumerate(found):
        if each.sha256 == found[0].sha256:
            continue
        if each.directory == found[0].directory:
            raise OtherProcessError(
                f"{each.directory}: process {process} has opened another checkpoint there than process 0: it was "
                "replaced meanwhile, so load it again; or that directory is not on storage that all of them share"
            )
        raise OtherProcessError(
            f"process {process} loads {each.directory}, but process 0 loads {found[0].directory}, which is another "
            "checkpoint; all processes of a job load the same, in the same order"
        )
    if any(each.leaves != found[0].leaves for each in found):
        return _DIFFERS
    return b"%d" % min(each.budget_bytes for each in found)


def _refuse_differences(values: Sequence[bytes]) -> bytes:
    found = [dict(msgspec.msgpack.decode(value, type=list[tuple[str, str]])) for value in values]
    lines = []
    for name in {name: None for each in found for name in each}:
        others = [number for number, each in enumerate(found) if each.get(name) != found[0].get(name)]
        if others:
            lines.append(f"leaf {name!r}: {_told(others[0], found[others[0]].get(name), found[0].get(name))}")
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    raise OtherProcessError(f"the processes of this job do not load the same: {'; '.join(lines[:SHOWN])}{more}")


def _told(process: int, its: str | None, first: str | None) -> str:
    if its is None or first is None:
        who, other = (process, 0) if first is None else (0, process)
        return f"process {who} loads it together with the others, process {other} does not"
    return f"process {process} loads it onto other devices than process 0"


def _leaves(shared: Sequence[Shared]) -> list[tuple[str, str]]:
    """The name of each array, and a digest of what the processes need of it."""
    known = dict[int, str]()
    found = []
    for each in shared:
        if id(each.needs) not in known:
            known[id(each.needs)] = _digest(each.needs)
        found.append((each.array.name, known[id(each.needs)]))
    return found


def _digest(found: Requirements | list[tuple[str, str]]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(found)).hexdigest()


class JointRead:
    """What one process does of it. All of them do the same, in the same order.

    Args:
        job: through which they agree; used by nobody else meanwhile. Whoever made it tells them what fails here.
        files: where.
        committed: the opened checkpoint.
        subject: what is loaded, for messages.
        settings: threads, budget, verification, how long another process is waited for.
        progress: told of the bytes that this process reads.
        memory: in which they see each other, which is closed by `run`; None: they move what they read over devices.
    """

    def __init__(
        self,
        job: Coordinator,
        files: Opener,
        committed: Committed,
        subject: str,
        settings: StoreSettings,
        progress: ReadProgress | None,
        memory: ColocatedMemory | None = None,
    ) -> None:
        self._memory = memory
        self._job, self._files, self._committed, self._subject = job, files, committed, subject
        self._settings, self._told_progress = settings, progress
        self._budget_bytes = settings.read_budget_bytes
        self._bytes = self._signs = 0  # another number whenever this process has got further

    def run(
        self, shared: Sequence[Shared], take: Callable[[ReadBox], None], rest: Callable[[ReadProgress], None]
    ) -> None:
        """Read and move the shared arrays, then do the rest of the load.

        Args:
            shared: the arrays, the same ones in all processes.
            take: is given each box that this process needs, under the number of its array.
            rest: reads what each process needs for itself; is given what it must tell of its progress.

        Raises:
            What failed here; what failed in another process, of the same class.
            CheckpointTimeoutError: another process did not come, or got no further; names it.
            OtherProcessError: another process loads something else.
        """
        with contextlib.nullcontext() if self._memory is None else contextlib.closing(self._memory):
            self._budget_bytes = agree(self._together, self._committed, shared, self._budget_bytes)
            if self._memory is None:
                self._move_all(shared, take)
                last = functools.partial(rest, self._progress)
            else:
                last = functools.partial(self._look_at_each_other, self._memory, shared, take, rest)
            self._together(f"loading {self._subject}", last)

    def _look_at_each_other(
        self,
        memory: ColocatedMemory,
        shared: Sequence[Shared],
        take: Callable[[ReadBox], None],
        rest: Callable[[ReadProgress], None],
    ) -> None:
        streams = self._even_shares(shared)
        way = SharedMemoryWindows(shared, streams, memory, self._block_bytes, self._alive)
        hand_over = functools.partial(self._hand_over, way.assembly, shared, take)
        way.read(self._feed(shared, streams[self._job.process]), self._settings.known_io_threads, hand_over)
        memory.close()  # the rest may need room
        rest(self._progress)

    def _even_shares(self, shared: Sequence[Shared]) -> list[Stream]:
        """What each process reads, whoever needs it."""
        processes = range(self._job.processes)
        return read_shares([each.array for each in shared], len(processes), self._block_bytes, lambda _: processes)

    def _alive(self, waits_for_others: bool) -> None:
        self._signs += waits_for_others  # whose own disk does not answer is the one that all wait for
        self._progress(0)

    def _move_all(self, shared: Sequence[Shared], take: Callable[[ReadBox], None]) -> None:
        to_all = [each for each in shared if self._goes_to_all(each)]
        to_some = [each for each in shared if not self._goes_to_all(each)]
        for chosen, prepare in ((to_all, self._gathering), (to_some, self._exchange)):
            if chosen:
                way, feed = prepare(chosen)
                with contextlib.closing(feed):
                    self._move(chosen, way, feed, take)

    def _goes_to_all(self, each: Shared) -> bool:
        needed = LEAST_NEED_BYTES * self._job.processes
        return stored_bytes(each.array) < needed or holds_nearly_all(each.needs, int(np.prod(each.array.shape)))

    def _gathering(self, shared: Sequence[Shared]) -> tuple[Way, ShardReader]:
        """All that comes is in memory twice, while the next comes; what is sent three times, while it is read."""
        processes, process = self._job.processes, self._job.process
        streams = self._even_shares(shared)
        longest = max(stream.end for stream in streams)
        window = self._window(min(longest, self._budget_bytes // (2 * processes + 4)))
        return Gathering(shared, streams, window, JobTransfer(process), process), self._feed(shared, streams[process])

    def _exchange(self, shared: Sequence[Shared]) -> tuple[Way, ShardReader]:
        """What comes and what goes, in memory twice each; and what is read, three times."""
        processes, process = self._job.processes, self._job.process
        arrays = [each.array for each in shared]
        streams = read_shares(
            arrays, processes, self._block_bytes, lambda number: in_order_of_needs(shared[number].needs)
        )
        window = self._window(min(max(stream.end for stream in streams), self._budget_bytes // 6))
        while True:
            mine = np.array(longest_rows(shared, streams, process, window), np.int64)
            told = self._together(f"planning {self._subject}", mine.tobytes, _longest)
            rows = np.frombuffer(told, np.int64).tolist()
            needed = 4 * processes * max(rows) + 3 * window
            if needed <= self._budget_bytes or window == LEAST_WINDOW_BYTES:
                way = Exchange(shared, streams, window, JobTransfer(process), process, rows)
                return way, self._feed(shared, streams[process])
            window = self._window(min(window // 2, window * self._budget_bytes // needed))

    def _window(self, size: int) -> int:
        return max(LEAST_WINDOW_BYTES, -(-size // LEAST_ROW_BYTES) * LEAST_ROW_BYTES)

    def _feed(self, shared: Sequence[Shared], stream: Stream) -> ShardReader:
        arrays = [each.array for each in shared]
        return ShardReader(self._files, self._committed, arrays, stream, self._settings, self._progress)

    @property
    def _block_bytes(self) -> int:
        return self._committed.manifest.block_bytes

    def _move(self, shared: Sequence[Shared], way: Way, feed: ShardReader, take: Callable[[ReadBox], None]) -> None:
        """Read a window while the one before it is on its way, and order a transfer once all have what they give.

        So nobody orders one in which another, whose read failed, would take no part.
        """
        flying: Moving | None = None
        for number in range(way.windows + 1):
            window = self._read(way, feed, number, flying)
            landed, flying = flying, None
            if window is not None:
                flying = way.send(number, window)
            del window
            if landed is not None:
                way.land(number - 1, landed.rows())
            del landed
            self._hand_over(way.assembly, shared, take)

    def _hand_over(self, assembly: Assembly, shared: Sequence[Shared], take: Callable[[ReadBox], None]) -> None:
        while assembly.completed:
            box = assembly.completed.pop()
            each = shared[box.wanted]
            take(ReadBox(each.number, each.numbers[box.box], box.data))
            del box

    def _read(self, way: Way, feed: ShardReader, number: int, flying: Moving | None) -> np.ndarray | None:
        """The next window of this process, once all have theirs, and the transfer of the last one is over."""
        start, stop = way.window(number) if number < way.windows else (0, 0)
        window = aligned_buffer(stop - start) if stop else None
        self._together(
            f"loading {self._subject}", functools.partial(self._fill_and_wait, feed, window, start, stop, flying)
        )
        return window

    def _fill_and_wait(
        self, feed: ShardReader, window: np.ndarray | None, start: int, stop: int, flying: Moving | None
    ) -> None:
        if window is not None:
            feed.fill(window, start, stop)
        if flying is not None:
            self._wait_for(flying)

    def _wait_for(self, moving: Moving) -> None:
        """Wait until a transfer is over, giving signs of life: another process may be the one that is stopped.

        Raises:
            CheckpointError: it failed, here or in another process.
            CheckpointTimeoutError: it takes longer than a process is waited for that gives none.
        """
        limit_s, waited_s, pause_s, looks = self._settings.barrier_timeout_s + GRACE_S, 0.0, SHORTEST_PAUSE_S, 0
        failure: Exception | None = None
        while not moving.is_over() or (failure := failure or moving.failure()) is not None:
            time.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(LONGEST_PAUSE_S, 1.5 * pause_s)
            if waited_s >= looks * LOOK_S:
                looks, self._signs = looks + 1, self._signs + 1
                self._progress(0)
            if waited_s >= limit_s:
                raise CheckpointTimeoutError(
                    f"{self._subject}: what the processes have read is still between them after {waited_s:.0f} s"
                ) from failure

    def _progress(self, done: int) -> None:
        self._bytes += done
        if self._told_progress is not None:
            self._told_progress(done)
        if self._job.is_over():
            raise CheckpointError(f"{self._subject}: stopped, as another process failed")

    def _together(
        self, doing: str, act: Callable[[], bytes | None], merge: Callable[[Sequence[bytes]], bytes] = no_result
    ) -> bytes:
        """Do something in all processes; what fails in one of them fails in all."""
        return self._job.exchange(doing, _Once(act), merge, lambda: (self._bytes, self._signs))


class _Once:
    """What this process does of an exchange.

    Functions that other functions refer to stay with the frames of an error, also when those are cleared, and so would
    all that is loaded; of this nothing stays but its shell.
    """

    def __init__(self, act: Callable[[], bytes | None]) -> None:
        self._acts = [act]

    def __call__(self) -> bytes:
        return self._acts.pop()() or b""


def _longest(values: Sequence[bytes]) -> bytes:
    """Of each window the longest row of all processes."""
    most: np.ndarray = np.maximum.reduce([np.frombuffer(value, np.int64) for value in values])
    return most.tobytes()


class ReadTogether(NamedTuple):
    """How the processes of a job read what several of them need.

    Attributes:
        shared: the arrays of which each reads a share.
        cached: numbers of those that each reads for itself, but through the page cache of their machine.
        memory: in which the processes see each other's shares, to be closed; None: these go over devices.
    """

    shared: Sequence[Shared]
    cached: Sequence[int]
    memory: ColocatedMemory | None


class JobLoads:
    """The loads of one call, in a job, with an order of their own.

    Args:
        job: None: there is no job.
        settings: whether its processes read together, and how long they wait for each other.
        order: which they have already; None: begun where it is needed.

    Attributes:
        process: number of this one.
        processes: how many take part.
    """

    def __init__(self, job: Coordinator | None, settings: StoreSettings, order: Coordinator | None = None) -> None:
        self._job = None if job is None or job.processes == 1 or settings.read_once is False else job
        self._settings, self._order = settings, order
        self.process, self.processes = (0, 1) if self._job is None else (self._job.process, self._job.processes)

    def expect(self, shardings: Iterable[jax.sharding.Sharding | None]) -> None:
        """Have an order if arrays are wanted that span processes, before anything can fail in this process alone.

        All processes count these orders: one without it would be out of step with the others at each later load.
        """
        if self._job is not None and self._order is None and any(map(spans_processes, shardings)):
            self._order = self._job.within("load", self._settings.barrier_timeout_s)

    def find_colocated_processes(self, block_bytes: int) -> ColocatedProcesses:
        """Whether all processes run on one machine, and see each other's memory there; each time it is other memory.

        Args:
            block_bytes: of the checkpoint.
        """
        settings = self._settings
        size = memory_bytes(settings.read_budget_bytes, settings.known_io_threads, block_bytes)
        return find_colocated_processes(self.order, size)

    @property
    def order(self) -> Coordinator:
        """Through which the processes agree."""
        assert self._order is not None
        return self._order

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """All of the loads: what fails within is told to the other processes, some of which may wait for this one.

        It may be what they know already: after a failure of all of them one may try again, where another one gives up.
        """
        try:
            yield
        except BaseException as error:
            if self._order is not None and not getattr(error, "lost", ()):  # who is lost may be who would be asked
                _tell(self._order, error)
            raise
        finally:
            if self._order is not None:
                self._order.end()


def _tell(order: Coordinator, error: BaseException) -> None:
    def give() -> bytes:
        raise error

    with contextlib.suppress(type(error)):
        order.exchange("loading", give)


def read_together(
    arrays: Sequence[tuple[ArrayRecord, Placement]],
    read_once: bool | Literal["auto"],
    loads: JobLoads,
    block_bytes: int,
) -> ReadTogether:
    """Those of which the processes would otherwise read bytes that another one reads, too.

    It follows from the checkpoint and the shardings, so that all processes come to the same result. Only where there
    are any they ask each other whether they all run on one machine: what one of them has read there is in memory, and
    comes to the others sooner than over any network.

    Args:
        arrays: of the load, each with the place where it goes.
        read_once: False: none; "auto": none unless it is worth it.
        loads: of the job.
        block_bytes: of the checkpoint.
    """
    if read_once is False or loads.processes == 1:
        return ReadTogether([], [], None)
    needs, reads = JobRequirements(loads.processes), RepeatedReads(block_bytes)
    found, stored, repeated = list[Shared](), 0, 0
    for number, (array, place) in enumerate(arrays):
        if not spans_processes(place.sharding) or not array.chunks:
            continue
        assert place.sharding is not None
        size = stored_bytes(array)
        of_each = needs.of(array.shape, place.sharding)
        again = reads.job_bytes(array, of_each) - size
        stored, repeated = stored + size, repeated + max(0, again)
        if again * NOTICEABLE > size or (read_once is True and again > 0):
            numbers = [place.boxes.index(box) for box in of_each[loads.process]]
            found.append(Shared(number, array, of_each, numbers))
    is_worth_it = repeated >= WORTH_BYTES and repeated * NOTICEABLE >= stored
    if not found or not (read_once is True or is_worth_it):
        return ReadTogether([], [], None)
    are_colocated, memory = loads.find_colocated_processes(block_bytes)
    if are_colocated and memory is None and read_once == "auto":
        return ReadTogether([], [each.number for each in found], None)
    return ReadTogether(found, [], memory)
