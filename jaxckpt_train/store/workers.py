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
_log = logging.getLogger("jaxckpt_train")

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """A fixed number of daemon threads that run jobs in the order they come; if `polite`, others go first.

    Where the system has fewer threads to give they do all the work, without any the calling thread; the next call asks
    for the rest again.
    """

    def __init__(self, count: int, name: str, *, polite: bool = False) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._count, self._name, self._polite = count, name, polite
        self._started, self._starting = 0, threading.Lock()
        self._start_missing()

    def _start_missing(self) -> bool:
        """Start the threads that are not there yet; whether there is any."""
        if self._started < self._count:
            with self._starting, contextlib.suppress(RuntimeError):
                while self._started < self._count:
                    threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
                    self._started += 1
        return self._started > 0

    def _work(self) -> None:
        if self._polite and sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            self._jobs.get()()

    def run_all(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Run `work` on every item and wait; a single item runs on the calling thread, but not on the main one.

        After the first error no further item is begun; that error is raised once the running ones have ended.
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
            for _ in range(len(items)):
                self._jobs.put(batch.run_next)
            while (result := self._next(results, moved)) is not None:
                yield result.pop()  # the consumer alone holds it, and may wait for what it frees by letting go
        except CheckpointTimeoutError as error:  # what the running ones use they hold until they end, if ever
            give_up()
            batch.give_up(error)
            batch.take_error()
            raise
        except BaseException as error:  # an interrupt, or the consumer's: as in run_all()
            give_up()
            batch.give_up(error)
            ends_s = time.monotonic() + MOMENT_S  # a disk may not answer
            while not (batch.done.is_open() and results.empty()) and time.monotonic() < ends_s:
                with contextlib.suppress(queue.Empty):  # results that nobody takes hold memory
                    results.get(LOOK_S)
            batch.take_error()
            raise
        batch.raise_error()

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
        self._left, self._at_end = len(items), at_end
        self.moved_at = time.monotonic()
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.done = Latch()
        if not items:
            self._end()

    def _end(self) -> None:
        self.done.open()
        self._at_end()

    def run_next(self) -> None:
        """Work on one more item, if one is left."""
        try:
            item = self._items.popleft()
        except IndexError:
            return
        try:
            if self.error is None:
                self._work(item)
            del item
        except BaseException as error:  # noqa: BLE001  # a thread's edge: raised by run_all()
            self._fail(error)
        finally:
            with self._lock:
                self._left, self.moved_at = self._left - 1, time.monotonic()
                last = self._left == 0
            if last:
                del self._work  # with all that it holds: whoever waits may be done before this thread is
                self._end()

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


def _start(key: tuple[int, str, bool]) -> Workers:
    count, name, polite = key
    return Workers(count, name, polite=polite)


_shared = PerProcess(_start)


def shared_workers(count: int, name: str, *, polite: bool = False) -> Workers:
    """The workers of this process for a count and a purpose, the same ones at every call."""
    return _shared.get((count, name, polite))
