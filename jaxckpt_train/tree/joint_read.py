"""One load of a job: the processes read once what they share, and each gets what it needs of it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError
from jaxckpt_train.jobs.coordinator import Coordinator, always
from jaxckpt_train.jobs.near_memory import NearMemory
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Opener
from jaxckpt_train.store.read_shares import Stream, read_shares, stored_bytes
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.reading import ReadBox
from jaxckpt_train.store.share_feed import ShareFeed
from jaxckpt_train.store.share_parts import Assembly
from jaxckpt_train.store.staging import aligned_buffer
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.tree.job_agreement import agree
from jaxckpt_train.tree.job_needs import holds_nearly_all, in_order_of_needs
from jaxckpt_train.tree.job_transfer import LEAST_ROW_BYTES, JobTransfer, Moving
from jaxckpt_train.tree.near_windows import NearWindows
from jaxckpt_train.tree.share_ways import Exchange, Gathering, Shared, longest_rows

LEAST_WINDOW_BYTES = 16 * LEAST_ROW_BYTES
LEAST_NEED_BYTES = 16 << 10
"""An array of which the processes need less each goes to all of them: to pick it apart takes longer."""
LOOK_S, SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 0.0005, 0.02
GRACE_S = 30.0
"""So much longer than for another process a transfer is waited for: until then that process is named."""
Way = Gathering | Exchange


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
        progress: Progress | None,
        memory: NearMemory | None = None,
    ) -> None:
        self._memory = memory
        self._job, self._files, self._committed, self._subject = job, files, committed, subject
        self._settings, self._told_progress = settings, progress
        self._budget_bytes = settings.read_budget_bytes
        self._bytes = self._signs = 0  # another number whenever this process has got further

    def run(self, shared: Sequence[Shared], take: Callable[[ReadBox], None], rest: Callable[[Progress], None]) -> None:
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
        memory: NearMemory,
        shared: Sequence[Shared],
        take: Callable[[ReadBox], None],
        rest: Callable[[Progress], None],
    ) -> None:
        streams = self._even_shares(shared)
        way = NearWindows(shared, streams, memory, self._block_bytes, self._alive)
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

    def _gathering(self, shared: Sequence[Shared]) -> tuple[Way, ShareFeed]:
        """All that comes is in memory twice, while the next comes; what is sent three times, while it is read."""
        processes, process = self._job.processes, self._job.process
        streams = self._even_shares(shared)
        longest = max(stream.end for stream in streams)
        window = self._window(min(longest, self._budget_bytes // (2 * processes + 4)))
        return Gathering(shared, streams, window, JobTransfer(process), process), self._feed(shared, streams[process])

    def _exchange(self, shared: Sequence[Shared]) -> tuple[Way, ShareFeed]:
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

    def _feed(self, shared: Sequence[Shared], stream: Stream) -> ShareFeed:
        arrays = [each.array for each in shared]
        return ShareFeed(self._files, self._committed, arrays, stream, self._settings, self._progress)

    @property
    def _block_bytes(self) -> int:
        return self._committed.manifest.block_bytes

    def _move(self, shared: Sequence[Shared], way: Way, feed: ShareFeed, take: Callable[[ReadBox], None]) -> None:
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

    def _read(self, way: Way, feed: ShareFeed, number: int, flying: Moving | None) -> np.ndarray | None:
        """The next window of this process, once all have theirs, and the transfer of the last one is over."""
        start, stop = way.window(number) if number < way.windows else (0, 0)
        window = aligned_buffer(stop - start) if stop else None
        self._together(
            f"loading {self._subject}", functools.partial(self._fill_and_wait, feed, window, start, stop, flying)
        )
        return window

    def _fill_and_wait(
        self, feed: ShareFeed, window: np.ndarray | None, start: int, stop: int, flying: Moving | None
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
        self, doing: str, act: Callable[[], bytes | None], merge: Callable[[Sequence[bytes]], bytes] = always
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
