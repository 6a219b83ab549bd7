"""What each process of a planned job holds: computed from the geometry of its mesh, without devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxckpt_train.pytree.partition import HeldBox, Holders
from jaxckpt_train.store.boxes import Box

Cuts = tuple[tuple[str, ...], ...]  # for each dimension, the mesh axes over which it is sharded, the outermost first
Place = tuple[int, ...]  # position of a device along each axis of a mesh


class MeshLayout:
    """One mesh, from the viewpoint of one process; `processes`: that of each device, in the shape of the mesh.

    The time that it takes does not depend on the number of processes, so that it can be made for each of them.
    """

    def __init__(self, processes: np.ndarray, axes: Sequence[str], process: int) -> None:
        self._processes, self._axes = processes, {axis: number for number, axis in enumerate(axes)}
        self._places: list[Place] = [tuple(place) for place in np.argwhere(processes == process).tolist()]
        self._holders: dict[tuple[int | None, ...], Holders] = {}

    def box(self, place: Place, cuts: Cuts, shape: Sequence[int]) -> Box:
        """The box that the device at a place holds."""
        sides = []
        for size, axes in self._sides(cuts, shape):
            number, part = 0, size // math.prod(self._processes.shape[axis] for axis in axes)
            for axis in axes:
                number = number * self._processes.shape[axis] + place[axis]
            sides.append((number * part, (number + 1) * part))
        return tuple(sides)

    def held(self, cuts: Cuts, shape: Sequence[int]) -> list[HeldBox]:
        """The distinct boxes that this process holds, with all their holders, in the order of the boxes."""
        used = {self._axes[axis] for axes in cuts for axis in axes}
        found = {self.box(place, cuts, shape): self._holders_of(place, used) for place in self._places}
        return [HeldBox(box, found[box]) for box in sorted(found)]

    def _sides(self, cuts: Cuts, shape: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for size, axes in zip(shape, cuts, strict=True):
            yield size, [self._axes[axis] for axis in axes]

    def _holders_of(self, place: Place, used: set[int]) -> Holders:
        """The processes of all devices that hold the same box as the device at this place."""
        fixed = tuple(at if axis in used else None for axis, at in enumerate(place))
        if fixed not in self._holders:
            there = self._processes[tuple(slice(None) if at is None else at for at in fixed)]
            self._holders[fixed] = tuple(np.unique(there).tolist())
        return self._holders[fixed]


class PlannedDevice:
    """Stands in for a device of JAX: it knows its process."""

    def __init__(self, process: int) -> None:
        self.process_index = process


class PlannedSharding:
    """Stands in for a sharding of JAX whose maps of devices are made already, from the viewpoint of one process."""

    def __init__(
        self, processes: np.ndarray, axes: Sequence[str], cuts: Cuts, shape: Sequence[int], process: int = 0
    ) -> None:
        layout, self._process = MeshLayout(processes, axes, process), process
        self._indices = {
            PlannedDevice(process): tuple(slice(*side) for side in layout.box(place, cuts, shape))
            for place, process in np.ndenumerate(processes)
        }

    def devices_indices_map(self, shape: Sequence[int]) -> dict[PlannedDevice, tuple[slice, ...]]:
        """As JAX returns it."""
        return self._indices

    def addressable_devices_indices_map(self, shape: Sequence[int]) -> dict[PlannedDevice, tuple[slice, ...]]:
        """As JAX returns it."""
        return {device: index for device, index in self._indices.items() if device.process_index == self._process}
