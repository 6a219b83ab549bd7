"""Reads arrays that several processes of a job need once per job, and moves them to the processes that need them.

`select_shared` selects the arrays, and `JointRead` reads and moves them: through shared memory if all processes run on
one machine, else over devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import msgspec
import numpy as np

from jaxckpt_train.distributed.coordinator import Coordinator, no_result
from jaxckpt_train.distributed.shared_memory import ColocatedMemory, find_colocated_processes
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, OtherProcessError
from jaxckpt_train.pytree._jax import boxes_of
from jaxckpt_train.pytree.placing import ArrayLoad, spans_processes
from jaxckpt_train.pytree.redistribution import (
    LEAST_ROW_BYTES,
    AllGather,
    AllToAll,
    Assembly,
    Requirements,
    ShardReader,
    SharedArray,
    SharedMemoryWindows,
    Stream,
    Transfer,
    assign_reads,
    longest_rows,
    memory_bytes,
    stored_bytes,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box, box_elements
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.committed import Committed, index_files
from jaxckpt_train.store.index_files import IndexFile, IndexFiles, WantedBoxes
from jaxckpt_train.store.manifest import ArrayRecord, Manifest
from jaxckpt_train.store.process_index import packed, unpacked
from jaxckpt_train.store.read_plan import Wanted, is_read_by_bands, plan_reads
from jaxckpt_train.store.reader import ReadBox, ReadProgress
from jaxckpt_train.store.threads import check_interrupt, interruptible
from jaxckpt_train.store.timeouts import time_limited

LEAST_WINDOW_BYTES = 16 * LEAST_ROW_BYTES
# An array goes to all processes if they need less than this each: taking it apart would take longer.
LEAST_NEED_BYTES = 16 << 10
POLL_S, SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 0.0005, 0.02
GRACE_S = 30.0  # additional time limit of a transfer: a process that is lost is named before that
# A transfer is worth it if at least one fiftieth of the bytes, and this many, would be read repeatedly: most storages
# deliver less before the first transfer has started.
NOTICEABLE, WORTH_BYTES = 50, 64 << 20
LEAST_SAMPLE = 16  # in a large job, the processes for which reads of an array are planned
CLEARLY = 1.5  # an array that is read so often is read repeatedly, whatever further plans say
REPEATED = 1.5  # index files that are read so often on average are read once
MOST_TOGETHER_BYTES = 64 << 20  # of index files, which go through the key-value store
UNLIMITED_BYTES = 1 << 60  # the estimate does not depend on the memory of a process
Redistribution = AllGather | AllToAll


class ReadSelection(NamedTuple):
    """How the processes of a job read what several of them need."""

    shared: Sequence[SharedArray] = ()
    cached: Sequence[int] = ()  # numbers of arrays that each process reads through the page cache of their machine
    memory: ColocatedMemory | None = None  # to be closed; None: what is shared goes over devices


class IndexedLoads(NamedTuple):
    """Arrays with the chunks that the load needs; those with names in `alone` have other chunks in other processes."""

    loads: Sequence[ArrayLoad]
    committed: Committed
    alone: frozenset[str] = frozenset()


def read_index_files(
    loads: Sequence[ArrayLoad],
    part: str,
    job: Coordinator | None,
    files: Opener,
    committed: Committed,
    settings: StoreSettings,
) -> IndexedLoads:
    """Read the index files that list what this process loads of a checkpointable.

    If the processes of a job would read index files repeatedly, each reads some, and all have the chunks of all. Raises
    CorruptCheckpointError: an index file is damaged.
    """
    indexes, wanted = index_files(files, committed), dict[str, list[Box]]()
    for load in loads:
        if not load.array.chunks and 0 not in load.array.shape:
            wanted.setdefault(load.array.name, []).extend(load.placement.boxes)
    if indexes is None or not wanted:
        return IndexedLoads(loads, committed)
    needed = covering_index_files(indexes, part, wanted)
    together: Sequence[IndexFile] = ()
    if job is not None and job.processes > 1 and settings.read_once is not False:
        needs = packed([each.process for each in needed]), packed([each.size for each in needed])
        give = functools.partial(msgspec.msgpack.encode, needs)
        merge = functools.partial(_common_index_files, most=1.0 if settings.read_once is True else REPEATED)
        answer = job.exchange(f"choosing index files of {committed.directory}", give, merge)
        together = listed_index_files(indexes, unpacked(answer).tolist())
    if not together or job is None:
        manifest = _manifest_with(indexes, part, wanted, needed)
        return _indexed(loads, part, dataclasses.replace(committed, manifest=manifest), frozenset(wanted))
    mine = together[job.process :: job.processes]

    def read() -> bytes:
        return msgspec.msgpack.encode(read_some(indexes, mine))

    doing = f"reading index files of {committed.directory}"
    answer = job.exchange(doing, read, _joined_contents, lambda: indexes.bytes_read)
    contents = msgspec.msgpack.decode(answer, type=list[tuple[IndexFile, bytes]])
    manifest = indexes.manifest_with(part, wanted, contents, keeps_all=True)
    return _indexed(loads, part, dataclasses.replace(committed, manifest=manifest), frozenset())


def _indexed(loads: Sequence[ArrayLoad], name: str, committed: Committed, alone: frozenset[str]) -> IndexedLoads:
    part = committed.manifest.part(name)
    arrays = {array.name: array for array in (part.arrays if part is not None else ())}
    return IndexedLoads([each._replace(array=arrays[each.array.name]) for each in loads], committed, alone)


@time_limited
def covering_index_files(indexes: IndexFiles, part: str, wanted: WantedBoxes) -> list[IndexFile]:
    """As `IndexFiles.covering`, with a time limit."""
    return indexes.covering(part, wanted)


@time_limited
def read_some(indexes: IndexFiles, entries: Sequence[IndexFile]) -> list[tuple[IndexFile, bytes]]:
    """As `IndexFiles.read_all`, with a time limit."""
    return indexes.read_all(entries)


@time_limited
def listed_index_files(indexes: IndexFiles, processes: Collection[int]) -> list[IndexFile]:
    """The index files of these processes."""
    chosen = frozenset(processes)
    return [entry for entry in indexes.all() if entry.process in chosen] if chosen else []


@time_limited
def _manifest_with(indexes: IndexFiles, part: str, wanted: WantedBoxes, entries: Sequence[IndexFile]) -> Manifest:
    return indexes.manifest_with(part, wanted, indexes.contents(entries))


def _common_index_files(values: Sequence[bytes], most: float) -> bytes:
    """The processes whose index files are read together; none if each would be read at most `most` times."""
    needs = [msgspec.msgpack.decode(value, type=tuple[bytes, bytes]) for value in values]
    processes = np.concatenate([unpacked(numbers) for numbers, _ in needs])
    sizes = np.concatenate([unpacked(each) for _, each in needs])
    found, first = np.unique(processes, return_index=True)
    size = int(sizes[first].sum())
    is_together = int(sizes.sum()) > most * size and size <= MOST_TOGETHER_BYTES
    return packed(found if is_together else [])


def _joined_contents(values: Sequence[bytes]) -> bytes:
    contents = [msgspec.msgpack.decode(value, type=list[tuple[IndexFile, bytes]]) for value in values]
    return msgspec.msgpack.encode(sorted(itertools.chain(*contents)))


def select_shared(
    loads: Sequence[ArrayLoad],
    job: Coordinator,
    settings: StoreSettings,
    committed: Committed,
    alone: Collection[str] = (),
) -> ReadSelection:
    """Select the arrays of which several processes would otherwise read the same bytes, equally in all processes.

    Those in `alone` are not selected.
    """
    read_once = settings.read_once
    if job.processes == 1 or read_once is False:
        return ReadSelection()
    known, planned = dict[object, Requirements](), dict[object, int]()  # arrays of one kind are planned once
    found, stored, repeated = list[SharedArray](), 0, 0
    for number, load in enumerate(loads):
        array, sharding = load.array, load.placement.sharding
        if sharding is None or not spans_processes(sharding) or not array.chunks or array.name in alone:
            continue
        key = array.shape, sharding
        needs = known[key] = known.get(key) or _requirements(*key, job.processes)
        stored_as = tuple((chunk.box, is_read_by_bands(chunk)) for chunk in array.chunks)
        alike = needs, stored_as, array.dtype
        if alike not in planned:
            planned[alike] = job_bytes(committed.manifest, array, needs)
        size = stored_bytes(array)
        again = planned[alike] - size
        stored, repeated = stored + size, repeated + max(0, again)
        if again * NOTICEABLE > size or (read_once is True and again > 0):
            numbers = [load.placement.boxes.index(box) for box in needs[job.process]]
            found.append(SharedArray(number, array, needs, numbers))
    is_worth_it = repeated >= WORTH_BYTES and repeated * NOTICEABLE >= stored
    if not found or not (read_once is True or is_worth_it):
        return ReadSelection()
    size = memory_bytes(settings.read_budget_bytes, settings.io_threads, committed.manifest.block_bytes)
    are_colocated, memory = find_colocated_processes(job, size)
    if are_colocated and memory is None and read_once == "auto":
        return ReadSelection(cached=[each.number for each in found])
    return ReadSelection(found, memory=memory)


def _requirements(shape: tuple[int, ...], sharding: jax.sharding.Sharding, processes: int) -> Requirements:
    boxes: list[set[Box]] = [set() for _ in range(processes)]
    for device, box in boxes_of(sharding.devices_indices_map(shape), shape):
        if box_elements(box):
            boxes[device.process_index].add(box)
    return tuple(tuple(sorted(each)) for each in boxes)


def job_bytes(manifest: Manifest, array: ArrayRecord, needs: Requirements) -> int:
    """Return the bytes that a job reads if every process reads what it needs of an array itself.

    They are estimated from the plans of some processes in a large job, and as soon as they are clearly repeated.
    """
    counts = Counter(boxes for boxes in needs if boxes)
    chunks = {chunk.box: chunk.length for chunk in array.chunks}
    read = processes = 0
    # An odd step: with an even one, all boxes of the sample may start where a chunk does.
    for boxes in list(counts)[:: len(counts) // LEAST_SAMPLE | 1]:
        if all(box in chunks for box in boxes):  # as after most starts; a plan goes through the chunks of all processes
            size = sum(chunks[box] for box in boxes)
        else:
            runs = plan_reads(manifest, [Wanted(array, boxes)], UNLIMITED_BYTES, gap_bytes=0)
            size = sum(each.stop - each.start for run in runs for each in run.reads)
        read += counts[boxes] * size
        processes += counts[boxes]
        if read > CLEARLY * stored_bytes(array):
            break
    return read * counts.total() // max(1, processes)


class _LoadSummary(msgspec.Struct, array_like=True):
    """The summary of a process's next load, which the processes compare."""

    directory: str
    sha256: str
    leaves: str
    budget_bytes: int


def _merge_summaries(values: Sequence[bytes]) -> bytes:
    found = [msgspec.msgpack.decode(value, type=_LoadSummary) for value in values]
    for process, each in enumerate(found):
        if each.sha256 != found[0].sha256:
            raise OtherProcessError(
                f"process {process} loads {each.directory}, but process 0 loads {found[0].directory}, which is another "
                "checkpoint there (replaced meanwhile, or not on shared storage); all processes of a job must load the "
                "same, in the same order"
            )
        if each.leaves != found[0].leaves:
            raise OtherProcessError(
                f"{each.directory}: process {process} and process 0 load other leaves, or onto other devices, or in "
                "another order; all processes of a job must load the same"
            )
    return b"%d" % min(each.budget_bytes for each in found)


def _digest(found: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(found)).hexdigest()


class JointRead:
    """A read of shared arrays by all processes, in the same order; it closes `memory` (None: over devices)."""

    def __init__(
        self,
        job: Coordinator,
        files: Opener,
        committed: Committed,
        subject: str,
        settings: StoreSettings,
        progress: ReadProgress | None,
        memory: ColocatedMemory | None,
    ) -> None:
        self._job, self._files, self._committed, self._subject = job, files, committed, subject
        self._settings, self._progress_callback, self._memory = settings, progress, memory
        self._budget_bytes, self._block_bytes = settings.read_budget_bytes, committed.manifest.block_bytes
        self._bytes = self._signs = 0  # change whenever this process makes progress

    def run(
        self, shared: Sequence[SharedArray], take: Callable[[ReadBox], None], rest: Callable[[ReadProgress], None]
    ) -> None:
        """Read and move the shared arrays, `take` each box, then do the `rest`; an error in one is raised in all."""
        with contextlib.nullcontext() if self._memory is None else contextlib.closing(self._memory):
            self._budget_bytes = self._check_same_load(shared)
            if self._memory is None:
                self._move_all(shared, take)
                last = functools.partial(rest, self._progress)
            else:
                last = functools.partial(self._read_in_shared_memory, self._memory, shared, take, rest)
            self._run_in_all(f"loading {self._subject}", last)

    def _check_same_load(self, shared: Sequence[SharedArray]) -> int:
        """Verify that all processes load the same, and return the smallest of their budgets."""
        directory = self._committed.directory.encode(errors="backslashreplace").decode()
        digests = {id(each.needs): _digest(each.needs) for each in shared}  # most arrays share theirs
        leaves = [(each.array.name, digests[id(each.needs)]) for each in shared]
        summary = _LoadSummary(directory, self._committed.manifest_sha256, _digest(leaves), self._budget_bytes)
        encoded = functools.partial(msgspec.msgpack.encode, summary)
        return int(self._run_in_all(f"starting to load {directory}", encoded, _merge_summaries))

    def _read_in_shared_memory(
        self,
        memory: ColocatedMemory,
        shared: Sequence[SharedArray],
        take: Callable[[ReadBox], None],
        rest: Callable[[ReadProgress], None],
    ) -> None:
        streams = self._balanced_streams(shared)
        redistribution = SharedMemoryWindows(shared, streams, memory, self._block_bytes, self._heartbeat)
        reader, threads = self._reader(shared, streams[self._job.process]), self._settings.io_threads
        redistribution.read(reader, threads, functools.partial(_hand_over, redistribution.assembly, take))
        memory.close()  # the rest may need the memory
        rest(self._progress)

    def _balanced_streams(self, shared: Sequence[SharedArray]) -> list[Stream]:
        """Return what each process reads, regardless of which process needs it."""
        processes = range(self._job.processes)
        return assign_reads([each.array for each in shared], len(processes), self._block_bytes, lambda _: processes)

    def _heartbeat(self, waits_for_others: bool) -> None:
        self._signs += waits_for_others  # if the own disk does not answer, this process must count as stalled
        check_interrupt()

    def _move_all(self, shared: Sequence[SharedArray], take: Callable[[ReadBox], None]) -> None:
        to_all = [each for each in shared if self._needs_all_gather(each)]
        to_some = [each for each in shared if not self._needs_all_gather(each)]
        for chosen, prepare in ((to_all, self._prepare_all_gather), (to_some, self._prepare_all_to_all)):
            if chosen:
                redistribution, reader = prepare(chosen)
                with contextlib.closing(reader):
                    self._move(redistribution, reader, take)

    def _needs_all_gather(self, each: SharedArray) -> bool:
        """Return whether the processes need more than half of an array on average, or little in all."""
        needed = sum(box_elements(box) for boxes in each.needs for box in boxes)
        is_small = stored_bytes(each.array) < LEAST_NEED_BYTES * self._job.processes
        return is_small or 2 * needed > len(each.needs) * int(np.prod(each.array.shape))

    def _prepare_all_gather(self, shared: Sequence[SharedArray]) -> tuple[Redistribution, ShardReader]:
        """Prepare an all-gather. Received data is held twice, while the next arrives; sent data three times."""
        processes, process = self._job.processes, self._job.process
        streams = self._balanced_streams(shared)
        longest = max(stream.end for stream in streams)
        window = _window_bytes(min(longest, self._budget_bytes // (2 * processes + 4)))
        return AllGather(shared, streams, window, process), self._reader(shared, streams[process])

    def _prepare_all_to_all(self, shared: Sequence[SharedArray]) -> tuple[Redistribution, ShardReader]:
        """Prepare an all-to-all exchange. Received and sent data is held twice each; read data three times."""
        processes, process = self._job.processes, self._job.process
        arrays = [each.array for each in shared]
        streams = assign_reads(
            arrays, processes, self._block_bytes, lambda number: _reading_order(shared[number].needs)
        )
        window = _window_bytes(min(max(stream.end for stream in streams), self._budget_bytes // 6))
        while True:
            mine = np.array(longest_rows(shared, streams, process, window), np.int64)
            result = self._run_in_all(f"planning {self._subject}", mine.tobytes, _merge_longest)
            rows = np.frombuffer(result, np.int64).tolist()
            needed = 4 * processes * max(rows) + 3 * window
            if needed <= self._budget_bytes or window == LEAST_WINDOW_BYTES:
                redistribution = AllToAll(shared, streams, window, process, rows)
                return redistribution, self._reader(shared, streams[process])
            window = _window_bytes(min(window // 2, window * self._budget_bytes // needed))

    def _reader(self, shared: Sequence[SharedArray], stream: Stream) -> ShardReader:
        arrays = [each.array for each in shared]
        return ShardReader(self._files, self._committed, arrays, stream, self._settings, self._progress)

    def _move(self, redistribution: Redistribution, reader: ShardReader, take: Callable[[ReadBox], None]) -> None:
        """Read each window while the one before is in transit; start a transfer once all processes have read theirs.

        So no process starts a transfer in which another one, whose read failed, does not take part.
        """
        in_transit: Transfer | None = None
        for number in range(redistribution.windows + 1):
            window = self._read(redistribution, reader, number, in_transit)
            arrived, in_transit = in_transit, None
            if window is not None:
                in_transit = redistribution.send(number, window)
            del window
            if arrived is not None:
                redistribution.land(number - 1, arrived.rows())
            del arrived
            _hand_over(redistribution.assembly, take)

    def _read(
        self, redistribution: Redistribution, reader: ShardReader, number: int, in_transit: Transfer | None
    ) -> np.ndarray | None:
        """Read the next window of this process; wait until all have theirs and the last transfer is over."""
        start, stop = redistribution.window(number) if number < redistribution.windows else (0, 0)
        window = aligned_buffer(stop - start) if stop else None
        fill_and_wait = functools.partial(self._fill_and_wait, reader, window, start, stop, in_transit)
        self._run_in_all(f"loading {self._subject}", fill_and_wait)
        return window

    def _fill_and_wait(
        self, reader: ShardReader, window: np.ndarray | None, start: int, stop: int, in_transit: Transfer | None
    ) -> None:
        if window is not None:
            reader.fill(window, start, stop)
        if in_transit is not None:
            self._wait_for(in_transit)

    def _wait_for(self, transfer: Transfer) -> None:
        """Wait until a transfer is over, with heartbeats, because another process may be the one that is stopped."""
        limit_s, waited_s, pause_s, looks = self._settings.barrier_timeout_s + GRACE_S, 0.0, SHORTEST_PAUSE_S, 0
        failure: Exception | None = None
        while not transfer.is_over() or (failure := failure or transfer.failure()) is not None:
            time.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(LONGEST_PAUSE_S, 1.5 * pause_s)
            if waited_s >= looks * POLL_S:
                looks, self._signs = looks + 1, self._signs + 1
                check_interrupt()
            if waited_s >= limit_s:
                raise CheckpointTimeoutError(
                    f"{self._subject}: a transfer between the processes has not ended after {waited_s:.0f} s"
                ) from failure

    def _progress(self, done: int) -> None:
        self._bytes += done
        if self._progress_callback is not None:
            self._progress_callback(done)

    def _check_others(self) -> None:
        if self._job.has_failed_elsewhere():
            raise CheckpointError(f"{self._subject}: stopped, because another process failed")

    def _run_in_all(
        self, doing: str, act: Callable[[], bytes | None], merge: Callable[[Sequence[bytes]], bytes] = no_result
    ) -> bytes:
        """Run something in all processes; an error in one of them is raised in all."""
        return self._job.exchange(doing, _OneShot(act, self._check_others), merge, lambda: (self._bytes, self._signs))


class _OneShot:
    """The contribution of this process to an exchange: it drops its function when it is called; `check` may end it.

    A nested function keeps what it refers to in its frame, even when the frames of an error are cleared, and with it
    all that is loaded. So pass it a method, or a partial of one.
    """

    def __init__(self, act: Callable[[], bytes | None], check: Callable[[], None]) -> None:
        self._acts, self._check = [act], check

    def __call__(self) -> bytes:
        with interruptible(self._check):
            return self._acts.pop()() or b""


def _hand_over(assembly: Assembly, take: Callable[[ReadBox], None]) -> None:
    while assembly.completed:
        take(assembly.completed.pop())


def _merge_longest(values: Sequence[bytes]) -> bytes:
    """Return the longest row of all processes for each window."""
    most: np.ndarray = np.maximum.reduce([np.frombuffer(value, np.int64) for value in values])
    return most.tobytes()


def _window_bytes(size: int) -> int:
    return max(LEAST_WINDOW_BYTES, -(-size // LEAST_ROW_BYTES) * LEAST_ROW_BYTES)


def _reading_order(needs: Requirements) -> list[int]:
    """Order the processes by their first box, so that a process that reads a part often needs it itself."""
    return sorted(range(len(needs)), key=lambda process: (not needs[process], needs[process][:1], process))
