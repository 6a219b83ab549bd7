"""The outcome of a save as a future: no lock that an interrupt may leave taken keeps the save's thread from ending."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from jaxckpt_train.store.latch import LOOK_S, Latch

T = TypeVar("T")
_FINISHED = "FINISHED"  # as `concurrent.futures` calls it
_log = logging.getLogger("jaxckpt_train")


class Outcome(Future[T]):
    """A future that says when its error was seen, so that it need not be told again. Nothing here waits for a lock.

    `concurrent.futures.wait` and `as_completed` take that of the future, and wait for an event that has one too. A
    KeyboardInterrupt may leave either taken. So who sets the outcome waits for the first for a moment at most, and lets
    another thread set the events.

    Args:
        seen: called when somebody was handed the error, or that there is none.
    """

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self._seen = seen
        self._settled = Latch()
        self._calls: list[deque[Callable[[Future[T]], object]]] = []  # whoever takes one out of its deque calls it
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def __repr__(self) -> str:
        """As of any future."""
        return f"<{type(self).__name__} at {id(self):#x} state={'finished' if self.done() else 'running'}>"

    def done(self) -> bool:
        """As of any future."""
        return self._settled.is_open()

    def running(self) -> bool:
        """As of any future."""
        return not self.done()

    def cancelled(self) -> bool:
        """It never is."""
        return False

    def cancel(self) -> bool:
        """It cannot be."""
        return False

    def result(self, timeout: float | None = None) -> T:
        """As of any future."""
        error = self.exception(timeout)
        if error is None:
            return cast("T", self._result)
        try:
            raise error
        finally:
            del error, self  # of which the error would hold this frame, and this frame the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any future."""
        if not self._settled.wait(timeout):
            raise TimeoutError
        self._seen()
        return self._exception

    def error(self) -> BaseException | None:
        """What it has failed with by now, which does not count as seen."""
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """As of any future."""
        call = deque([fn])
        self._calls.append(call)
        if self.done():
            self._take_and_call(call)

    def set_result(self, result: T) -> None:
        """As of any future."""
        self._result = result
        self._settle()

    def set_exception(self, exception: BaseException | None) -> None:
        """As of any future."""
        self._exception = exception
        self._settle()

    def _settle(self) -> None:
        self._settled.open()
        for waiter in self._publish():
            tell = waiter.add_result if self._exception is None else waiter.add_exception
            try:
                threading.Thread(target=tell, args=(self,), name="jaxckpt-note", daemon=True).start()
            except RuntimeError:  # the system has no thread for it
                tell(self)
        for call in self._calls:  # also what is added meanwhile
            self._take_and_call(call)

    def _publish(self) -> list[Any]:
        """Say that it is done where `concurrent.futures.wait` looks; who waits there and has to be told.

        Its lock is held for as long as it looks: whoever holds it for longer was interrupted, and never gives it back.
        """
        condition = self._condition
        is_taken = condition.acquire(timeout=LOOK_S)
        self._state, waiters = _FINISHED, list(self._waiters)
        if is_taken:
            condition.release()
        else:
            self._condition = threading.Condition()  # for those who look from now on
        return waiters

    def _take_and_call(self, call: deque[Callable[[Future[T]], object]]) -> None:
        try:
            fn = call.pop()
        except IndexError:
            return
        try:
            fn(self)
        except BaseException as error:  # as any future does, which tells of errors, and lets interrupts pass
            if not isinstance(error, Exception):
                raise
            _log.exception("a callback of a save's `committed` failed")
