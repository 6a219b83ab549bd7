"""Reads boxes on other threads before their turn comes to be written elsewhere, into memory that is used again."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.store.answers import Patience, Question, leave, put
from jaxckpt_train.store.box_to_come import BoxToCome
from jaxckpt_train.store.latch import LOOK_S
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.staging import fresh_area

LEAST_BYTES = 1 << 20  # a smaller box is read when its turn comes, with small ones that come after it
TOGETHER_BYTES, TOGETHER = 4 << 20, 1024  # of such boxes
AT_ONCE = 2
T = TypeVar("T")


class BoxAhead:
    """A box of a `ReadAhead`: an array to come, as writers take it."""

    def __init__(self, ahead: ReadAhead, box: BoxToCome) -> None:
        self._ahead, self.box = ahead, box
        self.shape, self.dtype, self.size, self.nbytes = box.shape, box.dtype, box.size, box.nbytes
        self.question: Question[np.ndarray] | None = None
        self.together: tuple[_Together, int] | None = None

    def fetch(self) -> np.ndarray:
        """Wait until it is read; raises as `read_box`, and as `ReadAhead.fetch`."""
        return self._ahead.fetch(self)


class ReadAhead:
    """Boxes of a checkpoint, read about in the order in which they will be wanted.

    Reads that have begun and what they gave take the budget at most, but for one that is wanted at once: that waits for
    nobody. Small ones are beside that: some `TOGETHER_BYTES`, and the memory of those that are still held.
    Use it as a context manager: it reads nothing more at its end.

    Args:
        budget_bytes: how much memory is lent at a time.
        subject: what is read, for messages about a disk that does not answer.
        at_once: how many are being read, or wait to be fetched, at a time.
        decoding: how many times its own size a box takes beside that while it is read; this is of the budget, too.
    """

    def __init__(self, budget_bytes: int, subject: str, at_once: int = AT_ONCE, decoding: int = 0) -> None:
        self._subject, self._at_once, self._decoding = subject, at_once, decoding
        self._waiting, self._begun, self._small = deque[BoxAhead](), list[BoxAhead](), deque[BoxAhead]()
        self._wanted, self._is_given_up = list[Question[Any]](), False
        self._lock = threading.Lock()
        self._memory = _KeptMemory(budget_bytes)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._waiting.clear()
            self._small.clear()
            left = self._wanted + [each.question for each in self._begun if each.question is not None]
            self._begun, self._wanted = [], []
        for question in left:
            leave(question)

    def give_up(self) -> None:
        """Have whoever waits for a box wait no more, from any thread: perhaps its disk does not answer."""
        self._is_given_up = True

    def of(self, boxes: Sequence[BoxToCome]) -> list[BoxAhead]:
        """More boxes, which will be wanted after those before."""
        found = [BoxAhead(self, box) for box in boxes]
        for each in found:
            (self._small if each.nbytes < LEAST_BYTES else self._waiting).append(each)
        return found

    def order(self, key: Callable[[BoxAhead], int]) -> None:
        """Tell that those with a smaller key will be wanted first; before any is."""
        self._waiting, self._small = deque(sorted(self._waiting, key=key)), deque(sorted(self._small, key=key))

    def fetch(self, box: BoxAhead) -> np.ndarray:
        """Wait until a box is read.

        Raises:
            CheckpointTimeoutError: its disk does not answer, or it was given up.
        """
        if box.nbytes < LEAST_BYTES:
            together, place = self._together(box)
            self._wait_for(together.question)
            return together.take(place)
        with self._lock:
            question = box.question
            if question is None:
                question = self._put(_question(self._read(box.box)))
                self._waiting.remove(box)
            self._begin_more()
        self._wait_for(question)
        with self._lock:
            if box.question is not None:
                self._begun.remove(box)
            self._begin_more()
        return question.take()

    def _put(self, question: Question[T]) -> Question[T]:
        """Ask what is wanted at once; the lock is held."""
        self._wanted = [each for each in self._wanted if not each.is_answered.is_open()]
        self._wanted.append(question)
        return put(question)

    def _wait_for(self, question: Question[Any]) -> None:
        patience = Patience(self._subject)
        while not question.is_answered.wait(LOOK_S):
            if self._is_given_up:
                raise CheckpointTimeoutError(f"{self._subject}: a read has not ended, and is not waited for any more")
            patience.waited(LOOK_S, 0)

    def _together(self, box: BoxAhead) -> tuple[_Together, int]:
        """What a small box is read with, and its place in that: those that will be wanted next."""
        with self._lock:
            if box.together is None:
                at = self._small.index(box)  # 0 where they are wanted in their order
                most = min(TOGETHER, len(self._small) - at)
                self._small.rotate(-at)
                some, nbytes = list[BoxAhead](), 0
                while len(some) < most and nbytes < TOGETHER_BYTES:
                    some.append(self._small.popleft())
                    nbytes += some[-1].nbytes
                self._small.rotate(at)
                together = _Together([each.box for each in some])
                self._put(together.question)
                for place, each in enumerate(some):
                    each.together = together, place
            self._begin_more()
            assert box.together is not None
            return box.together

    def _begin_more(self) -> None:
        """Begin what there is room for; the lock is held."""
        while self._waiting and len(self._begun) < self._at_once:
            if not self._memory.has_room(self._waiting[0].nbytes * (1 + self._decoding)):
                return
            box = self._waiting.popleft()
            box.question = _question(self._read(box.box))
            self._begun.append(box)
            put(box.question)

    def _read(self, box: BoxToCome) -> Callable[[], np.ndarray]:
        """What reads a box; its memory is taken at once, and comes back when nothing refers to the array any more."""
        beside = box.nbytes * self._decoding
        self._memory.take_beside(beside)
        memory = self._memory.take(box.nbytes)

        def read() -> np.ndarray:
            try:
                box.read_into(memory)
            finally:
                self._memory.give_beside(beside)
            return memory.view(box.dtype).reshape(box.shape)

        return read


def _question(read: Callable[[], np.ndarray]) -> Question[np.ndarray]:
    return Question(lambda moved: read())


class _Together:
    """Boxes of which the first that is fetched has all of them read, by a question that is put once."""

    def __init__(self, boxes: Sequence[BoxToCome]) -> None:
        first, *others = boxes
        self.question = Question[Sequence[np.ndarray]](lambda moved: first.read_with(others))
        self._lock = threading.Lock()
        self._found: list[np.ndarray | None] = []
        self._error: BaseException | None = None

    def take(self, place: int) -> np.ndarray:
        """One of them, once the question is answered; it is not kept."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._found:
                try:
                    self._found = [*self.question.take()]
                except BaseException as error:  # for each of them: it can be taken once
                    self._error = error
                    raise
            found, self._found[place] = self._found[place], None
        assert found is not None
        return found


class _KeptMemory:
    """Buffers of arrays that come and go: what comes back is lent again, as its first touch costs more than to read."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget, self._lent, self._beside = budget_bytes, 0, 0
        self._returned, self._free = deque[mmap.mmap](), list[mmap.mmap]()
        self._over = deque[int]()  # of what was taken beside: other threads give it back

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more are within the budget, or nothing is lent."""
        self._take_back()
        return self._lent == 0 or self._lent + self._beside + size <= self._budget

    def take_beside(self, size: int) -> None:
        """So many bytes are about to be used beside what is lent."""
        self._beside += size

    def give_beside(self, size: int) -> None:
        """They are used no more."""
        self._over.append(size)

    def take(self, size: int) -> np.ndarray:
        """A flat uint8 array at a page boundary, with whatever was in it."""
        self._take_back()
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fitting = [area for area in self._free if rounded <= len(area) <= 2 * rounded]
        if fitting:
            area = min(fitting, key=len)
            self._free.remove(area)
        else:
            self._forget(rounded)
            area = fresh_area(rounded)
        self._lent += len(area)
        array = np.frombuffer(area, np.uint8, size)
        weakref.finalize(array, self._returned.append, area).atexit = False
        return array

    def _take_back(self) -> None:
        while self._over:
            self._beside -= self._over.popleft()
        while self._returned:
            area = self._returned.popleft()
            self._lent -= len(area)
            self._free.append(area)
        self._forget(0)

    def _forget(self, more: int) -> None:
        """Let go of free ones that would be beyond the budget, with so many bytes more."""
        while self._free and self._lent + self._beside + sum(map(len, self._free)) + more > self._budget:
            self._free.pop(0)
