"""The way of shares on one machine: each process looks at what the others have read, where they have read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxckpt_train.store.read_shares import Stream
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.tree.share_ways import Shared, assembly_of

WINDOW_BYTES = 32 << 20
WINDOWS = 2  # while the others look at one, the next one is read


class NearWindows:
    """Windows of all streams, in memory that all processes see. Nobody begins the next but one before all are done.

    Args:
        shared: the arrays.
        streams: what each process reads.
        memory: of each process, flat uint8, for two windows.
        process: number of this one.
    """

    def __init__(
        self, shared: Sequence[Shared], streams: Sequence[Stream], memory: Sequence[np.ndarray], process: int
    ) -> None:
        self.assembly = assembly_of(shared, process)
        self._streams, self._memory, self._process = streams, memory, process
        self._window_bytes = min(map(len, memory)) // WINDOWS // ALIGNMENT * ALIGNMENT
        self.windows = -(-max(stream.end for stream in streams) // self._window_bytes)

    def window(self, number: int) -> tuple[int, int]:
        """From where to where it goes in each stream."""
        return number * self._window_bytes, (number + 1) * self._window_bytes

    def own(self, number: int) -> np.ndarray:
        """Where this process reads its own into."""
        return self._place(self._process, number)

    def look(self, number: int, looked: Callable[[], None]) -> None:
        """Take what this process needs of a window that all have read; `looked` is told of each piece."""
        for process, stream in enumerate(self._streams):
            place = self._place(process, number)
            for cut in stream.within(*self.window(number)):
                self.assembly.add_cut(cut, place)
                looked()

    def _place(self, process: int, number: int) -> np.ndarray:
        start = number % WINDOWS * self._window_bytes
        return self._memory[process][start : start + self._window_bytes]


def memory_bytes(budget_bytes: int) -> int:
    """How much memory for windows a process has of this budget."""
    return WINDOWS * max(ALIGNMENT, min(WINDOW_BYTES, budget_bytes // (2 * WINDOWS)) // ALIGNMENT * ALIGNMENT)
