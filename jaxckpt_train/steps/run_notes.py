"""What is noted of a run: pins and metrics of its steps, how its processes begin and end, and what came of them all."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.attempts import Attempt, hear, settled
from jaxckpt_train.steps.goodput import Goodput, goodput
from jaxckpt_train.steps.history import History, metrics_to_json, plain_metrics
from jaxckpt_train.steps.listing import StepListing
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.steps.run_events import RunEvent
from jaxckpt_train.steps.step_names import check_step
from jaxckpt_train.steps.step_save import Clock
from jaxckpt_train.steps.together import Together
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.value_checks import flag


class RunNotes(StepListing, abc.ABC):
    """The part of `StepManager` that writes notes and history; in a job process 0 does that for all.

    Attributes:
        history: of the run, `history.jsonl` in its directory.
    """

    settings: StoreSettings

    def __init__(self, directory: str, run: RunDirectory, together: Together, clock: Clock) -> None:
        super().__init__(directory, together.known)
        self._run, self._together, self._clock = run, together, clock
        self.history: History = run.history

    @property
    def leads(self) -> bool:
        """Whether this process writes for all: the only one, or process 0 of a job."""
        return self._together.leads

    @abc.abstractmethod
    def _check_open(self) -> None:
        """Raise SettingsError if it is closed."""

    @abc.abstractmethod
    def _replace_idle(self) -> None:
        """Close older managers of this directory that nobody uses any more."""

    def pin(self, step: int, pinned: bool = True) -> None:
        """Keep a step whatever the preservation policy says; `pinned=False` lets it go again.

        Raises:
            StepNotFoundError: there is no such step.
        """
        self._note(step, lambda: {"pin": flag("pin: pinned", pinned)})

    def attach_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a committed step, such as those of an evaluation that ended later.

        Raises:
            StepNotFoundError: there is no such step.
        """
        self._note(step, lambda: {"metrics": metrics_to_json(plain_metrics(metrics))})

    def _note(self, step: int, note: Callable[[], Mapping[str, Any]]) -> None:
        self._check_open()
        self._replace_idle()
        self._together.hold()

        def write() -> None:
            found = check_step(step), note()
            answer_of(self.directory, lambda moved: self._run.note_step(*found))

        self._together.led(f"noting of step {step}", write, time.monotonic)

    def note_preemption(self, step: int | None, reason: str, plan: str | None = None) -> None:
        """Write into the history that the run was asked to leave, which step is saved, and what was chosen to do."""
        if self._together.leads:
            self.history.add("preempted", self._clock(), step=step, reason=reason, plan=plan)

    def retain(self) -> None:
        """Let go now of what the preservation policy does not keep any more; else the next commit does.

        Raises:
            DirectoryLockedError, StorageError: a live process owns the directory, or it cannot be taken.
        """
        self._check_open()
        self._replace_idle()
        self._together.retain(is_durable=self.settings.durability == "full")

    def note_resume(self, step: int, resume_s: float, progress: Progress | None = None) -> None:
        """Write into the history that the loop has its state: that of this step, 0: none was restored.

        Args:
            step: number of completed updates.
            resume_s: seconds since the loop began to look for it.
            progress: called with 0 while the disk is waited for, a minute at most; what it raises ends the wait.
        """
        if self._together.leads:
            self._run.log.resumed(step, resume_s, progress)

    def ends_as(self, how: str) -> None:
        """What the history is to say of how this process has ended: "finished", "preempted", or an error."""
        self._run.log.ends_as = how

    def goodput(self) -> Goodput:
        """Which part of the run's time went into updates that count, over all its processes so far.

        Raises:
            CorruptCheckpointError, StorageError: the history cannot be read.
            CheckpointTimeoutError: its disk has not answered for ten minutes.
        """
        running = (self._run.log.completed, self._clock()) if self._run.is_owner else None

        def read(moved: Callable[[], None]) -> tuple[list[Attempt], bool]:
            lock, found = self._run.held.lock, list[Attempt]()
            was_live = lock.is_anybodys()
            for number, event in enumerate(self.history.each(RunEvent)):
                hear(found, event)
                if number % 10_000 == 0:
                    moved()
            return found, was_live or lock.is_anybodys()  # one may begin meanwhile, and one that ends says so first

        found, is_live = answer_of(self.directory, read)
        return goodput(settled(found, running, is_live=is_live))
