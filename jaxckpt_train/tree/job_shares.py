"""What this process writes of the arrays of a job of many: which boxes of a leaf it holds, which parts are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt_train.store.boxes import Box, box_from_index, full_box, slices_within
from jaxckpt_train.store.shares import HeldBox, Shares


class OwnPart(NamedTuple):
    """A part of an array: its box, the array on one device that holds it, and where in that; None: it is all of it."""

    box: Box
    held: jax.Array
    inner: tuple[slice, ...] | None


class JobShares:
    """Of one save. All processes ask for the same leaves, in one order.

    Args:
        process: number of this process.
        processes: how many there are.
    """

    def __init__(self, process: int, processes: int) -> None:
        self._process, self._everyone = process, tuple(range(processes))
        self._shares = Shares(process)
        self._layouts: dict[tuple[jax.sharding.Sharding, tuple[int, ...]], Sequence[HeldBox]] = {}

    def writes(self, nbytes: int) -> bool:
        """Whether this process writes an array that each process has for itself."""
        return self._shares.of_whole(self._everyone, nbytes)

    def of(self, leaf: jax.Array) -> list[OwnPart]:
        """The own parts of an array that spans devices of several processes."""
        layout = self._layout(leaf.sharding, leaf.shape)
        shares = self._shares.of(layout, np.dtype(leaf.dtype).itemsize)
        here = {box_from_index(shard.index, leaf.shape): shard.data for shard in reversed(leaf.addressable_shards)}
        parts = []
        for number, box in shares:
            held = layout[number].box
            parts.append(OwnPart(box, here[held], None if box == held else slices_within(box, held)))
        return parts

    def _layout(self, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Sequence[HeldBox]:
        found = self._layouts.get((sharding, shape))
        if found is None:
            holders: dict[Box, set[int]] = {}
            devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
            for device, index in devices.items():
                box = full_box(shape) if index is None else box_from_index(index, shape)
                holders.setdefault(box, set()).add(device.process_index)
            found = [HeldBox(box, tuple(sorted(numbers))) for box, numbers in holders.items()]
            self._layouts[sharding, shape] = found
        return found
