"""Asks a disk on another thread, so that nobody has to wait for ever for one that does not answer."""

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
from jaxckpt_train.store.threads import GIVE_UP_S, LOOK_S, TELL_S, Latch, PerProcess

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")
MOST_LEFT = 128
_here = threading.local()


class Question(Generic[T]):
    """What is asked of a disk. Whoever asks calls `moved` whenever it has answered in part.

    Args:
        ask: asks it.
        undo: what is done about an answer that comes when nobody waits for it any more.
        then: called once it is answered, from any thread.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[], None]], T],
        undo: Callable[[T], object] = lambda answer: None,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        self._ask, self._undo, self._then = ask, undo, then
        self._answer: list[T] = []
        self._is_left = False
        self._error: BaseException | None = None
        self.parts = 0
        self.is_answered = Latch()

    def _moved(self) -> None:
        self.parts += 1

    def ask(self) -> None:
        """Ask it; the answer, or the error, is kept until it is taken."""
        try:
            self._answer.append(self._ask(self._moved))
        except BaseException as error:  # noqa: BLE001  # a thread's edge: raised by take()
            self._error = error
        finally:
            del self._ask  # with all that it holds
        if self._is_left:
            self.undo()

    def have_answered(self) -> None:
        """Let whoever waits for it go on."""
        self.is_answered.open()
        self._then()

    def leave(self) -> bool:
        """Say that nobody waits any more; whether there is an answer already, which is to be undone."""
        self._is_left = True  # first: an answer that comes from now on is undone where it comes
        self._error = None
        return bool(self._answer)

    def undo(self) -> None:
        """Undo the answer, unless another thread does."""
        self._error = None
        with contextlib.suppress(IndexError):
            self._undo(self._answer.pop())

    def take(self) -> T:
        """The answer; the error is raised, and not kept: its traceback holds what was being done."""
        error, self._error = self._error, None
        if error is None:
            return self._answer.pop()
        try:
            raise error
        finally:
            del error


def asks_since() -> float | None:
    """When this thread has begun to ask what it asks, by `time.monotonic()`; None: it asks nothing."""
    return getattr(_here, "asks_since", None)


class _Thread:
    """A daemon thread that asks one question after the other; where a disk never answers it does not come back."""

    def __init__(self, idle: deque[_Thread]) -> None:
        self._idle = idle
        self._questions: queue.SimpleQueue[Question[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="jaxckpt-ask", daemon=True).start()

    def put(self, question: Question[Any]) -> None:
        self._questions.put(question)

    def _work(self) -> None:
        while True:
            question, _here.asks_since = self._questions.get(), time.monotonic()
            try:
                question.ask()
            except BaseException:  # noqa: BLE001  # a thread's edge: it is of an `undo`, which nobody waits for
                _log.exception("an answer of a disk that came too late could not be undone")
            self._idle.append(self)  # before it is told: who asks the next question need not start another thread
            question.have_answered()
            del question, _here.asks_since


class _Threads:
    """Those of this process: which wait to be asked, and what was asked and is waited for by nobody but them."""

    def __init__(self, _: None) -> None:
        self.idle: deque[_Thread] = deque()
        self._left: set[Question[Any]] = set()

    def leave(self, question: Question[Any]) -> None:
        self._left.add(question)

    def left(self) -> int:
        """How many of them wait for disks that have not answered yet."""
        for question in list(self._left):
            if question.is_answered.is_open():
                self._left.discard(question)
        return len(self._left)


_threads = PerProcess(_Threads)


def call_with_timeout(
    subject: str,
    ask: Callable[[Callable[[], None]], T],
    progress: Callable[[int], object] | None = None,
    *,
    undo: Callable[[T], object] = lambda answer: None,
) -> T:
    """What `ask` returns or raises, called on another thread; where the system has none, on this one.

    A thread whose disk does not answer is left to itself. Once there are `MOST_LEFT` of these nothing more is asked.

    Args:
        subject: the file or directory that is asked for, for messages.
        ask: is given a function that it calls whenever the disk has answered in part.
        progress: called with 0 at least once a second; what it raises ends the wait, and so does an interrupt. What was
            asked goes on then, so it must change nothing that its asker uses.
        undo: called with an answer that comes when nobody waits for it any more, on another thread. Without it `ask`
            must make nothing that lasts.

    Raises:
        CheckpointTimeoutError: the disk has not answered for ten minutes, in which this process was awake; or so many
            other questions have no answer yet that no more are asked.
    """
    if (left := _threads.get(None).left()) >= MOST_LEFT:
        raise CheckpointTimeoutError(f"{subject}: not asked for, as disks have not answered {left} questions before")
    question = put(Question(ask, undo))
    try:
        _wait_for(question, subject, progress)
    except BaseException:
        leave(question)
        raise
    return question.take()


def put(question: Question[T]) -> Question[T]:
    """Have another thread begin to ask it; where the system has none, it is answered already.

    Whoever does so takes the answer once there is one, or says that it is not waited for any more.
    """
    if not _is_put(question):
        question.ask()
        question.have_answered()
    return question


def _wait_for(question: Question[Any], subject: str, progress: Callable[[int], object] | None) -> None:
    patience = StallDetector(subject)
    while not question.is_answered.wait(LOOK_S):
        if progress is not None:
            progress(0)
        patience.waited(LOOK_S, question.parts)


class StallDetector:
    """For how long a disk that was asked has not answered.

    Args:
        subject: the file or directory that it was asked for, for messages.
    """

    def __init__(self, subject: str) -> None:
        self._subject, self._parts, self._still_s, self._tell_s = subject, 0, 0.0, TELL_S

    def waited(self, seconds: float, parts: int) -> None:
        """So long again, in which this process was awake; by then the disk has answered so many parts.

        Raises:
            CheckpointTimeoutError: it has not answered for ten minutes.
        """
        self._still_s += seconds
        if parts != self._parts:
            self._parts, self._still_s, self._tell_s = parts, 0.0, TELL_S
        if self._still_s >= GIVE_UP_S:
            raise CheckpointTimeoutError(f"{self._subject}: its disk has not answered for {self._still_s:.0f} s")
        if self._still_s >= self._tell_s:
            _log.warning("%s: its disk has not answered for %.0f s", self._subject, self._still_s)
            self._tell_s += TELL_S


def leave(question: Question[T]) -> None:
    """Do not wait for it any more; an answer that is there is undone, for which its disk is asked once more."""
    _threads.get(None).leave(question)
    if question.leave():
        _have_done(question.undo)


def have_closed(files: Collection[Source]) -> None:
    """Have files closed that a load left open, and wait for a moment: perhaps their disk does not answer."""
    if not files:
        return

    def close() -> None:
        for file in files:
            with contextlib.suppress(StorageError, OSError):
                file.close()

    _have_done(close)


def _have_done(call: Callable[[], None]) -> None:
    question = Question(lambda moved: call())
    if not _is_put(question):
        question.ask()
    elif not question.is_answered.wait(LOOK_S):
        _threads.get(None).leave(question)


def _is_put(question: Question[Any]) -> bool:
    idle = _threads.get(None).idle
    try:
        thread = idle.pop()
    except IndexError:
        try:
            thread = _Thread(idle)
        except RuntimeError:  # the system has no thread for it
            return False
    thread.put(question)
    return True
