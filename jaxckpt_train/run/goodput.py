"""What earlier processes of a run tell a new one: how often it has failed, and what its saves took.

Prints the goodput of a run as one table.

Goodput: which part of a run's time went into updates that count, over all its processes.

The processes that a run has had so far, read from its history: when each lived, how far it came, how it ended.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from jaxckpt_train.policies.context import Failures
from jaxckpt_train.run.history import CLOSED, FINISHED, PREEMPTED, RunEvent, run_events

RUNNING, KILLED = "running", "killed"  # as nobody has said how it ended
COLUMNS = ("began", "ended", "steps", "useful", "redone", "saves", "blocked", "resume", "wall", "useful time")
LESS_NEEDED = ("resume", "blocked", "saves", "began", "steps", "wall")  # left out in this order where all are too wide
MOST_ROWS = 40
MOST_SHOWN = 24  # letters of how a process has ended
LEAST_WIDTH = 120  # where there is no terminal to tell


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


def print_goodput(found: Goodput, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print one line for each process of a run, and the totals; of very many the first and the last.

    Args:
        found: the goodput.
        file: where to; None: standard output.
        width: in letters. None: that of the terminal, or what is needed where there is none.
    """
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    if width is None and not console.is_terminal:
        console.width = max(console.width, LEAST_WIDTH)
    names = [*COLUMNS]
    for name in LESS_NEEDED:
        if console.measure(_table(found, names), options=console.options.update(width=1000)).maximum > console.width:
            names.remove(name)
    console.print(_table(found, names))


def _table(found: Goodput, names: Sequence[str]) -> Table:
    processes = "1 process" if len(found.attempts) == 1 else f"{len(found.attempts)} processes"
    between = "" if found.between_s == 0 else f"; between processes {_duration(found.between_s)}"
    table = Table(title=f"{processes}, useful time {found.share:.1%}{between}", title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)

    def add(cells: dict[str, str]) -> None:
        table.add_row(*(cells.get(name, "") for name in names))

    rows, left_out = [*found.attempts], len(found.attempts) - MOST_ROWS
    for row in rows if left_out <= 0 else rows[: MOST_ROWS // 2]:
        add(_cells(row))
    if left_out > 0:
        add({names[0]: f"... {left_out} more"})
        for row in rows[-MOST_ROWS // 2 :]:
            add(_cells(row))
    table.add_section()
    add({names[0]: "total", **_amounts(found, found.share)})
    return table


def _cells(row: AttemptGoodput) -> dict[str, str]:
    share = min(1.0, row.useful_s / row.wall_s) if row.wall_s > 0 else 0.0
    return {
        "began": f"{row.began.astimezone():%m-%d %H:%M:%S}",
        "ended": "".join(letter if letter.isprintable() else "?" for letter in row.how[:MOST_SHOWN]),  # as a file says
        "steps": "-" if row.first_step is None else f"{row.first_step}-{row.last_step}",
        **_amounts(row, share),
    }


def _amounts(of: AttemptGoodput | Goodput, share: float) -> dict[str, str]:
    return {
        "useful": str(of.useful_steps),
        "redone": str(of.redone_steps),
        "saves": str(of.saves),
        "blocked": _duration(of.blocked_s),
        "resume": _duration(of.to_resume_s),
        "wall": _duration(of.wall_s),
        "useful time": f"{_duration(of.useful_s)} {share:.0%}",
    }


def _duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes}m{round(seconds) % 60:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


@dataclasses.dataclass(frozen=True)
class RunStatistics:
    """What earlier processes of a run tell a new one.

    Attributes:
        failures: how often, and in which time, it has failed.
        cost_s: what a save cost the loop; None: not known.
        duration_s: the longest of the last saves, from its begin until it was committed; None: not known.
        has_begun: whether a loop has had its state.
    """

    failures: Failures = dataclasses.field(default_factory=Failures)
    cost_s: float | None = None
    duration_s: float | None = None
    has_begun: bool = False

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]], last: int = 6) -> RunStatistics:
        """Read it from the events of a run, of which none is of a process that is at work."""
        listed = [*run_events(events)]
        attempts = [each for each in attempts_of(listed) if each.is_of_the_training]
        failures = Failures(sum(each.has_lost_work for each in attempts), sum(each.wall_s for each in attempts))
        saves = [event for event in listed if event.event == "save" and event.ok][-last:]
        costs = [event.cost_s for event in saves if event.cost_s is not None]
        took = [max(0.0, event.save_s - event.decide_s - event.wait_s) for event in saves if event.save_s]
        has_begun = any(event.event == "resumed" for event in listed)
        return cls(failures, costs[-1] if costs else None, max(took, default=None), has_begun)
