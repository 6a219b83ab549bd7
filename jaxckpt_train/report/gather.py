"""Gathers all that a report tells of a run, as plain data; needs neither JAX nor anything that draws.

Reads what the directory of a run tells: its history and its steps; what cannot be read is told, and left out.

The history of a run as a report shows it: totals of all events, and of very many events a part.

The processes of a run as rows: who, when, how each ended, and what became of its time.
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
HEARD_S = 150.0  # whoever is at work notes how far it has come every minute
_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a run; what its time went into adds up to `wall_s`.

    Attributes:
        number: from 1.
        where: its host and number, and its job, as far as was told.
        first_step, last_step: None: it had no state yet when it ended.
        lost_s: in updates that were lost.
        other_s: in a loop, or a program, that did no update.
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
    """All processes together; what the time went into adds up to `wall_s`, as far as clocks were not set back.

    Attributes:
        share: of the useful time, from 0 to 1.
        between_s: without a process.
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
    """The processes of a training, in order, and their totals.

    Args:
        attempts: all processes that a history names, in order.
        places: where each of them ran, as `place_of` gives it.
    """
    of_the_training = [pair for pair in zip(attempts, places, strict=True) if pair[0].is_of_the_training]
    attempts, places = [attempt for attempt, _ in of_the_training], [place for _, place in of_the_training]
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
    """Where a process ran, by the event of its start: its host and number, and its job, as far as they are known."""
    pid, restarts = count(start.pid), count(start.slurm_restart_count)
    words = [text(start.host), "" if pid is None else f"process {pid}"]
    job = text(start.slurm_job_id)
    if job:
        words.append(f"Slurm job {job}" + (f", restart {restarts}" if restarts else ""))
    return ", ".join(filter(None, words))


@dataclasses.dataclass(frozen=True)
class Counts:
    """How much there was in all, where the lists of a report may hold a part.

    Attributes:
        blocked_s: that all saves held up the loop.
        states: how many steps there were in each state.
        changes: of the room on the disk.
        values: of each metric.
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
    """Takes note of the events of a history, one after another.

    Args:
        names: of the directories of the steps that were there before the history was read.

    Attributes:
        events: how many events of each kind there are, in the order in which they came first.
        last: the last event; None: there was none.
        places: where each process ran.
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
        """Take note of the next event."""
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
        """The saves, in order; of very many of each group of neighbours one that failed, or the longest."""
        return [save_of(event) for event in self._saves.items]

    def restores(self) -> list[Restore]:
        """The restores, in order; of very many the longest of each group of neighbours."""
        return self._restores.items

    def marks(self) -> list[Mark]:
        """The other events that are worth a mark, in order; of very many one of each group of neighbours."""
        return self._marks.items

    def attempts(self, is_live: bool) -> list[Attempt]:
        """All processes, in order; `is_live`: the last one is at work."""
        return settled(self._attempts, is_live=is_live)

    def steps(self, looks: Sequence[StepStatus]) -> StepsFound:
        """What became of all steps, once all events were added; `looks`: the steps that are there."""
        return self._lives.found(looks)

    def counts(self, steps: StepsFound) -> Counts:
        """How much there was in all."""
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
class RunRead:
    """What is known of a run.

    Attributes:
        directory: of the run.
        history: what its history says.
        looks: its steps, lowest first.
        is_live: whether a process is at work on it.
        warnings: what could not be read.
    """

    directory: str
    history: RunHistory
    looks: tuple[StepStatus, ...]
    is_live: bool
    warnings: tuple[str, ...]


def read_run(backend: Backend, directory: str, now: datetime.datetime) -> RunRead:
    """Read the history and look at the steps of a run.

    Args:
        backend: where.
        directory: of the run.
        now: the time, with a zone.

    Raises:
        NotACheckpointError: the directory has neither, or is not there.
        StorageError: it cannot be read.
    """
    names = _names(backend, directory)
    history = RunHistory({name for name in names if parse_step_name(name) is not None})
    with _heard() as warnings:
        lock = OwnerLock(backend, directory)
        was_live = lock.has_live_owner()
        try:
            for event in _events(backend, directory):
                history.add(event)
        except CheckpointError as error:
            _log.warning("the history cannot be read: %s", error)
        is_live = was_live or lock.has_live_owner()  # one may begin meanwhile, and one that ends says so first
        is_live = is_live or (LOCK_NAME in names and _was_heard_of(history.last, now))
        looks = inspect_run(backend, directory)
    return RunRead(directory, history, tuple(looks), is_live, tuple(warnings))


def _names(backend: Backend, directory: str) -> set[str]:
    """The names in it, if it is a run's."""
    try:
        names = {entry.name for entry in backend.list(directory)}
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            raise NotACheckpointError(f"{directory}: expected the directory of a run, found none") from error
        raise
    if HISTORY_NAME not in names and all(parse_step_name(name) is None for name in names):
        raise NotACheckpointError(f"{directory}: expected a run, found neither a step nor a {HISTORY_NAME} in it")
    return names


def _was_heard_of(last: ReportEvent | None, now: datetime.datetime) -> bool:
    """Whether an owner has written a moment ago: who may not write here cannot ask for the age of its lock."""
    return last is not None and last.event != "end" and abs((now - last.time).total_seconds()) < HEARD_S


def _events(backend: Backend, directory: str) -> Iterator[ReportEvent]:
    unfit = yield from History(backend, directory).each(ReportEvent)
    if unfit:
        _log.warning("%d lines of %s tell of no event of a run, and are left out", unfit, HISTORY_NAME)


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Within: what the package warns of is kept, and goes into the report instead of to standard error."""
    warnings: list[str] = []
    handler = _Keeper(warnings)
    _log.addHandler(handler)
    try:
        yield warnings
    finally:
        _log.removeHandler(handler)


class _Keeper(logging.Handler):
    keeps = True  # so that nobody else tells of it

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
class Gathered:
    """All of it; of a very long run the lists of saves, restores, marks, steps and values hold a part.

    Attributes:
        run: the directory.
        made: when the report was made.
        is_live: whether a process was at work on the run then.
        warnings: what could not be read.
        events: how many events of each kind the history has.
        counts: how much there was in all.
        tree: of the newest step that can be restored; None: there is none.
        disk: None: it was not measured.
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
        """The steps that should be there and cannot be restored."""
        return [step for step in self.steps if step.is_there and step.problem and step.is_current]


def gather(
    backend: Backend,
    read: RunRead,
    plan: Plan,
    made: datetime.datetime,
    disk: DiskRate | None = None,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Gathered:
    """Gather it.

    Args:
        backend: where the run is.
        read: what its directory tells.
        plan: which steps are compared.
        made: the time now, with a zone.
        disk: what was measured.
        progress: told of bytes as they are read.
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
    """The data as JSON has it: times as text, properties of the classes among the fields."""
    found = dataclasses.asdict(gathered)
    for step, life in zip(found["steps"], gathered.steps, strict=True):
        step["state"] = life.state
        del step["metrics"]  # they are in the series
    return found
