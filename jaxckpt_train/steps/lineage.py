"""Lineage: which committed steps the run descends from, and which a roll-back has left behind."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Sequence

from jaxckpt_train.steps.entry import Entry

UNKNOWN_SAVES = 1 << 20  # more than lie between any two steps of a run


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
