"""Worker threads for I/O, ways to wait for another thread, per-process singletons and a pause of the collector.

`interruptible` states what may end the waits of a thread, and a `StallDetector` counts how long a wait sees nothing.

Some parts replace the standard library's, for these reasons:

- Executors refuse work once the interpreter begins to exit, and some releases of Python 3.12 refuse new threads then. A
  save that is running at that moment must still finish (test_saves_after_main_thread_are_committed). So `Workers` uses
  daemon threads that it starts beforehand. If the system refuses a thread, the work is only slower.
- `threading.Event` and `concurrent.futures.Future` wait inside a `threading.Condition`. Its lock stays locked if a
  KeyboardInterrupt arrives between the acquisition and the `with` block, and the thread that would set the event hangs
  too (test_interrupted_waits_leave_the_latch_working). `Latch` and `Mailbox` wait for a bare lock.
- `queue.SimpleQueue.get(timeout=...)` may wait for ever before Python 3.13, if a delay or a signal handler uses up the
  timeout (test_long_signal_handler_does_not_extend_wait).
- `functools.cached_property` of Python 3.11 has one lock for all objects. A child that is forked while a thread of its
  parent computes such a property finds it taken for ever (test_forked_child_loads_and_reads_metadata).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar, overload

from jaxckpt_train.errors import CheckpointTimeoutError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
# The longest single wait: a signal that arrives just before a wait does not end it, and is handled after it.
POLL_S = 1.0
# A training step has priority over a save that runs at the same time.
NICENESS = 10
WARN_S, GIVE_UP_S = 60.0, 600.0  # without progress
MOMENT_S = 2.0  # how long running items may take to end after an interrupt
MAX_LOST_THREADS = 64
_log = logging.getLogger("jaxckpt_train")
R = TypeVar("R")


class PerProcess(Generic[K, V]):
    """Values that are created at the first request for their key, and again in a forked child.

    The child has no thread of its parent, so a lock or buffer that such a thread held stays taken for ever there
    (tests/integration/store/test_fork_while_loading.py).
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._values: dict[K, V] = {}
        self._lock = threading.RLock()  # a signal handler may call `get` while this thread creates a value

    def get(self, key: K) -> V:
        """The value for this key, the same one at every call."""
        with self._lock:
            if key not in self._values:
                value = self._make(key)
                self._values.setdefault(key, value)  # keep a value that a signal handler has created meanwhile
            return self._values[key]


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_child(guarded: object) -> None:
    """Replace the object's lock `_guard` in a forked child, where the thread that held it does not exist."""
    _guarded.add(guarded)


def _replace_guards() -> None:
    for guarded in list(_guarded):
        guarded._guard = threading.RLock()


os.register_at_fork(after_in_child=_replace_guards)


class Latch:
    """A one-time event: closed at first, and open for ever once it is opened."""

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[threading.Lock] = []

    def open(self) -> None:
        """Wake all waiting threads."""
        self._is_open = True
        for waiter in list(self._waiters):
            _ring(waiter)

    def is_open(self) -> bool:
        """Whether it has been opened."""
        return self._is_open

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is open; False if that takes longer than `timeout_s` seconds."""
        if self.is_open():
            return True
        end = None if timeout_s is None else time.monotonic() + timeout_s
        mine = _new_bell()
        self._waiters.append(mine)
        try:
            while not self.is_open():
                left = POLL_S if end is None else min(POLL_S, end - time.monotonic())
                if left <= 0:
                    return False
                mine.acquire(timeout=left)
        finally:
            self._waiters.remove(mine)
        return True


class Mailbox(Generic[T]):
    """A queue: any thread may put items in, even a finalizer at any point; one thread takes them out, in order."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = _new_bell()

    def put(self, item: T) -> None:
        """Add an item without waiting."""
        self._items.append(item)
        _ring(self._bell)

    def get(self, timeout_s: float) -> T:
        """The oldest item. Raises queue.Empty: no item arrived within `timeout_s` seconds."""
        while True:
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            if not self._bell.acquire(timeout=timeout_s):
                raise queue.Empty

    def empty(self) -> bool:
        """Whether it holds no item."""
        return not self._items


def _new_bell() -> threading.Lock:
    bell = threading.Lock()
    bell.acquire()
    return bell


def _ring(bell: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # it has been rung already, and the waiting thread has not woken up yet
        bell.release()


class _Checks(threading.local):
    """What may end the waits of this thread, the outermost first."""

    checks: tuple[Callable[[], object], ...] = ()


_local = _Checks()


@contextlib.contextmanager
def interruptible(check: Callable[[], object]) -> Iterator[None]:
    """Within the context, waits of this thread for storage call `check` at least once a second.

    An error that it raises ends the wait. The checks of outer contexts are called before it.
    """
    outer = _local.checks
    _local.checks = (*outer, check)
    try:
        yield
    finally:
        _local.checks = outer


def check_interrupt() -> None:
    """Raise what ends the waits of this thread, if it is within `interruptible`; not while a check itself waits."""
    checks, _local.checks = _local.checks, ()
    try:
        for check in checks:
            check()
    finally:
        _local.checks = checks


class StallDetector:
    """Counts how long something has made no progress; warns, and raises CheckpointTimeoutError after ten minutes."""

    def __init__(self, subject: str, progress: object) -> None:
        self._subject, self._progress, self._still_s, self._warn_s = subject, progress, 0.0, WARN_S

    def waited(self, seconds: float, progress: object) -> None:
        """Record a wait in which this process was awake, and the progress by then."""
        self._still_s += seconds
        if progress != self._progress:
            self._progress, self._still_s, self._warn_s = progress, 0.0, WARN_S
        if self._still_s >= GIVE_UP_S:
            raise CheckpointTimeoutError(f"{self._subject}: {_stalled(self._still_s)}")
        if self._still_s >= self._warn_s:
            _log.warning("%s: %s", self._subject, _stalled(self._still_s))
            self._warn_s += WARN_S


def _stalled(seconds: float) -> str:
    return f"no progress for {seconds:.0f} s; check whether the storage responds"


class Workers:
    """A fixed number of daemon threads that run jobs in order; `polite` threads run with low priority.

    If the system refuses threads, the existing ones do all the work, or the calling thread does; the next call tries to
    start the missing ones again.

    A thread is lost if `run_each` has abandoned its item because its disk does not respond. Another thread replaces it,
    at most `MAX_LOST_THREADS` times, and the lost thread ends when its item does. While threads are lost, `run_each`
    starts with a single item and adds the others when that has ended, so that a disk that stays unresponsive costs one
    thread per attempt.
    """

    def __init__(self, count: int, name: str, polite: bool = False) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._count, self._name, self._polite = count, name, polite
        self._started, self._lost = 0, 0
        self._starting = threading.RLock()  # a signal handler may load while this thread starts others
        self._start_missing()

    def _start_missing(self) -> bool:
        """Start the missing threads; returns whether there is one that is not lost."""
        if self._started < self._count + self._lost:
            with self._starting, contextlib.suppress(RuntimeError):
                while self._started < self._count + self._lost:
                    threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
                    self._started += 1
        return self._started > self._lost

    def _replace(self, batch: _Batch[T]) -> None:
        """Start other threads in place of those that still work on an abandoned batch."""
        with self._starting:
            lost = batch.lose(MAX_LOST_THREADS - self._lost)
            self._lost += lost  # read again, because a signal handler may have changed it
        self._start_missing()

    def _work(self) -> None:
        if self._polite and sys.platform == "linux":  # elsewhere a thread has no priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._jobs.get()():
            pass
        with self._starting:
            self._started, self._lost = self._started - 1, self._lost - 1

    def run_all(
        self, work: Callable[[T], None], items: Sequence[T], *, give_up: Callable[[], None] | None = None
    ) -> None:
        """Run `work` on every item and wait.

        A single item runs on the calling thread, unless that is the main thread. After the first error no other item is
        started, and the error is raised once the running items have ended. An interrupt does the same after a call to
        `give_up`, which may unblock the running items.
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
            while not batch.done.wait(WARN_S):
                if time.monotonic() - batch.moved_at >= WARN_S:
                    _log.warning("%s: %s", self._name, _stalled(WARN_S))
        except BaseException as error:  # an interrupt: wait, because the running items use the caller's resources
            if give_up is not None:
                give_up()
            batch.cancel(error)
            batch.done.wait()
            batch.take_error()
            raise
        batch.raise_error()

    def run_each(
        self,
        work: Callable[[T], R],
        items: Sequence[T],
        *,
        give_up: Callable[[], None] | None = None,
        moved: Callable[[], object] | None = None,
    ) -> Generator[R]:
        """Run `work` on every item and yield the results on the calling thread, as the items finish.

        After the first error no other item is started, and the error is raised once the running items have ended.
        Closing the iterator early, or an interrupt, does the same after a call to `give_up`, which may unblock the
        running items; then the wait takes at most two seconds. So use `contextlib.closing`. An error of `interruptible`
        does so, too. `moved` returns a value that changes whenever there was progress.

        Raises CheckpointTimeoutError: there was no progress for `GIVE_UP_S` seconds; the running items are abandoned.
        """
        if not self._start_missing():
            for item in items:
                check_interrupt()
                yield work(item)
            return
        results = Mailbox[list[R] | None]()
        batch = _Batch(lambda item: results.put([work(item)]), items, lambda: results.put(None))
        try:
            self._put(batch, len(items))
            while (result := self._next(results, moved)) is not None:
                yield result.pop()  # so that only the consumer refers to it, which may wait for its memory
        except BaseException as error:  # an interrupt, an error of the consumer, or no progress
            if give_up is not None:
                give_up()
            batch.cancel(error)
            try:
                if not isinstance(error, CheckpointTimeoutError):
                    _drain(batch, results)
            finally:  # even after another interrupt; the running items keep their resources until they end, if ever
                self._replace(batch)
            batch.take_error()
            raise
        batch.raise_error()

    def _put(self, batch: _Batch[T], count: int) -> None:
        """Queue the items of a batch; if threads are lost, the first item before all others."""
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

    def _next(self, results: Mailbox[T], moved: Callable[[], object] | None) -> T:
        stall = StallDetector(self._name, moved() if moved else None)
        while True:
            check_interrupt()
            with contextlib.suppress(queue.Empty):
                return results.get(POLL_S)
            stall.waited(POLL_S, moved() if moved else None)


class _Batch(Generic[T]):
    """Items that several threads work on. Once `done` is open, no thread refers to an item or to the work any more."""

    def __init__(self, work: Callable[[T], None], items: Sequence[T], at_end: Callable[[], None] | None = None) -> None:
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
        if self._at_end is not None:
            self._at_end()

    def run_next(self) -> bool:
        """Work on one more item, if any; returns whether the calling thread was replaced meanwhile."""
        try:
            item = self._items.popleft()
        except IndexError:
            return False
        try:
            if self.error is None:
                self._work(item)
            del item
        except BaseException as error:  # noqa: BLE001  # run_all() and run_each() raise it on their thread
            self._fail(error)
        finally:
            with self._lock:
                self._left, self.moved_at = self._left - 1, time.monotonic()
                last, is_lost = self._left == 0, self._lost > 0
                self._lost -= is_lost
            if last:
                del self._work  # release its resources before the waiting thread continues
                self._end()
        return is_lost

    def lose(self, most: int) -> int:
        """After `cancel`: count the threads that still work on it as lost, at most `most`; returns how many."""
        with self._lock:
            self._lost = min(most, self._left)
        return self._lost

    def cancel(self, error: BaseException) -> None:
        """Start no more items, and count the items that no thread has taken as done."""
        self._fail(error)
        while self._items:
            self.run_next()

    def take_error(self) -> BaseException | None:
        """The first error, which is removed: its traceback refers to this batch, and so to all items."""
        error, self.error = self.error, None
        return error

    def raise_error(self) -> None:
        """Raise the first error, if any."""
        error = self.take_error()
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error


def _drain(batch: _Batch[T], results: Mailbox[R]) -> None:
    """Wait briefly until the batch is done; its disk may not respond."""
    ends_s = time.monotonic() + MOMENT_S
    while not (batch.done.is_open() and results.empty()) and time.monotonic() < ends_s:
        with contextlib.suppress(queue.Empty):  # results that stay in the mailbox hold memory
            results.get(POLL_S)


_shared = PerProcess[tuple[int, str, bool], Workers](lambda key: Workers(*key))


def shared_workers(count: int, name: str, *, polite: bool = False) -> Workers:
    """The workers of this process for a count and a purpose, the same ones at every call."""
    return _shared.get((count, name, polite))


class unlocked_cached_property(Generic[T]):  # noqa: N801  # as `property`
    """A cached property without a lock: threads that compute it at once all get the value that was stored first."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> T | Self:
        if instance is None:
            return self
        value: T = vars(instance).setdefault(self._name, self._make(instance))
        return value


_guard = threading.RLock()
_threshold = 0  # to restore when the pause ends; 0: no pause


class _Pause:
    """One pause. If an interrupt keeps it from ending, the next pause ends it, because nothing refers to it now."""

    def begin(self) -> None:
        """Pause, unless the collector is disabled or another thread has paused it."""
        global _current, _threshold
        with _guard:
            if _current() is None:
                _restore_threshold()
                if gc.isenabled():
                    _current = weakref.ref(self)
                    _threshold = gc.get_threshold()[0]
                    gc.set_threshold(0)

    def end(self) -> None:
        """Restore the collector's threshold."""
        global _current
        with _guard:
            if _current() is self:
                _restore_threshold()
                _current = _nobody


def _restore_threshold() -> None:
    global _threshold
    if _threshold and not gc.get_threshold()[0]:  # otherwise other code has set a threshold meanwhile
        gc.set_threshold(_threshold)
    _threshold = 0


def _nobody() -> _Pause | None:
    return None


_current = _nobody


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the garbage collector for a moment in which many objects are created that all stay alive.

    The records of a few thousand leaves trigger a full collection, which looks at every object of the process, of which
    JAX alone has hundreds of thousands. It takes longer than everything else that is done with the records.

    The pause sets the collector's threshold to 0, so that a loop may call `gc.disable()` meanwhile without losing that
    setting. If another thread has paused the collector, this call does nothing.
    """
    pause = _Pause()
    try:
        pause.begin()
        yield
    finally:
        pause.end()


def _reset_pause_in_child() -> None:
    """A forked child does not have the thread that would end the pause."""
    global _guard, _current
    _guard, _current = threading.RLock(), _nobody
    _restore_threshold()


os.register_at_fork(after_in_child=_reset_pause_in_child)
