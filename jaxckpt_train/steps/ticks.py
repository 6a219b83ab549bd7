"""Ticks: at which calls of a loop the processes of a job talk to each other, about once a second."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S, PER_PROCESS_S = 1.0, 1e-3  # process 0 answers each of the others at each tick
MOST_CALLS, PER_CALLS = 32, 10  # so many, or one for ten processes: a loop may become much slower from call to call


class Ticks:
    """Counts calls; every so manieth is a tick. Process 0 says at each tick how many calls later the next one is.

    Args:
        processes: how many there are.
        monotonic: the time in seconds.
    """

    def __init__(self, processes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._period_s = LEAST_S + PER_PROCESS_S * processes
        self._most = max(MOST_CALLS, processes // PER_CALLS)
        self._monotonic = monotonic
        self._every, self._left = 1, 1
        self._at = monotonic()

    def is_due(self) -> bool:
        """Count a call; whether it is a tick, after which `set_next` is called."""
        self._left -= 1
        return self._left <= 0

    def next(self) -> int:
        """In process 0: in how many calls the next one should be. At most twice as many as since the last one."""
        now = self._monotonic()
        per_call_s = max((now - self._at) / self._every, 1e-9)
        self._at = now
        return max(1, min(int(self._period_s / per_call_s), 2 * self._every, self._most))

    def set_next(self, calls: int) -> None:
        """Take note of what process 0 has said."""
        self._every = self._left = calls
