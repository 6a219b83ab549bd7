"""Gathers all that a report tells of a run, as plain data; needs neither JAX nor anything that draws."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.looking.run_look import newest_whole
from jaxckpt_train.opened import OURS, Opened
from jaxckpt_train.report.changes import Changes, Plan, compare
from jaxckpt_train.report.disk_rate import DiskRate
from jaxckpt_train.report.leaf_sizes import TreeSizes, tree_sizes
from jaxckpt_train.report.metric_series import MetricValue
from jaxckpt_train.report.processes import Process, Totals, processes_of
from jaxckpt_train.report.run_history import Counts
from jaxckpt_train.report.run_reading import RunRead
from jaxckpt_train.report.step_lives import DiskUse, StepLife
from jaxckpt_train.report.timeline import Mark, Restore, Save
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.transaction import open_committed


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
