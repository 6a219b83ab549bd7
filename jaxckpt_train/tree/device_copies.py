"""Copies of arrays on their own devices, so that training goes on while the copies leave for the host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt_train.tree.caller_context import nothing_set

# Of the memory that training has never used, this much stays free: allocators cut memory up.
SPARE_FRACTION = 0.05

_measured: set[jax.Device] = set()


def copy_on_devices(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies with the same shardings. Returns once the copying is ordered, before it is done.

    The devices run what they are given in order, so a later step that is given the originals' memory cannot reach it
    before the copies are made. One computation copies all arrays on the same devices; it is compiled at the first save.
    """
    copies: list[jax.Array | None] = [None] * len(arrays)
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, array in enumerate(arrays):
        devices = tuple(array.sharding.addressable_devices_indices_map(array.shape))
        groups[devices, array.sharding.memory_kind].append(number)
    for numbers in groups.values():
        shardings = tuple(arrays[number].sharding for number in numbers)
        with nothing_set():
            copied = jax.jit(_copy, out_shardings=shardings)(tuple(arrays[number] for number in numbers))
        for number, copy in zip(numbers, copied, strict=True):
            copies[number] = copy
    return [copy for copy in copies if copy is not None]


def _copy(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.copy(array) for array in arrays)


def have_room(arrays: Sequence[jax.Array]) -> bool:
    """Whether every device surely has memory for a copy of its shards beside all that training has used so far.

    What training uses is known from its peak, which says nothing before the first step has run: so the first question
    about a device is always answered with no. A device that does not tell its memory counts as full.
    """
    needed: dict[jax.Device, int] = defaultdict(int)
    for array in arrays:
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in array.sharding.addressable_devices:
            needed[device] += size
    asked_before = _measured.issuperset(needed)
    _measured.update(needed)
    return asked_before and all(_free_bytes(device.memory_stats()) >= size for device, size in needed.items())


def _free_bytes(statistics: dict[str, int] | None) -> float:
    if not statistics or not {"bytes_limit", "peak_bytes_in_use"} <= statistics.keys():
        return -1
    return statistics["bytes_limit"] * (1 - SPARE_FRACTION) - statistics["peak_bytes_in_use"]
