"""What became of each step that was saved: when it came and went, and what keeps it, or keeps it from being used."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Sequence

from jaxckpt_train.looking.run_look import StepLook
from jaxckpt_train.report.told_events import Told
from jaxckpt_train.steps.step_names import parse_step_name

STATES = ("kept", "pinned", "temporary", "left behind", "damaged", "not committed", "deleted", "gone")


@dataclasses.dataclass
class StepLife:
    """One committed generation of a step, or what should be one.

    Attributes:
        name: of its directory; may be given again once it is deleted.
        saved: when it was committed; None: not known.
        deleted: when retention has deleted it.
        left: when the run has gone on from an earlier step and saved, so that this one is no part of it any more.
        set_aside: when it was proven to be damaged.
        bytes: of its data files; of one that is gone what the history tells, which did not count the heads of files
            once. None: not known.
        is_there: whether its directory is.
        is_current: whether the run goes on from it or from a later one.
        problem: why it cannot be restored; empty: nothing that a look at its manifest tells.
    """

    name: str
    step: int
    saved: datetime.datetime | None = None
    deleted: datetime.datetime | None = None
    left: datetime.datetime | None = None
    set_aside: datetime.datetime | None = None
    bytes: int | None = None
    is_there: bool = False
    is_committed: bool = True
    is_current: bool = True
    pinned: bool = False
    temporary: bool = False
    problem: str = ""

    @property
    def state(self) -> str:
        """One of `STATES`: the one that matters most for whoever wants to use it."""
        if not self.is_there:
            return "gone" if self.deleted is None else "deleted"
        checks = (
            (not self.is_committed, "not committed"),
            (bool(self.problem), "damaged"),
            (not self.is_current, "left behind"),
            (self.pinned, "pinned"),
            (self.temporary, "temporary"),
        )
        return next((state for holds, state in checks if holds), "kept")


@dataclasses.dataclass(frozen=True)
class DiskUse:
    """How many steps there were from some time on, and how many bytes."""

    time: datetime.datetime
    steps: int
    bytes: int


def lives_of(told: Iterable[Told], looks: Sequence[StepLook]) -> list[StepLife]:
    """All steps that the history tells of, or that are there; in the order in which they were saved.

    Args:
        told: the events, oldest first.
        looks: the steps that are there.
    """
    lives = _Lives()
    for each in told:
        lives.hear(each)
    for look in looks:
        lives.look(look)
    early = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    return sorted(lives.all, key=lambda life: (life.saved or life.deleted or early, life.step, life.name))


class _Lives:
    def __init__(self) -> None:
        self.all: list[StepLife] = []
        self._there: dict[str, StepLife] = {}  # in the order in which they were saved
        self._last = -1  # the step that was saved last
        self._passed_over: list[StepLife] = []  # by the last restore: left behind once the run saves

    def hear(self, told: Told) -> None:
        name, parsed = told.text("name"), parse_step_name(told.text("name"))
        if told.kind == "start" and told.event.step is not None:  # it had restored that before it took the directory
            same = [life.name for life in self._there.values() if life.step == told.event.step]
            self._restored(same[-1] if same else "")
        if parsed is None:
            return
        if told.kind == "save" and told.event.ok:
            self._saved(told, name, parsed[0])
        elif told.kind == "delete":
            life = self._there.pop(name, None) or self._add(StepLife(name, parsed[0]))
            life.deleted = told.time
        elif told.kind == "set_aside" and name in self._there:
            self._there[name].set_aside = told.time
        elif told.kind == "restore":
            self._restored(name)

    def _restored(self, name: str) -> None:
        later = itertools.dropwhile(lambda life: life.name != name, self._there.values())
        self._passed_over = list(later)[1:]

    def _saved(self, told: Told, name: str, step: int) -> None:
        above: list[StepLife] = []
        if step <= self._last:  # else there is none, and all steps need not be looked at
            above = [life for life in self._there.values() if life.step >= step and life.name != name]
        self._last = step
        for life in [*self._passed_over, *above]:
            life.left = life.left or told.time
        self._passed_over = []
        self._there.pop(name, None)  # somebody has removed it
        self._there[name] = self._add(StepLife(name, step, saved=told.time, bytes=told.count("bytes")))

    def _add(self, life: StepLife) -> StepLife:
        self.all.append(life)
        return life

    def look(self, look: StepLook) -> None:
        entry = look.entry
        life = self._there.get(look.name) or self._add(StepLife(look.name, look.step))
        life.is_there, life.is_committed = True, entry is not None
        life.bytes = life.bytes if look.nbytes is None else look.nbytes
        life.problem = look.problem or ""
        life.is_current = look.is_current or entry is None
        life.left = None if life.is_current else life.left
        if entry is not None:
            life.pinned, life.temporary = entry.pinned, entry.temporary
            if life.saved is None and entry.time.year > 1970:  # else its manifest cannot be read
                life.saved = entry.time.astimezone(datetime.UTC)


def disk_use_of(lives: Iterable[StepLife]) -> list[DiskUse]:
    """How many steps and bytes there were over time; those of which it is not known when they came or went left out."""
    changes: list[tuple[datetime.datetime, int, int]] = []
    for life in lives:
        if life.saved is None or life.state == "gone":
            continue
        changes.append((life.saved, 1, life.bytes or 0))
        if life.deleted is not None:
            changes.append((life.deleted, -1, -(life.bytes or 0)))
    found, steps, nbytes = [], 0, 0
    for time, more, bytes_more in sorted(changes):
        steps, nbytes = steps + more, nbytes + bytes_more
        found.append(DiskUse(time, steps, nbytes))
    return found
