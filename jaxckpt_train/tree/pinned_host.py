"""Pinned host memory: devices write into it on their own, so that a transfer holds nobody up and is copied once."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

KIND = "pinned_host"
_HOST_KINDS = (KIND, "unpinned_host")


def start_transfers(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Order that arrays of one device each are brought to the host; returns before they are there.

    Returns:
        Arrays to take the data from, in the same order: `np.asarray` of one waits until it is there.
    """
    pinned = in_pinned_host(arrays)
    if pinned is not None:
        return pinned
    for array in arrays:
        array.copy_to_host_async()
    return arrays


def in_pinned_host(arrays: Sequence[jax.Array]) -> Sequence[jax.Array] | None:
    """As `start_transfers`, into pinned host memory. None: a device knows no such memory, or there is no room in it.

    What happens to the arrays afterwards, donation included, cannot reach what is transferred: JAX keeps that order. It
    also keeps pinned memory that is let go of for the next transfers. JAX's own array serialization takes this way too
    (jax-ml/jax#22114), since other transfers go through small buffers and are copied once more.
    """
    here = [number for number, array in enumerate(arrays) if array.sharding.memory_kind not in _HOST_KINDS]
    if not here:
        return arrays
    devices = [next(iter(arrays[number].sharding.device_set)) for number in here]
    if not all(map(_has_pinned_memory, set(devices))):
        return None
    places = {device: SingleDeviceSharding(device, memory_kind=KIND) for device in set(devices)}
    found = list(arrays)
    try:
        moved = jax.device_put([arrays[number] for number in here], [places[device] for device in devices])
    except jax.errors.JaxRuntimeError:
        return None
    for number, array in zip(here, moved, strict=True):
        found[number] = array
    return found


def _has_pinned_memory(device: jax.Device) -> bool:
    return any(memory.kind == KIND for memory in device.addressable_memories())
