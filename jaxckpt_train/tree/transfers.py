"""Transfers: brings device arrays to the host one after the other, a bounded number of bytes ahead of the writer."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.store.latch import Latch
from jaxckpt_train.tree.device_wait import device_wait_s
from jaxckpt_train.tree.pinned_host import is_on_host, start_transfers

GIVEN_UP = "given up: the state was not taken from its devices in time"


class Ahead:
    """How much of one save may be on its way from the devices, or be there and not dropped yet, at a time.

    One that is asked for alone is always let through. Whoever asks holds `lock`; giving back needs none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lock = threading.Lock()
        self._under_way = 0
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(self, nbytes: int) -> bool:
        """Count these bytes if there is room for them."""
        self._collect()
        has_room = self._under_way <= 0 or self._under_way + nbytes <= self.limit_bytes
        if has_room:
            self._under_way += nbytes
        return has_room

    def take_anyway(self, nbytes: int) -> None:
        """Count these bytes, which cannot wait."""
        self._collect()
        self._under_way += nbytes

    def _collect(self) -> None:
        while not self._dropped.empty():
            self._under_way -= self._dropped.get()

    def give_back(self, nbytes: int) -> None:
        """They are dropped; may be called by a finalizer, at any time on any thread."""
        self._dropped.put(nbytes)


class Transfers:
    """Arrays of one device each that are still to be brought to the host, in the order in which they were added.

    A fetch starts the transfers of the next arrays too, so that they run while others are written, as far as `ahead`
    lets them. Each array is let go of as soon as it was fetched.

    Attributes:
        done: open once nothing is read from the devices any more.
        fetching: how many fetches wait for their devices now, which may still be computing.
        waited_s: seconds that the devices were waited for while the arrays were added.
    """

    def __init__(
        self, ahead: Ahead, start: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] = start_transfers
    ) -> None:
        self.done = Latch()
        self._ahead, self._start = ahead, start
        self._waiting: list[jax.Array | None] = []
        self._to_copy: set[int] = set()
        self._lock = ahead.lock
        self._left = self._next = self.fetching = 0
        self._is_given_up = False
        self.waited_s = 0.0

    def add(self, array: jax.Array, *, is_ours: bool = False) -> ArrayToCome | np.ndarray:
        """Add an array that lies on a single device; one without elements is here at once.

        Unless it is `is_ours`, which nobody else is given the memory of, an array on the host is copied by the fetch: a
        view of it would make a step fail that is given its memory.
        """
        if not array.size:
            return np.empty(array.shape, array.dtype)
        if not is_ours and is_on_host(array):
            self._to_copy.add(len(self._waiting))
        self._waiting.append(array)
        self._left += 1
        return ArrayToCome(self, len(self._waiting) - 1, array)

    def begin(self) -> None:
        """Start the first transfers, once all arrays are added."""
        if not self._left:
            self.done.open()
        with self._lock:
            self._start_more()

    def fetch(self, number: int) -> np.ndarray:
        """Bring array number `number` to the host, once; waits until it is there.

        Raises:
            CheckpointTimeoutError: it was let go of meanwhile.
        """
        with self._lock:
            array = self._waiting[number]
            if array is None:
                raise CheckpointTimeoutError(GIVEN_UP)
            self._waiting[number] = None
            if number >= self._next:  # out of order
                self._ahead.take_anyway(array.nbytes)
                (array,) = self._start([array])
            self._start_more()
            self.fetching += 1
        try:
            data = np.array(array, copy=True) if number in self._to_copy else np.asarray(array)
            weakref.finalize(data, self._ahead.give_back, array.nbytes).atexit = False
        finally:
            with self._lock:
                self.fetching -= 1
        with self._lock:
            if self._is_given_up:
                raise CheckpointTimeoutError(GIVEN_UP)
            self._left -= 1
            last = self._left == 0
        if last:
            self.done.open()
        return data

    def wait_for_devices(self) -> float:
        """Wait until the first array is computed, and here if its transfer was started; the seconds that it took.

        The devices run what they are given in order: nothing else is computed then that was queued before.
        """
        with self._lock:
            first = next((array for array in self._waiting if array is not None), None)
            self.fetching += 1
        try:
            return device_wait_s([] if first is None else [first])
        finally:
            with self._lock:
                self.fetching -= 1

    def give_up(self) -> bool:
        """See to it that a fetch fails, unless all are done; whether one will."""
        with self._lock:
            self._is_given_up = self._left > 0
        return self._is_given_up

    def close(self) -> None:
        """Let go of what was not fetched."""
        with self._lock:
            self._waiting = [None] * len(self._waiting)
            self._next = len(self._waiting)
        self.done.open()

    def _start_more(self) -> None:
        next_ones: list[int] = []
        while self._next < len(self._waiting):
            array = self._waiting[self._next]
            if array is not None:
                if not self._ahead.take(array.nbytes):
                    break
                next_ones.append(self._next)
            self._next += 1
        if next_ones:
            started = self._start([array for n in next_ones if (array := self._waiting[n]) is not None])
            for number, array in zip(next_ones, started, strict=True):
                self._waiting[number] = array


class ArrayToCome:
    """An array that is fetched when its turn to be written comes; `store.layout.ArrayToCome` says what it promises."""

    def __init__(self, transfers: Transfers, number: int, array: jax.Array) -> None:
        self._transfers, self._number = transfers, number
        self.shape, self.dtype, self.size, self.nbytes = array.shape, np.dtype(array.dtype), array.size, array.nbytes

    def fetch(self) -> np.ndarray:
        """The data; may be called once, from any thread."""
        return self._transfers.fetch(self._number)
