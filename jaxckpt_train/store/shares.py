"""Shares: which process writes which part of each array, so that each byte is written once, by all alike."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxckpt_train.store.boxes import Box, box_elements

LEAST_PART_BYTES = 1 << 20  # what is smaller is not cut: another write and another line in the manifest cost more


class HeldBox(NamedTuple):
    """One distinct box of an array, and the processes that have its data, lowest first."""

    box: Box
    holders: tuple[int, ...]


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
        self._loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # heaps of bytes and process

    def of(self, layout: Sequence[HeldBox], item_bytes: int) -> list[Share]:
        """What this process writes of an array.

        Args:
            layout: its distinct boxes, in an order that is the same for all processes.
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

    def of_whole(self, holders: tuple[int, ...], nbytes: int) -> bool:
        """Whether this process writes what these all have, and what is not cut."""
        loads = self._heap(holders)
        load, holder = loads[0]
        heapq.heapreplace(loads, (load + nbytes, holder))
        return holder == self._process

    def _heap(self, holders: tuple[int, ...]) -> list[tuple[int, int]]:
        loads = self._loads.get(holders)
        if loads is None:
            loads = self._loads[holders] = [(0, holder) for holder in holders]
        return loads

    def _parts(self, box: Box, holders: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int, Box]]:
        loads = self._heap(holders)
        wanted = min(len(holders), box_elements(box) * item_bytes // self._least_bytes)
        parts = sorted(cut(box, max(1, wanted)), key=box_elements, reverse=True)
        taken = [heapq.heappop(loads) for _ in parts]  # each process one of them
        for (load, holder), part in zip(taken, parts, strict=True):
            heapq.heappush(loads, (load + box_elements(part) * item_bytes, holder))
            yield holder, part


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
