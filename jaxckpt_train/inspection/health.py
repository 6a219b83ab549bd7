"""The health of a run, and the plan of `jaxckpt prune`: which steps go, why, and how many bytes that frees."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    NotACheckpointError,
)
from jaxckpt_train.inspection.runs import (
    StepStatus,
    check_newest,
    inspect_run,
    links_to_steps,
    newer_broken,
    newest_whole,
)
from jaxckpt_train.policies.preservation import BestN
from jaxckpt_train.run.catalog import leftovers
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.run.goodput import attempts_of
from jaxckpt_train.run.history import History, RunEvent
from jaxckpt_train.run.lock import SILENCE_S, Owner, OwnerLock
from jaxckpt_train.run.maintenance import Fate, Pruning, fates
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.backends.local_names import shared_bytes


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """The fate of all steps of a run, lowest first."""

    steps: list[tuple[StepStatus, Fate]]
    broken: list[StepStatus]  # those newer than the newest valid step
    freed_bytes: int  # the size of the data of the steps to delete, as far as it is known, that no other step has

    @property
    def going(self) -> list[StepStatus]:
        """The steps to delete."""
        return [status for status, fate in self.steps if fate.goes]


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
    statuses = check_newest(backend, directory, statuses, every_byte=every_byte, progress=reading)
    newest, links = newest_whole(statuses), links_to_steps(backend, directory)
    broken = [each for each in newer_broken(statuses, newest) if each.entry is not None and each.entry.damaged is None]
    if newest is None:
        for status in broken:
            if status.refusal is not None:
                raise status.refusal
        raise CorruptCheckpointError(
            f"{directory}: none of its steps is valid, so all of them stay; see `jaxckpt scrub` for the damage"
        )
    targets = [status for status in statuses if status.is_current and status.name in links]
    pruning.safe |= {status.step: f"the link {links[status.name]!r}" for status in targets}
    pruning.safe |= {newest.step: "newest valid"} if broken else {}
    for status in broken:
        pruning.safe[status.step] = f"{'damaged' if status.refusal is None else 'cannot be read'}: {status.problem}"
    decided = fates(_entries(statuses), FoundRecord(backend, directory).record.roll_back, pruning, now)
    steps = [
        (status, decided.get(status.name) or Fate(False, (f"not committed: {status.problem}",))) for status in statuses
    ]
    going = [status for status, fate in steps if fate.goes and status.nbytes is not None]
    freed_bytes = sum(status.nbytes or 0 for status in going)
    if not is_url(directory):
        freed_bytes -= shared_bytes([f"{directory}/{status.name}" for status in going])
    return PrunePlan(steps, broken, freed_bytes)


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
    stale_files: list[str]  # directories of dead processes and of deleted steps, which the next owner removes
    at_risk: AtRisk | None  # None: no process of the run has recorded its progress
    unreadable: str | None  # why the history cannot be read
    is_remote: bool  # then the files of dead processes include the data of deleted steps

    def warnings(self) -> list[str]:
        """Return the problems of the run as text."""
        problems = self.damaged | self.uncommitted | self.refused
        found = [f"{name}: {problem}" for name, problem in problems.items()]
        if self.statuses and self.newest is None:
            found.append("none of the steps can be restored")
        owner = self.owner
        if owner is not None and owner.is_alive and owner.silent_s > SILENCE_S:
            found.append(f"{owner.name} owns the run, but has given no sign of life for {owner.silent_s:.0f} s")
        if self.stale_files and not self.is_remote:
            names = ", ".join(self.stale_files)
            found.append(f"the next process that saves will remove files of dead processes: {names}")
        if self.unreadable is not None:
            found.append(f"the history cannot be read: {self.unreadable}")
        return found


def health_of(backend: Backend, directory: str, now: datetime.datetime) -> RunHealth:
    """Inspect the health of a run."""
    owner = OwnerLock(backend, directory).owner()
    statuses = check_newest(backend, directory, inspect_run(backend, directory), every_byte=False)
    newest = newest_whole(statuses)
    damaged, uncommitted, refused = dict[str, str](), dict[str, str](), dict[str, str]()
    for status in statuses:
        if status.problem is not None:
            kind = refused if status.refusal is not None else uncommitted if status.entry is None else damaged
            kind[status.name] = status.problem
    at_risk, unreadable = _at_risk(backend, directory, owner, newest, now)
    is_live = owner is not None and owner.is_alive  # then it removes its leftovers itself
    stale_files = [] if is_live else leftovers(backend, directory)
    return RunHealth(
        owner=owner,
        statuses=statuses,
        newest=newest,
        newest_age_s=None if newest is None or newest.entry is None else (now - newest.entry.time).total_seconds(),
        damaged=damaged,
        uncommitted=uncommitted,
        refused=refused,
        stale_files=stale_files,
        at_risk=at_risk,
        unreadable=unreadable,
        is_remote=is_url(directory),
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
