"""Gathers the data of a report from the directory of a run, without JAX and without a drawing library.

`read_run` reads the history and the steps; files that cannot be read become warnings. `gather` adds the processes, the
tree of the newest step and the changes between steps. Of very long histories, lists hold the newest items, while
`Counts` has the totals.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxckpt_train.errors import CheckpointError, NotACheckpointError
from jaxckpt_train.inspection.runs import StepStatus, inspect_run, is_run, newest_whole, open_at
from jaxckpt_train.report.changes import Changes, Plan, TreeSizes, compare, tree_sizes
from jaxckpt_train.report.series import (
    DiskUse,
    Drain,
    Lives,
    Mark,
    MetricValue,
    Newest,
    ReportEvent,
    Restore,
    Save,
    StepLife,
    drain_of,
    mark_of,
    restore_of,
    save_of,
)
from jaxckpt_train.run.goodput import Attempt, AttemptGoodput, Goodput, add_event, goodput, settled
from jaxckpt_train.run.history import HISTORY_NAME, History
from jaxckpt_train.run.lock import OwnerLock
from jaxckpt_train.store.backends.base import Backend

_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The data of a report. Of a very long run, the lists of events, steps and values hold the newest.

    docs/how-to/report.md explains the fields, which are the keys of `--json`.
    """

    run: str
    made: datetime.datetime
    is_live: bool
    warnings: tuple[str, ...]
    events: dict[str, int]
    counts: Counts
    saves: tuple[Save, ...]
    restores: tuple[Restore, ...]
    drains: tuple[Drain, ...]
    marks: tuple[Mark, ...]
    processes: tuple[Process, ...]
    totals: Goodput
    steps: tuple[StepLife, ...]
    disk_use: tuple[DiskUse, ...]
    metrics: dict[str, list[MetricValue]]
    tree: TreeSizes | None
    changes: Changes

    @property
    def damaged(self) -> list[StepLife]:
        """The steps of the current branch that cannot be restored."""
        return [step for step in self.steps if step.is_there and step.problem and step.is_current]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Total numbers; the lists of a report may hold the newest items only. `changes` are those of the disk use."""

    saves: int
    failed_saves: int
    blocked_s: float
    restores: int
    drains: int
    marks: int
    steps: int
    states: dict[str, int]
    changes: int
    values: dict[str, int]


def gather(
    backend: Backend,
    read: RunRead,
    plan: Plan,
    made: datetime.datetime,
    progress: Callable[[int], object],
) -> Gathered:
    """Gather the data of a report."""
    history, steps = read.history, read.history.lives.found(read.looks)
    processes, totals = processes_of(settled(history.attempts, is_live=read.is_live), history.places)
    tree, warnings, newest = None, read.warnings, newest_whole(read.looks)
    if newest is not None:
        try:
            tree = tree_sizes(open_at(backend, f"{read.directory}/{newest.name}"), newest.step)
        except CheckpointError as error:
            warnings = (*warnings, str(error))
    counts = Counts(
        saves=history.saves.count,
        failed_saves=history.failed_saves,
        blocked_s=history.blocked_s,
        restores=history.restores.count,
        drains=history.drains.count,
        marks=history.marks.count,
        steps=sum(steps.states.values()),
        states=steps.states,
        changes=steps.changes,
        values=steps.values,
    )
    return Gathered(
        run=read.directory,
        made=made.astimezone(datetime.UTC),
        is_live=read.is_live,
        warnings=warnings,
        events=history.events,
        counts=counts,
        saves=tuple(map(save_of, history.saves.items)),
        restores=tuple(history.restores.items),
        drains=tuple(history.drains.items),
        marks=tuple(history.marks.items),
        processes=tuple(processes),
        totals=totals,
        steps=tuple(steps.lives),
        disk_use=tuple(steps.uses),
        metrics=steps.metrics,
        tree=tree,
        changes=compare(backend, read.directory, plan, progress),
    )


def gathered_json(gathered: Gathered) -> dict[str, Any]:
    """Return the data for JSON, with computed properties added to the fields."""
    found = dataclasses.asdict(gathered)
    for step, life in zip(found["steps"], gathered.steps, strict=True):
        step["state"] = life.state
        del step["metrics"]  # they are in the series
    found["totals"]["share"] = gathered.totals.share
    del found["totals"]["attempts"]  # they are the processes
    return found


@dataclasses.dataclass(frozen=True)
class RunRead:
    """The contents of the directory of a run, and warnings about what could not be read."""

    directory: str
    history: RunHistory
    looks: tuple[StepStatus, ...]
    is_live: bool
    warnings: tuple[str, ...]


def read_run(backend: Backend, directory: str) -> RunRead:
    """Read the history and inspect the steps of a run. Warnings of the package are collected instead of printed."""
    if not is_run(backend, directory):
        raise NotACheckpointError(f"{directory}: expected the directory of a run, found no step, lock or history in it")
    history = RunHistory()
    collector = _WarningCollector(logging.WARNING)
    _log.addHandler(collector)
    try:
        lock = OwnerLock(backend, directory)
        was_live = lock.has_live_owner()
        try:
            for event in _events(backend, directory):
                history.add(event)
        except CheckpointError as error:
            _log.warning("the history cannot be read: %s", error)
        is_live = was_live or lock.has_live_owner()  # a process may start meanwhile, and one that ends records it first
        looks = inspect_run(backend, directory)
    finally:
        _log.removeHandler(collector)
    return RunRead(directory, history, tuple(looks), is_live, tuple(collector.warnings))


def _events(backend: Backend, directory: str) -> Iterator[ReportEvent]:
    invalid = yield from History(backend, directory).each(ReportEvent)
    if invalid:
        _log.warning("%d lines of %s are not events of a run and are left out", invalid, HISTORY_NAME)


class _WarningCollector(logging.Handler):
    keeps = True  # the handler of the command does not print the warnings

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


class RunHistory:
    """Collects the events of a history. `places` says where each of the `attempts` ran."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}  # how many of each kind
        self.attempts: list[Attempt] = []
        self.places: list[str] = []
        self.lives = Lives()
        self.saves = Newest[ReportEvent]()
        self.restores = Newest[Restore]()
        self.drains = Newest[Drain]()
        self.marks = Newest[Mark]()
        self.failed_saves, self.blocked_s = 0, 0.0

    def add(self, event: ReportEvent) -> None:
        """Add the next event."""
        kind = event.event
        self.events[kind] = self.events.get(kind, 0) + 1
        add_event(self.attempts, event)
        self.lives.add(event)
        if kind == "save":
            self.saves.add(event)
            self.failed_saves += event.ok is not True
            self.blocked_s += event.blocked_s
        elif kind == "restore":
            self.restores.add(restore_of(event))
        elif kind == "drain":
            self.drains.add(drain_of(event))
        elif kind == "start":
            self.places.append(_place_of(event))
        elif (mark := mark_of(event)) is not None:
            self.marks.add(mark)


@dataclasses.dataclass(frozen=True)
class Process(AttemptGoodput):
    """One process of a run."""

    number: int
    where: str


def processes_of(attempts: Sequence[Attempt], places: Sequence[str]) -> tuple[list[Process], Goodput]:
    """Return the processes of a training in order, and their totals."""
    trained = [place for attempt, place in zip(attempts, places, strict=True) if attempt.is_of_the_training]
    totals = goodput(attempts)
    rows = zip(totals.attempts, trained, strict=True)
    return [Process(**vars(rated), number=number, where=place) for number, (rated, place) in enumerate(rows, 1)], totals


def _place_of(start: ReportEvent) -> str:
    """Return the host, process ID and job of a process, as far as they are known."""
    words = [start.host, "" if start.pid is None else f"process {start.pid}"]
    if start.slurm_job_id:
        restarts = f", restart {start.slurm_restart_count}" if start.slurm_restart_count else ""
        words.append(f"Slurm job {start.slurm_job_id}{restarts}")
    return ", ".join(filter(None, words))
