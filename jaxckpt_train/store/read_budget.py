"""The memory that a load may use beyond its destination: a number of bytes that are taken, and come back when freed."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np

from jaxckpt_train.store.latch import Mailbox

_log = logging.getLogger("jaxckpt_train")

# So long a reading thread waits for memory before it helps along, and so many times before it goes on without; so many
# times more often while somebody is at work who may give some back.
STALL_S, STALLS, PATIENCE = 0.05, 100, 120


class ReadBudget:
    """A number of bytes that may be in use at once; one request larger than all of it waits until it is alone.

    Only `take` waits, and only worker threads take: giving back happens wherever memory is freed. Libraries such as JAX
    let go of what they have put on a device in later calls to them, or when Python collects garbage; so who waits
    collects. If nothing comes back even so, and nobody is at work whose end could bring it, then somebody keeps what
    should only pass, and the budget is given up: better than to wait for ever. (Ten minutes where somebody is at work.)
    """

    def __init__(self, total: int) -> None:
        self._total, self._used, self._lock = total, 0, threading.Lock()
        self._returned = Mailbox[int]()
        self._is_lifted = False
        self._at_work: set[int] = set()  # threads

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, this thread reads, or does what it read for: memory may come back when it is done, however late."""
        me = threading.get_ident()
        self._at_work.add(me)
        try:
            yield
        finally:
            self._at_work.discard(me)

    def take(self, size: int) -> None:
        """Wait until so many bytes may be used; on a reading thread only."""
        with self._lock:
            stalls = 0.0
            while not self._is_lifted and (not self._returned.empty() or 0 < self._used > self._total - size):
                try:
                    self._used -= self._returned.get(STALL_S)
                    stalls = 0.0
                except queue.Empty:
                    gc.collect(0)
                    stalls += 1 / PATIENCE if self._at_work else 1
                    if stalls >= STALLS:
                        _log.warning("%d bytes do not leave host memory; the load goes on without a limit", self._used)
                        self._is_lifted = True
            self._used += size

    def give(self, size: int) -> None:
        """They are free again; may be called by a finalizer, at any time on any thread."""
        self._returned.put(size)

    def charge(self, array: np.ndarray) -> None:
        """Count memory that is there already, until nothing refers to it any more."""
        owner = owner_of(array)
        self.give(-owner.nbytes)
        weakref.finalize(owner, self.give, owner.nbytes).atexit = False

    def lift(self) -> None:
        """Let everyone through from now on: nobody will give back what others wait for."""
        self._is_lifted = True
        self.give(0)


def owner_of(array: np.ndarray) -> np.ndarray:
    """The array that all others of the same memory are views of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
