"""Gathers the data of a report from the directory of a run, without JAX and without a drawing library.

`read_run` reads the history and the steps; files that cannot be read become warnings. `gather` adds the processes, the
tree of the newest step and the changes between steps. Of very long histories, lists hold a sample, and `Counts` has the
totals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jaxckpt_train.errors import CheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.inspection.runs import StepStatus, inspect_run, newest_whole
from jaxckpt_train.opened import OURS, Opened
from jaxckpt_train.report.changes import Changes, Plan, TreeSizes, compare, tree_sizes
from jaxckpt_train.report.events import DiskUse, Lives, StepLife, StepsFound
from jaxckpt_train.report.series import (
    DiskRate,
    Mark,
    MetricValue,
    ReportEvent,
    Restore,
    Sample,
    Save,
    count,
    mark_of,
    restore_of,
    save_of,
    save_s_of,
    text,
)
from jaxckpt_train.run.entry import parse_step_name
from jaxckpt_train.run.goodput import Attempt, AttemptGoodput, add_event, goodput, settled
from jaxckpt_train.run.history import HISTORY_NAME, History
from jaxckpt_train.run.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import GONE, Backend
from jaxckpt_train.store.committed import open_committed

MOST_KINDS = 1000
MOST_WARNINGS = 20
HEARD_S = 150.0  # a live process records its progress every minute
_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The data of a report. Of a very long run, the lists of saves, restores, marks, steps and values hold a sample.

    Attributes:
        run: the directory of the run.
        made: when the report was made.
        is_live: whether a process was running then.
        warnings: what could not be read.
        events: the number of events of each kind in the history.
        counts: the total numbers.
        tree: the leaves of the newest valid step; None: there is no valid step.
        disk: the measured rate of the disk; None: not measured.
    """

    run: str
    made: datetime.datetime
    is_live: bool
    warnings: tuple[str, ...]
    events: dict[str, int]
    counts: Counts
    saves: tuple[Save, ...]
    restores: tuple[Restore, ...]
    marks: tuple[Mark, ...]
    processes: tuple[Process, ...]
    totals: Totals
    steps: tuple[StepLife, ...]
    disk_use: tuple[DiskUse, ...]
    metrics: dict[str, list[MetricValue]]
    tree: TreeSizes | None
    changes: Changes
    disk: DiskRate | None

    @property
    def damaged(self) -> list[StepLife]:
        """The steps of the current branch that cannot be restored."""
        return [step for step in self.steps if step.is_there and step.problem and step.is_current]


def gather(
    backend: Backend,
    read: RunRead,
    plan: Plan,
    made: datetime.datetime,
    disk: DiskRate | None = None,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Gathered:
    """Gather the data of a report.

    Args:
        backend: the storage of the run.
        read: the contents of the directory of the run.
        plan: the pairs of steps to compare.
        made: the current time, with a time zone.
        disk: the measured rate of the disk, or None.
        progress: called with the number of bytes after each read.
    """
    history, steps = read.history, read.history.steps(read.looks)
    processes, totals = processes_of(history.attempts(read.is_live), history.places)
    tree, problem = _newest_tree(backend, read)
    return Gathered(
        run=read.directory,
        made=made.astimezone(datetime.UTC),
        is_live=read.is_live,
        warnings=(*read.warnings, *problem),
        events=history.events,
        counts=history.counts(steps),
        saves=tuple(history.saves()),
        restores=tuple(history.restores()),
        marks=tuple(history.marks()),
        processes=tuple(processes),
        totals=totals,
        steps=tuple(steps.lives),
        disk_use=tuple(steps.uses),
        metrics=steps.metrics,
        tree=tree,
        changes=compare(backend, read.directory, plan, progress),
        disk=disk,
    )


def _newest_tree(backend: Backend, read: RunRead) -> tuple[TreeSizes | None, tuple[str, ...]]:
    newest = newest_whole(read.looks)
    if newest is None:
        return None, ()
    path = f"{read.directory}/{newest.name}"
    try:
        opened = Opened(OURS, backend, open_committed(backend, path), StoreSettings(), read.directory)
        return tree_sizes(opened, newest.step), ()
    except CheckpointError as error:
        return None, (str(error),)


def gathered_json(gathered: Gathered) -> dict[str, Any]:
    """Return the data for JSON, with computed properties added to the fields."""
    found = dataclasses.asdict(gathered)
    for step, life in zip(found["steps"], gathered.steps, strict=True):
        step["state"] = life.state
        del step["metrics"]  # they are in the series
    return found


@dataclasses.dataclass(frozen=True)
class RunRead:
    """The contents of the directory of a run.

    Attributes:
        directory: the directory of the run.
        history: the events of the history.
        looks: the steps in ascending order.
        is_live: whether a process is running.
        warnings: what could not be read.
    """

    directory: str
    history: RunHistory
    looks: tuple[StepStatus, ...]
    is_live: bool
    warnings: tuple[str, ...]


def read_run(backend: Backend, directory: str, now: datetime.datetime) -> RunRead:
    """Read the history and inspect the steps of a run.

    Args:
        backend: the storage of the run.
        directory: the directory of the run.
        now: the current time, with a time zone.

    Raises:
        NotACheckpointError: the directory does not exist, or has neither a history nor a step.
        StorageError: the directory cannot be read.
    """
    names = _names(backend, directory)
    history = RunHistory({name for name in names if parse_step_name(name) is not None})
    with _collected_warnings() as warnings:
        lock = OwnerLock(backend, directory)
        was_live = lock.has_live_owner()
        try:
            for event in _events(backend, directory):
                history.add(event)
        except CheckpointError as error:
            _log.warning("the history cannot be read: %s", error)
        is_live = (
            was_live or lock.has_live_owner()
        )  # a process may start meanwhile, and a process that ends records it first
        is_live = is_live or (LOCK_NAME in names and _is_recent(history.last, now))
        looks = inspect_run(backend, directory)
    return RunRead(directory, history, tuple(looks), is_live, tuple(warnings))


def _names(backend: Backend, directory: str) -> set[str]:
    """Return the names in the directory, if it is the directory of a run."""
    try:
        names = {entry.name for entry in backend.list(directory)}
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            raise NotACheckpointError(f"{directory}: expected the directory of a run, found no directory") from error
        raise
    if HISTORY_NAME not in names and all(parse_step_name(name) is None for name in names):
        raise NotACheckpointError(f"{directory}: expected a run, found neither a step nor {HISTORY_NAME}")
    return names


def _is_recent(last: ReportEvent | None, now: datetime.datetime) -> bool:
    """Return whether the owner wrote an event recently. Without write access, the age of the lock is unknown."""
    return last is not None and last.event != "end" and abs((now - last.time).total_seconds()) < HEARD_S


def _events(backend: Backend, directory: str) -> Iterator[ReportEvent]:
    invalid = yield from History(backend, directory).each(ReportEvent)
    if invalid:
        _log.warning("%d lines of %s are not events of a run and are left out", invalid, HISTORY_NAME)


@contextlib.contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of the package for the report, instead of printing them."""
    warnings: list[str] = []
    handler = _WarningCollector(warnings)
    _log.addHandler(handler)
    try:
        yield warnings
    finally:
        _log.removeHandler(handler)


class _WarningCollector(logging.Handler):
    keeps = True  # tells the handler of the command not to print the warnings

    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        _keep(self._warnings, record.getMessage())


def _keep(warnings: list[str], text: str) -> None:
    if len(warnings) < MOST_WARNINGS:
        warnings.append(text)
    elif len(warnings) == MOST_WARNINGS:
        warnings.append("more warnings of the same kind are left out")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Total numbers, where the lists of a report may hold a sample.

    Attributes:
        blocked_s: the time for which all saves blocked the loop.
        states: the number of steps in each state.
        changes: the number of changes of the disk use.
        values: the number of values of each metric.
    """

    saves: int
    failed_saves: int
    blocked_s: float
    restores: int
    marks: int
    steps: int
    states: dict[str, int]
    changes: int
    values: dict[str, int]


class RunHistory:
    """Collects the events of a history.

    Args:
        names: the names of the step directories that existed before the history was read.

    Attributes:
        events: the number of events of each kind, in the order of their first occurrence.
        last: the last event, or None.
        places: where each process ran, see `place_of`.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self.events: dict[str, int] = {}
        self.last: ReportEvent | None = None
        self.places: list[str] = []
        self._attempts: list[Attempt] = []
        self._lives = Lives(names)
        self._saves = Sample[ReportEvent](_weight)
        self._restores = Sample[Restore](lambda each: each.restore_s or 0.0)
        self._marks = Sample[Mark](lambda mark: mark.kind != "take_over")
        self._failed_saves, self._blocked_s = 0, 0.0

    def add(self, event: ReportEvent) -> None:
        """Add the next event."""
        kind = event.event
        name = kind if kind in self.events or len(self.events) < MOST_KINDS else "others"
        self.events[name] = self.events.get(name, 0) + 1
        self.last = event
        add_event(self._attempts, event)
        self._lives.add(event)
        if kind == "save":
            self._saves.add(event)
            self._failed_saves += event.ok is not True
            self._blocked_s += event.blocked_s
        elif kind == "restore":
            self._restores.add(restore_of(event))
        elif kind == "start":
            self.places.append(place_of(event))
        elif (mark := mark_of(event)) is not None:
            self._marks.add(mark)

    def saves(self) -> list[Save]:
        """Return the saves in order; of very many, a failed or the longest save of each group of neighbours."""
        return [save_of(event) for event in self._saves.items]

    def restores(self) -> list[Restore]:
        """Return the restores in order; of very many, the longest of each group of neighbours."""
        return self._restores.items

    def marks(self) -> list[Mark]:
        """Return the other events to mark, in order; of very many, one of each group of neighbours."""
        return self._marks.items

    def attempts(self, is_live: bool) -> list[Attempt]:
        """Return all processes in order; `is_live` says that the last one is running."""
        return settled(self._attempts, is_live=is_live)

    def steps(self, looks: Sequence[StepStatus]) -> StepsFound:
        """Return the lives of all steps, after all events were added; `looks` are the existing steps."""
        return self._lives.found(looks)

    def counts(self, steps: StepsFound) -> Counts:
        """Return the total numbers."""
        return Counts(
            saves=self._saves.count,
            failed_saves=self._failed_saves,
            blocked_s=self._blocked_s,
            restores=self._restores.count,
            marks=self._marks.count,
            steps=sum(steps.states.values()),
            states=steps.states,
            changes=steps.changes,
            values=steps.values,
        )


def _weight(event: ReportEvent) -> float:
    return save_s_of(event) + (0 if event.ok else 1e9)


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a run. The parts of its time add up to `wall_s`.

    Attributes:
        number: the number of the process, from 1.
        where: the host, process ID and job, as far as they are known.
        first_step, last_step: the steps; None: the process ended before it had a state.
        lost_s: the time of updates that were lost.
        other_s: the time of a process that did no update.
    """

    number: int
    began: datetime.datetime
    ended: datetime.datetime
    how: str
    where: str
    first_step: int | None
    last_step: int | None
    useful_steps: int
    redone_steps: int
    saves: int
    failed_saves: int
    useful_s: float
    lost_s: float
    other_s: float
    blocked_s: float
    to_resume_s: float
    wall_s: float


@dataclasses.dataclass(frozen=True)
class Totals:
    """The totals of all processes. The parts of the time add up to `wall_s`, unless a clock was set back.

    Attributes:
        share: the share of useful time, from 0 to 1.
        between_s: the time between processes.
    """

    share: float
    useful_steps: int
    redone_steps: int
    saves: int
    failed_saves: int
    useful_s: float
    lost_s: float
    other_s: float
    blocked_s: float
    to_resume_s: float
    between_s: float
    wall_s: float


def processes_of(attempts: Sequence[Attempt], places: Sequence[str]) -> tuple[list[Process], Totals]:
    """Return the processes of a training in order, and their totals.

    Args:
        attempts: all processes in a history, in order.
        places: where each of them ran, see `place_of`.
    """
    trained = [pair for pair in zip(attempts, places, strict=True) if pair[0].is_of_the_training]
    attempts, places = [attempt for attempt, _ in trained], [place for _, place in trained]
    found = goodput(attempts)
    rows = zip(attempts, found.attempts, places, strict=True)
    processes = [_process(number, *row) for number, row in enumerate(rows, 1)]
    return processes, Totals(
        share=found.share,
        useful_steps=found.useful_steps,
        redone_steps=found.redone_steps,
        saves=found.saves,
        failed_saves=sum(each.failed_saves for each in processes),
        useful_s=found.useful_s,
        lost_s=sum(each.lost_s for each in processes),
        other_s=sum(each.other_s for each in processes),
        blocked_s=found.blocked_s,
        to_resume_s=found.to_resume_s,
        between_s=found.between_s,
        wall_s=found.wall_s,
    )


def _process(number: int, attempt: Attempt, rated: AttemptGoodput, place: str) -> Process:
    rest_s = max(0.0, rated.wall_s - rated.to_resume_s - rated.blocked_s - rated.useful_s)
    has_updates = rated.useful_steps + rated.redone_steps > 0
    return Process(
        number=number,
        began=rated.began.astimezone(datetime.UTC),
        ended=rated.ended.astimezone(datetime.UTC),
        how=rated.how,
        where=place,
        first_step=rated.first_step,
        last_step=rated.last_step,
        useful_steps=rated.useful_steps,
        redone_steps=rated.redone_steps,
        saves=rated.saves,
        failed_saves=attempt.failed_saves,
        useful_s=rated.useful_s,
        lost_s=rest_s if has_updates else 0.0,
        other_s=0.0 if has_updates else rest_s,
        blocked_s=rated.blocked_s,
        to_resume_s=rated.to_resume_s,
        wall_s=rated.wall_s,
    )


def place_of(start: ReportEvent) -> str:
    """Return the host, process ID and job from the start event of a process, as far as they are known."""
    pid, restarts = count(start.pid), count(start.slurm_restart_count)
    words = [text(start.host), "" if pid is None else f"process {pid}"]
    job = text(start.slurm_job_id)
    if job:
        words.append(f"Slurm job {job}" + (f", restart {restarts}" if restarts else ""))
    return ", ".join(filter(None, words))
