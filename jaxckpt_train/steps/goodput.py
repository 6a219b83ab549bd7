"""Goodput: which part of a run's time went into updates that count, over all its processes."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

from jaxckpt_train.steps.attempts import Attempt


@dataclasses.dataclass(frozen=True)
class AttemptGoodput:
    """One process of a run.

    Attributes:
        began, ended: when; of one that was killed, when it was last heard of.
        how: how it ended: "finished", "preempted", "closed", "killed", "running", or an error.
        first_step: the step that it went on from.
        last_step: how many updates were complete when it was last heard of.
        useful_steps: of its updates those that a later process went on from, or that nobody had to do again.
        redone_steps: those that were lost, and done again.
        saves: how many were committed.
        blocked_s: seconds that they held up the loop.
        to_resume_s: seconds until the loop had its state.
        useful_s: seconds in useful updates: those in the loop, without the time blocked, by the share of useful ones.
        wall_s: all its seconds.
    """

    began: datetime.datetime
    ended: datetime.datetime
    how: str
    first_step: int
    last_step: int
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
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0


def goodput(attempts: Sequence[Attempt]) -> Goodput:
    """The goodput of a run, of which these are the processes in order."""
    rated: list[AttemptGoodput] = []
    kept: int | None = None  # the lowest step that a later process went on from
    following: Attempt | None = None
    for attempt in reversed(attempts):
        rated.append(_rated(attempt, following, kept))
        kept = attempt.first_step if kept is None else min(kept, attempt.first_step)
        following = attempt
    if not rated:
        return Goodput()
    rated.reverse()
    wall_s = max(0.0, (max(each.ended for each in rated) - rated[0].began).total_seconds())
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


def _rated(attempt: Attempt, following: Attempt | None, kept: int | None) -> AttemptGoodput:
    # One that was killed may have come further than was heard of it, as the next one tells.
    first = attempt.first_step
    last = max(first, attempt.last_step, 0 if following is None else following.first_step)
    useful = last - first if kept is None else max(0, min(last, kept) - first)
    steps = last - first
    in_loop_s = max(0.0, attempt.wall_s - attempt.to_resume_s - attempt.blocked_s)
    return AttemptGoodput(
        began=attempt.began,
        ended=attempt.ended,
        how=attempt.how,
        first_step=first,
        last_step=last,
        useful_steps=useful,
        redone_steps=steps - useful,
        saves=attempt.saves,
        blocked_s=attempt.blocked_s,
        to_resume_s=attempt.to_resume_s,
        useful_s=in_loop_s * useful / steps if steps else 0.0,
        wall_s=attempt.wall_s,
    )
