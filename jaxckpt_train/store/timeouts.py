"""Run blocking storage calls on helper threads, with a timeout.

`time_limited` marks an operation that may meet a storage that does not respond: its callers call it plainly.
`report_progress` states that one is not stuck.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Generic, ParamSpec, TypeVar

from jaxckpt_train.errors import CheckpointTimeoutError, StorageError
from jaxckpt_train.store.backends.base import Source
from jaxckpt_train.store.threads import POLL_S, Latch, PerProcess, StallDetector, check_interrupt

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")
P = ParamSpec("P")
MAX_ABANDONED = 128


class _Local(threading.local):
    call: BackgroundCall[Any] | None = None  # that this thread runs as a helper


_local = _Local()


class BackgroundCall(Generic[T]):
    """A call that runs on a helper thread.

    `undo` reverts a result that arrives after the call was abandoned. `then` is called when the call is done, on any
    thread. `progress` changes whenever the call reports progress. `started_s` is by `time.monotonic()`.
    """

    def __init__(
        self,
        call: Callable[[], T],
        undo: Callable[[T], object] | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._call, self._undo, self._then = call, undo, then
        self._result: list[T] = []
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.progress, self.started_s = 0, 0.0
        self.is_done = Latch()

    def run(self) -> None:
        """Run the call, and keep its result or error."""
        outer, _local.call, self.started_s = _local.call, self, time.monotonic()
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001  # take() raises it on the waiting thread
            self._error = error
        finally:
            _local.call = outer
            del self._call  # release its resources
        if self._is_abandoned:
            self.undo()

    def finish(self) -> None:
        """Wake the waiting thread."""
        self.is_done.open()
        if self._then is not None:
            self._then()

    def abandon(self) -> bool:
        """Abandon the call; returns whether there is a result already, which has to be undone."""
        self._is_abandoned = True  # first: from now on the helper thread undoes a result itself
        self._error = None
        return bool(self._result)

    def undo(self) -> None:
        """Undo the result, unless another thread does."""
        self._error = None
        with contextlib.suppress(IndexError):
            result = self._result.pop()
            if self._undo is not None:
                self._undo(result)

    def take(self) -> T:
        """The result; or raise the error, which is removed because its traceback refers to the call's resources."""
        error, self._error = self._error, None
        if error is None:
            return self._result.pop()
        try:
            raise error
        finally:
            del error


def call_started_s() -> float | None:
    """When the current call of this helper thread started, by `time.monotonic()`; None on any other thread."""
    return None if _local.call is None else _local.call.started_s


def report_progress() -> None:
    """Report that the current storage call has made progress; does nothing outside of such a call."""
    if _local.call is not None:
        _local.call.progress += 1


class _HelperThread:
    """A daemon thread that runs calls in order; it does not return from a call to a disk that never responds."""

    def __init__(self, idle: deque[_HelperThread]) -> None:
        self._idle = idle
        self.calls: queue.SimpleQueue[BackgroundCall[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="jaxckpt-ask", daemon=True).start()

    def _work(self) -> None:
        while True:
            pending = self.calls.get()
            try:
                pending.run()
            except BaseException:  # noqa: BLE001  # of an `undo`, which no thread waits for
                _log.exception("a storage operation that finished too late could not be undone")
            self._idle.append(self)  # before the waiting thread wakes up, which can then use this thread again
            pending.finish()
            del pending


class _HelperThreads:
    """The idle helper threads of this process, and the abandoned calls."""

    def __init__(self, _: None) -> None:
        self.idle: deque[_HelperThread] = deque()
        self.abandoned: set[BackgroundCall[Any]] = set()

    def abandoned_count(self) -> int:
        """How many abandoned calls have not returned yet."""
        for pending in list(self.abandoned):
            if pending.is_done.is_open():
                self.abandoned.discard(pending)
        return len(self.abandoned)


_threads = PerProcess(_HelperThreads)


def call_with_timeout(subject: str, call: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Run a blocking call on a helper thread and return its result or raise its error.

    If the system has no thread for it, or this is a helper thread already, it runs on the calling thread. A helper
    thread whose disk does not respond is abandoned. Once `MAX_ABANDONED` calls have not returned, no more are started.

    The call goes on after an interrupt of the wait, or an error of `interruptible`, so it must not change anything that
    its caller uses. `undo` is called on another thread with a result that arrives after the wait has ended; without it,
    the call must not create anything that lasts.

    Raises CheckpointTimeoutError: the storage made no progress for ten minutes in which this process was awake; or too
    many earlier calls have not returned.
    """
    if _local.call is not None:  # the thread that waits for this one has a time limit
        return call()
    if (left := _threads.get(None).abandoned_count()) >= MAX_ABANDONED:
        raise CheckpointTimeoutError(f"{subject}: not accessed, because {left} earlier storage calls did not return")
    pending = start_call(BackgroundCall(call, undo))
    try:
        stall = StallDetector(subject, pending.progress)
        while not pending.is_done.wait(POLL_S):
            check_interrupt()
            stall.waited(POLL_S, pending.progress)
    except BaseException:
        abandon_call(pending)
        raise
    return pending.take()


def time_limited(operation: Callable[P, T]) -> Callable[P, T]:
    """Decorate a storage operation so that it runs by `call_with_timeout`, which says what it must not do.

    The subject of messages is its first argument that is a path or has a path as its attribute `directory`;
    without one, its name.
    """

    @functools.wraps(operation)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        paths = (each if isinstance(each, str) else getattr(each, "directory", None) for each in args)
        subject = next((path for path in paths if isinstance(path, str)), operation.__name__)
        return call_with_timeout(subject, functools.partial(operation, *args, **kwargs))

    return limited


def start_call(pending: BackgroundCall[T]) -> BackgroundCall[T]:
    """Start a call, whose result must be taken or abandoned, on a helper thread; if the system has none, run it now."""
    if not _is_started(pending):
        pending.run()
        pending.finish()
    return pending


def abandon_call(pending: BackgroundCall[T]) -> None:
    """Stop waiting for a call; if its result has arrived already, undo it on a helper thread."""
    _threads.get(None).abandoned.add(pending)
    if pending.abandon():
        _run_briefly(pending.undo)


def close_files(files: Collection[Source]) -> None:
    """Close files that a load left open, on a helper thread; wait only briefly, as the disk may not respond."""
    if not files:
        return

    def close() -> None:
        for file in files:
            with contextlib.suppress(StorageError, OSError):
                file.close()

    _run_briefly(close)


def _run_briefly(call: Callable[[], None]) -> None:
    pending = BackgroundCall(call)
    if not _is_started(pending):
        pending.run()
    elif not pending.is_done.wait(POLL_S):
        _threads.get(None).abandoned.add(pending)


def _is_started(pending: BackgroundCall[Any]) -> bool:
    idle = _threads.get(None).idle
    try:
        thread = idle.pop()
    except IndexError:
        try:
            thread = _HelperThread(idle)
        except RuntimeError:  # the system refuses a thread
            return False
    thread.calls.put(pending)
    return True
