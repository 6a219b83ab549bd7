"""How many writes a disk is given at a time: measured in the first large saves to it, without a byte written extra."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

from jaxckpt_train.settings import DEFAULT_IO_THREADS, MIB
from jaxckpt_train.store.per_process import PerProcess

_log = logging.getLogger("jaxckpt_train")

CANDIDATES = (DEFAULT_IO_THREADS, 4, 8)
TURN_BYTES = 96 * MIB
# So much faster than the default that it is no chance: a shared machine alone makes a fifth of difference.
CLEARLY = 1.25


Write = Callable[[int, int | None], int]
"""Writes about so many of the next bytes (None: all that are left) at a depth, waits, and tells how many it were."""


class WriteDepth:
    """The best depth for one disk. The first large saves try every candidate twice, there and back.

    Args:
        staging_bytes: of the buffers that are written: a turn is at least so long, so that all can be under way.
    """

    def __init__(self, staging_bytes: int = 0) -> None:
        self._turn_bytes = max(TURN_BYTES, staging_bytes)
        self._best: int | None = None
        self._lock = threading.Lock()
        self._turns = [*CANDIDATES, *reversed(CANDIDATES)]
        self._moved, self._seconds = dict.fromkeys(CANDIDATES, 0), dict.fromkeys(CANDIDATES, 0.0)

    def run(self, total_bytes: int, write: Write, prepare: Callable[[], None]) -> None:
        """Write so many bytes; `prepare` does what happens only once, and should not be in the first turn's time."""
        if self._best is None and total_bytes >= 2 * self._turn_bytes and self._lock.acquire(blocking=False):
            try:
                prepare()
                self._measure(total_bytes, write)
            finally:
                self._lock.release()
        write(self._best or CANDIDATES[0], None)

    def _measure(self, left_bytes: int, write: Write) -> None:
        """Take as many of the turns that are left as these bytes are enough for."""
        while self._turns and left_bytes >= 2 * self._turn_bytes:  # a turn and some: it ends with a whole buffer
            depth, started = self._turns[0], time.perf_counter()
            done = write(depth, self._turn_bytes)
            took_s, left_bytes = time.perf_counter() - started, left_bytes - done
            if done < self._turn_bytes:
                return  # it was over too soon, as turns end with whole buffers
            self._seconds[depth] += took_s
            self._moved[depth] += done
            del self._turns[0]
        if not self._turns:
            speeds = {depth: self._moved[depth] / self._seconds[depth] for depth in CANDIDATES}
            self._best = best_of(speeds)
            shown = {depth: round(speed / MIB) for depth, speed in speeds.items()}
            _log.info("%d writes at a time; measured, in MiB/s: %s", self._best, shown)


def best_of(speeds: dict[int, float]) -> int:
    """The candidate to use: the default unless another one is clearly faster."""
    fastest = max(speeds, key=lambda depth: speeds[depth])
    return fastest if speeds[fastest] > CLEARLY * speeds[CANDIDATES[0]] else CANDIDATES[0]


def _unmeasured(way: tuple[Hashable, int]) -> WriteDepth:
    return WriteDepth(way[1])


_known = PerProcess(_unmeasured)


def write_depth_of(way: Hashable, staging_bytes: int) -> WriteDepth:
    """What this process knows of a disk, or of a disk and a way to write to it, with so large buffers in all."""
    return _known.get((way, staging_bytes))
