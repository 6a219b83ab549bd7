"""The processes that a run has had so far, read from its history: when each lived, how far it came, how it ended."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable

from jaxckpt_train.steps.run_events import RunEvent

RUNNING, KILLED = "running", "killed"  # as nobody has said how it ended
PREEMPTED, LATE, FINISHED, CLOSED = "preempted", "late", "finished", "closed"


@dataclasses.dataclass
class Stretch:
    """Updates that one process did one after the other, from a step that it took up.

    Attributes:
        first: the step that it went on from.
        last: how many updates were complete when it was last heard of.
        saved: the steps that were committed meanwhile, each above the one before.
    """

    first: int
    last: int
    saved: list[int] = dataclasses.field(default_factory=list)

    @property
    def safe(self) -> int:
        """The last step of it that a later process can go on from."""
        return self.saved[-1] if self.saved else self.first


@dataclasses.dataclass
class Attempt:
    """One process of a run, from when it took the directory.

    Attributes:
        began: when it was made, where that is known, or took the directory.
        ended: when it let go of the directory; of one that was killed, when it was last heard of.
        how: "finished", "preempted", "late" (asked to leave, without the time for a save), "closed", "killed",
            "running", or the error that it ended with.
        stretches: its updates. None: it had no state yet when it ended. More than one: it went back in between.
        saves: how many saves were committed.
        failed_saves: how many were not.
        blocked_s: seconds that saves held up the loop.
        to_resume_s: seconds from `began` until the loop had its state.
        follows: the step that was last committed before it began; 0: none was.
        tends: whether it took the directory for a command, as `jaxckpt pin` and `prune` do.
    """

    began: datetime.datetime
    ended: datetime.datetime
    how: str = RUNNING
    stretches: list[Stretch] = dataclasses.field(default_factory=list)
    saves: int = 0
    failed_saves: int = 0
    blocked_s: float = 0.0
    to_resume_s: float = 0.0
    follows: int = 0
    has_resumed: bool = False
    tends: bool = False

    @property
    def wall_s(self) -> float:
        """Seconds that it lived, as far as is known."""
        return max(0.0, (self.ended - self.began).total_seconds())

    @property
    def safe_step(self) -> int:
        """The step that whoever came next could go on from."""
        return self.stretches[-1].safe if self.stretches else self.follows

    @property
    def has_lost_work(self) -> bool:
        """Whether it had its state, and ended without the chance to save: killed, late, or with an error."""
        return bool(self.stretches) and self.how not in (FINISHED, CLOSED, PREEMPTED, RUNNING)

    @property
    def is_of_the_training(self) -> bool:
        """Whether it may have had a loop: of a command's process older histories tell no more than that it came."""
        has_left_nothing = self.how == CLOSED and not (self.stretches or self.saves or self.failed_saves)
        return not self.tends and not has_left_nothing

    def hear(self, event: RunEvent) -> None:
        """Take note of an event of it."""
        kind, step = event.event, event.step
        if kind not in ("restore", "resumed", "save", "progress", "preempted", "end"):
            return
        self.ended = max(self.ended, event.time)
        if kind in ("restore", "resumed"):
            self._resumed(event)
        elif kind == "save":
            self._saved(event)
        elif kind == PREEMPTED:
            self.how = PREEMPTED
        elif step is not None:
            self.came_to(step)
        if kind == "end" and (self.how != PREEMPTED or event.how not in (None, CLOSED)):
            self.how = event.how or CLOSED

    def takes_up(self, step: int) -> None:
        """It goes on from this step; to be told so twice, by the restore and by the loop, changes nothing."""
        if not self.stretches or not self.stretches[-1].first == self.stretches[-1].last == step:
            self.stretches.append(Stretch(step, step))

    def came_to(self, step: int) -> Stretch:
        """So many updates are complete."""
        if not self.stretches:  # nobody has said where it began
            self.takes_up(min(self.follows, step))
        stretch = self.stretches[-1]
        stretch.last = max(stretch.last, step)
        return stretch

    def _resumed(self, event: RunEvent) -> None:
        is_first = not self.stretches
        if event.completed is not None:
            self.came_to(event.completed)
        if event.step is not None:
            self.takes_up(event.step)
        if self.has_resumed or not (is_first or event.event == "resumed"):
            return
        if event.event == "resumed":
            self.has_resumed = True
            before_s = max(event.resume_s, event.process_age_s or 0.0)
            self.began = min(self.began, event.time - datetime.timedelta(seconds=before_s))
        self.to_resume_s = max(0.0, event.resume_s, (event.time - self.began).total_seconds())

    def _saved(self, event: RunEvent) -> None:
        self.saves, self.failed_saves = self.saves + bool(event.ok), self.failed_saves + (not event.ok)
        self.blocked_s += event.blocked_s
        step = event.step
        if step is None:
            return
        stretch = self.came_to(step)
        if event.ok:
            if step < stretch.first or (stretch.saved and step <= stretch.safe):  # they are committed in order
                stretch = Stretch(step, step)
                self.stretches.append(stretch)
            stretch.saved.append(step)


def attempts_of(
    events: Iterable[RunEvent],
    running: tuple[int | None, datetime.datetime] | None = None,
    *,
    is_live: bool = False,
) -> list[Attempt]:
    """The processes that these events of one run tell of, in order.

    Args:
        events: oldest first.
        running: of the last one, if it is this process: how many updates are complete (None: it has no state yet), and
            the time.
        is_live: whether the last one is at work, here or elsewhere.
    """
    found: list[Attempt] = []
    for event in events:
        hear(found, event)
    return settled(found, running, is_live=is_live)


def hear(found: list[Attempt], event: RunEvent) -> None:
    """Take note of the next event of a run."""
    if event.event == "start":
        follows = found[-1].safe_step if found else 0
        found.append(Attempt(event.time, event.time, follows=follows, tends=event.tends))
        if event.step is not None:  # it had restored that before
            found[-1].takes_up(event.step)
    elif found:
        found[-1].hear(event)


def settled(
    found: list[Attempt], running: tuple[int | None, datetime.datetime] | None = None, *, is_live: bool = False
) -> list[Attempt]:
    """The processes once all events of them were heard; arguments as of `attempts_of`."""
    if running is not None and found and found[-1].how == RUNNING:
        completed, now = running
        found[-1].ended = max(found[-1].ended, now)
        if completed is not None:
            found[-1].came_to(completed)
    for attempt in found[:-1] if is_live or running is not None else found:
        attempt.how = KILLED if attempt.how == RUNNING else attempt.how
    return found
