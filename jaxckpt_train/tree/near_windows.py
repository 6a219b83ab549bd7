"""The way of shares on one machine: each process looks at what the others have read, where they have read it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxckpt_train.jobs.near_memory import NearMemory
from jaxckpt_train.store.feed_ahead import FeedAhead
from jaxckpt_train.store.read_plan import parts_bytes
from jaxckpt_train.store.read_shares import Stream
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.share_feed import ShareFeed
from jaxckpt_train.tree.share_ways import Shared, assembly_of

LEAST_PLACES = 3  # one that is read, one that is taken, and one for whoever is faster


class NearWindows:
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
        memory: NearMemory,
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

    def read(self, feed: ShareFeed, threads: int, hand_over: Callable[[], None]) -> None:
        """Read the own stream on other threads, and take what this process needs of all of them.

        Args:
            feed: of the own stream; it is closed.
            threads: on which it is read: few, as all processes read from one disk, and one while the others digest.
            hand_over: called after each window, for what is complete in the assembly.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: of the own stream, as `iter_boxes`.
        """
        with contextlib.closing(FeedAhead(feed, threads, self._memory.wake)) as ahead:
            while self._taken < self._windows or self._memory.owes():
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
            self._memory.tell(self._given, self._taken)

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
        self._memory.tell(self._given, self._taken)

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
