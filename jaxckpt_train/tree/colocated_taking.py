"""Takes arrays for the hosts that hold them: each gets copies of its share in its own memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt_train.settings import Colocated
from jaxckpt_train.store.boxes import Box, box_from_index, full_box, slices_within
from jaxckpt_train.store.shares import HeldBox, Shares
from jaxckpt_train.tree.colocated_devices import cpu_beside, runs_on_hosts
from jaxckpt_train.tree.own_parts import cut_out


class HostPart(NamedTuple):
    """A part of array number `array` of a tree, held by a CPU device."""

    array: int
    box: Box
    data: jax.Array


@dataclasses.dataclass
class HostParts:
    """What the hosts have of one tree: the parts that each is to write, by CPU device.

    Attributes:
        by_device: the parts.
        is_waiting: whether somebody waits until they are there, which the devices may compute for long.
    """

    by_device: Mapping[jax.Device, Sequence[HostPart]]
    is_waiting: bool = False

    def wait(self) -> None:
        """Wait until all have arrived on their hosts."""
        self.is_waiting = True
        try:
            for parts in self.by_device.values():
                for part in parts:
                    part.data.block_until_ready()
        finally:
            self.is_waiting = False

    def close(self) -> None:
        """Let go of them."""
        self.by_device = {}


class HostTaker:
    """Of one tree: collects the leaves that hosts write, and shares them out.

    Args:
        setting: which leaves those are.
    """

    def __init__(self, setting: Colocated) -> None:
        self._setting = setting
        self._found: list[tuple[int, Box, jax.Array]] = []
        self._devices: list[jax.Device] = []
        self._shares = Shares(0)
        self._layouts: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], Sequence[HeldBox]] = {}

    def takes(self, sharding: jax.sharding.Sharding) -> bool:
        """Whether arrays of this sharding are for it."""
        return runs_on_hosts(sharding, self._setting)

    def add(self, number: int, leaf: jax.Array) -> None:
        """Take one: every part of it once, of the device with the fewest bytes so far of those that hold it.

        Parts are cut out on their device, so that no more than them travels.
        """
        layout = self._layout(leaf.sharding, leaf.shape)
        here = {shard.device.id: shard.data for shard in leaf.addressable_shards}
        devices = {shard.device.id: shard.device for shard in leaf.addressable_shards}
        for holder, (held, box) in self._shares.of_all(layout, np.dtype(leaf.dtype).itemsize):
            data, whole = here[holder], layout[held].box
            self._found.append((number, box, data if box == whole else cut_out(data, slices_within(box, whole))))
            self._devices.append(cpu_beside(devices[holder]))

    def taken(self) -> HostParts | None:
        """Order the copies of all that was added; None: nothing was."""
        if not self._found:
            return None
        places = {device: jax.sharding.SingleDeviceSharding(device) for device in set(self._devices)}
        copies = jax.device_put(
            [data for *_, data in self._found], [places[device] for device in self._devices], may_alias=False
        )
        by_device: dict[jax.Device, list[HostPart]] = {}
        for device, (number, box, _), copy in zip(self._devices, self._found, copies, strict=True):
            by_device.setdefault(device, []).append(HostPart(number, box, copy))
        self._found.clear()
        return HostParts(dict(sorted(by_device.items(), key=lambda item: item[0].id)))

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

    Raises:
        SettingsError: hosts were asked for in a job of several processes.
    """
    if setting is False:
        return None
    example = next((leaf for leaf in leaves if isinstance(leaf, jax.Array) and not _is_traced(leaf)), None)
    if example is None or not runs_on_hosts(example.sharding, setting):
        return None  # one process has one runtime
    return HostTaker(setting)


def _is_traced(leaf: jax.Array) -> bool:
    return isinstance(leaf, jax.core.Tracer)
