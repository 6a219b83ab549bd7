"""Assign to each process the part of each array that it writes, so that the job writes each byte once.

All processes compute the same partition from the shardings, without communication.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxckpt_train.pytree._jax import boxes_of, without_caller_settings
from jaxckpt_train.pytree.copies import TransferBudget, Transfers, copies_if_wanted, own_handle, take_handles
from jaxckpt_train.settings import SnapshotMode
from jaxckpt_train.store.boxes import Box, box_elements, slices_within
from jaxckpt_train.store.segment import ChunkSource
from jaxckpt_train.store.threads import unlocked_cached_property

Holders = tuple[int, ...] | range
LEAST_PART_BYTES = 1 << 20  # smaller parts are not cut: another write and another manifest entry cost more
Cuts = tuple[tuple[str, ...], ...]  # for each dimension, the mesh axes over which it is sharded, the outermost first
Place = tuple[int, ...]  # position of a device along each axis of a mesh


class ProcessSet(tuple[int, ...]):
    """Numbers of processes, in order, with a cached hash: every array would hash a hundred thousand numbers again."""

    def __hash__(self) -> int:
        return self._hash

    @unlocked_cached_property
    def _hash(self) -> int:
        return super().__hash__()


def as_holders(numbers: Sequence[int] | np.ndarray) -> Holders:
    """Convert process numbers, in order and distinct, to the form that takes the fewest bytes."""
    found = np.asarray(numbers, np.int64)
    steps = np.diff(found)
    if len(steps) and (steps == steps[0]).all():
        return range(int(found[0]), int(found[-1]) + 1, int(steps[0]))
    return ProcessSet(found.tolist())


class HeldBox(NamedTuple):
    """One distinct box of an array, and the processes (or devices) that hold its data, in order."""

    box: Box
    holders: Holders


class AssignedPart(NamedTuple):
    """A part of box number `held` of an array, which one process writes."""

    held: int
    box: Box


class WriteAssignment:
    """Assigns parts of arrays to the holders with the fewest bytes; all holders of a box compute the same result."""

    def __init__(self, process: int, least_bytes: int = LEAST_PART_BYTES) -> None:
        self._process, self._least_bytes = process, least_bytes
        self._loads: dict[Holders, _AssignedBytes] = {}

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
        return self._loads.setdefault(holders, _AssignedBytes(holders)).give(sizes)


class _AssignedBytes:
    """The bytes assigned to each of some processes; of those without any, only the first is on the heap."""

    def __init__(self, holders: Holders) -> None:
        self._holders, self._fresh = holders, 0
        self._heap: list[tuple[int, int]] = []  # bytes and process

    def give(self, sizes: Sequence[int]) -> list[int]:
        """Assign each of these sizes to another process: to those with the fewest bytes, the lowest number first."""
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


class MeshLayout:
    """One mesh, from the viewpoint of one process; `processes`: that of each device, in the shape of the mesh."""

    def __init__(self, processes: np.ndarray, axes: Sequence[str], process: int) -> None:
        self._processes, self._axes = processes, {axis: number for number, axis in enumerate(axes)}
        self.places: list[Place] = [tuple(place) for place in np.argwhere(processes == process).tolist()]
        self._holders: dict[tuple[int | None, ...], Holders] = {}

    def divides(self, cuts: Cuts, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape is cut into boxes of equal size."""
        return len(cuts) == len(shape) and all(size % self._parts(axes) == 0 for size, axes in self._sides(cuts, shape))

    def box(self, place: Place, cuts: Cuts, shape: Sequence[int]) -> Box:
        """Return the box that the device at a place holds."""
        sides = []
        for size, axes in self._sides(cuts, shape):
            number, part = 0, size // self._parts(axes)
            for axis in axes:
                number = number * self._processes.shape[axis] + place[axis]
            sides.append((number * part, (number + 1) * part))
        return tuple(sides)

    def held(self, cuts: Cuts, shape: Sequence[int]) -> list[HeldBox]:
        """Return the distinct boxes that this process holds, with all their holders, in the order of the boxes."""
        if 0 in shape:
            return []
        used = {self._axes[axis] for axes in cuts for axis in axes}
        found = {self.box(place, cuts, shape): self._holders_of(place, used) for place in self.places}
        return [HeldBox(box, found[box]) for box in sorted(found)]

    def _sides(self, cuts: Cuts, shape: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for size, axes in zip(shape, cuts, strict=True):
            yield size, [self._axes[axis] for axis in axes]

    def _parts(self, axes: Sequence[int]) -> int:
        return math.prod(self._processes.shape[axis] for axis in axes)

    def _holders_of(self, place: Place, used: set[int]) -> Holders:
        """Return the processes of all devices that hold the same box as the device at this place."""
        fixed = tuple(at if axis in used else None for axis, at in enumerate(place))
        found = self._holders.get(fixed)
        if found is None:
            there = self._processes[tuple(slice(None) if at is None else at for at in fixed)]
            all_ = np.sort(there, axis=None, kind="stable")
            found = self._holders[fixed] = as_holders(all_[np.append(True, np.diff(all_) > 0)])
        return found


def cuts_of(spec: Sequence[object], dimensions: int, axes: Mapping[str, int]) -> Cuts | None:
    """Return the cuts that a partition spec names; None: it contains something else than axes of this size."""
    named = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    flat = [axis for part in named for axis in part]
    if len(named) > dimensions or len(set(flat)) != len(flat) or not all(axis in axes for axis in flat):
        return None
    return tuple(named) + ((),) * (dimensions - len(named))


class LocalShard(NamedTuple):
    """A part of an array: its box, a single-device array that contains it, and its slices there; None: all of it."""

    box: Box
    held: jax.Array
    inner: tuple[slice, ...] | None


class _Layout(NamedTuple):
    """The boxes that this process holds of arrays of one shape and sharding, and the box of each of its devices."""

    held: Sequence[HeldBox]
    boxes: Mapping[jax.Device, Box]


class JobPartition:
    """The partition of one save. All processes ask for the same leaves, in the same order."""

    def __init__(self, process: int, processes: int) -> None:
        self._process, self._everyone = process, range(processes)
        self._assignment = WriteAssignment(process)
        self._layouts: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], _Layout] = {}
        self._meshes: dict[jax.sharding.Mesh, MeshLayout] = {}

    def writes(self, nbytes: int) -> bool:
        """Return whether this process writes an array that each process has for itself."""
        return self._assignment.of_whole(self._everyone, nbytes)

    def of(self, leaf: jax.Array) -> list[LocalShard]:
        """Return the parts that this process writes of an array on devices of several processes."""
        layout = self._layout(leaf.sharding, leaf.shape)
        here = {layout.boxes[shard.device]: shard.data for shard in reversed(leaf.addressable_shards)}
        parts = []
        for number, box in self._assignment.of(layout.held, np.dtype(leaf.dtype).itemsize):
            held = layout.held[number].box
            parts.append(LocalShard(box, here[held], None if box == held else slices_within(box, held)))
        return parts

    def _layout(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _Layout:
        found = self._layouts.get((sharding, shape))
        if found is None:
            found = self._by_geometry(sharding, shape) or self._by_device(sharding, shape)
            self._layouts[sharding, shape] = found
        return found

    def _by_geometry(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _Layout | None:
        """Compute the layout in time independent of the number of devices; None: it is not a plain mesh sharding."""
        cuts = _plain_cuts(sharding, len(shape))
        if cuts is None:
            return None
        mesh: jax.sharding.Mesh = sharding.mesh  # type: ignore[attr-defined]
        if mesh not in self._meshes:
            numbers = np.array([device.process_index for device in mesh.devices.flat], np.int64)
            self._meshes[mesh] = MeshLayout(numbers.reshape(mesh.devices.shape), mesh.axis_names, self._process)
        layout = self._meshes[mesh]
        if not layout.divides(cuts, shape):
            return None
        boxes = {mesh.devices[place]: layout.box(place, cuts, shape) for place in layout.places}
        return _Layout(layout.held(cuts, shape), boxes)

    def _by_device(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _Layout:
        """Compute the layout from the index of every device."""
        holders: dict[Box, set[int]] = {}
        boxes: dict[jax.Device, Box] = {}
        for device, box in boxes_of(sharding.devices_indices_map(shape), shape):
            holders.setdefault(box, set()).add(device.process_index)
            if device.process_index == self._process:
                boxes[device] = box
        mine = sorted(set(boxes.values()))
        return _Layout([HeldBox(box, as_holders(sorted(holders[box]))) for box in mine], boxes)


def _plain_cuts(sharding: jax.sharding.Sharding, dimensions: int) -> Cuts | None:
    """Return how mesh axes cut an array; None: more than the axes determines which device holds what."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh, spec = sharding.mesh, tuple(sharding.spec)
    plain = jax.sharding.PartitionSpec(*spec)  # type: ignore[no-untyped-call]
    if sharding != jax.sharding.NamedSharding(mesh, plain, memory_kind=sharding.memory_kind):
        return None
    return cuts_of(spec, dimensions, dict(mesh.shape))


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
