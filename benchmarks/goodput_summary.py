"""What the attempts of a subject come to: which part of their time went into updates that are there in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.goodput_facts import Facts
from benchmarks.spread import Spread


@dataclasses.dataclass(frozen=True)
class Where:
    """Where the time of a subject went, in seconds; together all of it.

    Attributes:
        starting: until the model was there.
        restoring: from then until the loop began.
        useful: updates that are there in the end, each as long as an undisturbed one.
        lost: updates that were lost, or done again, each as long as an undisturbed one.
        called: in calls of the checkpoint library.
        leaving: from requests to leave to the ends of the processes.
        slower: what is left: what updates took longer than undisturbed ones, the first of each process among them.
    """

    starting: float
    restoring: float
    useful: float
    lost: float
    called: float
    leaving: float
    slower: float


@dataclasses.dataclass(frozen=True)
class Goodput:
    """One subject.

    Attributes:
        wall_s: all its attempts together.
        kills, requests: how many were killed by the schedule, and asked to leave by it.
        useful: the highest update that could be restored in the end.
        done: all its updates.
        redone: of these the ones that an earlier attempt had done.
        share: of its time, what as many undisturbed updates as are useful take.
        where: the time went.
        start_s, restore_s, resume_s: until the model was there; from then until the loop began, where there was
            something to restore; from the start of the process until its first update was complete.
        lost_by_kill, lost_by_request: updates that the next attempt did not go on from.
        late: of the processes that were asked to leave, those that had not when their grace period was over.
        shares: of each attempt, what it added to what could be restored.
    """

    wall_s: float
    kills: int
    requests: int
    useful: int
    done: int
    redone: int
    share: float
    where: Where
    start_s: Spread | None
    restore_s: Spread | None
    resume_s: Spread | None
    lost_by_kill: Spread | None
    lost_by_request: Spread | None
    late: int
    shares: Spread


def goodput_of(facts: Sequence[Facts], final: int, update_s: float) -> Goodput:
    """What a subject has come to.

    Args:
        facts: its attempts in order.
        final: the update that could be restored after the last one.
        update_s: seconds for an undisturbed update.
    """
    wall_s = sum(one.wall_s for one in facts)
    done = sum(one.done for one in facts)
    added, lost = _added(facts, final)
    reached, redone = 0, 0
    for one in facts:
        if one.restored is not None and one.last is not None:
            redone += max(0, min(reached, one.last) - one.restored)
            reached = max(reached, one.last)
    restores = [one for one in facts if one.restored and one.restored_s is not None and one.made_s is not None]
    return Goodput(
        wall_s=wall_s,
        kills=sum(one.is_scheduled and not one.asked for one in facts),
        requests=sum(one.asked for one in facts),
        useful=final,
        done=done,
        redone=redone,
        share=final * update_s / wall_s,
        where=_where(facts, final, update_s),
        start_s=_spread(one.made_s for one in facts),
        restore_s=_spread((one.restored_s or 0) - (one.made_s or 0) for one in restores),
        resume_s=_spread(one.first_s for one in facts),
        lost_by_kill=_spread(each for one, each in zip(facts, lost, strict=True) if not one.asked and one.is_scheduled),
        lost_by_request=_spread(each for one, each in zip(facts, lost, strict=True) if one.asked),
        late=sum(one.asked and not one.left_itself for one in facts),
        shares=Spread.of([each * update_s / one.wall_s for one, each in zip(facts, added, strict=True)]),
    )


def _added(facts: Sequence[Facts], final: int) -> tuple[list[int], list[int]]:
    """For each attempt, how many updates it added to what can be restored, and how many of its own were lost."""
    nexts = [final]  # what the next one that came so far went on from
    for one in reversed(facts[1:]):
        nexts.append(nexts[-1] if one.restored is None else one.restored)
    nexts.reverse()
    added, lost, before = [], [], 0
    for one, after in zip(facts, nexts, strict=True):
        first = before if one.restored is None else one.restored
        added.append(after - first)
        lost.append(max(0, (first if one.last is None else one.last) - after))
        before = after
    return added, lost


def _where(facts: Sequence[Facts], final: int, update_s: float) -> Where:
    wall, starting, restoring, leaving = sum(one.wall_s for one in facts), 0.0, 0.0, 0.0
    for one in facts:
        made_s = one.wall_s if one.made_s is None else one.made_s
        restored_s = one.wall_s if one.restored_s is None else one.restored_s
        starting += made_s
        restoring += restored_s - made_s
        leaving += min(one.leaving_s, one.wall_s - restored_s)
    called, useful = sum(one.called_s for one in facts), final * update_s
    lost = sum(one.done for one in facts) * update_s - useful
    slower = wall - starting - restoring - useful - lost - called - leaving
    return Where(starting, restoring, useful, lost, called, leaving, slower)


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


def as_goodput(stored: Mapping[str, Any]) -> Goodput:
    """A goodput that JSON has held."""
    values = dict(stored)
    for name in ("start_s", "restore_s", "resume_s", "lost_by_kill", "lost_by_request", "shares"):
        values[name] = None if values[name] is None else Spread(**values[name])
    return Goodput(**{**values, "where": Where(**values["where"])})
