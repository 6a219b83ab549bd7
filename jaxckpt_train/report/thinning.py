"""Leaves out items where there are too many to keep or draw; the one that stands out most in each group stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

MOST_KEPT = 10_000
"""How many items of a thinned stream are kept at least; at most twice this number."""
RECENT = 1000  # the last ones of a stream are all kept, as tables show them
BATCH = 4096
Item = TypeVar("Item")


def thinned(items: Sequence[Item], most: int, weight: Callable[[Item], float], recent: int = 0) -> list[Item]:
    """Of each group of neighbours the item of the greatest weight, in order; all of them if they are few enough.

    Args:
        items: in order.
        most: how many may stay.
        weight: what stands out; equal ones: the first.
        recent: how many of the last items all stay, in addition to `most`.
    """
    older = max(0, len(items) - recent)
    if older <= most:
        return list(items)
    edges = [older * number // most for number in range(most + 1)]
    return [max(items[start:stop], key=weight) for start, stop in itertools.pairwise(edges)] + list(items[older:])


class Sample(Generic[Item]):
    """Items of a stream: all of them while they are few, else the heaviest of each group, and all recent ones.

    All groups have the same size, which doubles whenever there are too many groups.

    Args:
        weight: what stands out in a group.
        most: how many groups there are at least, once items are left out; at most twice as many.
    """

    def __init__(self, weight: Callable[[Item], float], most: int = MOST_KEPT) -> None:
        self._weight, self._most = weight, most
        self._kept: list[Item] = []  # one item of each group
        self._group = 1  # the size of a group
        self._grouped = 0  # how many items the groups had
        self._recent: list[Item] = []

    def __len__(self) -> int:
        return len(self._kept) + len(self._recent)

    @property
    def count(self) -> int:
        """How many items there were."""
        return self._grouped + len(self._recent)

    @property
    def items(self) -> list[Item]:
        """The items that are kept, in order."""
        return [*self._kept, *self._recent]

    def add(self, item: Item) -> None:
        """Add the next item."""
        self._recent.append(item)
        if len(self._recent) >= BATCH + RECENT:
            self._put_into_groups(BATCH)

    def _put_into_groups(self, count: int) -> None:
        count -= count % self._group
        starts = range(0, count, self._group)
        self._kept += [max(self._recent[at : at + self._group], key=self._weight) for at in starts]
        self._grouped += count
        del self._recent[:count]
        if len(self._kept) > 2 * self._most:
            self.halve()

    def halve(self) -> None:
        """Join each two groups to one."""
        pairs = (self._kept[at : at + 2] for at in range(0, len(self._kept), 2))
        self._kept = [max(pair, key=self._weight) for pair in pairs]
        self._group *= 2
