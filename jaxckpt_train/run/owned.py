"""What is noted of a run: pins and metrics of its steps, how its processes begin and end, and what came of them all.

What a run directory says of its steps, without a word to other processes; and letting go of those not kept.

A run that this process owns for a while, to pin a step of it or to let some go; needs no JAX.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import errno
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from jaxckpt_train._validation import flag, stated_mode
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata
from jaxckpt_train.errors import NotACheckpointError, StorageError
from jaxckpt_train.policies.context import CheckpointInfo, PreservationPolicy, metric_name, rank_checkpoints
from jaxckpt_train.run.catalog import scan, step_not_found
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import StepVanishedError, check_step
from jaxckpt_train.run.goodput import Attempt, Goodput, goodput, hear, settled
from jaxckpt_train.run.history import Clock, History, RunEvent, metrics_to_json, plain_metrics
from jaxckpt_train.run.job import JobSync, KnownRun
from jaxckpt_train.run.restoring import describe_listed
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.timeouts import call_with_timeout

PATIENCE_S = 7 * 86400.0  # for deletions: whoever does not want to wait interrupts


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@contextlib.contextmanager
def owned_run(backend: Backend, directory: str, policy: PreservationPolicy | None = None) -> Iterator[RunDirectory]:
    """Within: this process owns the run. Afterwards its deletions are done, and it is nobody's.

    Args:
        backend, directory: where the run is.
        policy: what `retain` keeps; None: all but temporary steps.

    Raises:
        NotACheckpointError: there is no run, and none is to be made.
        DirectoryLockedError, StorageError: a live process owns it, or the disk refuses.
        CheckpointTimeoutError: the disk has not answered for ten minutes.
    """
    if not call_with_timeout(directory, lambda moved: scan(backend, directory)):
        raise NotACheckpointError(f"{directory}: expected a run, found no committed steps in it")
    run = RunDirectory(backend, directory, policy, _now)
    run.log.tends = True
    try:
        _own(run)
        yield run
    finally:
        run.close(PATIENCE_S)


def _own(run: RunDirectory) -> None:
    """Become its owner; a disk that has not a single block for that is told of with the way out."""
    try:
        run.own()
    except StorageError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        told = (
            f"{error.strerror}. Steps are deleted, or moved, by the owner of a run only, and there is no room to be "
            "that: remove the directory of the oldest step by hand, while no job runs, and try it again"
        )
        raise StorageError(error.errno, told, error.filename) from error


class StepListing:
    """The committed steps of a run; the part of `StepManager` that saves nothing and restores nothing.

    In a job each process answers by what process 0 has told it last; before the directory is taken, by the disk.
    """

    _backend: Backend
    _run: RunDirectory
    _job_sync: JobSync

    def __init__(self, directory: str, known: KnownRun) -> None:
        self.directory, self._known = directory, known

    @property
    def steps(self) -> list[int]:
        """The committed steps, lowest first."""
        return sorted(entry.step for entry in self._known.newest())

    @property
    def latest(self) -> int | None:
        """The step that was committed last; after a roll-back, of the new branch. None: there is none."""
        found = self._known.newest()
        return found[-1].step if found else None

    @property
    def damaged(self) -> list[int]:
        """The steps that were set aside as damaged and not saved anew, lowest first; `restore(step=...)` tries one."""
        return sorted({entry.step for entry in self._known.damaged()} - set(self.steps))

    @property
    def infos(self) -> list[CheckpointInfo]:
        """The committed steps as policies see them, lowest first."""
        return sorted((entry.info() for entry in self._known.newest()), key=lambda info: info.step)

    def all_steps(self) -> list[int]:
        """As `steps`."""
        return self.steps

    def latest_step(self) -> int | None:
        """As `latest`."""
        return self.latest

    def is_committed(self, step: int) -> bool:
        """Whether this step is committed, and was not left behind by a roll-back."""
        return self._known.is_committed(step)

    def best(self, metric: str, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step with the best value of a metric; of equal ones the latest; nan is never best. None: no step has it.

        Args:
            metric: its name.
            mode: "min": lower is better; "max": higher is; None: "min", and refused for a metric such as "accuracy".

        Raises:
            SettingsError: `metric` is no name, or `mode` is neither "min" nor "max", or has to be stated.
        """
        name = metric_name("best: metric", metric)
        infos = [entry.info() for entry in self._known.newest()]
        ranked = rank_checkpoints(infos, name, stated_mode("best: mode", mode, name))
        return ranked[0].step if ranked else None

    def path(self, step: int | None = None) -> str:
        """The directory of a step, for `jaxckpt_train.load`, `verify` and whoever copies it; None: of the latest.

        Raises:
            StepNotFoundError: there is no such step, or none at all.
        """
        return f"{self.directory}/{self._known.candidates(step)[0].name}"

    def metadata(self, step: int | None = None, *, progress: ReadProgress | None = None) -> CheckpointMetadata:
        """What a step holds; None: the latest. `progress` is called with 0 in waits; what it raises ends them.

        Raises:
            StepNotFoundError: there is no such step, or none at all.
        """
        describe = functools.partial(describe_listed, self._backend, self.directory, progress=progress)
        if not self._job_sync.leads:
            try:
                return describe(self._job_sync.known.candidates(step))
            except StepVanishedError as gone:
                raise step_not_found(self.directory, step, self._job_sync.known.newest()) from gone
        return self._run.with_entries(step, describe, progress=progress)


class RunNotes(StepListing, abc.ABC):
    """The part of `StepManager` that writes notes and history; in a job process 0 does that for all.

    Attributes:
        history: of the run, `history.jsonl` in its directory.
    """

    settings: StoreSettings

    def __init__(self, directory: str, run: RunDirectory, job_sync: JobSync, clock: Clock) -> None:
        super().__init__(directory, job_sync.known)
        self._run, self._job_sync, self._clock = run, job_sync, clock
        self.history: History = run.history

    @property
    def leads(self) -> bool:
        """Whether this process writes for all: the only one, or process 0 of a job."""
        return self._job_sync.leads

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
        self._job_sync.hold()

        def write() -> None:
            found = check_step(step), note()
            call_with_timeout(self.directory, lambda moved: self._run.note_step(*found))

        self._job_sync.led(f"noting of step {step}", write, time.monotonic)

    def note_preemption(self, step: int | None, reason: str, plan: str | None = None) -> None:
        """Write into the history that the run was asked to leave, which step is saved, and what was chosen to do."""
        if self._job_sync.leads:
            self.history.add("preempted", self._clock(), step=step, reason=reason, plan=plan)

    def retain(self) -> None:
        """Let go now of what the preservation policy does not keep any more; else the next commit does.

        Raises:
            DirectoryLockedError, StorageError: a live process owns the directory, or it cannot be taken.
        """
        self._check_open()
        self._replace_idle()
        self._job_sync.retain(is_durable=self.settings.durability == "full")

    def note_resume(self, step: int, resume_s: float, progress: ReadProgress | None = None) -> None:
        """Write into the history that the loop has its state: that of this step, 0: none was restored.

        Args:
            step: number of completed updates.
            resume_s: seconds since the loop began to look for it.
            progress: called with 0 while the disk is waited for, a minute at most; what it raises ends the wait.
        """
        if self._job_sync.leads:
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

        found, is_live = call_with_timeout(self.directory, read)
        return goodput(settled(found, running, is_live=is_live))
