"""What this process writes of the arrays of a job of many: which boxes of a leaf it holds, which parts are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt_train.store.boxes import Box, box_from_index, full_box, slices_within
from jaxckpt_train.store.shares import HeldBox, Shares, as_holders
from jaxckpt_train.tree.mesh_layout import Cuts, MeshLayout, Place, cuts_of


class OwnPart(NamedTuple):
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

    def of(self, leaf: jax.Array) -> list[OwnPart]:
        """The own parts of an array that spans devices of several processes."""
        layout = self._layout(leaf.sharding, leaf.shape)
        here = {layout.boxes[shard.device]: shard.data for shard in reversed(leaf.addressable_shards)}
        parts = []
        for number, box in self._shares.of(layout.held, np.dtype(leaf.dtype).itemsize):
            held = layout.held[number].box
            parts.append(OwnPart(box, here[held], None if box == held else slices_within(box, held)))
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
