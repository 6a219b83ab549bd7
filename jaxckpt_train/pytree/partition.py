"""Takes from the devices what this process needs in a job of many: its own parts of arrays that are shared.

What this process writes of the arrays of a job of many: which boxes of a leaf it holds, which parts are its own.

What one process holds of arrays that are cut over a mesh: from its geometry, however many devices it has.

Shares: which process writes which part of each array, so that each byte is written once, by all alike.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxckpt_train.pytree._jax import nothing_set
from jaxckpt_train.pytree.copies import Ahead, Transfers, copies_if_wanted, own_handle, take_handles
from jaxckpt_train.settings import SnapshotMode
from jaxckpt_train.store.boxes import Box, box_elements, box_from_index, box_shape, full_box, slices_within
from jaxckpt_train.store.segment import ArrayToCome, ChunkSource

Holders = tuple[int, ...] | range
LEAST_PART_BYTES = 1 << 20  # what is smaller is not cut: another write and another line in the manifest cost more
Cuts = tuple[tuple[str, ...], ...]
"""For each dimension of an array the axes of the mesh that it is cut over, the outermost first."""
Place = tuple[int, ...]
"""Where a device stands in a mesh: its position along each axis."""


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


class MeshLayout:
    """One mesh, as one process sees it. No device is asked, so that meshes can be planned for that are not there.

    Args:
        processes: number of the process of each device, in the form of the mesh.
        axes: names of the mesh's axes.
        process: number of this process.

    Attributes:
        places: of the devices of this process.
    """

    def __init__(self, processes: np.ndarray, axes: Sequence[str], process: int) -> None:
        self._processes, self._axes = processes, {axis: number for number, axis in enumerate(axes)}
        self.places: list[Place] = [tuple(place) for place in np.argwhere(processes == process).tolist()]
        self._holders: dict[tuple[int | None, ...], Holders] = {}

    def divides(self, cuts: Cuts, shape: Sequence[int]) -> bool:
        """Whether an array of this shape is cut into boxes that are all of one size."""
        return len(cuts) == len(shape) and all(size % self._parts(axes) == 0 for size, axes in self._sides(cuts, shape))

    def box(self, place: Place, cuts: Cuts, shape: Sequence[int]) -> Box:
        """The box that the device at a place holds."""
        sides = []
        for size, axes in self._sides(cuts, shape):
            number, part = 0, size // self._parts(axes)
            for axis in axes:
                number = number * self._processes.shape[axis] + place[axis]
            sides.append((number * part, (number + 1) * part))
        return tuple(sides)

    def held(self, cuts: Cuts, shape: Sequence[int]) -> list[HeldBox]:
        """The distinct boxes that this process holds, and who else does; in the order of the boxes."""
        if 0 in shape:
            return []
        used = {self._axes[axis] for axes in cuts for axis in axes}
        found = {self.box(place, cuts, shape): self._holders_of(place, used) for place in self.places}
        return [HeldBox(box, found[box]) for box in sorted(found)]

    def _sides(self, cuts: Cuts, shape: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for size, axes in zip(shape, cuts, strict=True):
            yield size, [self._axes[axis] for axis in axes]

    def _parts(self, axes: Sequence[int]) -> int:
        parts = 1
        for axis in axes:
            parts *= self._processes.shape[axis]
        return parts

    def _holders_of(self, place: Place, used: set[int]) -> Holders:
        """The processes of all devices that hold what the one at this place holds."""
        fixed = tuple(at if axis in used else None for axis, at in enumerate(place))
        found = self._holders.get(fixed)
        if found is None:
            there = self._processes[tuple(slice(None) if at is None else at for at in fixed)]
            all_ = np.sort(there, axis=None, kind="stable")
            found = self._holders[fixed] = as_holders(all_[np.append(True, np.diff(all_) > 0)])
        return found


def cuts_of(spec: Sequence[object], dimensions: int, axes: Mapping[str, int]) -> Cuts | None:
    """The cuts that a partition spec names; None: it says something else, too.

    Args:
        spec: for each of the first dimensions None, an axis, or several.
        dimensions: of the array.
        axes: sizes of the mesh's axes.
    """
    named = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    flat = [axis for part in named for axis in part]
    if len(named) > dimensions or len(set(flat)) != len(flat) or not all(axis in axes for axis in flat):
        return None
    return tuple(named) + ((),) * (dimensions - len(named))


class LocalShard(NamedTuple):
    """A part of an array: its box, the array on one device that holds it, and where in that; None: it is all of it."""

    box: Box
    held: jax.Array
    inner: tuple[slice, ...] | None


class _Layout(NamedTuple):
    """The boxes of a form of array that this process holds, and which of them each of its devices has."""

    held: Sequence[HeldBox]
    boxes: Mapping[jax.Device, Box]


class _Mesh(NamedTuple):
    """A mesh, and where in it the devices of this process stand."""

    layout: MeshLayout
    places: Mapping[jax.Device, Place]


class JobShares:
    """Of one save. All processes ask for the same leaves, in one order.

    Args:
        process: number of this process.
        processes: how many there are.
    """

    def __init__(self, process: int, processes: int) -> None:
        self._process, self._everyone = process, range(processes)
        self._shares = Shares(process)
        self._layouts: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], _Layout] = {}
        self._meshes: dict[jax.sharding.Mesh, _Mesh] = {}

    def writes(self, nbytes: int) -> bool:
        """Whether this process writes an array that each process has for itself."""
        return self._shares.of_whole(self._everyone, nbytes)

    def of(self, leaf: jax.Array) -> list[LocalShard]:
        """The own parts of an array that spans devices of several processes."""
        layout = self._layout(leaf.sharding, leaf.shape)
        here = {layout.boxes[shard.device]: shard.data for shard in reversed(leaf.addressable_shards)}
        parts = []
        for number, box in self._shares.of(layout.held, np.dtype(leaf.dtype).itemsize):
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
        """In time that does not grow with the number of devices, once their mesh is known; None: it is no plain one."""
        cuts = _plain_cuts(sharding, len(shape))
        if cuts is None:
            return None
        mesh = self._mesh(sharding.mesh)  # type: ignore[attr-defined]
        if not mesh.layout.divides(cuts, shape):
            return None
        boxes = {device: mesh.layout.box(place, cuts, shape) for device, place in mesh.places.items()}
        return _Layout(mesh.layout.held(cuts, shape), boxes)

    def _mesh(self, mesh: jax.sharding.Mesh) -> _Mesh:
        found = self._meshes.get(mesh)
        if found is None:
            numbers = np.array([device.process_index for device in mesh.devices.flat], np.int64)
            layout = MeshLayout(numbers.reshape(mesh.devices.shape), mesh.axis_names, self._process)
            found = self._meshes[mesh] = _Mesh(layout, {mesh.devices[place]: place for place in layout.places})
        return found

    def _by_device(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _Layout:
        """What JAX says of every device there is."""
        holders: dict[Box, set[int]] = {}
        boxes: dict[jax.Device, Box] = {}
        devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
        for device, index in devices.items():
            box = full_box(shape) if index is None else box_from_index(index, shape)
            holders.setdefault(box, set()).add(device.process_index)
            if device.process_index == self._process:
                boxes[device] = box
        mine = sorted(set(boxes.values()))
        return _Layout([HeldBox(box, as_holders(sorted(holders[box]))) for box in mine], boxes)


def _plain_cuts(sharding: jax.sharding.Sharding, dimensions: int) -> Cuts | None:
    """How a mesh and the names of its axes cut an array; None: more than these decides who holds what."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh, spec = sharding.mesh, tuple(sharding.spec)
    plain = jax.sharding.PartitionSpec(*spec)  # type: ignore[no-untyped-call]
    if sharding != jax.sharding.NamedSharding(mesh, plain, memory_kind=sharding.memory_kind):
        return None
    return cuts_of(spec, dimensions, dict(mesh.shape))


def take_local_shards(
    leaves: Sequence[Sequence[LocalShard]], mode: SnapshotMode, ahead: Ahead
) -> tuple[list[tuple[ChunkSource, ...]], Transfers]:
    """As `take_from_devices`, of parts of arrays.

    They are cut out on their device, before they leave it; in mode "stream", which makes nothing new there, afterwards.
    All is done by computations of single devices: processes may well choose different modes.
    """
    parts = [part for several in leaves for part in several]
    handles = [own_handle(part.held) for part in parts]
    data: Iterable[np.ndarray | ArrayToCome]
    if mode == "stream":
        taken, transfers = take_handles(handles, mode, ahead, is_copied=False)
        data = map(_inner, taken, parts)
    else:
        whole = [handle for handle, part in zip(handles, parts, strict=True) if part.inner is None]
        copies = copies_if_wanted(whole, mode)
        kept = iter(copies or whole)
        handles = [
            next(kept) if part.inner is None else cut_out(handle, part.inner)
            for handle, part in zip(handles, parts, strict=True)
        ]
        data, transfers = take_handles(handles, mode, ahead, is_copied=copies is not None)
    following = iter(data)
    return [tuple(ChunkSource(part.box, next(following)) for part in several) for several in leaves], transfers


def _inner(data: np.ndarray | ArrayToCome, part: LocalShard) -> np.ndarray | ArrayToCome:
    if part.inner is None:
        return data
    return data[part.inner] if isinstance(data, np.ndarray) else _PartToCome(data, part.inner, box_shape(part.box))


class _PartToCome:
    """A part of an array that is fetched when its turn comes; `store.layout.ArrayToCome` says what it promises."""

    def __init__(self, whole: ArrayToCome, inner: tuple[slice, ...], shape: tuple[int, ...]) -> None:
        self._whole, self._inner = whole, inner
        self.shape, self.dtype, self.size = shape, whole.dtype, math.prod(shape)
        self.nbytes = self.size * whole.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """The data; may be called once, from any thread."""
        return self._whole.fetch()[self._inner]


def cut_out(array: jax.Array, inner: tuple[slice, ...]) -> jax.Array:
    """A part of an array of one device, made on that device; compiled once for each shape."""
    sizes = tuple(part.stop - part.start for part in inner)
    starts = tuple(np.int64(part.start) if max(array.shape) >= 1 << 31 else np.int32(part.start) for part in inner)
    with nothing_set():
        cut: jax.Array = _sliced(array, starts, sizes)
    return cut


@functools.partial(jax.jit, static_argnums=2)
def _sliced(array: jax.Array, starts: tuple[jax.Array, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, starts, sizes)
