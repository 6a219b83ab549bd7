"""Placement: which boxes of an array the devices of this process need, as the target's sharding says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.boxes import Box, box_from_index, full_box


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one array goes: the distinct boxes to read, and for every device the number of its box.

    Without devices the array stays on the host.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    boxes: Sequence[Box]
    devices: Sequence[tuple[jax.Device, int]]


def host_placement(shape: tuple[int, ...]) -> Placement:
    """The whole array as one box, kept on the host or put uncommitted on the default device."""
    return Placement(shape, None, (full_box(shape),), ())


def device_placement(name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Placement:
    """The boxes that the devices of this process need; replicas share one box.

    Raises:
        MismatchError: the sharding does not fit the shape.
    """
    try:
        if isinstance(sharding, jax.sharding.NamedSharding):  # before JAX 0.7 other shardings cannot check a shape
            sharding.check_compatible_aval(shape)
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise MismatchError(f"leaf {name!r}: shape {shape} does not fit its sharding {sharding}: {error}") from error
    numbers: dict[Box, int] = {}
    devices = []
    for device, index in indices.items():
        box = full_box(shape) if index is None else box_from_index(index, shape)
        devices.append((device, numbers.setdefault(box, len(numbers))))
    return Placement(shape, sharding, tuple(numbers), tuple(devices))


def default_platform() -> str:
    """Where JAX puts an array without a sharding: what its default device is made of."""
    (device,) = jax.device_put(np.zeros((), np.bool_)).devices()
    platform: str = device.platform
    return platform
