"""Run blocking file-system calls on helper threads, with a timeout."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

from jaxckpt_train.errors import CheckpointTimeoutError, StorageError
from jaxckpt_train.store.backends.base import Source
from jaxckpt_train.store.threads import GIVE_UP_S, POLL_S, WARN_S, Latch, PerProcess

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")
MAX_ABANDONED = 128
_local = threading.local()


class BackgroundCall(Generic[T]):
    """A call that runs on a helper thread.

    Args:
        call: what to run; it gets a function to call whenever it makes progress.
        undo: reverts a result that arrives after the call was abandoned.
        then: called when the call is done, on any thread.
    """

    def __init__(
        self,
        call: Callable[[Callable[[], None]], T],
        undo: Callable[[T], object] | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        self._call, self._undo, self._then = call, undo, then
        self._result: list[T] = []
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.progress = 0
        self.is_done = Latch()

    def _report_progress(self) -> None:
        self.progress += 1

    def run(self) -> None:
        """Run the call; keep its result or error until it is taken."""
        try:
            self._result.append(self._call(self._report_progress))
        except BaseException as error:  # noqa: BLE001  # take() raises it on the waiting thread
            self._error = error
        finally:
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
    return getattr(_local, "call_started_s", None)


class _HelperThread:
    """A daemon thread that runs calls in order; it does not return from a call to a disk that never responds."""

    def __init__(self, idle: deque[_HelperThread]) -> None:
        self._idle = idle
        self._calls: queue.SimpleQueue[BackgroundCall[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="jaxckpt-ask", daemon=True).start()

    def submit(self, pending: BackgroundCall[Any]) -> None:
        self._calls.put(pending)

    def _work(self) -> None:
        while True:
            pending, _local.call_started_s = self._calls.get(), time.monotonic()
            try:
                pending.run()
            except BaseException:  # noqa: BLE001  # of an `undo`, which no thread waits for
                _log.exception("a storage operation that finished too late could not be undone")
            self._idle.append(self)  # before the waiting thread wakes up, which can then use this thread again
            pending.finish()
            del pending, _local.call_started_s


class _HelperThreads:
    """The helper threads of this process: the idle ones, and the abandoned calls."""

    def __init__(self, _: None) -> None:
        self.idle: deque[_HelperThread] = deque()
        self._abandoned: set[BackgroundCall[Any]] = set()

    def abandon(self, pending: BackgroundCall[Any]) -> None:
        self._abandoned.add(pending)

    def abandoned_count(self) -> int:
        """How many abandoned calls have not returned yet."""
        for pending in list(self._abandoned):
            if pending.is_done.is_open():
                self._abandoned.discard(pending)
        return len(self._abandoned)


_threads = PerProcess(_HelperThreads)


def call_with_timeout(
    subject: str,
    call: Callable[[Callable[[], None]], T],
    progress: Callable[[int], object] | None = None,
    *,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Run a blocking call on a helper thread and return its result or raise its error.

    If the system has no thread for it, it runs on the calling thread. A helper thread whose disk does not respond is
    abandoned. Once `MAX_ABANDONED` calls have not returned, no more are started.

    Args:
        subject: the file or directory concerned, for messages.
        call: what to run; it gets a function to call whenever it makes progress.
        progress: called with 0 at least once a second. Its error ends the wait, and so does an interrupt. The call goes
            on then, so it must not change anything that its caller uses.
        undo: called on another thread with a result that arrives after the wait has ended. Without it, `call` must not
            create anything that lasts.

    Raises:
        CheckpointTimeoutError: the storage made no progress for ten minutes in which this process was awake; or too
            many earlier calls have not returned.
    """
    if (left := _threads.get(None).abandoned_count()) >= MAX_ABANDONED:
        raise CheckpointTimeoutError(f"{subject}: not accessed, because {left} earlier storage calls did not return")
    pending = start_call(BackgroundCall(call, undo))
    try:
        _wait_for(pending, subject, progress)
    except BaseException:
        abandon_call(pending)
        raise
    return pending.take()


def start_call(pending: BackgroundCall[T]) -> BackgroundCall[T]:
    """Start a call on a helper thread; if the system has none, run it now.

    The caller must take the result, or abandon the call.
    """
    if not _is_started(pending):
        pending.run()
        pending.finish()
    return pending


def _wait_for(pending: BackgroundCall[Any], subject: str, progress: Callable[[int], object] | None) -> None:
    stall = StallDetector(subject)
    while not pending.is_done.wait(POLL_S):
        if progress is not None:
            progress(0)
        stall.waited(POLL_S, pending.progress)


class StallDetector:
    """Counts how long a storage call has made no progress; warns, and raises after ten minutes.

    Args:
        subject: the file or directory concerned, for messages.
    """

    def __init__(self, subject: str) -> None:
        self._subject, self._progress, self._still_s, self._warn_s = subject, 0, 0.0, WARN_S

    def waited(self, seconds: float, progress: int) -> None:
        """Record a wait of `seconds`, in which this process was awake, and the progress by then.

        Raises:
            CheckpointTimeoutError: there was no progress for ten minutes.
        """
        self._still_s += seconds
        if progress != self._progress:
            self._progress, self._still_s, self._warn_s = progress, 0.0, WARN_S
        if self._still_s >= GIVE_UP_S:
            raise CheckpointTimeoutError(f"{self._subject}: the storage has not responded for {self._still_s:.0f} s")
        if self._still_s >= self._warn_s:
            _log.warning("%s: the storage has not responded for %.0f s", self._subject, self._still_s)
            self._warn_s += WARN_S


def abandon_call(pending: BackgroundCall[T]) -> None:
    """Stop waiting for a call; if its result has arrived already, undo it on a helper thread."""
    _threads.get(None).abandon(pending)
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
    pending = BackgroundCall(lambda _: call())
    if not _is_started(pending):
        pending.run()
    elif not pending.is_done.wait(POLL_S):
        _threads.get(None).abandon(pending)


def _is_started(pending: BackgroundCall[Any]) -> bool:
    idle = _threads.get(None).idle
    try:
        thread = idle.pop()
    except IndexError:
        try:
            thread = _HelperThread(idle)
        except RuntimeError:  # the system refuses a thread
            return False
    thread.submit(pending)
    return True
