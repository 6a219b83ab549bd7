"""Copies on devices: the same bytes and shardings in new memory, made only if there is room."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt_train.pytree import copies as copies_module
from jaxckpt_train.pytree.copies import SPARE_FRACTION, copy_on_devices, have_room
from tests.support.same_trees import raw


def over(devices: list[jax.Device], *spec: Any, kind: str | None = None) -> Sharding:
    sizes = (4, 2) if len(devices) == 8 else (len(devices), 1)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(sizes), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)


def mixed_arrays() -> list[jax.Array]:
    """Arrays on several sets of devices and of several dtypes; one is uncommitted."""
    devices = jax.devices()
    shardings: list[Sharding | None] = [
        None,
        over(devices, "x", "y"),
        SingleDeviceSharding(devices[3]),
        over(devices[::-1], "x", "y"),
        over(devices[:4], "x"),
        over(devices),
        over(devices[4:], None, "y"),
        SingleDeviceSharding(devices[3], memory_kind="pinned_host"),
        over(devices, "y", "x"),
    ]
    dtypes = [jnp.float32, jnp.bfloat16, jnp.int4, jnp.uint8, jnp.bool, jnp.complex64]
    contents = [np.arange(32).reshape(8, 4) % 7 + number for number in range(2 * len(shardings))]
    return [
        jax.device_put(data.astype(dtypes[n % len(dtypes)]), shardings[n % len(shardings)])
        for n, data in enumerate(contents)
    ]


def test_copies_are_same_in_all_but_their_memory() -> None:
    arrays = mixed_arrays()
    copies = copy_on_devices(arrays)
    assert len(copies) == len(arrays)
    for copy, array in zip(copies, arrays, strict=True):
        assert raw(copy) == raw(array)
        assert (copy.dtype, copy.sharding) == (array.dtype, array.sharding)
        assert copy.sharding.memory_kind == array.sharding.memory_kind
        pairs = list(zip(copy.addressable_shards, array.addressable_shards, strict=True))
        for mine, theirs in pairs:
            assert (mine.device, mine.index, mine.replica_id) == (theirs.device, theirs.index, theirs.replica_id)
            assert raw(mine.data) == raw(theirs.data)
            assert mine.data.unsafe_buffer_pointer() != theirs.data.unsafe_buffer_pointer()


def test_copies_survive_donation_of_originals() -> None:
    step = jax.jit(lambda tree: [leaf + jnp.ones((), leaf.dtype) for leaf in tree], donate_argnums=0)
    state = step([jax.device_put(np.zeros((64, 64), np.float32), over(jax.devices(), "x", "y")) for _ in range(4)])
    for number in range(20):
        copies, old = copy_on_devices(state), state
        state = step(state)
        assert all(leaf.is_deleted() for leaf in old)
        assert all((np.asarray(copy) == number + 1).all() for copy in copies)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_scalars_and_empty_arrays_are_copied(shape: tuple[int, ...]) -> None:
    array = jax.device_put(np.full(shape, 3, np.float32), over(jax.devices()))
    (copy,) = copy_on_devices([array])
    assert (copy.shape, copy.sharding, raw(copy)) == (shape, array.sharding, raw(array))


def test_no_arrays_give_no_copies() -> None:
    assert copy_on_devices([]) == []


class FakeDevice:
    """A device that reports its memory."""

    def __init__(self, statistics: dict[str, int] | None) -> None:
        self.statistics = statistics

    def memory_stats(self) -> dict[str, int] | None:
        return self.statistics


@dataclasses.dataclass
class FakeSharding:
    """A replicated sharding: every device holds the whole array."""

    addressable_devices: Sequence[FakeDevice]

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


@dataclasses.dataclass
class FakeArray:
    shape: tuple[int, ...]
    sharding: FakeSharding
    dtype = np.dtype(np.uint8)


def device(limit: int, peak: int) -> FakeDevice:
    return FakeDevice({"bytes_limit": limit, "peak_bytes_in_use": peak, "bytes_in_use": 0})


def array_on(*devices: FakeDevice, size: int) -> Any:
    return FakeArray((size,), FakeSharding(devices))


@pytest.fixture(autouse=True)
def _nothing_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_measured", set())


def test_device_copy_needs_never_used_memory() -> None:
    limit, peak = 1000, 300
    free = round(limit * (1 - SPARE_FRACTION)) - peak
    for size, fits in [(1, True), (free, True), (free + 1, False), (5000, False)]:
        array = array_on(device(limit, peak), size=size)
        assert [have_room([array]) for _ in range(3)] == [False, fits, fits]


def test_later_memory_statistics_count() -> None:
    one = device(1000, 0)
    array = array_on(one, size=500)
    assert [have_room([array]), have_room([array])] == [False, True]
    assert one.statistics is not None
    one.statistics["peak_bytes_in_use"] = 600
    assert not have_room([array])


def test_every_device_must_have_room() -> None:
    wide, narrow = device(1000, 0), device(1000, 850)
    small, large = array_on(wide, narrow, size=40), array_on(wide, size=400)
    have_room([small, large])
    assert have_room([small, large, large])
    assert not have_room([small, small, small]), "120 bytes on the narrow one"
    assert not have_room([large, large, large]), "1200 bytes on the wide one"


def test_device_not_measured_before_has_no_room() -> None:
    known, new = device(1000, 0), device(1000, 0)
    have_room([array_on(known, size=1)])
    assert have_room([array_on(known, size=1)])
    assert not have_room([array_on(known, new, size=1)])
    assert have_room([array_on(known, new, size=1)])


@pytest.mark.parametrize("statistics", [None, {}, {"bytes_limit": 1 << 40}, {"peak_bytes_in_use": 0}])
@pytest.mark.parametrize("size", [0, 1])
def test_device_without_memory_statistics_counts_as_full(statistics: dict[str, int] | None, size: int) -> None:
    array = array_on(FakeDevice(statistics), size=size)
    assert [have_room([array]) for _ in range(3)] == [False] * 3


def test_real_devices_are_asked_too() -> None:
    array = jax.device_put(np.zeros((8, 4)), over(jax.devices(), "x", "y"))
    has_statistics = all(one.memory_stats() for one in array.sharding.device_set)  # CPU devices have none
    assert [have_room([array]) for _ in range(2)] == [False, has_statistics]
