"""A latch: opened once, waited for by any number of threads, and not broken by a signal handler that raises.

`threading.Event` and `concurrent.futures.Future` wait inside a `threading.Condition`, whose lock stays taken if a
KeyboardInterrupt lands between its acquisition and the `with` block; the thread that would set them then hangs too.
"""

from __future__ import annotations

import contextlib
import queue
import time

# A signal that comes just before a wait begins does not end it: Python sees the signal when it next looks.
LOOK_S = 1.0


class Latch:
    """Closed at first; once opened it stays open."""

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[queue.SimpleQueue[None]] = []

    def open(self) -> None:
        """Let everyone through."""
        self._is_open = True
        for waiter in list(self._waiters):
            waiter.put(None)

    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._is_open

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is open; False if that took longer than `timeout_s` seconds."""
        if self.is_open():
            return True
        end = None if timeout_s is None else time.monotonic() + timeout_s
        mine: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiters.append(mine)
        try:
            while not self.is_open():
                left = LOOK_S if end is None else min(LOOK_S, end - time.monotonic())
                if left <= 0:
                    return False
                with contextlib.suppress(queue.Empty):
                    mine.get(timeout=left)
        finally:
            self._waiters.remove(mine)
        return True
