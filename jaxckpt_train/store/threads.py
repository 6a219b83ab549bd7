"""Worker threads for I/O: started once, reused, and still able to work while the interpreter is exiting.

Executors of the standard library refuse work once the interpreter begins to exit, and some releases of Python 3.12
refuse new threads then; a save that is under way at that moment must still finish. So the threads are daemons that
exist beforehand, whoever started a save waits for it at exit, and a refused thread only makes it slower.

Two ways to wait for another thread, neither of them for longer than asked: a latch, and a mailbox.

They wait for a bare lock, and nothing else of the standard library does for that:

- `threading.Event` and `concurrent.futures.Future` wait inside a `threading.Condition`, whose lock stays taken if a
  KeyboardInterrupt lands between its acquisition and the `with` block; the thread that would set them then hangs too.
- `queue.SimpleQueue.get(timeout=...)` waits for ever before Python 3.13 if the thread is held up, or a signal is
  handled, until the time is over: what is left of it is negative then.

What a forked child makes anew, having none of its parent's threads: what a process shares, and guards.

An attribute that is made when it is first asked for, without a lock.

`functools.cached_property` of Python 3.11 has one lock for all objects. A child that is forked while any thread of its
parent makes such an attribute finds it taken for ever.

Keeps the garbage collector quiet for a moment in which many objects are made, all of which stay.
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
from typing import Any, Generic, Protocol, Self, TypeVar, overload

from jaxckpt_train.errors import CheckpointTimeoutError

_guard = threading.RLock()
_threshold = 0  # that is to be set again when the pause ends; 0: there is none
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_guarded: weakref.WeakSet[Guarded] = weakref.WeakSet()
# A signal that comes just before a wait begins does not end it: Python sees the signal when it next looks.
LOOK_S = 1.0
# What a training step computes goes before what a save does beside it; the full share is left where nothing else runs.
NICENESS = 10
TELL_S, GIVE_UP_S = 60.0, 600.0
MOMENT_S = 2.0  # for what is under way to end, after an interrupt
MOST_LOST = 64
_log = logging.getLogger("jaxckpt_train")
R = TypeVar("R")


class _Pause:
    """One pause. If an interrupt keeps it from ending, the next one does that: when nothing refers to it any more."""

    def begin(self) -> None:
        """Pause, unless the collector is off anyway, or paused by another thread."""
        global _current, _threshold
        with _guard:
            if _current() is None:
                _go_on()
                if gc.isenabled():
                    _current = weakref.ref(self)
                    _threshold = gc.get_threshold()[0]
                    gc.set_threshold(0)

    def end(self) -> None:
        """Go on as before."""
        global _current
        with _guard:
            if _current() is self:
                _go_on()
                _current = _nobody


def _go_on() -> None:
    global _threshold
    if _threshold and not gc.get_threshold()[0]:  # else someone has set another meanwhile
        gc.set_threshold(_threshold)
    _threshold = 0


def _nobody() -> _Pause | None:
    return None


_current = _nobody


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """No collection within, unless another thread is within: for fractions of a second beside what is waited for.

    A full collection looks at every object of the process, of which JAX alone has some hundred thousands; the records
    of a few thousand leaves set one off, which takes longer than all else that is done with them.

    It is the threshold that pauses: a loop may call `gc.disable()` meanwhile, and finds it as it has left it. (Not so a
    threshold of 0 that it sets meanwhile, or one that it has read meanwhile and sets later.)
    """
    pause = _Pause()
    try:
        pause.begin()
        yield
    finally:
        pause.end()


def _go_on_in_child() -> None:
    """A forked child lacks the thread that would end the pause."""
    global _guard, _current
    _guard, _current = threading.RLock(), _nobody
    _go_on()


os.register_at_fork(after_in_child=_go_on_in_child)


class made_once(Generic[T]):  # noqa: N801  # as `property`
    """Decorates a method. Threads that ask for the first time at once may all make it; one of what they made stays."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> T | Self:
        if instance is None:
            return self
        made: T = vars(instance).setdefault(self._name, self._make(instance))
        return made


class PerProcess(Generic[K, V]):
    """Makes the thing for a key when it is first asked for. A forked child makes its own.

    The child has none of its parent's threads; what these held, a lock or a lent buffer, is held for ever there.
    """

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._made: dict[K, V] = {}
        self._lock = threading.RLock()  # a signal's handler may ask while this thread makes one

    def get(self, key: K) -> V:
        """The thing for this key, the same one at every call."""
        with self._lock:
            if key not in self._made:
                made = self._make(key)
                self._made.setdefault(key, made)  # a handler's own stays
            return self._made[key]


class Guarded(Protocol):
    """What threads use one after the other, each as often within as it likes."""

    _guard: Any


def free_in_child(guarded: Guarded) -> None:
    """Have a forked child find it free, whoever had it in the parent: that thread is not there, and lets nobody in."""
    _guarded.add(guarded)


def _free() -> None:
    for guarded in list(_guarded):
        guarded._guard = threading.RLock()


os.register_at_fork(after_in_child=_free)


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
