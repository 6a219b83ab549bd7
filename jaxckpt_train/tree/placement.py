"""Placement: host arrays onto devices, in large batches, as the target's shardings want them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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
        sharding.check_compatible_aval(shape)  # type: ignore[attr-defined]
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise MismatchError(f"leaf {name!r}: shape {shape} does not fit its sharding {sharding}: {error}") from error
    numbers: dict[Box, int] = {}
    devices = []
    for device, index in indices.items():
        box = full_box(shape) if index is None else box_from_index(index, shape)
        devices.append((device, numbers.setdefault(box, len(numbers))))
    return Placement(shape, sharding, tuple(numbers), tuple(devices))


def put_all(placements: Sequence[Placement], contents: Sequence[Sequence[np.ndarray]]) -> list[jax.Array]:
    """Put the boxes of many arrays onto their devices with two calls in all.

    On the CPU the aligned, writable arrays become the devices' memory without a copy, so the caller must let go of
    them. An array without a sharding is put on the default device and stays uncommitted.
    """
    loose: list[np.ndarray] = []
    pieces: list[np.ndarray] = []
    places: list[Any] = []
    for placement, boxes in zip(placements, contents, strict=True):
        if placement.sharding is None:
            loose.append(boxes[0])
            continue
        kind = placement.sharding.memory_kind
        for device, number in placement.devices:
            pieces.append(boxes[number])
            places.append(jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
    put_loose = iter(jax.device_put(loose))
    put_pieces = iter(jax.device_put(pieces, places) if pieces else ())
    arrays = []
    for placement in placements:
        if placement.sharding is None:
            arrays.append(next(put_loose))
        else:
            shards = [next(put_pieces) for _ in placement.devices]
            arrays.append(jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, shards))
    return arrays
