"""The health of a run, and the plan of `jaxckpt prune`: which steps go, why, and how many bytes that frees."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxckpt_train.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    NotACheckpointError,
    StorageError,
)
from jaxckpt_train.inspection.runs import StepStatus, inspect_run, links_to_steps, newest_whole_step
from jaxckpt_train.policies.preservation import BestN
from jaxckpt_train.run.catalog import half_deleted
from jaxckpt_train.run.entry import Entry, newest_generations
from jaxckpt_train.run.goodput import attempts_of
from jaxckpt_train.run.history import History, RunEvent
from jaxckpt_train.run.lock import SILENCE_S, Owner, OwnerLock
from jaxckpt_train.run.maintenance import Pruning, current_line, fates
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.removal import find_dead_attempts


class PlannedStep(NamedTuple):
    """A step, whether it is deleted, and the reasons."""

    status: StepStatus
    goes: bool
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """The fate of all steps of a run, lowest first, and the problems of steps newer than the newest valid one."""

    steps: list[PlannedStep]
    damaged: dict[int, str]
    refused: dict[int, StorageError]

    @property
    def going(self) -> list[PlannedStep]:
        """The steps to delete."""
        return [each for each in self.steps if each.goes]

    @property
    def freed_bytes(self) -> int:
        """The size of their data, as far as it is known."""
        return sum(each.status.nbytes or 0 for each in self.going)


def plan_pruning(
    backend: Backend,
    directory: str,
    pruning: Pruning,
    now: datetime.datetime,
    *,
    every_byte: bool,
    reading: Callable[[int], None],
) -> PrunePlan:
    """Plan the fate of each step, and add steps that stay regardless of the policies to `pruning.safe`."""
    statuses = inspect_run(backend, directory)
    entries = _entries(statuses)
    if not entries:
        raise NotACheckpointError(f"{directory}: expected a run, found a directory without committed steps")
    _refuse_unknown_metrics(directory, pruning, entries)
    roll_back = FoundRecord(backend, directory).record.roll_back
    newest = newest_generations(current_line(entries, roll_back))
    found = newest_whole_step(backend, directory, newest, every_byte=every_byte, progress=reading)
    if found.entry is None and found.refused:
        raise next(iter(found.refused.values()))
    if found.entry is None:
        raise CorruptCheckpointError(
            f"{directory}: none of its steps is valid, so all of them stay; see `jaxckpt scrub` for the damage"
        )
    links = links_to_steps(backend, directory)
    pruning.safe |= {entry.step: f"the link {links[entry.name]!r}" for entry in newest if entry.name in links}
    if found.damaged or found.refused:
        pruning.safe[found.entry.step] = "newest valid"
    pruning.safe |= {step: f"cannot be read: {error}" for step, error in found.refused.items()}
    pruning.safe |= {step: f"damaged: {problem}" for step, problem in found.damaged.items()}
    by_name = {fate.entry.name: (fate.goes, fate.why) for fate in fates(entries, roll_back, pruning, now)}
    steps = [
        PlannedStep(status, *by_name.get(status.name, (False, (f"not committed: {status.problem}",))))
        for status in statuses
    ]
    return PrunePlan(steps, found.damaged, found.refused)


def _entries(statuses: Sequence[StepStatus]) -> list[Entry]:
    return sorted((status.entry for status in statuses if status.entry is not None), key=lambda entry: entry.order)


def _refuse_unknown_metrics(directory: str, pruning: Pruning, entries: list[Entry]) -> None:
    # A misspelt name would keep all steps, or the wrong ones.
    there = sorted({name for entry in entries for name in entry.metrics or ()})
    for policy in pruning.policies.values():
        if isinstance(policy, BestN) and policy.metric not in there:
            raise MismatchError(
                f"{directory}: expected steps with the metric {policy.metric!r}, found none; the metrics are "
                f"{', '.join(there) or 'not recorded'}"
            )


class AtRisk(NamedTuple):
    """The work that is lost if the running process dies now, or that was lost when the last process ended."""

    is_live: bool
    how: str  # how the process ended, according to the history
    completed: int  # updates at its last sign of life, `heard_s` seconds ago
    since: int | None  # the step from which the next process continues
    updates: int  # to repeat
    heard_s: float


@dataclasses.dataclass(frozen=True)
class RunHealth:
    """The health of a run. Problems are by the name of the step: damage, no COMMIT, a refusal of the storage."""

    owner: Owner | None
    statuses: list[StepStatus]
    newest: StepStatus | None  # the newest one that is valid by its manifest and the sizes of its files
    newest_age_s: float | None
    damaged: dict[str, str]
    uncommitted: dict[str, str]
    refused: dict[str, str]
    stale_files: list[str]  # temporary files of dead processes, which the next owner removes
    at_risk: AtRisk | None  # None: no process of the run has recorded its progress
    unreadable: str | None  # why the history cannot be read

    def warnings(self) -> list[str]:
        """Return the problems of the run as text."""
        problems = self.damaged | self.uncommitted | self.refused
        found = [f"{name}: {problem}" for name, problem in problems.items()]
        if self.statuses and self.newest is None:
            found.append("none of the steps can be restored")
        owner = self.owner
        if owner is not None and owner.is_alive and owner.silent_s > SILENCE_S:
            found.append(f"{owner.name} owns the run, but has given no sign of life for {owner.silent_s:.0f} s")
        if self.stale_files:
            names = ", ".join(self.stale_files)
            found.append(f"the next process that saves will remove files of dead processes: {names}")
        if self.unreadable is not None:
            found.append(f"the history cannot be read: {self.unreadable}")
        return found


def health_of(backend: Backend, directory: str, now: datetime.datetime) -> RunHealth:
    """Inspect the health of a run."""
    owner, statuses = OwnerLock(backend, directory).owner(), inspect_run(backend, directory)
    line = newest_generations(current_line(_entries(statuses), FoundRecord(backend, directory).record.roll_back))
    whole = newest_whole_step(backend, directory, line, every_byte=False)
    newest = next((status for status in statuses if whole.entry is not None and status.name == whole.entry.name), None)
    damaged = {entry.name: whole.damaged[entry.step] for entry in line if entry.step in whole.damaged}
    refused = {entry.name: str(whole.refused[entry.step]) for entry in line if entry.step in whole.refused}
    uncommitted = dict[str, str]()
    for status in statuses:
        if status.refusal is not None:
            refused[status.name] = str(status.refusal)
        elif status.problem is not None:
            (uncommitted if status.entry is None else damaged)[status.name] = status.problem
    damaged = {name: problem for name, problem in damaged.items() if name not in refused}
    at_risk, unreadable = _at_risk(backend, directory, owner, newest, now)
    stale_files = find_dead_attempts(backend, directory)
    if owner is None or not owner.is_alive:  # a live owner finishes its deletions itself
        stale_files += half_deleted(backend, directory)
    if damaged or uncommitted or refused:  # the owner may have deleted steps during the inspection
        there = {entry.name for entry in backend.list(directory)}
        for problems in (damaged, uncommitted, refused):
            for name in problems.keys() - there:
                del problems[name]
    return RunHealth(
        owner=owner,
        statuses=statuses,
        newest=newest,
        newest_age_s=None if whole.entry is None else (now - whole.entry.time).total_seconds(),
        damaged=damaged,
        uncommitted=uncommitted,
        refused=refused,
        stale_files=stale_files,
        at_risk=at_risk,
        unreadable=unreadable,
    )


def _at_risk(
    backend: Backend, directory: str, owner: Owner | None, newest: StepStatus | None, now: datetime.datetime
) -> tuple[AtRisk | None, str | None]:
    is_live = owner is not None and owner.is_alive
    try:
        attempts = attempts_of(History(backend, directory).each(RunEvent), is_live=is_live)
    except CheckpointError as error:
        return None, str(error)
    trained = [attempt for attempt in attempts if attempt.stretches]
    if not trained:
        return None, None
    last, since = trained[-1], None if newest is None else newest.step
    completed = last.stretches[-1].last
    heard_s = max(0.0, (now - last.ended).total_seconds())
    is_at_work = is_live and last is attempts[-1]
    return AtRisk(is_at_work, last.how, completed, since, max(0, completed - (since or 0)), heard_s), None
