"""Transfers run in order, a bounded number of bytes ahead, and release each array after one fetch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt_train as jct
from jaxckpt_train.pytree.copies import LazyArray, TransferBudget, Transfers, start_transfers
from jaxckpt_train.store.threads import Workers
from tests.support.same_trees import raw

pytestmark = pytest.mark.timeout(60)


class Device:
    """A fake device: records which transfers to the host were started, and checks their limit.

    Attributes:
        started: numbers of the arrays whose transfer was started before they were fetched, in that order.
        alone: numbers of the arrays that were fetched before their turn, which started their transfer.
        wanted: numbers of the arrays that were fetched.
        on_host: sizes of the arrays that are on the host or on their way there, until nothing refers to them.
        ahead: the most bytes on the host after a transfer is started ahead. One array may always be larger.
    """

    def __init__(self, ahead: int) -> None:
        self.started: list[int] = []
        self.alone: list[int] = []
        self.wanted: set[int] = set()
        self.on_host: dict[int, int] = {}
        self.ahead = ahead
        self.refuses = -1

    def start(self, arrays: Sequence[FakeArray]) -> Sequence[FakeArray]:
        for array in arrays:
            there = sum(self.on_host.values())
            if array.number in self.wanted:
                self.alone.append(array.number)
            else:
                assert there == 0 or there + array.nbytes <= self.ahead
                self.started.append(array.number)
            self.on_host[array.number] = array.nbytes
            array.is_started = True
        return arrays


class FakeArray:
    """An array on a fake device."""

    def __init__(self, device: Device, number: int, size: int) -> None:
        self.device, self.number, self.is_started = device, number, False
        self.shape, self.dtype, self.size, self.nbytes = (size,), np.dtype(np.uint8), size, size
        self.sharding = SimpleNamespace(memory_kind="device")
        self.content = np.full(size, number, np.uint8)
        weakref.finalize(self.content, device.on_host.pop, number, None)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        assert self.is_started
        if self.number == self.device.refuses:
            raise RuntimeError("lost on the way")
        return self.content


class FakePlace:
    """A lazy array as the writer sees it: records that it was fetched."""

    def __init__(self, device: Device, number: int, place: Any) -> None:
        self._device, self._number, self._place = device, number, place

    def fetch(self) -> np.ndarray:
        self._device.wanted.add(self._number)
        data: np.ndarray = self._place.fetch()
        return data


def filled(device: Device, sizes: list[int]) -> tuple[Transfers, list[FakePlace]]:
    transfers = Transfers(TransferBudget(device.ahead), device.start)  # type: ignore[arg-type]
    places = [FakePlace(device, n, transfers.add(FakeArray(device, n, size))) for n, size in enumerate(sizes)]  # type: ignore[arg-type]
    transfers.begin()
    return transfers, places


@given(st.data(), st.lists(st.integers(1, 50), max_size=12), st.sampled_from([1, 10, 60, 10_000]))
def test_fetches_in_any_order_keep_the_bound(data: st.DataObject, sizes: list[int], ahead: int) -> None:
    """The device checks the bound; some fetched arrays are held for a while, as a writer does."""
    device = Device(ahead)
    transfers, places = filled(device, sizes)
    held: list[np.ndarray] = []
    for number in data.draw(st.permutations(range(len(sizes)))):
        assert not transfers.done.is_open()
        held = [*held[-data.draw(st.integers(0, 3)) :], places[number].fetch()]
        assert held[-1].tobytes() == bytes([number]) * sizes[number]
    assert transfers.done.is_open()
    assert device.started == sorted(device.started)
    assert sorted(device.started + device.alone) == list(range(len(sizes)))


def test_in_order_every_transfer_is_started_ahead() -> None:
    device = Device(ahead=25)
    transfers, places = filled(device, [10] * 6)
    seen = [len(device.started)]
    for place in places:
        place.fetch()
        seen.append(len(device.started))
    assert seen == [2, 2, 3, 4, 5, 6, 6]
    assert device.started == list(range(6))
    assert transfers.done.is_open()


def test_held_arrays_delay_further_transfers() -> None:
    device = Device(ahead=25)
    _, places = filled(device, [10] * 6)
    held = [places[0].fetch(), places[1].fetch()]
    assert device.started == [0, 1]
    held.clear()
    places[2].fetch()
    assert (device.started, device.alone) == ([0, 1, 3], [2])


def test_array_larger_than_the_bound_comes_alone() -> None:
    device = Device(ahead=25)
    _, places = filled(device, [100, 100, 10])
    assert device.started == [0]
    assert [place.fetch().nbytes for place in places] == [100, 100, 10]


def test_array_fetched_early_is_not_started_again() -> None:
    device = Device(ahead=20)
    _, places = filled(device, [10] * 5)
    places[3].fetch()
    assert device.started == [0, 1]
    for number in (0, 1, 2, 4):
        places[number].fetch()
    assert (device.started, device.alone) == ([0, 1, 2, 4], [3])


def test_array_that_is_left_makes_room_for_the_next() -> None:
    started: list[int] = []

    def start(several: Sequence[jax.Array]) -> Sequence[jax.Array]:
        started.extend(array.size for array in several)
        return several

    transfers = Transfers(TransferBudget(20), start)
    places: list[Any] = [transfers.add(jnp.zeros(size, jnp.uint8)) for size in (10, 9, 8, 7, 6)]
    transfers.begin()
    assert started == [10, 9]
    for number in (0, 4):
        places[number].leave()
    assert started == [10, 9, 8]
    for number in (2, 1, 3):
        assert not transfers.done.is_open()
        assert places[number].fetch().size == 10 - number
        places[number].leave()
    assert transfers.done.is_open()
    assert started == [10, 9, 8, 7]


def test_empty_array_needs_no_transfer() -> None:
    transfers = Transfers(TransferBudget(10))
    place = transfers.add(jnp.zeros((0, 8), jnp.bfloat16))
    assert isinstance(place, np.ndarray)
    assert (place.shape, place.dtype) == ((0, 8), jnp.bfloat16)
    transfers.begin()
    assert transfers.done.is_open()


def test_lazy_array_has_shape_and_dtype() -> None:
    array = jnp.ones((3, 5), jnp.bfloat16)
    place = Transfers(TransferBudget(1)).add(array)
    assert isinstance(place, LazyArray)
    assert (place.shape, place.dtype, place.size, place.nbytes) == ((3, 5), np.dtype(jnp.bfloat16), 15, 30)
    assert isinstance(place.dtype, np.dtype)


@pytest.mark.parametrize("ahead", [1, 1000, 1 << 30])
def test_arrays_of_real_devices_are_fetched_and_released(ahead: int) -> None:
    pinned = []

    def start(several: Sequence[jax.Array]) -> Sequence[jax.Array]:
        moved = start_transfers(several)
        pinned.extend([weakref.ref(array) for array in moved])
        assert {array.sharding.memory_kind for array in moved} == {"pinned_host"}
        return moved

    transfers = Transfers(TransferBudget(ahead), start)
    arrays = [jax.device_put(np.arange(100 * n + 1, dtype=np.float32), jax.devices()[n]) for n in range(8)]
    expected, references = [raw(array) for array in arrays], [weakref.ref(array) for array in arrays]
    places: list[Any] = [transfers.add(array) for array in arrays]
    transfers.begin()
    del arrays
    for number, place in enumerate(places):
        assert place.fetch().tobytes() == expected[number]
        assert references[number]() is None
        assert pinned[number]() is None
    assert transfers.done.is_open()
    assert len(pinned) == 8


@pytest.mark.parametrize("is_ours", [False, True])
def test_view_is_taken_only_of_own_arrays(is_ours: bool) -> None:
    """On a GPU, a step fails if it is given memory that has a view."""
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = jax.device_put(jnp.arange(5000.0), there)
    transfers = Transfers(TransferBudget(1 << 20))
    place: Any = transfers.add(array, is_ours=is_ours)
    transfers.begin()
    data = place.fetch()
    assert raw(data) == raw(array)
    assert (data.ctypes.data == array.unsafe_buffer_pointer()) is is_ours


def test_several_threads_fetch_each_once() -> None:
    device = Device(ahead=50)
    transfers, places = filled(device, [7] * 200)
    found: dict[int, bytes] = {}

    def fetch(number: int) -> None:
        found[number] = places[number].fetch().tobytes()

    Workers(4, "test").run_all(fetch, range(200))
    assert found == {number: bytes([number]) * 7 for number in range(200)}
    assert transfers.done.is_open()
    assert sorted(device.started + device.alone) == list(range(200))


def test_empty_transfers_are_done_at_once() -> None:
    transfers = Transfers(TransferBudget(10))
    assert not transfers.done.is_open()
    transfers.begin()
    assert transfers.done.is_open()


def test_nothing_is_started_before_all_are_added() -> None:
    device = Device(1000)
    transfers = Transfers(TransferBudget(1000), device.start)  # type: ignore[arg-type]
    transfers.add(FakeArray(device, 0, 10))  # type: ignore[arg-type]
    assert device.started == []


def test_close_releases_all_and_ends_waits() -> None:
    transfers = Transfers(TransferBudget(1))
    arrays = [jnp.arange(10.0) + n for n in range(5)]
    references = [weakref.ref(array) for array in arrays]
    places: list[Any] = [transfers.add(array) for array in arrays]
    transfers.begin()
    del arrays
    waiting = threading.Thread(target=transfers.done.wait, daemon=True)
    waiting.start()
    places[0].fetch()
    assert waiting.is_alive()
    transfers.close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert [reference() for reference in references] == [None] * 5
    with pytest.raises(jct.CheckpointTimeoutError, match="given up"):
        places[1].fetch()


def test_failed_transfer_is_raised_when_fetched() -> None:
    device = Device(ahead=1000)
    device.refuses = 1
    transfers, places = filled(device, [10] * 3)
    places[0].fetch()
    with pytest.raises(RuntimeError, match="lost on the way"):
        places[1].fetch()
    places[2].fetch()
    assert not transfers.done.is_open()
    transfers.close()
    assert transfers.done.is_open()
