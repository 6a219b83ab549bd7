"""The processes that a run has had so far, read from its history: when each lived, how far it came, how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from jaxckpt_train.steps.save_costs import Failures

RUNNING, KILLED = "running", "killed"  # as nobody has said how it ended
PREEMPTED, FINISHED, CLOSED = "preempted", "finished", "closed"


class _Event(msgspec.Struct):
    """What is looked at of an event; the rest of it may be anything."""

    event: str
    time: datetime.datetime
    step: int | None = None
    ok: bool | None = None
    how: str | None = None
    blocked_s: float = 0.0
    save_s: float = 0.0
    decide_s: float = 0.0
    wait_s: float = 0.0
    restore_s: float = 0.0
    resume_s: float = 0.0
    process_age_s: float | None = None
    cost_s: float | None = None


@dataclasses.dataclass
class Attempt:
    """One process of a run, from when it took the directory.

    Attributes:
        began: when it was made, where that is known, or took the directory.
        ended: when it let go of the directory; of one that was killed, when it was last heard of.
        how: "finished", "preempted", "closed", "killed", "running", or the error that it ended with.
        first_step: the step that it went on from; 0: it began from scratch.
        last_step: how many updates were complete when it was last heard of.
        saves: how many saves were committed.
        failed_saves: how many were not.
        blocked_s: seconds that saves held up the loop.
        to_resume_s: seconds from `began` until the loop had its state.
    """

    began: datetime.datetime
    ended: datetime.datetime
    how: str = RUNNING
    first_step: int = 0
    last_step: int = 0
    saves: int = 0
    failed_saves: int = 0
    blocked_s: float = 0.0
    to_resume_s: float = 0.0
    has_resumed: bool = False

    @property
    def wall_s(self) -> float:
        """Seconds that it lived, as far as is known."""
        return max(0.0, (self.ended - self.began).total_seconds())

    def hear(self, event: _Event) -> None:
        """Take note of an event of it."""
        kind, step = event.event, event.step
        if kind not in ("restore", "resumed", "save", "progress", "preempted", "end"):
            return
        self.ended = max(self.ended, event.time)
        if kind == "restore" and step is not None and not self.has_resumed:
            self.first_step = self.last_step = step
            self.to_resume_s = (event.time - self.began).total_seconds()
        elif kind == "resumed" and step is not None:
            self._resumed(event, step)
        elif kind == "save":
            self.saves, self.failed_saves = self.saves + bool(event.ok), self.failed_saves + (not event.ok)
            self.blocked_s += event.blocked_s
        elif kind in (PREEMPTED, "end"):
            self.how = PREEMPTED if kind == PREEMPTED or self.how == PREEMPTED else event.how or CLOSED
        if kind in ("save", "progress", "end") and step is not None:
            self.last_step = max(self.last_step, step)

    def _resumed(self, event: _Event, step: int) -> None:
        self.has_resumed, self.first_step, self.last_step = True, step, step
        if event.process_age_s is not None:
            self.began = min(self.began, event.time - datetime.timedelta(seconds=event.process_age_s))
        self.to_resume_s = max(event.resume_s, (event.time - self.began).total_seconds())


def attempts_of(
    events: Iterable[Mapping[str, Any]], running: tuple[int, datetime.datetime] | None = None
) -> list[Attempt]:
    """The processes that these events of one run tell of, in order.

    Args:
        events: oldest first.
        running: of the last one, if it is at work: how many updates are complete, and the time.
    """
    found: list[Attempt] = []
    for event in _typed(events):
        if event.event == "start":
            found.append(Attempt(event.time, event.time))
        elif found:
            found[-1].hear(event)
    if running is not None and found and found[-1].how == RUNNING:
        found[-1].last_step, found[-1].ended = max(found[-1].last_step, running[0]), running[1]
    for attempt in found if running is None else found[:-1]:
        attempt.how = KILLED if attempt.how == RUNNING else attempt.how
    return found


def _typed(events: Iterable[Mapping[str, Any]]) -> Iterable[_Event]:
    for event in events:
        with contextlib.suppress(msgspec.ValidationError):
            yield msgspec.convert(event, _Event)


@dataclasses.dataclass(frozen=True)
class Past:
    """What earlier processes of a run tell a new one.

    Attributes:
        failures: how often, and in which time, it has failed.
        cost_s: what a save cost the loop; None: not known.
        duration_s: the longest of the last saves, from its begin until it was committed; None: not known.
    """

    failures: Failures = dataclasses.field(default_factory=Failures)
    cost_s: float | None = None
    duration_s: float | None = None

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]], last: int = 6) -> Past:
        """Read it from the events of a run, of which none is of a process that is at work."""
        listed = [*events]
        attempts = attempts_of(listed)
        failures = Failures(sum(lost_work(each) for each in attempts), sum(each.wall_s for each in attempts))
        saves = [event for event in _typed(listed) if event.event == "save" and event.ok][-last:]
        costs = [event.cost_s for event in saves if event.cost_s is not None]
        took = [event.save_s - event.decide_s - event.wait_s for event in saves if event.save_s]
        return cls(failures, costs[-1] if costs else None, max(took, default=None))


def lost_work(attempt: Attempt) -> bool:
    """Whether it ended without the chance to save: killed, or with an error."""
    return attempt.how not in (FINISHED, CLOSED, PREEMPTED, RUNNING)
