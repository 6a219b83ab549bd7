"""The part of `StepManager` that lists steps, describes them, and changes their pins and metrics."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxckpt_train._validation import flag, stated_mode
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata
from jaxckpt_train.policies.context import CheckpointInfo, metric_name, rank_checkpoints
from jaxckpt_train.run.catalog import step_not_found
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import StepVanishedError, check_step
from jaxckpt_train.run.goodput import Attempt, Goodput, add_event, goodput, settled
from jaxckpt_train.run.history import Clock, RunEvent, metrics_to_json, plain_metrics
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.run.record import Annotation
from jaxckpt_train.run.restoring import describe_listed
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.timeouts import report_progress, time_limited


class RunNotes(abc.ABC):
    """The part of `StepManager` that neither saves nor restores.

    In a multi-process job, each process lists the steps that the primary has last reported; before the directory is
    owned, those on the disk. The primary writes notes and history for all processes.
    """

    settings: StoreSettings

    def __init__(self, directory: str, run: RunDirectory, job_sync: JobSync, clock: Clock) -> None:
        self.directory = directory
        self._run, self._job_sync, self._clock = run, job_sync, clock
        self.history = run.history

    @property
    def steps(self) -> list[int]:
        """The committed steps in ascending order."""
        return sorted(entry.step for entry in self._run.newest())

    @property
    def latest(self) -> int | None:
        """The step that was committed last; after a roll-back, on the new branch. None: there is none."""
        found = self._run.newest()
        return found[-1].step if found else None

    @property
    def damaged(self) -> list[int]:
        """The steps set aside as damaged and not saved again, in ascending order; `restore(step=...)` tries one."""
        return sorted({entry.step for entry in self._run.damaged()} - set(self.steps))

    @property
    def infos(self) -> list[CheckpointInfo]:
        """The committed steps as policies see them, in ascending order of the step."""
        return sorted((entry.info() for entry in self._run.newest()), key=lambda info: info.step)

    def all_steps(self) -> list[int]:
        """Same as `steps`."""
        return self.steps

    def latest_step(self) -> int | None:
        """Same as `latest`."""
        return self.latest

    def is_committed(self, step: int) -> bool:
        """Whether this step is committed, and was not left behind by a roll-back."""
        return self._run.is_committed(step)

    def best(self, metric: str, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step with the best value of a metric. Of equal values, the latest wins; nan never does. None: no value.

        Args:
            metric: the name of the metric.
            mode: "min": lower is better; "max": higher is better; None: "min", but refused with a SettingsError for a
                metric such as "accuracy".
        """
        name = metric_name("best: metric", metric)
        infos = [entry.info() for entry in self._run.newest()]
        ranked = rank_checkpoints(infos, name, stated_mode("best: mode", mode, name))
        return ranked[0].step if ranked else None

    def path(self, step: int | None = None) -> str:
        """The directory of a step, for `jaxckpt_train.load` and `verify`, or to copy it; None: of the latest step.

        Raises StepNotFoundError if there is no such step.
        """
        return f"{self.directory}/{self._run.candidates(step)[0].name}"

    def metadata(self, step: int | None = None) -> CheckpointMetadata:
        """Describe what a step contains; None: the latest step. Raises StepNotFoundError if there is no such step."""
        if not self._job_sync.is_primary:
            try:
                return describe_listed(self._run.backend, self.directory, self._run.candidates(step))
            except StepVanishedError as gone:
                raise step_not_found(self.directory, step, self._run.newest()) from gone
        while True:
            with contextlib.suppress(StepVanishedError), self._run.holding_candidates(step) as (listed, _):
                return describe_listed(self._run.backend, self.directory, listed)

    @property
    def is_primary(self) -> bool:
        """Whether this process is the primary, which writes for all processes."""
        return self._job_sync.is_primary

    @abc.abstractmethod
    def _check_open(self) -> None:
        """Raise SettingsError if the manager is closed."""

    def pin(self, step: int, pinned: bool = True) -> None:
        """Keep a step whatever the preservation policy says; `pinned=False` removes the pin.

        Raises StepNotFoundError if there is no such step.
        """
        self._annotate(step, lambda: Annotation(pin=flag("pin: pinned", pinned)))

    def attach_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a committed step, such as those of an evaluation that finished later.

        Raises StepNotFoundError if there is no such step.
        """
        self._annotate(step, lambda: Annotation(metrics=metrics_to_json(plain_metrics(metrics))))

    def _annotate(self, step: int, change: Callable[[], Annotation]) -> None:
        """Annotate a step. In a job, the arguments of the primary count, and so does their error."""
        self._check_open()
        self._job_sync.hold()

        def write() -> None:
            self._run.annotate_step(check_step(step), change())

        self._job_sync.on_primary(f"writing the record of step {step}", write, time.monotonic)

    def note_preemption(self, step: int | None, reason: str, plan: str | None = None) -> None:
        """Record a preemption in the history: the step to save, the reason, and the chosen shutdown plan."""
        if self._job_sync.is_primary:
            self.history.add("preempted", self._clock(), step=step, reason=reason, plan=plan)

    def retain(self) -> None:
        """Delete the steps that the preservation policy no longer keeps now, instead of after the next commit.

        Raises DirectoryLockedError or StorageError if the directory cannot be owned.
        """
        self._check_open()
        self._job_sync.retain(is_durable=self.settings.durability == "full")

    def note_resume(self, step: int, resume_s: float) -> None:
        """Record in the history that the loop has its state of this step; wait at most a minute for the disk."""
        if self._job_sync.is_primary:
            self._run.log.resumed(step, resume_s)

    def ends_as(self, how: str) -> None:
        """Set how the history describes the end of this process: "finished", "preempted", or an error."""
        self._run.log.ends_as = how

    def goodput(self) -> Goodput:
        """The share of the run's time that went into updates that count, over all its processes so far.

        Raises CorruptCheckpointError, StorageError or CheckpointTimeoutError if the history cannot be read.
        """
        running = (self._run.log.completed, self._clock()) if self._run.is_owner else None
        found, is_live = self._attempts()
        return goodput(settled(found, running, is_live=is_live))

    @time_limited
    def _attempts(self) -> tuple[list[Attempt], bool]:
        """The attempts in the history, and whether the last one may still run."""
        lock, found = self._run.held.lock, list[Attempt]()
        was_live = lock.has_live_owner()
        for number, event in enumerate(self.history.each(RunEvent)):
            add_event(found, event)
            if number % 10_000 == 0:
                report_progress()
        # A process may start meanwhile; one that ends records it first.
        return found, was_live or lock.has_live_owner()
