"""Puts host arrays onto devices one after the other, as they come from the disk."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.tree.placement import Placement

_log = logging.getLogger("jaxckpt_train")
_WANTED_PARAMETERS = ["aval", "sharding", "xs", "devices", "committed"]


def _find_fast_put() -> Callable[..., jax.Array] | None:
    """JAX's internal call that makes an array of one host buffer per device; None where it is not as it was.

    Of the public functions only `device_put` and `make_array_from_single_device_arrays` together do the same, in ten
    times the time for a small array: each array passes through shape inference and checks anew. See ADR 009.
    """
    try:
        from jax._src.interpreters import pxla
    except ImportError:
        return None
    found: Callable[..., jax.Array] | None = getattr(pxla, "batched_device_put", None)
    if found is None or list(inspect.signature(found).parameters)[: len(_WANTED_PARAMETERS)] != _WANTED_PARAMETERS:
        return None
    return found


def _find_copying_put() -> Callable[..., jax.Array] | None:
    """The call behind `_find_fast_put`, which can copy: the array gets memory that XLA allocates. None: not there.

    On the CPU XLA reuses only its own memory for the results of a computation that its arguments are donated to, and
    no public function copies a host array into such memory without keeping the host array for a while.
    """
    try:
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        during_call = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
        put = functools.partial(xla_client.batched_device_put, force_copy=True, host_buffer_semantics=during_call)
    except (ImportError, AttributeError):
        return None
    return put if "force_copy" in (xla_client.batched_device_put.__doc__ or "") else None


_fast_put = _find_fast_put()
_copying_put = _find_copying_put()


class _Kind(NamedTuple):
    """What JAX found out about the first array of a shape, dtype and sharding, and takes again for the next."""

    aval: Any
    sharding: jax.sharding.Sharding
    devices: Sequence[jax.Device]


class DevicePuts:
    """Arrays of one load on their way to the devices. The first of each kind goes through JAX's public functions."""

    def __init__(self) -> None:
        self._kinds: dict[object, _Kind] = {}
        self._begun: dict[int, tuple[list[jax.Array], int]] = {}

    def put(
        self, number: int, placement: Placement, box: int, data: np.ndarray, *, donatable: bool = False
    ) -> jax.Array | None:
        """Put one box of array number `number` onto its devices; returns the array once it has all of its boxes.

        Without a sharding it goes to the default device and stays uncommitted. On the CPU an aligned, writable box
        becomes the device's memory without a copy: the caller must drop it. If the array is to be donatable, the box is
        copied into memory of XLA, which reuses it when the array is donated to a computation.
        """
        if len(placement.boxes) == 1 and not (donatable and _spans_cpus_of_processes(placement)):
            return self._put_alike(placement.shape, placement.sharding, data, donatable)
        shards, left = self._begun.pop(number, ([], len(placement.boxes)))
        assert placement.sharding is not None
        memory = placement.sharding.memory_kind
        for device, wanted in placement.devices:
            if wanted == box:
                alone = jax.sharding.SingleDeviceSharding(device, memory_kind=memory)
                shards.append(self._put_alike(data.shape, alone, data, donatable))
        if left > 1:
            self._begun[number] = shards, left - 1
            return None
        return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, shards)

    def none_here(self, placement: Placement, dtype: np.dtype) -> jax.Array:
        """An array of which no device of this process has any part."""
        assert placement.sharding is not None
        return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, [], dtype=dtype)

    def _put_alike(
        self, shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, data: np.ndarray, donatable: bool
    ) -> jax.Array:
        """An array of this shape, with the same data on every device of its sharding that this process has."""
        key = shape, data.dtype, sharding
        kind = self._kinds.get(key)
        donatable = donatable and data.size > 0  # XLA fails to copy an empty array that is cut where it has no elements
        if kind is None or _fast_put is None:
            array = _put_here(shape, sharding, data)
            if array.dtype != data.dtype:  # JAX converts: 64-bit types while x64 is off
                return array
            devices = list(array.sharding.addressable_devices_indices_map(shape))
            kind = self._kinds[key] = _Kind(array.aval, array.sharding, devices)
            if not (donatable and _can_copy(kind)):
                return array
        put = _copying_put if donatable and _can_copy(kind) else _fast_put
        assert put is not None
        return put(kind.aval, kind.sharding, [data] * len(kind.devices), kind.devices, sharding is not None)


def _spans_cpus_of_processes(placement: Placement) -> bool:
    """Whether its array is partly on CPU devices of other processes; the call that copies fails for some of these."""
    sharding, devices = placement.sharding, placement.devices
    is_elsewhere = sharding is not None and not sharding.is_fully_addressable
    return is_elsewhere and any(device.platform == "cpu" for device, _ in devices)


def _can_copy(kind: _Kind) -> bool:
    return _copying_put is not None and kind.devices[0].platform == "cpu"


def _put_here(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, data: np.ndarray) -> jax.Array:
    if sharding is None or sharding.is_fully_addressable:
        placed: jax.Array = jax.device_put(data, sharding)
        return placed
    devices = sharding.addressable_devices_indices_map(shape)
    alone = [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(data, each) for each in alone])


def weakly_typed(name: str, array: jax.Array) -> jax.Array:
    """The same array, weakly typed, in the same memory where JAX's internal call is as known."""
    if array.weak_type:
        return array
    if _fast_put is not None:
        shards = [shard.data for shard in array.addressable_shards]
        devices = [shard.device for shard in array.addressable_shards]
        return _fast_put(array.aval.update(weak_type=True), array.sharding, shards, devices, array.committed)
    # A weakly typed array keeps its weak type when its elements are replaced.
    zero = array.dtype.type(0).item()
    weak = jnp.broadcast_to(jnp.asarray(zero), array.shape)
    if weak.dtype != array.dtype or not array.is_fully_addressable:
        _log.warning(
            "leaf %r: saved weakly typed, loaded strongly typed: this version of JAX makes no weakly typed %s array "
            "with its sharding. What is computed with it may get another dtype than before",
            name,
            array.dtype,
        )
        return array
    made: jax.Array = weak.at[...].set(array)
    return jax.device_put(made, array.sharding) if array.committed else made
