"""Asks a disk on another thread, so that nobody has to wait for ever for one that does not answer."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

from jaxckpt_train.errors import CheckpointTimeoutError, StorageError
from jaxckpt_train.store.backend import Source
from jaxckpt_train.store.latch import LOOK_S, Latch
from jaxckpt_train.store.per_process import PerProcess
from jaxckpt_train.store.workers import GIVE_UP_S, TELL_S

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")


class Question(Generic[T]):
    """What is asked of a disk. Whoever asks calls `moved` whenever it has answered in part."""

    def __init__(self, ask: Callable[[Callable[[], None]], T]) -> None:
        self._ask = ask
        self._answer: list[T] = []
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

    def take(self) -> T:
        """The answer; the error is raised, and not kept: its traceback holds what was being done."""
        error, self._error = self._error, None
        if error is None:
            return self._answer.pop()
        try:
            raise error
        finally:
            del error


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
            question = self._questions.get()
            question.ask()
            self._idle.append(self)  # before it is told: who asks the next question need not start another thread
            question.is_answered.open()
            del question


def _none_idle(_: None) -> deque[_Thread]:
    return deque()


_idle_threads = PerProcess(_none_idle)


def answer_of(
    subject: str, ask: Callable[[Callable[[], None]], T], progress: Callable[[int], object] | None = None
) -> T:
    """What `ask` returns or raises, called on another thread; where the system has none, on this one.

    Args:
        subject: the file or directory that is asked for, for messages.
        ask: is given a function that it calls whenever the disk has answered in part.
        progress: called with 0 at least once a second; what it raises ends the wait, and so does an interrupt. What was
            asked goes on then, so it must change nothing that its asker uses.

    Raises:
        CheckpointTimeoutError: the disk has not answered for ten minutes, in which this process was awake.
    """
    question = Question(ask)
    if not _is_put(question):
        question.ask()
        return question.take()
    parts, still_s, tell_s = 0, 0.0, TELL_S
    while not question.is_answered.wait(LOOK_S):
        still_s += LOOK_S
        if progress is not None:
            progress(0)
        if question.parts != parts:
            parts, still_s, tell_s = question.parts, 0.0, TELL_S
        if still_s >= GIVE_UP_S:
            raise CheckpointTimeoutError(f"{subject}: its disk has not answered for {still_s:.0f} s")
        if still_s >= tell_s:
            _log.warning("%s: its disk has not answered for %.0f s", subject, still_s)
            tell_s += TELL_S
    return question.take()


def have_closed(files: Collection[Source]) -> None:
    """Have files closed that a load left open, and wait for a moment: perhaps their disk does not answer."""
    if not files:
        return

    def close(moved: Callable[[], None]) -> None:
        for file in files:
            with contextlib.suppress(StorageError, OSError):
                file.close()

    question = Question(close)
    if _is_put(question):
        question.is_answered.wait(LOOK_S)
    else:
        question.ask()


def _is_put(question: Question[Any]) -> bool:
    idle = _idle_threads.get(None)
    try:
        thread = idle.pop()
    except IndexError:
        try:
            thread = _Thread(idle)
        except RuntimeError:  # the system has no thread for it
            return False
    thread.put(question)
    return True
