"""The health of a run: its owner, steps that cannot be restored, left-overs, and what would be lost if it died now.

What `jaxckpt prune` would let go: each step of a run with what becomes of it, and how many bytes that frees.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Collection

from jaxckpt_train.errors import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchError,
    NotACheckpointError,
    StorageError,
)
from jaxckpt_train.inspection.runs import StepStatus, inspect_run, links_to_steps, newest_whole_step
from jaxckpt_train.policies.preservation import BestN
from jaxckpt_train.run.annotations import Notes
from jaxckpt_train.run.catalog import half_deleted
from jaxckpt_train.run.entry import Entry, newest_generations
from jaxckpt_train.run.goodput import attempts_of
from jaxckpt_train.run.history import History, RunEvent
from jaxckpt_train.run.lock import SILENCE_S, Owner, OwnerLock
from jaxckpt_train.run.pruning import Fate, Pruning, current_line, fates
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.removal import find_dead_attempts

MAX_LISTED = 5


@dataclasses.dataclass(frozen=True)
class Planned:
    """What becomes of one step.

    Attributes:
        look: which one, with what else is known of it.
        goes: whether nobody keeps it.
        why: the reasons.
    """

    look: StepStatus
    goes: bool
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """What becomes of all steps, lowest first.

    Attributes:
        steps: of the run, also those that are not committed, which stay.
        damaged: what is wrong with steps that are newer than the newest whole one, by step.
        refused: why others of these could not be read, by step.
    """

    steps: list[Planned]
    damaged: dict[int, str]
    refused: dict[int, StorageError]

    @property
    def going(self) -> list[Planned]:
        """Those that go."""
        return [each for each in self.steps if each.goes]

    @property
    def freed_bytes(self) -> int:
        """How many bytes of data these have, as far as is known."""
        return sum(each.look.nbytes or 0 for each in self.going)


def plan_pruning(
    backend: Backend,
    directory: str,
    pruning: Pruning,
    now: datetime.datetime,
    *,
    every_byte: bool,
    reading: Callable[[int], None] = lambda nbytes: None,
) -> PrunePlan:
    """Tell what becomes of each step. The newest whole step and what links stand for become safe in `pruning`.

    Args:
        backend, directory: where the run is.
        pruning: what is kept.
        now: the time, for policies.
        every_byte: whether all bytes of the newest step are compared; if it is damaged, those of the one before, too.
        reading: called with numbers of bytes as they are read for that.

    Raises:
        NotACheckpointError: there is no run.
        CorruptCheckpointError: none of its steps is whole.
        MismatchError: no step has the metric by which the best are kept.
        StorageError: none that can be read is whole.
    """
    looks = inspect_run(backend, directory)
    entries = sorted((look.entry for look in looks if look.entry is not None), key=lambda entry: entry.order)
    if not entries:
        raise NotACheckpointError(f"{directory}: expected a run, found no committed steps in it")
    _refuse_unknown_metrics(directory, pruning, entries)
    roll_back = Notes(backend, directory).roll_back
    newest = newest_generations(current_line(entries, roll_back))
    found = newest_whole_step(backend, directory, newest, every_byte=every_byte, progress=reading)
    if found.entry is None and found.refused:
        raise next(iter(found.refused.values()))
    if found.entry is None:
        raise CorruptCheckpointError(f"{directory}: none of its steps is whole, so all stay; `jaxckpt scrub` tells why")
    links = links_to_steps(backend, directory)
    pruning.safe |= {entry.step: f"the link {links[entry.name]!r}" for entry in newest if entry.name in links}
    pruning.safe |= {found.entry.step: "newest that is whole"} if found.damaged or found.refused else {}
    pruning.safe |= {step: f"cannot be read: {error}" for step, error in found.refused.items()}
    pruning.safe |= {step: f"damaged: {problem}" for step, problem in found.damaged.items()}
    by_name = {fate.entry.name: fate for fate in fates(entries, roll_back, pruning, now)}
    return PrunePlan([_planned(look, by_name.get(look.name)) for look in looks], found.damaged, found.refused)


def _planned(look: StepStatus, fate: Fate | None) -> Planned:
    if fate is None:
        return Planned(look, False, (f"not committed: {look.problem}",))
    return Planned(look, fate.goes, fate.why)


def _refuse_unknown_metrics(directory: str, pruning: Pruning, entries: list[Entry]) -> None:
    """A name that is misspelt would keep all, or the wrong ones."""
    there = sorted({name for entry in entries for name in entry.metrics or ()})
    for policy in pruning.policies.values():
        if isinstance(policy, BestN) and policy.metric not in there:
            raise MismatchError(
                f"{directory}: expected steps with the metric {policy.metric!r}, found none; the metrics that they "
                f"have: {', '.join(there) or 'none'}"
            )


@dataclasses.dataclass(frozen=True)
class AtRisk:
    """What is lost if the process at work dies now; of one that has ended, what was lost then.

    Attributes:
        is_live: whether it is at work.
        how: how it ended, as the history says.
        completed: how many updates were complete when it was last heard of.
        since: the step that the next process goes on from; None: there is none.
        updates: how many have to be done again.
        heard_s: seconds since it was heard of.
    """

    is_live: bool
    how: str
    completed: int
    since: int | None
    updates: int
    heard_s: float


@dataclasses.dataclass(frozen=True)
class RunHealth:
    """What was found.

    Attributes:
        owner: of the lock; None: nobody.
        looks: all steps.
        newest: the newest step that is whole, by its manifest and the sizes of its files.
        newest_age_s: seconds since it was saved.
        damaged: what is wrong with committed steps, by the names of their directories.
        uncommitted: the same of what was never committed, or lost its COMMIT.
        refused: why others could not be read, by these names.
        stale_files: what dead processes left, which the next owner removes.
        at_risk: None: no process of the run has told how far it came.
        unreadable: why the history cannot be read.
    """

    owner: Owner | None
    looks: list[StepStatus]
    newest: StepStatus | None
    newest_age_s: float | None
    damaged: dict[str, str]
    uncommitted: dict[str, str]
    refused: dict[str, str]
    stale_files: list[str]
    at_risk: AtRisk | None
    unreadable: str | None

    @property
    def committed(self) -> int:
        """How many steps are committed."""
        return sum(look.entry is not None for look in self.looks)

    def warnings(self) -> list[str]:
        """What is not as it should be."""
        problems = [*self.damaged.items(), *self.uncommitted.items(), *self.refused.items()]
        found = [f"{name}: {problem}" for name, problem in problems]
        if self.looks and self.newest is None:
            found.append("none of the steps can be restored")
        if self.owner is not None and self.owner.is_alive and self.owner.silent_s > SILENCE_S:
            found.append(f"{self.owner.name} owns the run and has not been heard of for {self.owner.silent_s:.0f} s")
        if self.stale_files:
            more = ", ..." if len(self.stale_files) > MAX_LISTED else ""
            found.append(
                f"left by dead processes, and removed by the next one that saves: "
                f"{', '.join(self.stale_files[:MAX_LISTED])}{more}"
            )
        return found + ([] if self.unreadable is None else [f"the history cannot be read: {self.unreadable}"])


def health_of(backend: Backend, directory: str, now: datetime.datetime) -> RunHealth:
    """Look at a run.

    Raises:
        NotACheckpointError: there is no such directory.
        StorageError: it cannot be read.
    """
    owner, looks = OwnerLock(backend, directory).owner(), inspect_run(backend, directory)
    entries = sorted((look.entry for look in looks if look.entry is not None), key=lambda entry: entry.order)
    line = newest_generations(current_line(entries, Notes(backend, directory).roll_back))
    whole = newest_whole_step(backend, directory, line, every_byte=False)
    by_name = {look.name: look for look in looks}
    newest = None if whole.entry is None else by_name[whole.entry.name]
    found_out = {entry.name: whole.damaged[entry.step] for entry in line if entry.step in whole.damaged}
    problems = {look.name: look.problem for look in looks if look.problem is not None}
    refused = {entry.name: str(whole.refused[entry.step]) for entry in line if entry.step in whole.refused}
    refused |= {look.name: str(look.refusal) for look in looks if look.refusal is not None}
    uncommitted = {name: problem for name, problem in problems.items() if by_name[name].entry is None}
    told = uncommitted.keys() | refused.keys()
    damaged = {name: problem for name, problem in {**found_out, **problems}.items() if name not in told}
    at_risk, unreadable = _at_risk(backend, directory, owner, newest, now)
    is_any = damaged or uncommitted or refused
    # What is not there any more was deleted by its owner meanwhile.
    there = {entry.name for entry in backend.list(directory)} if is_any else set[str]()
    return RunHealth(
        owner=owner,
        looks=looks,
        newest=newest,
        newest_age_s=None if whole.entry is None else (now - whole.entry.time).total_seconds(),
        damaged=_of(there, damaged),
        uncommitted=_of(there, uncommitted),
        refused=_of(there, refused),
        stale_files=[*find_dead_attempts(backend, directory), *_left_half_deleted(backend, directory)],
        at_risk=at_risk,
        unreadable=unreadable,
    )


def _of(names: Collection[str], problems: dict[str, str]) -> dict[str, str]:
    return {name: problem for name, problem in problems.items() if name in names}


def _left_half_deleted(backend: Backend, directory: str) -> list[str]:
    """What was being deleted when its owner died; a live one is deleting it now, or ends when it has done so."""
    found = half_deleted(backend, directory)
    owner = OwnerLock(backend, directory).owner() if found else None
    if not found or (owner is not None and owner.is_alive):
        return []
    there = half_deleted(backend, directory)
    return [name for name in found if name in there]


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
