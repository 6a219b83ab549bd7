"""Takes arrays for the hosts that hold them: each gets copies of its share in its own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt_train.settings import MIB, Colocated
from jaxckpt_train.store.boxes import Box, box_from_index, full_box, slices_within
from jaxckpt_train.store.shares import HeldBox, Shares
from jaxckpt_train.tree.colocated_calls import refuse_without_pickler
from jaxckpt_train.tree.colocated_devices import cpu_beside, has_single_controller, runs_on_hosts
from jaxckpt_train.tree.device_wait import device_wait_s
from jaxckpt_train.tree.own_parts import cut_out

LEAST_CUT_BYTES = 64 * MIB
"""What is smaller is not cut: JAX compiles each cut for each shape and device, on the thread that calls for a save."""


class HostPart(NamedTuple):
    """A part of array number `array` of a tree, held by a CPU device."""

    array: int
    box: Box
    data: jax.Array


class HostParts:
    """What the hosts have of one tree.

    Args:
        whole: copies of arrays each of whose shards is a part, with their numbers in the tree.
        apart: further parts, by the CPU device that holds them.

    Attributes:
        is_waiting: whether somebody waits until they are there, which the devices may compute for long.
    """

    def __init__(self, whole: Sequence[tuple[int, jax.Array]], apart: Sequence[tuple[jax.Device, HostPart]]) -> None:
        self._whole, self._apart = whole, apart
        self.is_waiting = False

    def by_device(self) -> dict[jax.Device, list[HostPart]]:
        """The parts that each CPU device holds, by its number; waits until all are there."""
        found: dict[jax.Device, list[HostPart]] = {}
        for number, array in self._whole:
            for shard in array.addressable_shards:
                part = HostPart(number, box_from_index(shard.index, array.shape), shard.data)
                found.setdefault(shard.device, []).append(part)
        for device, part in self._apart:
            found.setdefault(device, []).append(part)
        self.is_waiting = True
        try:
            for parts in found.values():
                for part in parts:
                    part.data.block_until_ready()
        finally:
            self.is_waiting = False
        return dict(sorted(found.items(), key=lambda item: item[0].id))

    def wait_for_devices(self) -> float:
        """Wait until the first copy is there; the seconds that it took."""
        first = [array for _, array in self._whole[:1]] or [part.data for _, part in self._apart[:1]]
        self.is_waiting = True
        try:
            return device_wait_s(first)
        finally:
            self.is_waiting = False

    def close(self) -> None:
        """Let go of them."""
        self._whole = self._apart = ()


class HostTaker:
    """Of one tree: collects the leaves that hosts write, and shares them out.

    Args:
        setting: which leaves those are.
    """

    def __init__(self, setting: Colocated) -> None:
        self._setting = setting
        self._whole: list[tuple[int, jax.Array, jax.sharding.Sharding]] = []
        self._found: list[tuple[int, Box, jax.Array]] = []
        self._devices: list[jax.Device] = []
        self._shares = Shares(0, LEAST_CUT_BYTES)
        self._layouts: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], Sequence[HeldBox]] = {}
        self._beside: dict[jax.sharding.Sharding, jax.sharding.Sharding | None] = {}

    def takes(self, sharding: jax.sharding.Sharding) -> bool:
        """Whether arrays of this sharding are for it."""
        return runs_on_hosts(sharding, self._setting)

    def add(self, number: int, leaf: jax.Array) -> None:
        """Take one: every part of it once, of the device with the fewest bytes so far of those that hold it.

        Parts are cut out on their device, so that no more than them travels.
        """
        layout = self._layout(leaf.sharding, leaf.shape)
        if all(len(held.holders) == 1 for held in layout):
            beside = self._sharding_beside(leaf.sharding)
            if beside is not None:
                self._whole.append((number, leaf, beside))
                return
        here = {shard.device.id: shard for shard in leaf.addressable_shards}
        for holder, (held, box) in self._shares.of_all(layout, np.dtype(leaf.dtype).itemsize):
            data, whole = here[holder].data, layout[held].box
            self._found.append((number, box, data if box == whole else cut_out(data, slices_within(box, whole))))
            self._devices.append(cpu_beside(here[holder].device))

    def taken(self) -> HostParts | None:
        """Order the copies of all that was added; None: nothing was.

        Whole arrays are copied as such: JAX takes as long for one as for one part.
        """
        if not (self._whole or self._found):
            return None
        places = {device: jax.sharding.SingleDeviceSharding(device) for device in set(self._devices)}
        copies = jax.device_put(
            [leaf for _, leaf, _ in self._whole] + [data for *_, data in self._found],
            [beside for *_, beside in self._whole] + [places[device] for device in self._devices],
            may_alias=False,
        )
        whole = [(number, copy) for (number, *_), copy in zip(self._whole, copies, strict=False)]
        apart = [
            (device, HostPart(number, box, copy))
            for device, (number, box, _), copy in zip(self._devices, self._found, copies[len(whole) :], strict=True)
        ]
        self._whole.clear()
        self._found.clear()
        return HostParts(whole, apart)

    def _sharding_beside(self, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding | None:
        """The same over the CPU devices beside its devices; None: two of these share one, or it has no mesh."""
        if sharding not in self._beside:
            self._beside[sharding] = None
            if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
                mesh = sharding.mesh
                beside = [cpu_beside(device) for device in mesh.devices.flat]
                if len(set(beside)) == len(beside):
                    devices = np.array(beside).reshape(mesh.devices.shape)
                    there = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
                    self._beside[sharding] = jax.sharding.NamedSharding(there, sharding.spec)
        return self._beside[sharding]

    def _layout(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Sequence[HeldBox]:
        found = self._layouts.get((sharding, shape))
        if found is None:
            holders: dict[Box, set[int]] = {}
            devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
            for device, index in devices.items():
                box = full_box(shape) if index is None else box_from_index(index, shape)
                holders.setdefault(box, set()).add(device.id)
            found = [HeldBox(box, tuple(sorted(ids))) for box, ids in holders.items()]
            self._layouts[sharding, shape] = found
        return found


def host_taker(leaves: Sequence[Any], setting: Colocated) -> HostTaker | None:
    """For the leaves of one tree; None: no hosts are asked about any.

    Some may be of another runtime of this process, such as on its own CPU.

    Raises:
        SettingsError: hosts were asked for in a job of several processes, or Colocated Python cannot be used here.
    """
    if setting is False or (setting == "auto" and not has_single_controller()):
        return None
    shardings = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and not _is_traced(leaf)}
    if not any(runs_on_hosts(sharding, setting) for sharding in shardings):
        return None
    refuse_without_pickler()  # now, and not in the background
    return HostTaker(setting)


def _is_traced(leaf: jax.Array) -> bool:
    return isinstance(leaf, jax.core.Tracer)
