"""Notes in the history when a process of a run begins, how far it has come now and then, and how it ends."""

from __future__ import annotations

import datetime
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt_train.pending import call_within
from jaxckpt_train.steps.attempts import CLOSED
from jaxckpt_train.steps.history import History
from jaxckpt_train.steps.run_facts import run_facts
from jaxckpt_train.store.machine import ProcessIdentity, process_age_s
from jaxckpt_train.store.reader import Progress

# Between two notes of how far it has come: those of a month are some 4 MB.
LEAST_S, MOST_S, SHARE = 9.0, 60.0, 0.02
NOTE_S = 60.0  # that the loop waits for a disk to take a note
_resumes = itertools.count()  # counts the loops of this process that have had their state


class RunLog:
    """Of one process. A process that was killed has noted no end: the last note says how far it had come by then.

    Args:
        history: of the run.
        clock: the time, with a time zone.
        monotonic: the time in seconds.

    Attributes:
        completed: how many updates are complete; None: nobody has said.
        tends: whether the process takes the run for a command, and has no loop.
        ends_as: how it ends: "closed", or what whoever knows better has set.
    """

    def __init__(
        self,
        history: History,
        clock: Callable[[], datetime.datetime],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history, self._clock, self._monotonic = history, clock, monotonic
        self.completed: int | None = None
        self.ends_as, self.tends = CLOSED, False
        self._began_at: float | None = None
        self._noted: tuple[float, int | None] = (0.0, None)

    def took_over(self, dead: ProcessIdentity) -> None:
        """The process takes the run from an owner that has died."""
        self._history.add("take_over", self._clock(), host=dead.host, pid=dead.pid)

    def deleted(self, name: str) -> None:
        """A step directory is not there under this name any more."""
        self._history.add("delete", self._clock(), name=name)

    def started(self, step: int | None = None) -> None:
        """The process owns the run; `step`: that it has restored before."""
        self._began_at = self._monotonic()
        self._noted = self._began_at, None
        self._note("start", {"step": step, "tends": self.tends or None, **run_facts()})

    def resumed(self, step: int, resume_s: float, progress: Progress | None = None) -> None:
        """The loop has its state, that of this step, so many seconds after it has begun to look for it.

        `progress` is called with 0 while the disk is waited for; what it raises ends the wait.
        """
        if self._began_at is not None:
            self.completed = step
            self._noted = self._monotonic(), step
            is_first = next(_resumes) == 0  # what came before belongs to the loop that came first
            age_s = process_age_s() if is_first else None
            self._note("resumed", {"step": step, "resume_s": resume_s, "process_age_s": age_s}, progress)

    def _note(self, event: str, fields: Mapping[str, Any], progress: Progress | None = None) -> None:
        """Note it on another thread: the disk may not answer, and the loop goes on then."""
        add = functools.partial(self._history.add, event, self._clock(), **fields)
        call_within(add, NOTE_S, progress or (lambda done: None))

    def beat(self) -> None:
        """Note how far the loop has come, if it has got further and the last note is old. Called every few seconds."""
        now, (at, step) = self._monotonic(), self._noted
        began_at, completed = self._began_at, self.completed  # other threads change them
        if began_at is None or completed in (None, step):
            return
        if now - at >= max(LEAST_S, min(MOST_S, SHARE * (now - began_at))):
            self._noted = now, completed
            self._history.add("progress", self._clock(), step=completed)

    def ended(self) -> None:
        """The process lets go of the run."""
        if self._began_at is not None:
            self._began_at = None
            self._history.add("end", self._clock(), how=self.ends_as, step=self.completed)
