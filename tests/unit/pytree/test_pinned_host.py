"""Transfers to pinned host memory: the data at the call arrives, whatever happens to the arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxckpt_train as jct
from jaxckpt_train.pytree import copies, snapshot
from jaxckpt_train.pytree.copies import start_transfers
from tests.support.same_trees import raw
from tests.unit.pytree.test_snapshot_modes import next_state, quick, raw_of, state_of

pytestmark = pytest.mark.timeout(60)


class FakeDevice:
    """A device with memory of the given kinds; without any, asking for them raises an error."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def addressable_memories(self) -> list[Any]:
        if not self.kinds:
            raise NotImplementedError("this platform has no kinds of memory")
        return [SimpleNamespace(kind=kind) for kind in self.kinds]


class FakeArray:
    """An array in the first memory of a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self.sharding = SimpleNamespace(memory_kind="device", device_set={device})
        self.asked = 0

    def copy_to_host_async(self) -> None:
        self.asked += 1


def arrays_on_several_devices() -> list[jax.Array]:
    devices = jax.devices()
    dtypes = ["float32", "bfloat16", "int8", "bool", "uint32", "complex64", "float8_e4m3fn", "int4"]
    content = np.arange(600).reshape(20, 30)
    return [jax.device_put(jnp.asarray(content, dtype), devices[n]) for n, dtype in enumerate(dtypes)]


@pytest.fixture(autouse=True)
def _nothing_is_refused_before() -> Iterator[None]:
    copies._refused.clear()
    yield
    copies._refused.clear()


@pytest.mark.parametrize("then", ["nothing", "delete", "donate"])
def test_transfers_arrive_after_delete_or_donation(then: str) -> None:
    arrays = arrays_on_several_devices()
    expected = [raw(array) for array in arrays]
    found = start_transfers(arrays)
    assert [array.sharding.memory_kind for array in found] == ["pinned_host"] * len(arrays)
    for array in arrays:
        if then == "delete":
            array.delete()
        elif then == "donate":
            jax.jit(lambda x: ~x if x.dtype == bool else x + x, donate_argnums=0)(array)
            assert array.is_deleted()
    assert [raw(array) for array in found] == expected


def test_arrays_on_host_are_not_transferred() -> None:
    places = [SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("pinned_host", "unpinned_host")]
    arrays = [*(jax.device_put(jnp.arange(9), place) for place in places), jnp.arange(9)]
    found = start_transfers(arrays)
    assert [a is b for a, b in zip(found, arrays, strict=True)] == [True, True, False]
    assert start_transfers([]) == []


def test_devices_without_pinned_memory_are_asked_for_copy() -> None:
    plain = FakeDevice("device", "unpinned_host")
    arrays: Any = [FakeArray(plain), jnp.arange(9), FakeArray(FakeDevice("device")), FakeArray(FakeDevice())]
    found = start_transfers(arrays)
    assert [a is b for a, b in zip(found, arrays, strict=True)] == [True, False, True, True]
    assert [array.asked for array in arrays if isinstance(array, FakeArray)] == [1, 1, 1]


def test_full_memory_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(arrays: Any, _: Any) -> None:
        asked.append(len(arrays))
        no_room()

    arrays = arrays_on_several_devices()
    monkeypatch.setattr("jaxckpt_train.pytree.copies.jax.device_put", refuse)
    for _ in range(3):
        assert [a is b for a, b in zip(start_transfers(arrays), arrays, strict=True)] == [True] * len(arrays)
    assert asked == [len(arrays)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "RESOURCE_EXHAUSTED" in caplog.text


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat JAX's arrays on the CPU as arrays of another device."""
    collector = snapshot._LeafCollector
    monkeypatch.setattr(snapshot, "_LeafCollector", lambda keeps_views, **more: collector(keeps_views=False, **more))
    monkeypatch.setattr(snapshot, "_wait_for_cpus", lambda leaves, hosts: 0.0)


def no_room(*_: Any) -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request on device ordinal 0")


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "eight devices"])
@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
@pytest.mark.parametrize("mode", ["host", "auto"])
def test_host_saves_the_state_at_the_call(
    mode: Any, room: bool, sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call waits for nothing if there is pinned memory. The state may be donated in either case."""
    state = next_state(state_of(sharded))
    for _ in range(10):
        expected = raw_of(state)
        with monkeypatch.context() as patch:
            if not room:
                patch.setattr("jaxckpt_train.pytree.copies.jax.device_put", no_room)
            taken = snapshot.snapshot(state, mode)
            pending = jct.save_async(tmp_path / "c", state, overwrite=True, settings=quick(mode))
        places = [chunk.data for array in taken.arrays for chunk in array.chunks if chunk.data.nbytes]
        assert {isinstance(place, np.ndarray) for place in places} == {not room}
        assert taken.is_taken.is_open()
        taken.close()
        state = next_state(state)
        pending.wait()
        assert raw_of(jct.load(tmp_path / "c")) == expected


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_save_does_not_wait_for_pending_computation(tmp_path: Path) -> None:
    one, times = jnp.eye(500), 400
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, y: y @ one + 1, x))
    slow(one).block_until_ready()
    late = slow(jnp.zeros((500, 500)))
    pending = jct.save_async(tmp_path / "c", {"late": late}, settings=quick("host"))
    assert not late.is_ready()
    late.delete()
    pending.wait()
    assert jct.load(tmp_path / "c")["late"].tolist() == np.full((500, 500), times).tolist()


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_partly_offloaded_state_can_be_donated() -> None:
    """Optimizer states are offloaded to pinned memory, and the next step may be given that memory."""
    there = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {"a": jnp.arange(5000.0), "b": jax.device_put(jnp.arange(7000.0), there)}
    expected, memory = raw_of(state), state["b"].unsafe_buffer_pointer()
    taken = snapshot.snapshot(state, "host")
    for leaf in state.values():
        leaf.delete()
    data = {array.name: array.chunks[0].data for array in taken.arrays}
    assert isinstance(data["b"], np.ndarray)
    assert data["b"].ctypes.data != memory, "on a GPU, a step fails if it is given memory that has a view"
    found = {name: place if isinstance(place, np.ndarray) else place.fetch() for name, place in data.items()}  # type: ignore[union-attr]
    assert raw_of(found) == expected
