"""How many writes a disk is given at a time: measured in the first large save to it, without a byte written extra."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator, Hashable
from typing import NamedTuple

from jaxckpt_train.settings import DEFAULT_IO_THREADS, MIB

_log = logging.getLogger("jaxckpt_train")

CANDIDATES = (DEFAULT_IO_THREADS, 4, 8)
TURN_BYTES = 96 * MIB
# So much faster than the default that it is no chance: a shared machine alone makes a fifth of difference.
CLEARLY = 1.25


class Turn(NamedTuple):
    """A part of a save.

    Attributes:
        depth: how many writes are under way at a time.
        most_bytes: about how much to write in this turn; None: all that is left.
        begins_measuring: what happens only once should happen before this turn.
    """

    depth: int
    most_bytes: int | None = None
    begins_measuring: bool = False


class WriteDepth:
    """The best depth for one disk. The first save that is large enough tries every candidate twice, there and back."""

    def __init__(self) -> None:
        self._best: int | None = None
        self._lock = threading.Lock()

    def turns(self, total_bytes: int) -> Generator[Turn]:
        """How to write so many bytes. A turn is over when the next one is asked for."""
        order = (*CANDIDATES, *reversed(CANDIDATES))
        if self._best is None and total_bytes > len(order) * TURN_BYTES and self._lock.acquire(blocking=False):
            try:
                seconds = dict.fromkeys(CANDIDATES, 0.0)
                for number, depth in enumerate(order):
                    started = time.perf_counter()
                    yield Turn(depth, TURN_BYTES, begins_measuring=number == 0)
                    seconds[depth] += time.perf_counter() - started
                self._best = best_of(seconds)
                speeds = {depth: round(2 * TURN_BYTES / MIB / took) for depth, took in seconds.items()}
                _log.info("%d writes at a time; MiB/s measured: %s", self._best, speeds)
            finally:
                self._lock.release()
        yield Turn(self._best or CANDIDATES[0])


def best_of(seconds: dict[int, float]) -> int:
    """The candidate to use: the default unless another one is clearly faster."""
    fastest = min(seconds, key=lambda depth: seconds[depth])
    return fastest if seconds[fastest] * CLEARLY < seconds[CANDIDATES[0]] else CANDIDATES[0]


_known: dict[Hashable, WriteDepth] = {}
_known_lock = threading.Lock()


def _forget_locks() -> None:
    """A forked child measures for itself: a save of its parent may have held a lock."""
    global _known_lock
    _known_lock = threading.Lock()
    _known.clear()


os.register_at_fork(after_in_child=_forget_locks)


def write_depth_of(volume: Hashable) -> WriteDepth:
    """What this process knows of a disk."""
    with _known_lock:
        return _known.setdefault(volume, WriteDepth())
