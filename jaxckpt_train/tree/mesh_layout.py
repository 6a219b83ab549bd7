"""What one process holds of arrays that are cut over a mesh: from its geometry, however many devices it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.shares import HeldBox, Holders, as_holders

Cuts = tuple[tuple[str, ...], ...]
"""For each dimension of an array the axes of the mesh that it is cut over, the outermost first."""
Place = tuple[int, ...]
"""Where a device stands in a mesh: its position along each axis."""


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
