"""Worker threads for I/O: started once, reused, and still able to work while the interpreter is exiting.

Executors of the standard library refuse work once the interpreter begins to exit, and some releases of Python 3.12
refuse new threads then; a save that is under way at that moment must still finish. So the threads are daemons that
exist beforehand, whoever started a save waits for it at exit, and a refused thread only makes it slower.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.store.latch import LOOK_S, Latch, Mailbox
from jaxckpt_train.store.per_process import PerProcess

# What a training step computes goes before what a save does beside it; the full share is left where nothing else runs.
NICENESS = 10
TELL_S, GIVE_UP_S = 60.0, 600.0
MOMENT_S = 2.0  # for what is under way to end, after an interrupt
MOST_LOST = 64
_log = logging.getLogger("jaxckpt_train")

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """A fixed number of daemon threads that run jobs in the order they come; if `polite`, others go first.

    Where the system has fewer threads to give they do all the work, without any the calling thread; the next call asks
    for the rest again.

    A thread whose item `run_each` has left to itself, as its disk does not answer, is lost: another one takes its
    place, so that work on other disks goes on, and it ends when its item does. As long as there are lost ones, a call
    to `run_each` begins with a single item, and the others follow when that has ended: a disk that stays away takes one
    more thread at each try. `MOST_LOST` of them are replaced, so there are never more threads than these and the fixed
    number.
    """

    def __init__(self, count: int, name: str, *, polite: bool = False) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._count, self._name, self._polite = count, name, polite
        self._started, self._lost = 0, 0
        self._starting = threading.RLock()  # a signal's handler may load while this thread starts others
        self._start_missing()

    def _start_missing(self) -> bool:
        """Start the threads that are not there yet; whether there is any that is not lost."""
        if self._started < self._count + self._lost:
            with self._starting, contextlib.suppress(RuntimeError):
                while self._started < self._count + self._lost:
                    threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
                    self._started += 1
        return self._started > self._lost

    def _replace(self, batch: _Batch[T]) -> None:
        """Have other threads in place of those that still work on a batch which nobody waits for."""
        with self._starting:
            lost = batch.lose(MOST_LOST - self._lost)
            self._lost += lost  # as it is now: a signal's handler may have lost some as well
        self._start_missing()

    def _work(self) -> None:
        if self._polite and sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._jobs.get()():
            pass
        with self._starting:
            self._started, self._lost = self._started - 1, self._lost - 1

    def run_all(
        self, work: Callable[[T], None], items: Sequence[T], *, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """Run `work` on every item and wait; a single item runs on the calling thread, but not on the main one.

        After the first error no further item is begun; that error is raised once the running ones have ended. So it is
        with an interrupt, after a call to `give_up`, which may set free what the running ones wait for.
        """
        if len(items) == 1 and threading.current_thread() is not threading.main_thread():
            work(items[0])
            return
        if not self._start_missing():
            for item in items:
                work(item)
            return
        batch = _Batch(work, items)
        try:
            for _ in range(len(items)):
                self._jobs.put(batch.run_next)
            while not batch.done.wait(TELL_S):
                if time.monotonic() - batch.moved_at >= TELL_S:
                    self._tell()
        except BaseException as error:  # an interrupt: the running items still use what the caller is about to release
            give_up()
            batch.give_up(error)
            batch.done.wait()
            batch.take_error()
            raise
        batch.raise_error()

    def run_each(
        self,
        work: Callable[[T], R],
        items: Sequence[T],
        *,
        give_up: Callable[[], None] = lambda: None,
        moved: Callable[[], object] = lambda: None,
    ) -> Generator[R]:
        """Run `work` on every item and yield what it returned, on the calling thread, as the items get done.

        After the first error no further item is begun; that error is raised once the running ones have ended. Closing
        the iterator early, or an interrupt, ends it in the same way after a call to `give_up`, which may set free what
        the running ones wait for, and then two seconds at most; so use `contextlib.closing`. `moved` tells by another
        value that something was done since the last look.

        Raises:
            CheckpointTimeoutError: nothing was done for `GIVE_UP_S` seconds; the running items are not waited for.
        """
        if not self._start_missing():
            yield from map(work, items)
            return
        results = Mailbox[list[R] | None]()
        batch = _Batch(lambda item: results.put([work(item)]), items, lambda: results.put(None))
        try:
            self._put(batch, len(items))
            while (result := self._next(results, moved)) is not None:
                yield result.pop()  # the consumer alone holds it, and may wait for what it frees by letting go
        except CheckpointTimeoutError as error:  # what the running ones use they hold until they end, if ever
            give_up()
            batch.give_up(error)
            self._replace(batch)
            batch.take_error()
            raise
        except BaseException as error:  # an interrupt, or the consumer's: as in run_all()
            give_up()
            batch.give_up(error)
            try:
                _wait_a_moment(batch, results)
            finally:  # also after another interrupt
                self._replace(batch)
            batch.take_error()
            raise
        batch.raise_error()

    def _put(self, batch: _Batch[T], count: int) -> None:
        """Have so many items of a batch done; if threads are lost, the first before all others."""
        if self._lost == 0:
            for _ in range(count):
                self._jobs.put(batch.run_next)
            return

        def run_first() -> bool:
            is_lost = batch.run_next()
            for _ in range(count - 1):
                self._jobs.put(batch.run_next)
            return is_lost

        self._jobs.put(run_first)

    def _next(self, results: Mailbox[T], moved: Callable[[], object]) -> T:
        seen, still_s, tell_s = moved(), 0.0, TELL_S  # of seconds in which this process was awake
        while True:
            with contextlib.suppress(queue.Empty):
                return results.get(LOOK_S)
            still_s += LOOK_S
            if (latest := moved()) != seen:
                seen, still_s, tell_s = latest, 0.0, TELL_S
            if still_s >= GIVE_UP_S:
                raise CheckpointTimeoutError(
                    f"{self._name}: nothing was done for {still_s:.0f} s; does the disk still answer?"
                )
            if still_s >= tell_s:
                self._tell()
                tell_s += TELL_S

    def _tell(self) -> None:
        _log.warning("%s: nothing was done for %.0f s; does the disk still answer?", self._name, TELL_S)


class _Batch(Generic[T]):
    """Items that several threads work off. Once `done` is open, no thread holds an item, or the work, any more."""

    def __init__(
        self, work: Callable[[T], None], items: Sequence[T], at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self._items = work, deque(items)
        self._left, self._at_end, self._lost = len(items), at_end, 0
        self.moved_at = time.monotonic()
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.done = Latch()
        if not items:
            self._end()

    def _end(self) -> None:
        self.done.open()
        self._at_end()

    def run_next(self) -> bool:
        """Work on one more item, if one is left; whether the thread that did was replaced meanwhile."""
        try:
            item = self._items.popleft()
        except IndexError:
            return False
        try:
            if self.error is None:
                self._work(item)
            del item
        except BaseException as error:  # noqa: BLE001  # a thread's edge: raised by run_all()
            self._fail(error)
        finally:
            with self._lock:
                self._left, self.moved_at = self._left - 1, time.monotonic()
                last, is_lost = self._left == 0, self._lost > 0
                self._lost -= is_lost
            if last:
                del self._work  # with all that it holds: whoever waits may be done before this thread is
                self._end()
        return is_lost

    def lose(self, most: int) -> int:
        """Take the threads that still work on it, once it was given up, for lost; how many of them, of `most`."""
        with self._lock:
            self._lost = min(most, self._left)
        return self._lost

    def give_up(self, error: BaseException) -> None:
        """Begin nothing more; also count the items that no thread has been told of."""
        self._fail(error)
        while self._items:
            self.run_next()

    def take_error(self) -> BaseException | None:
        """The first error, which is not kept here: its traceback holds this batch, and so all that the items were."""
        error, self.error = self.error, None
        return error

    def raise_error(self) -> None:
        """Raise the first error, if there was one."""
        error = self.take_error()
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error


def _wait_a_moment(batch: _Batch[T], results: Mailbox[R]) -> None:
    """Wait until it is done; not for long, as a disk may not answer."""
    ends_s = time.monotonic() + MOMENT_S
    while not (batch.done.is_open() and results.empty()) and time.monotonic() < ends_s:
        with contextlib.suppress(queue.Empty):  # results that nobody takes hold memory
            results.get(LOOK_S)


def _start(key: tuple[int, str, bool]) -> Workers:
    count, name, polite = key
    return Workers(count, name, polite=polite)


_shared = PerProcess(_start)


def shared_workers(count: int, name: str, *, polite: bool = False) -> Workers:
    """The workers of this process for a count and a purpose, the same ones at every call."""
    return _shared.get((count, name, polite))
