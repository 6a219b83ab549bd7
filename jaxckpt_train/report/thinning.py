"""Leaves out items where there are too many to draw; the one that stands out most in each group stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def thinned(items: Sequence[Item], most: int, weight: Callable[[Item], float]) -> list[Item]:
    """Of each group of neighbours the item of the greatest weight, in order; all of them if they are few enough.

    Args:
        items: in order.
        most: how many may stay.
        weight: what stands out; equal ones: the first.
    """
    if len(items) <= most:
        return list(items)
    edges = [len(items) * number // most for number in range(most + 1)]
    return [max(items[start:stop], key=weight) for start, stop in itertools.pairwise(edges)]
