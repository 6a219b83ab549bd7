"""Goodput: the share of a run's time that went into updates that count, over all its processes.

`attempts_of` reads from the history when each process lived, how far it trained, and how it ended. `goodput` rates
these attempts, `RunStatistics` summarises them for the next process of the run, and `print_goodput` prints them.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table

from jaxckpt_train.policies.context import Failures
from jaxckpt_train.run.history import CLOSED, FINISHED, PREEMPTED, RunEvent

RUNNING, KILLED = "running", "killed"  # the history has no end of the process
COLUMNS = ("began", "ended", "steps", "useful", "redone", "saves", "blocked", "resume", "wall", "useful time")
LESS_NEEDED = ("resume", "blocked", "saves", "began", "steps", "wall")  # omitted in this order if the table is too wide
MOST_ROWS = 40
MOST_SHOWN = 24  # characters of the end of a process
LEAST_WIDTH = 120  # without a terminal


@dataclasses.dataclass
class Stretch:
    """Consecutive updates of one process, starting from the step `first`."""

    first: int
    last: int
    saved: list[int] = dataclasses.field(default_factory=list)

    @property
    def safe(self) -> int:
        """The last step of the stretch from which a later process can continue."""
        return self.saved[-1] if self.saved else self.first


@dataclasses.dataclass
class Attempt:
    """One process of a run, from the time when it took the directory."""

    began: datetime.datetime  # when the process started, if known, or took the directory
    ended: datetime.datetime  # when it released the directory; if it was killed, the time of its last event
    how: str = RUNNING  # as `AttemptGoodput.how`
    # Its updates. None: it ended before it had its state. More than one stretch: it went back in between.
    stretches: list[Stretch] = dataclasses.field(default_factory=list)
    saves: int = 0
    failed_saves: int = 0
    blocked_s: float = 0.0
    to_resume_s: float = 0.0
    follows: int = 0  # the last step committed before it began
    has_resumed: bool = False
    tends: bool = False  # it took the directory for a command, such as `jaxckpt pin` or `prune`

    @property
    def wall_s(self) -> float:
        """Seconds that it lived, as far as is known."""
        return max(0.0, (self.ended - self.began).total_seconds())

    @property
    def safe_step(self) -> int:
        """The step from which the next process could continue."""
        return self.stretches[-1].safe if self.stretches else self.follows

    @property
    def has_lost_work(self) -> bool:
        """Whether it had its state and ended without a chance to save: killed, late, or with an error."""
        return bool(self.stretches) and self.how not in (FINISHED, CLOSED, PREEMPTED, RUNNING)

    @property
    def is_of_the_training(self) -> bool:
        """Whether it may have had a loop. Older histories only have the start of a command's process."""
        has_left_nothing = self.how == CLOSED and not (self.stretches or self.saves or self.failed_saves)
        return not self.tends and not has_left_nothing

    def add_event(self, event: RunEvent) -> None:
        """Apply an event of this process."""
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
            self.advance_to(step)
        if kind == "end" and (self.how != PREEMPTED or event.how not in (None, CLOSED)):
            self.how = event.how or CLOSED

    def start_stretch(self, step: int) -> None:
        """Start a stretch at this step, unless the last one has just started there: restore and loop both report it."""
        if not self.stretches or not self.stretches[-1].first == self.stretches[-1].last == step:
            self.stretches.append(Stretch(step, step))

    def advance_to(self, step: int) -> Stretch:
        """Record the number of completed updates."""
        if not self.stretches:  # the history does not have the start
            self.start_stretch(min(self.follows, step))
        stretch = self.stretches[-1]
        stretch.last = max(stretch.last, step)
        return stretch

    def _resumed(self, event: RunEvent) -> None:
        is_first = not self.stretches
        if event.completed is not None:
            self.advance_to(event.completed)
        if event.step is not None:
            self.start_stretch(event.step)
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
        stretch = self.advance_to(step)
        if event.ok:
            if step < stretch.first or (stretch.saved and step <= stretch.safe):  # a stretch commits in ascending order
                stretch = Stretch(step, step)
                self.stretches.append(stretch)
            stretch.saved.append(step)


def attempts_of(
    events: Iterable[RunEvent], running: tuple[int | None, datetime.datetime] | None = None, *, is_live: bool = False
) -> list[Attempt]:
    """The processes in the history of one run, in order.

    If the last one is this process, `running` has its completed updates (None: it has no state yet) and the current
    time. `is_live`: the last one is running, here or elsewhere.
    """
    found: list[Attempt] = []
    for event in events:
        add_event(found, event)
    return settled(found, running, is_live=is_live)


def add_event(found: list[Attempt], event: RunEvent) -> None:
    """Apply the next event of a run."""
    if event.event == "start":
        follows = found[-1].safe_step if found else 0
        found.append(Attempt(event.time, event.time, follows=follows, tends=event.tends))
        if event.step is not None:  # it had restored this step before
            found[-1].start_stretch(event.step)
    elif found:
        found[-1].add_event(event)


def settled(
    found: list[Attempt], running: tuple[int | None, datetime.datetime] | None = None, *, is_live: bool = False
) -> list[Attempt]:
    """Complete the processes after their last event. The arguments are those of `attempts_of`."""
    if running is not None and found and found[-1].how == RUNNING:
        completed, now = running
        found[-1].ended = max(found[-1].ended, now)
        if completed is not None:
            found[-1].advance_to(completed)
    for attempt in found[:-1] if is_live or running is not None else found:
        attempt.how = KILLED if attempt.how == RUNNING else attempt.how
    return found


@dataclasses.dataclass(frozen=True)
class AttemptGoodput:
    """The goodput of one process of a run."""

    began: datetime.datetime
    ended: datetime.datetime  # if it was killed, the time of its last event
    # "finished", "preempted", "late" (asked to shut down without enough time for a save), "closed", "killed",
    # "running", or the error that ended it.
    how: str
    first_step: int | None  # the step that it started from; None: it ended before it had its state
    last_step: int | None  # the last known number of completed updates
    useful_steps: int  # the updates that the current state of the run descends from
    redone_steps: int  # the updates that were lost, and were or will be repeated
    saves: int
    failed_saves: int
    blocked_s: float  # in which saves blocked the loop
    to_resume_s: float  # until the loop had its state
    useful_s: float  # the unblocked time in the loop, times the share of useful updates
    lost_s: float  # the same for the updates that were lost
    other_s: float  # the unblocked time of a process that did no update
    wall_s: float


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The goodput of all processes of a run, in order, and the totals."""

    attempts: tuple[AttemptGoodput, ...] = ()
    useful_steps: int = 0
    redone_steps: int = 0
    saves: int = 0
    failed_saves: int = 0
    blocked_s: float = 0.0
    to_resume_s: float = 0.0
    useful_s: float = 0.0
    lost_s: float = 0.0
    other_s: float = 0.0
    between_s: float = 0.0  # without any process
    wall_s: float = 0.0  # from the start of the first process to the end of the last

    @property
    def share(self) -> float:
        """The share of the run's time that was useful, from 0 to 1."""
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s > 0 else 0.0  # a clock may be set back


def goodput(attempts: Sequence[Attempt]) -> Goodput:
    """Rate the processes of a run, given in order. Processes of commands are left out."""
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
        failed_saves=sum(each.failed_saves for each in rated),
        blocked_s=sum(each.blocked_s for each in rated),
        to_resume_s=sum(each.to_resume_s for each in rated),
        useful_s=sum(each.useful_s for each in rated),
        lost_s=sum(each.lost_s for each in rated),
        other_s=sum(each.other_s for each in rated),
        between_s=max(0.0, wall_s - sum(each.wall_s for each in rated)),
        wall_s=wall_s,
    )


def _complete(attempts: Sequence[Attempt]) -> None:
    """Extend killed processes: if the next one started from a later step, it was reached before."""
    trained = [attempt for attempt in attempts if attempt.stretches]
    asked = {attempt.stretches[0].first for attempt in trained}
    committed = set[int]()  # those of `asked` that are committed according to the events so far
    for attempt, following in itertools.pairwise(trained):
        for stretch in attempt.stretches:
            committed.update(asked.intersection([stretch.first]), asked.intersection(stretch.saved))
        last, taken_up = attempt.stretches[-1], following.stretches[0].first
        if taken_up > last.last and taken_up not in committed:
            last.last = taken_up


def _useful(stretches: Sequence[Stretch]) -> list[int]:
    """For each stretch, the number of its updates that the current state of the run descends from."""
    # For each step that a stretch started from: the numbers of the stretches that committed it, in order.
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
    """The stretch that this one continues: the last earlier one that committed or else reached its start; or -1."""
    step, before = stretches[number].first, bisect.bisect_left(had_in, number)
    if before:
        return had_in[before - 1]
    reached = (each for each in range(number - 1, -1, -1) if stretches[each].first <= step <= stretches[each].last)
    return next(reached, -1)


def _rated(attempt: Attempt, useful: int) -> AttemptGoodput:
    steps = sum(stretch.last - stretch.first for stretch in attempt.stretches)
    in_loop_s = max(0.0, attempt.wall_s - attempt.to_resume_s - attempt.blocked_s)
    useful_s = in_loop_s * useful / steps if steps else 0.0
    return AttemptGoodput(
        began=attempt.began.astimezone(datetime.UTC),
        ended=attempt.ended.astimezone(datetime.UTC),
        how=attempt.how,
        first_step=attempt.stretches[0].first if attempt.stretches else None,
        last_step=attempt.stretches[-1].last if attempt.stretches else None,
        useful_steps=useful,
        redone_steps=steps - useful,
        saves=attempt.saves,
        failed_saves=attempt.failed_saves,
        blocked_s=attempt.blocked_s,
        to_resume_s=attempt.to_resume_s,
        useful_s=useful_s,
        lost_s=in_loop_s - useful_s if steps else 0.0,
        other_s=0.0 if steps else in_loop_s,
        wall_s=attempt.wall_s,
    )


@dataclasses.dataclass(frozen=True)
class RunStatistics:
    """The statistics that a new process takes from the history of earlier ones."""

    failures: Failures = dataclasses.field(default_factory=Failures)
    cost_s: float | None = None  # the measured cost of a save for the loop
    duration_s: float | None = None  # the longest of the last saves, from start to commit
    was_resumed: bool = False  # a loop has had its state
    last_fast: RunEvent | None = None  # the last save, if it went to the fast tier

    @classmethod
    def of(cls, events: Sequence[RunEvent], last: int = 6) -> RunStatistics:
        """Compute the statistics from the events of a run that no process is using."""
        attempts = [each for each in attempts_of(events) if each.is_of_the_training]
        failures = Failures(sum(each.has_lost_work for each in attempts), sum(each.wall_s for each in attempts))
        saves = [event for event in events if event.event == "save" and event.ok][-last:]
        costs = [event.cost_s for event in saves if event.cost_s is not None]
        took = [max(0.0, event.save_s - event.decide_s - event.wait_s) for event in saves if event.save_s]
        was_resumed = any(event.event == "resumed" for event in events)
        last_fast = next((event for event in saves[-1:] if event.tier == "fast"), None)
        return cls(failures, costs[-1] if costs else None, max(took, default=None), was_resumed, last_fast)


def print_goodput(found: Goodput, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print one line for each process of a run, and the totals. Of many processes, print the first and the last ones.

    `width` is in characters; None: that of the terminal, or as wide as needed.
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
    rows, left_out, half = [*map(_cells, found.attempts)], len(found.attempts) - MOST_ROWS, MOST_ROWS // 2
    if left_out > 0:
        rows = [*rows[:half], {names[0]: f"... {left_out} more"}, *rows[-half:]]
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    table.add_section()
    total = {names[0]: "total", **_amounts(found, found.share)}
    table.add_row(*(total.get(name, "") for name in names))
    return table


def _cells(row: AttemptGoodput) -> dict[str, str]:
    share = min(1.0, row.useful_s / row.wall_s) if row.wall_s > 0 else 0.0
    return {
        "began": f"{row.began.astimezone():%m-%d %H:%M:%S}",
        "ended": "".join(letter if letter.isprintable() else "?" for letter in row.how[:MOST_SHOWN]),  # untrusted text
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
