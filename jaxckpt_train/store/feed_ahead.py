"""Reads windows of a feed ahead, on other threads, while the thread that wants them does something else."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from jaxckpt_train.store.answers import Patience, Question, leave, put
from jaxckpt_train.store.latch import LOOK_S
from jaxckpt_train.store.share_feed import ShareFeed, Window


@dataclasses.dataclass(eq=False)
class _Begun:
    """A window, and how many reads are missing to it."""

    window: Window
    left: int


class FeedAhead:
    """Who has ordered windows looks now and then what has become of them, and waits only for files to be opened.

    The reads go on from one window to the next: a disk that has to wait for the end of each window stands still while
    what it gave is digested.

    Args:
        feed: which.
        threads: how many reads are under way at a time.
        then: called after each read, from any thread.
    """

    def __init__(self, feed: ShareFeed, threads: int, then: Callable[[], object]) -> None:
        self._feed, self._threads, self._then = feed, threads, then
        self._ordered = deque[tuple[_Begun, Callable[[], object]]]()
        self._asked = list[tuple[_Begun, Question[object]]]()
        self._begun = deque[_Begun]()
        self._patience, self._looked_at = Patience(feed.directory), time.monotonic()

    def order(self, target: np.ndarray, start: int, stop: int) -> None:
        """As `ShareFeed.begin`.

        Raises:
            CorruptCheckpointError, StorageError, CheckpointTimeoutError: with the first one the files are opened.
        """
        window, reads = self._feed.begin(target, start, stop)
        begun = _Begun(window, len(reads))
        self._begun.append(begun)
        self._ordered.extend((begun, read) for read in reads)

    def look(self) -> int:
        """Go on, and tell how many windows are complete that were not at the last look.

        Raises:
            CorruptCheckpointError, StorageError: what a read raised.
            CheckpointTimeoutError: the disk has not answered for ten minutes.
        """
        self._take_answers()
        while self._ordered and len(self._asked) < self._threads:
            begun, read = self._ordered.popleft()
            self._asked.append((begun, put(self._question(read))))
        complete = 0
        while self._begun and not self._begun[0].left:
            self._feed.finish(self._begun.popleft().window)
            complete += 1
        return complete

    def close(self) -> None:
        """Read nothing more, and close the feed."""
        self._feed.close()
        for _, question in self._asked:
            leave(question)

    def _question(self, read: Callable[[], object]) -> Question[object]:
        return Question(lambda _: read(), then=self._then)

    def _take_answers(self) -> None:
        for each in [each for each in self._asked if each[1].is_answered.is_open()]:
            self._asked.remove(each)  # first: an error leaves the others here, to be left by `close`
            begun, question = each
            question.take()
            begun.left -= 1
        now = time.monotonic()
        if self._asked:
            self._patience.waited(min(now - self._looked_at, LOOK_S), self._feed.reads)
        self._looked_at = now
