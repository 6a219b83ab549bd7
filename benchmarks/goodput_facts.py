"""What counts of one attempt of a training, and how long an undisturbed update takes."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from benchmarks.goodput_attempt import Attempt
from benchmarks.spread import Spread


@dataclasses.dataclass(frozen=True)
class Facts:
    """One attempt. Seconds since it was started, or that something took; None: it did not come so far.

    Attributes:
        wall_s: all its time.
        made_s: until the model was there.
        restored_s: until the loop began.
        first_s: until its first update was complete.
        restored: the completed updates that it went on from.
        last: the number of its last update.
        called_s: in calls of the checkpoint library, until it was killed or asked to leave.
        asked: whether it was asked to leave.
        left_itself: whether it did.
        leaving_s: from the request to its end; 0 if it was killed.
        is_scheduled: whether the schedule has ended it, and not the end of the budget.
    """

    wall_s: float
    made_s: float | None
    restored_s: float | None
    first_s: float | None
    restored: int | None
    last: int | None
    called_s: float
    asked: bool
    left_itself: bool
    leaving_s: float
    is_scheduled: bool

    @property
    def done(self) -> int:
        """Its updates."""
        return 0 if self.last is None or self.restored is None else self.last - self.restored


def facts_of(attempt: Attempt, *, is_scheduled: bool) -> Facts:
    """What counts of an attempt."""
    record, began = attempt.record, attempt.began_at
    sent_at = attempt.ended_at if attempt.sent_at is None else attempt.sent_at
    called_s = 0.0
    for update in record.updates:
        until = attempt.ended_at if update.called_s is None else update.at + update.called_s
        called_s += max(0.0, min(until, sent_at) - update.at)
    return Facts(
        wall_s=attempt.wall_s,
        made_s=None if record.made_at is None else record.made_at - began,
        restored_s=None if record.restored_at is None else record.restored_at - began,
        first_s=record.updates[0].at - began if record.updates else None,
        restored=record.restored,
        last=record.updates[-1].number if record.updates else None,
        called_s=called_s,
        asked=attempt.asked,
        left_itself=attempt.left_itself,
        leaving_s=attempt.ended_at - sent_at if attempt.asked else 0.0,
        is_scheduled=is_scheduled,
    )


def update_times(attempt: Attempt, skipped: int) -> list[float]:
    """Seconds from each update to the next, without the first ones."""
    updates = attempt.record.updates[skipped:]
    return [after.at - before.at for before, after in itertools.pairwise(updates)]


def median_update_s(times: Sequence[Sequence[float]]) -> Spread:
    """The median of all, with the range of the medians of the processes."""
    medians = [statistics.median(one) for one in times]
    return Spread(statistics.median(step for one in times for step in one), min(medians), max(medians))
