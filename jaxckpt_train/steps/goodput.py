"""Goodput: which part of a run's time went into updates that count, over all its processes."""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import itertools
from collections.abc import Sequence

from jaxckpt_train.steps.attempts import Attempt, Stretch


@dataclasses.dataclass(frozen=True)
class AttemptGoodput:
    """One process of a run.

    Attributes:
        began, ended: when; of one that was killed, when it was last heard of.
        how: how it ended: "finished", "preempted", "late" (asked to leave, without the time for a save), "closed",
            "killed", "running", or an error.
        first_step: the step that it went on from first. None: it had no state yet when it ended.
        last_step: how many updates were complete when it was last heard of; None as before.
        useful_steps: of its updates those that what the run has now descends from.
        redone_steps: those that were lost, and done again or to be done again.
        saves: how many were committed.
        blocked_s: seconds that they held up the loop.
        to_resume_s: seconds until the loop had its state.
        useful_s: seconds in useful updates: those in the loop, without the time blocked, by the share of useful ones.
        wall_s: all its seconds.
    """

    began: datetime.datetime
    ended: datetime.datetime
    how: str
    first_step: int | None
    last_step: int | None
    useful_steps: int
    redone_steps: int
    saves: int
    blocked_s: float
    to_resume_s: float
    useful_s: float
    wall_s: float


@dataclasses.dataclass(frozen=True)
class Goodput:
    """All processes of a run, and their totals.

    Attributes:
        attempts: the processes, in order.
        useful_steps, redone_steps, saves, blocked_s, to_resume_s, useful_s: totals.
        between_s: seconds in which there was none.
        wall_s: from the first one's begin to the last one's end.
        share: of these the useful ones, from 0 to 1.
    """

    attempts: tuple[AttemptGoodput, ...] = ()
    useful_steps: int = 0
    redone_steps: int = 0
    saves: int = 0
    blocked_s: float = 0.0
    to_resume_s: float = 0.0
    useful_s: float = 0.0
    between_s: float = 0.0
    wall_s: float = 0.0

    @property
    def share(self) -> float:
        """The useful part of the run's time."""
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s > 0 else 0.0  # clocks may be set back


def goodput(attempts: Sequence[Attempt]) -> Goodput:
    """The goodput of a run, of which these are the processes in order; what only tended it is left out."""
    attempts = [attempt for attempt in attempts if attempt.is_of_the_training]
    if not attempts:
        return Goodput()
    _complete(attempts)
    stretches = [stretch for attempt in attempts for stretch in attempt.stretches]
    useful = iter(_useful(stretches))
    rated = [_rated(attempt, sum(next(useful) for _ in attempt.stretches)) for attempt in attempts]
    wall_s = max(0.0, (max(each.ended for each in rated) - min(each.began for each in rated)).total_seconds())
    return Goodput(
        tuple(rated),
        useful_steps=sum(each.useful_steps for each in rated),
        redone_steps=sum(each.redone_steps for each in rated),
        saves=sum(each.saves for each in rated),
        blocked_s=sum(each.blocked_s for each in rated),
        to_resume_s=sum(each.to_resume_s for each in rated),
        useful_s=sum(each.useful_s for each in rated),
        between_s=max(0.0, wall_s - sum(each.wall_s for each in rated)),
        wall_s=wall_s,
    )


def _complete(attempts: Sequence[Attempt]) -> None:
    """One that was killed may have come further than was heard of it: to where the next one went on."""
    trained = [attempt for attempt in attempts if attempt.stretches]
    asked = {attempt.stretches[0].first for attempt in trained}
    committed = set[int]()  # those of them that an event so far says were committed
    for attempt, following in itertools.pairwise(trained):
        for stretch in attempt.stretches:
            committed.update(asked.intersection([stretch.first]), asked.intersection(stretch.saved))
        last, taken_up = attempt.stretches[-1], following.stretches[0].first
        if taken_up > last.last and taken_up not in committed:
            last.last = taken_up


def _useful(stretches: Sequence[Stretch]) -> list[int]:
    """Of each stretch, how many of its updates are among those that what the run has now descends from."""
    # The numbers of the stretches that had a step committed, in order, by the steps that a stretch began with.
    had_in: dict[int, list[int]] = {stretch.first: [] for stretch in stretches}
    for number, stretch in enumerate(stretches):
        had_in[stretch.first].append(number)
        for step in filter(had_in.__contains__, stretch.saved):
            had_in[step].append(number)
    useful = [0] * len(stretches)
    number = len(stretches) - 1
    at = stretches[-1].last if stretches else 0
    while number >= 0:
        useful[number] = at - stretches[number].first
        at = stretches[number].first
        number = _origin(stretches, number, had_in[at])
    return useful


def _origin(stretches: Sequence[Stretch], number: int, had_in: Sequence[int]) -> int:
    """The number of the stretch from which this one went on: the last before it that had its first step committed.

    If none is known to have, the last one that reached it; -1: there is none, it began from scratch.
    """
    step, before = stretches[number].first, bisect.bisect_left(had_in, number)
    if before:
        return had_in[before - 1]
    reached = (each for each in range(number - 1, -1, -1) if stretches[each].first <= step <= stretches[each].last)
    return next(reached, -1)


def _rated(attempt: Attempt, useful: int) -> AttemptGoodput:
    steps = sum(stretch.last - stretch.first for stretch in attempt.stretches)
    in_loop_s = max(0.0, attempt.wall_s - attempt.to_resume_s - attempt.blocked_s)
    return AttemptGoodput(
        began=attempt.began,
        ended=attempt.ended,
        how=attempt.how,
        first_step=attempt.stretches[0].first if attempt.stretches else None,
        last_step=attempt.stretches[-1].last if attempt.stretches else None,
        useful_steps=useful,
        redone_steps=steps - useful,
        saves=attempt.saves,
        blocked_s=attempt.blocked_s,
        to_resume_s=attempt.to_resume_s,
        useful_s=in_loop_s * useful / steps if steps else 0.0,
        wall_s=attempt.wall_s,
    )
