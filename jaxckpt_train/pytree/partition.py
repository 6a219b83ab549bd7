"""Assign to each process the part of each array that it writes, so that the job writes each byte once.

All processes compute the same partition from the shardings, without communication.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxckpt_train.pytree._jax import boxes_of, without_caller_settings
from jaxckpt_train.pytree.copies import TransferBudget, Transfers, copies_if_wanted, own_handle, take_handles
from jaxckpt_train.settings import SnapshotMode
from jaxckpt_train.store.boxes import Box, box_elements, slices_within
from jaxckpt_train.store.segment import ChunkSource

Holders = tuple[int, ...]  # numbers of processes (or devices), in order
LEAST_PART_BYTES = 1 << 20  # smaller parts are not cut: another write and another manifest entry cost more
TURN_BYTES = 1 << 20
KEPT_LAYOUTS = 1024  # layouts that are kept for later saves


class HeldBox(NamedTuple):
    """One distinct box of an array, and the processes (or devices) that hold its data."""

    box: Box
    holders: Holders


class AssignedPart(NamedTuple):
    """A part of box number `held` of an array, which one process writes."""

    held: int
    box: Box


class WriteAssignment:
    """Assigns parts of arrays to the holders with the fewest bytes; all holders of a box compute the same result.

    A holder gets several small parts in turn, of up to 1 MiB together, so that a load opens fewer files.
    """

    def __init__(self, process: int, least_bytes: int = LEAST_PART_BYTES) -> None:
        self._process, self._least_bytes, self._turn_bytes = process, least_bytes, min(least_bytes, TURN_BYTES)
        self._loads: dict[Holders, list[tuple[int, int]]] = {}  # heaps of bytes and holder
        self._turns: dict[Holders, tuple[int, int, int]] = {}  # bytes, holder, and what it may still get in its turn

    def of(self, layout: Sequence[HeldBox], item_bytes: int) -> list[AssignedPart]:
        """Return what this process writes of an array; arguments as for `of_all`."""
        return [part for holder, part in self.of_all(layout, item_bytes) if holder == self._process]

    def of_all(self, layout: Sequence[HeldBox], item_bytes: int) -> Iterator[tuple[int, AssignedPart]]:
        """Yield what each process writes of an array; `layout` is in the same order in all processes."""
        for number, (box, holders) in enumerate(layout):
            if len(holders) == 1:
                yield holders[0], AssignedPart(number, box)
                continue
            wanted = min(len(holders), box_elements(box) * item_bytes // self._least_bytes)
            parts = sorted(cut(box, max(1, wanted)), key=box_elements, reverse=True)
            writers = self._assign(holders, [box_elements(part) * item_bytes for part in parts])
            for holder, part in zip(writers, parts, strict=True):
                yield holder, AssignedPart(number, part)

    def of_whole(self, holders: Holders, nbytes: int) -> bool:
        """Return whether this process writes an uncut array that all `holders` have."""
        return self._assign(holders, [nbytes]) == [self._process]

    def _assign(self, holders: Holders, sizes: Sequence[int]) -> list[int]:
        """Assign each size to another holder: to those with the fewest bytes, the lowest number first.

        A single small size goes to the holder of the one before, until its turn ends.
        """
        heap = self._loads.get(holders)
        if heap is None:
            heap = self._loads[holders] = [(0, holder) for holder in holders]
        turn = self._turns.pop(holders, None)
        is_small = len(sizes) == 1 and sizes[0] < self._turn_bytes
        if turn is not None and not (is_small and sizes[0] <= turn[2]):
            heapq.heappush(heap, turn[:2])
            turn = None
        if is_small:
            load, holder, room = turn or (*heapq.heappop(heap), self._turn_bytes)
            self._turns[holders] = load + sizes[0], holder, room - sizes[0]
            return [holder]
        taken = [heapq.heappop(heap) for _ in sizes]
        for (load, holder), size in zip(taken, sizes, strict=True):
            heapq.heappush(heap, (load + size, holder))
        return [holder for _, holder in taken]


def cut(box: Box, parts: int) -> list[Box]:
    """Cut a box along one axis into at most `parts` parts of about the same size.

    The axis is the first along which sizes differ by at most an eighth, for long runs of bytes, else the longest one.
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


def held_boxes(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], holder_of: Callable[[jax.Device], int]
) -> list[HeldBox]:
    """Return the distinct boxes that this process holds of an array, in order, and all their holders.

    `holder_of` returns the number that stands for a device. Goes through all devices of the sharding, of all processes.
    """
    holders: dict[Box, set[int]] = {}
    for _, box in boxes_of(sharding.addressable_devices_indices_map(shape), shape):
        holders[box] = set()
    for device, box in boxes_of(sharding.devices_indices_map(shape), shape):
        if box in holders:
            holders[box].add(holder_of(device))
    return [HeldBox(box, tuple(sorted(holders[box]))) for box in sorted(holders)]


class LocalShard(NamedTuple):
    """A part of an array: its box, a single-device array that contains it, and its slices there; None: all of it."""

    box: Box
    held: jax.Array
    inner: tuple[slice, ...] | None


class _Layout(NamedTuple):
    """The boxes that this process holds of arrays of one shape and sharding, and the box of each of its devices."""

    held: Sequence[HeldBox]
    boxes: Mapping[jax.Device, Box]


@functools.lru_cache(KEPT_LAYOUTS)
def _local_layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _Layout:
    boxes = dict(boxes_of(sharding.addressable_devices_indices_map(shape), shape))
    return _Layout(held_boxes(sharding, shape, operator.attrgetter("process_index")), boxes)


class JobPartition:
    """The partition of one save. All processes ask for the same leaves, in the same order."""

    def __init__(self, process: int, processes: int) -> None:
        self._everyone = tuple(range(processes))
        self._assignment = WriteAssignment(process)

    def writes(self, nbytes: int) -> bool:
        """Return whether this process writes an array that each process has for itself."""
        return self._assignment.of_whole(self._everyone, nbytes)

    def of(self, leaf: jax.Array) -> list[LocalShard]:
        """Return the parts that this process writes of an array on devices of several processes."""
        layout = _local_layout(leaf.sharding, leaf.shape)
        here = {layout.boxes[shard.device]: shard.data for shard in reversed(leaf.addressable_shards)}
        parts = []
        for number, box in self._assignment.of(layout.held, np.dtype(leaf.dtype).itemsize):
            held = layout.held[number].box
            parts.append(LocalShard(box, here[held], None if box == held else slices_within(box, held)))
        return parts


def take_local_shards(
    leaves: Sequence[Sequence[LocalShard]], mode: SnapshotMode, ahead: TransferBudget
) -> tuple[list[tuple[ChunkSource, ...]], Transfers]:
    """Take parts of arrays, as `take_from_devices` takes arrays.

    Parts are sliced on their device; in mode "stream", which allocates nothing there, after the transfer. Only
    single-device computations are used, because processes may choose different modes.
    """
    parts = [part for several in leaves for part in several]
    handles = [own_handle(part.held) for part in parts]
    if mode == "stream":
        taken, transfers = take_handles(handles, mode, ahead, is_copied=False)
        taken = [data if part.inner is None else data[part.inner] for data, part in zip(taken, parts, strict=True)]
    else:
        whole = [handle for handle, part in zip(handles, parts, strict=True) if part.inner is None]
        copies = copies_if_wanted(whole, mode)
        kept = iter(copies or whole)
        handles = [
            next(kept) if part.inner is None else cut_out(handle, part.inner)
            for handle, part in zip(handles, parts, strict=True)
        ]
        taken, transfers = take_handles(handles, mode, ahead, is_copied=copies is not None)
    data = iter(taken)
    return [tuple(ChunkSource(part.box, next(data)) for part in several) for several in leaves], transfers


def cut_out(array: jax.Array, inner: tuple[slice, ...]) -> jax.Array:
    """Slice a single-device array on its device; compiled once for each shape."""
    sizes = tuple(part.stop - part.start for part in inner)
    starts = tuple(np.int64(part.start) if max(array.shape) >= 1 << 31 else np.int32(part.start) for part in inner)
    with without_caller_settings():
        cut: jax.Array = _sliced(array, starts, sizes)
    return cut


@functools.partial(jax.jit, static_argnums=2)
def _sliced(array: jax.Array, starts: tuple[jax.Array, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, starts, sizes)
