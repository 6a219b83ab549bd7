"""Pinned host memory: devices write into it on their own, so that a transfer holds nobody up and is copied once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

_KIND = "pinned_host"
_HOST_KINDS = (_KIND, "unpinned_host")
_log = logging.getLogger("jaxckpt_train")
_refused: set[jax.Device] = set()


def is_on_host(array: jax.Array) -> bool:
    """Whether an array lies in host memory of its device, as an offloaded optimizer state does."""
    return array.sharding.memory_kind in _HOST_KINDS


def start_transfers(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Order that arrays of one device each are brought to the host; returns before they are there.

    They go to pinned host memory where their device knows such memory and has room. What happens to the arrays
    afterwards, donation included, cannot reach what is transferred: JAX keeps that order. It also keeps pinned memory
    that is let go of for the next transfers. JAX's own array serialization takes this way too (jax-ml/jax#22114), since
    other transfers go through small buffers and are copied once more.

    Returns:
        Arrays to take the data from, in the same order; `np.asarray` of one waits until it is there. Other objects than
        those given lie in pinned memory and are the caller's own.
    """
    started = list(arrays)
    away = [number for number, array in enumerate(arrays) if not is_on_host(array)]
    devices = {number: next(iter(arrays[number].sharding.device_set)) for number in away}
    usable = {device for device in set(devices.values()) if device not in _refused and _knows_pinned_memory(device)}
    pinned = [number for number in away if devices[number] in usable]
    places = {device: SingleDeviceSharding(device, memory_kind=_KIND) for device in usable}
    try:
        moved = jax.device_put([arrays[n] for n in pinned], [places[devices[n]] for n in pinned]) if pinned else []
    except jax.errors.JaxRuntimeError as error:
        # Asked again, an allocator that is full may wait for seconds, with every save.
        _refused.update(usable)
        _log.warning(
            "saves do without pinned host memory from now on, and wait longer: the devices refused it: %s", error
        )
        pinned, moved = [], []
    for number, array in zip(pinned, moved, strict=True):
        started[number] = array
    for number in away:
        if started[number] is arrays[number]:
            arrays[number].copy_to_host_async()
    return started


def _knows_pinned_memory(device: jax.Device) -> bool:
    try:
        return any(memory.kind == _KIND for memory in device.addressable_memories())
    except RuntimeError:  # a plugin that knows nothing of kinds of memory
        return False
