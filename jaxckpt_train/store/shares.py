"""Shares: which process writes which part of each array, so that each byte is written once, by all alike."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np

from jaxckpt_train.store.boxes import Box, box_elements

Holders = tuple[int, ...] | range
LEAST_PART_BYTES = 1 << 20  # what is smaller is not cut: another write and another line in the manifest cost more


class Several(tuple[int, ...]):
    """Numbers of processes, lowest first, hashed once: for each array it is asked for a hundred thousand of them."""

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("found")
        if found is None:
            found = self.__dict__["found"] = super().__hash__()
        return found

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __contains__(self, number: object) -> bool:
        at = bisect.bisect_left(self, cast(int, number))
        return at < len(self) and self[at] == number


def as_holders(numbers: Sequence[int] | np.ndarray) -> Holders:
    """Numbers of processes, lowest first, each once, in the form in which few bytes tell of many."""
    found = np.asarray(numbers, np.int64)
    steps = np.diff(found)
    if len(steps) and (steps == steps[0]).all():
        return range(int(found[0]), int(found[-1]) + 1, int(steps[0]))
    return Several(found.tolist())


class HeldBox(NamedTuple):
    """One distinct box of an array, and the processes that have its data, lowest first."""

    box: Box
    holders: Holders


class Share(NamedTuple):
    """A part that one process writes of box number `held` of an array."""

    held: int
    box: Box


class Shares:
    """Hands out the parts of one array after the other; all processes that hold the same boxes come to the same result.

    A box of several holders is cut into parts of at least `least_bytes`, which go to those who have the fewest bytes of
    what these same processes hold together.

    Args:
        process: whose shares.
        least_bytes: what a part has at least.
    """

    def __init__(self, process: int, least_bytes: int = LEAST_PART_BYTES) -> None:
        self._process, self._least_bytes = process, least_bytes
        self._loads: dict[Holders, _Loads] = {}

    def of(self, layout: Sequence[HeldBox], item_bytes: int) -> list[Share]:
        """What this process writes of an array.

        Args:
            layout: its distinct boxes, or those of them that this process holds, in an order that is the same for all.
            item_bytes: size of an element.
        """
        mine = []
        for number, (box, holders) in enumerate(layout):
            if self._process not in holders:
                continue
            if len(holders) == 1:
                mine.append(Share(number, box))
                continue
            for holder, part in self._parts(box, holders, item_bytes):
                if holder == self._process:
                    mine.append(Share(number, part))
        return mine

    def of_all(self, layout: Sequence[HeldBox], item_bytes: int) -> Iterator[tuple[int, Share]]:
        """What each process writes of an array, for one process that plans for all; arguments as of `of`."""
        for number, (box, holders) in enumerate(layout):
            if len(holders) == 1:
                yield holders[0], Share(number, box)
                continue
            for holder, part in self._parts(box, holders, item_bytes):
                yield holder, Share(number, part)

    def of_whole(self, holders: Holders, nbytes: int) -> bool:
        """Whether this process writes what these all have, and what is not cut."""
        (holder,) = self._loads_of(holders).give([nbytes])
        return holder == self._process

    def _loads_of(self, holders: Holders) -> _Loads:
        loads = self._loads.get(holders)
        if loads is None:
            loads = self._loads[holders] = _Loads(holders)
        return loads

    def _parts(self, box: Box, holders: Holders, item_bytes: int) -> Iterator[tuple[int, Box]]:
        wanted = min(len(holders), box_elements(box) * item_bytes // self._least_bytes)
        parts = sorted(cut(box, max(1, wanted)), key=box_elements, reverse=True)
        givers = self._loads_of(holders).give([box_elements(part) * item_bytes for part in parts])
        yield from zip(givers, parts, strict=True)


class _Loads:
    """How many bytes each of some processes has; of those who have none only the first is looked at."""

    def __init__(self, holders: Holders) -> None:
        self._holders, self._fresh = holders, 0
        self._heap: list[tuple[int, int]] = []  # bytes and process

    def give(self, sizes: Sequence[int]) -> list[int]:
        """Who gets which of these, each another one: those who have the fewest bytes, the lowest of them first."""
        taken = [self._least() for _ in sizes]
        for (load, holder), size in zip(taken, sizes, strict=True):
            heapq.heappush(self._heap, (load + size, holder))
        return [holder for _, holder in taken]

    def _least(self) -> tuple[int, int]:
        if self._fresh < len(self._holders):
            first = (0, self._holders[self._fresh])
            if not self._heap or first < self._heap[0]:
                self._fresh += 1
                return first
        return heapq.heappop(self._heap)


def cut(box: Box, parts: int) -> list[Box]:
    """A box in at most so many parts of about the same size, along one axis.

    That is the first axis on which they differ by no more than an eighth, so that each is one run of bytes or few long
    ones; where there is none, the longest.
    """
    if parts == 1 or not box:
        return [box]
    lengths = [stop - start for start, stop in box]
    axis = next((axis for axis, length in enumerate(lengths) if length >= 8 * parts or not length % parts), -1)
    if axis < 0 or not lengths[axis]:
        axis = lengths.index(max(lengths))
    start, length = box[axis][0], lengths[axis]
    parts = max(1, min(parts, length))
    edges = [start + length * number // parts for number in range(parts + 1)]
    return [(*box[:axis], (low, high), *box[axis + 1 :]) for low, high in itertools.pairwise(edges)]
