"""Two ways to wait for another thread, neither of them for longer than asked: a latch, and a mailbox.

They wait for a bare lock, and nothing else of the standard library does for that:

- `threading.Event` and `concurrent.futures.Future` wait inside a `threading.Condition`, whose lock stays taken if a
  KeyboardInterrupt lands between its acquisition and the `with` block; the thread that would set them then hangs too.
- `queue.SimpleQueue.get(timeout=...)` waits for ever before Python 3.13 if the thread is held up, or a signal is
  handled, until the time is over: what is left of it is negative then.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

# A signal that comes just before a wait begins does not end it: Python sees the signal when it next looks.
LOOK_S = 1.0


class Latch:
    """Closed at first; once opened it stays open."""

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[threading.Lock] = []

    def open(self) -> None:
        """Let everyone through."""
        self._is_open = True
        for waiter in list(self._waiters):
            _ring(waiter)

    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._is_open

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is open; False if that took longer than `timeout_s` seconds."""
        if self.is_open():
            return True
        end = None if timeout_s is None else time.monotonic() + timeout_s
        mine = _silent_bell()
        self._waiters.append(mine)
        try:
            while not self.is_open():
                left = LOOK_S if end is None else min(LOOK_S, end - time.monotonic())
                if left <= 0:
                    return False
                mine.acquire(timeout=left)
        finally:
            self._waiters.remove(mine)
        return True


class Mailbox(Generic[T]):
    """What any thread puts in, also a finalizer in the midst of all, and one thread takes out, in order."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = _silent_bell()

    def put(self, item: T) -> None:
        """Never waits."""
        self._items.append(item)
        _ring(self._bell)

    def get(self, timeout_s: float) -> T:
        """The oldest item.

        Raises:
            queue.Empty: there was none for so many seconds.
        """
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            if not self._bell.acquire(timeout=timeout_s):
                raise queue.Empty

    def empty(self) -> bool:
        """Whether nothing is in it."""
        return not self._items


def _silent_bell() -> threading.Lock:
    bell = threading.Lock()
    bell.acquire()
    return bell


def _ring(bell: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it has been rung, and nobody has heard it yet
        bell.release()
