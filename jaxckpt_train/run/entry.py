"""Lineage: which committed steps the run descends from, and which a roll-back has left behind.

The names of step directories: `step-0000000100`, and `step-0000000100.g1` for its next generation.

What a restore brought back, or why it has to look again.

An entry: what a run directory knows of one committed generation of a step.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jaxckpt_train._validation import index_of
from jaxckpt_train.errors import CheckpointExistsError, SettingsError
from jaxckpt_train.policies.context import CheckpointInfo
from jaxckpt_train.store.manifest import metrics_from_json

_MOST_NOTES = 1 << 53
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_log = logging.getLogger("jaxckpt_train")
MAX_STEP = 10**15
_DIGITS = 6
MAX_GENERATION = 10**_DIGITS - 1
_NAME = re.compile(rf"step-(?P<step>[0-9]{{10,16}})(\.g(?P<generation>[1-9][0-9]{{0,{_DIGITS - 1}}}))?")
UNKNOWN_SAVES = 1 << 20  # more than lie between any two steps of a run


def count_of(value: object) -> int | None:
    """A number of notes, as files tell it; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MOST_NOTES else None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One committed generation of a step.

    Attributes:
        name: of its directory.
        sequence: the how-manieth save of the run it was; orders steps by when they were saved, also after a roll-back.
        run: id of the run that saved it; None: not told.
        left_behind: names of the directories that a roll-back before this save has left behind.
        notes: how many notes the run had on the disk when it was saved.
        damaged: what is wrong with its bytes, if it was set aside for that; None: nothing that is known.
        tells_lineage: whether its manifest could be read, and is of the run whose directory this is.
        is_certain: whether its manifest is what was committed; else what it says is not to be relied upon.
        is_held: whether that, or what was noted of it, is not known: retention neither counts nor deletes it.
        is_unsynced: whether the disk has refused to keep its bytes. A later sync may succeed all the same, since a
            system forgets what it could not write; so nothing that it replaces is deleted.
    """

    name: str
    step: int
    generation: int
    sequence: int
    time: datetime
    metrics: Mapping[str, float] | None
    temporary: bool
    run: str | None = None
    left_behind: tuple[str, ...] = ()
    notes: int = 0
    tells_lineage: bool = True
    is_certain: bool = True
    is_held: bool = False
    is_unsynced: bool = False
    pinned: bool = False
    damaged: str | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Later saves are greater."""
        return (self.sequence, self.step, self.generation)

    @property
    def identity(self) -> tuple[str, datetime]:
        """Which save it is; a name alone may be given again."""
        return (self.name, self.time)

    @property
    def tells_time(self) -> bool:
        """Whether its manifest says when it was saved."""
        return self.time != _LONG_AGO

    def info(self) -> CheckpointInfo:
        """The entry as policies see it."""
        return CheckpointInfo(self.step, self.time, self.metrics, self.pinned, self.temporary)


def entry_from_manifest(name: str, step: int, generation: int, info: Mapping[str, Any]) -> Entry:
    """An entry from the free-form part of its manifest; empty where that could not be read."""
    sequence, left = info.get("sequence"), info.get("left_behind")
    run = info.get("run")
    return Entry(
        name,
        step,
        generation,
        sequence=sequence if isinstance(sequence, int) and not isinstance(sequence, bool) else -1,
        time=_time(info.get("created")),
        metrics=metrics_from_json(info.get("metrics")) or None,
        temporary=info.get("temporary") is True,
        run=run if isinstance(run, str) else None,
        left_behind=tuple(each for each in left if isinstance(each, str)) if isinstance(left, list) else (),
        notes=count_of(info.get("notes")) or 0,
        tells_lineage=bool(info),
    )


def _time(value: object) -> datetime:
    try:
        found = datetime.fromisoformat(str(value))
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        found.astimezone(UTC)  # as policies see it; kept as it is written, by which notes name it
    except (ValueError, OverflowError):
        return _LONG_AGO
    return found


class StepVanishedError(Exception):
    """A step was deleted by its owner after it was listed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that could not be restored; whether its bytes are proven to be wrong, or only could not be read now."""

    entry: Entry
    problem: str
    is_proven: bool


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a restore brought back, from which step, and past which it had to skip."""

    entry: Entry
    results: dict[str, Any]
    skipped: list[Skipped]
    bytes: int
    restore_s: float
    is_mended: bool = False  # it was set aside, and all of it was verified now
    is_verified: bool = False  # all of it was compared by this; asked for only where another one was skipped
    left_out: frozenset[str] = frozenset()  # names of what the step has and nobody asked for

    def warn_of_left_out(self) -> None:
        """For a run that goes on from it: what was not restored, such as the position in the data, is at its start."""
        if self.left_out:
            names = ", ".join(map(repr, sorted(self.left_out)))
            _log.warning("step %d also has %s, not asked for: what is not restored begins anew", self.entry.step, names)

    def record(self) -> dict[str, Any]:
        """What the history says of it."""
        return {
            "step": self.entry.step,
            "name": self.entry.name,
            "bytes": self.bytes,
            "restore_s": self.restore_s,
            "bytes_per_s": round(self.bytes / self.restore_s),
            "skipped": [each.entry.name for each in self.skipped] or None,
        }


def step_name(step: int, generation: int = 0) -> str:
    """The directory name of a generation of a step."""
    return f"step-{step:010d}" + (f".g{generation}" if generation else "")


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Step and generation of a directory name; None if it is no step directory's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match["step"]), int(match["generation"] or 0)
    return (step, generation) if step_name(step, generation) == name else None


def check_step(step: object) -> int:
    """The step as an int.

    Raises:
        SettingsError: not a whole number, negative or absurdly large.
    """
    number = index_of(step)
    if number is None:
        raise SettingsError(f"step: expected a whole number of completed updates, found {step!r}")
    if not 0 <= number < MAX_STEP:
        raise SettingsError(f"step: expected 0 to {MAX_STEP - 1}, found {number}")
    return int(number)


def free_step_name(step: int, names: Iterable[str], committed: Iterable[str] = ()) -> str:
    """The name of the next generation of a step, after all those that are among some names.

    Where a stranger's name has the last number that a generation can have, the first one that is free after those that
    are `committed`: a name with a higher number would be no step's, and what is saved under it lost.

    Raises:
        CheckpointExistsError: there is none.
    """
    taken = _generations(step, names)
    next_one = max(taken, default=-1) + 1
    if next_one > MAX_GENERATION:
        first = max(_generations(step, committed), default=-1) + 1
        free = (number for number in range(first, MAX_GENERATION + 1) if number not in taken)
        next_one = next(free, next_one)
    if next_one > MAX_GENERATION:
        raise CheckpointExistsError(
            f"step {step} cannot be saved again: {step_name(step, MAX_GENERATION)} is there, and no generation comes "
            "after it; move it away, or give it another name"
        )
    return step_name(step, next_one)


def _generations(step: int, names: Iterable[str]) -> set[int]:
    found = map(parse_step_name, names)
    return {parsed[1] for parsed in found if parsed is not None and parsed[0] == step}


@dataclasses.dataclass(frozen=True)
class RollBack:
    """What was left behind at some save of the run, by the names of the directories."""

    sequence: int = -1
    names: frozenset[str] = frozenset()


def last_sequence(entries: Sequence[Entry], noted: RollBack) -> int:
    """The highest number that a save of the run has; where a manifest does not tell it, a higher one than it can be."""
    known = max([noted.sequence, *(entry.sequence for entry in entries)])
    return known if all(entry.is_certain for entry in entries) else known + UNKNOWN_SAVES


def home_run(entries: Sequence[Entry]) -> str | None:
    """The id of the run whose directory this is: that of most steps, of equally many the one that has saved most."""
    count = collections.Counter(entry.run for entry in entries if entry.run is not None)
    last = {entry.run: entry.order for entry in sorted(entries, key=lambda entry: entry.order)}
    return max(count, key=lambda run: (count[run], last[run], run), default=None)


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """The entries in the order in which the run saved them.

    A step whose manifest is damaged does not say when that was, and one copied in from another run says when that run
    saved it: both are placed by their numbers. What such a copy says of its own run's branches is forgotten.
    """
    home = home_run(entries)
    known: list[Entry] = []
    others: list[Entry] = []
    for entry in entries:
        (known if entry.sequence >= 0 and entry.run in (None, home) else others).append(entry)
    placed = list(known)
    for entry in others:
        last = max((other.sequence for other in known if other.step <= entry.step), default=-1)
        placed.append(dataclasses.replace(entry, sequence=last, left_behind=(), tells_lineage=False))
    return sorted(placed, key=lambda entry: entry.order)


def left_behind(entries: Sequence[Entry], noted: RollBack | None = None) -> frozenset[str]:
    """The names of those that are no part of the line of the last save, as that save says.

    Never its own: it may have been given the name of one that was left behind and is deleted.

    Args:
        entries: in order.
        noted: what was noted of the last roll-back; used if no manifest that is certain is of a later save.
    """
    telling = [entry for entry in entries if entry.tells_lineage]
    last = next((entry for entry in reversed(telling) if entry.is_certain), None)
    found = RollBack() if last is None else RollBack(last.sequence, frozenset(last.left_behind) - {last.name})
    if noted is not None and noted.sequence > found.sequence:
        found = noted
    if telling and telling[-1].sequence > found.sequence:  # nobody else tells of it
        found = RollBack(names=frozenset(telling[-1].left_behind) - {telling[-1].name})
    return frozenset(entry.name for entry in entries) & found.names


def left_behind_by(restored: Entry, entries: Sequence[Entry]) -> frozenset[str]:
    """The names of those that are left behind once `restored` is what the run goes on from."""
    before = [entry for entry in entries if entry.order <= restored.order]
    later = {entry.name for entry in entries if entry.order > restored.order}
    return left_behind(before) - {restored.name} | later


def line_last(entries: Sequence[Entry], left: Collection[str]) -> list[Entry]:
    """What was left behind first, then the line of the run; each in order."""
    return sorted(entries, key=lambda entry: (entry.name not in left, entry.order))


def to_try(
    entries: Sequence[Entry], left: Collection[str], is_going: Callable[[str], bool], *, damaged: bool
) -> list[Entry]:
    """Those that may be restored, the last to be tried last; `damaged`: those that were set aside after all others."""
    there = [each for each in entries if each.damaged is None and not is_going(each.name)]
    aside = [each for each in reversed(entries) if each.damaged is not None and damaged]
    return line_last(there, left)[::-1] + aside


def newest_generations(entries: Sequence[Entry]) -> list[Entry]:
    """Of every step only the last one in the given order, in that order."""
    last: dict[int, Entry] = {}
    for entry in entries:
        last.pop(entry.step, None)
        last[entry.step] = entry
    return list(last.values())


def names_after(step: int, line: Sequence[Entry]) -> set[str]:
    """What is above a step of the line, or came after it: to save that step anew is to roll back to before it."""
    same = [entry.order for entry in line if entry.step == step]
    return {entry.name for entry in line if entry.step > step or (same and entry.order > max(same))}
