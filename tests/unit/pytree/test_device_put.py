"""Puts onto devices: JAX's internal call and its public ones give equal arrays, which own their memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.interpreters import pxla
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt_train.pytree import placing
from jaxckpt_train.pytree.placing import DevicePuts, Placement, place_array
from jaxckpt_train.store.buffers import Arena, empty_array
from tests.support.same_trees import raw

DTYPES = ("float32", "bfloat16", "int4", "bool", "complex64", "float8_e4m3fn")


def mesh(*sizes: int, backwards: bool = False) -> Mesh:
    devices = np.array(jax.devices()[::-1] if backwards else jax.devices()).reshape(sizes)
    return Mesh(devices, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def named(over: Mesh, *spec: Any, kind: str | None = None) -> Sharding:
    return NamedSharding(over, PartitionSpec(*spec), memory_kind=kind)


SHARDINGS: dict[str, Callable[[], Sharding | None]] = {
    "uncommitted": lambda: None,
    "one device": lambda: SingleDeviceSharding(jax.devices()[3]),
    "on all": lambda: named(mesh(8)),
    "over 4x2": lambda: named(mesh(4, 2), "x", "y"),
    "over 4 and on 2": lambda: named(mesh(4, 2), "x"),
    "backwards": lambda: named(mesh(8, backwards=True), "x"),
    "backwards over 4x2": lambda: named(mesh(4, 2, backwards=True), "y", "x"),
    "pinned": lambda: SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
    "pinned over 4x2": lambda: named(mesh(4, 2), "x", "y", kind="pinned_host"),
}
every_sharding = pytest.mark.parametrize("name", list(SHARDINGS))


class CountedFastPut:
    """Counts the calls of JAX's internal function."""

    def __init__(self) -> None:
        assert placing._fast_put is not None, "this JAX has no internal call, so there is nothing to compare"
        self.inner, self.calls = placing._fast_put, 0

    def __call__(self, *arguments: Any) -> jax.Array:
        self.calls += 1
        return self.inner(*arguments)


@pytest.fixture(params=["fast", "public"])
def fast_put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CountedFastPut | None:
    """Run the test on both paths."""
    chosen = CountedFastPut() if request.param == "fast" else None
    monkeypatch.setattr(placing, "_fast_put", chosen)
    return chosen


def content(number: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    data = np.random.default_rng(number).integers(0, 2, shape) if dtype == "bool" else None
    data = np.random.default_rng(number).integers(-7, 7, shape) if data is None else data
    return np.asarray(data).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def aligned(data: np.ndarray) -> np.ndarray:
    box = empty_array(data.shape, data.dtype)
    box[...] = data
    return box


def placement_of(sharding: Sharding | None, shape: tuple[int, ...]) -> Placement:
    return place_array("x", shape, sharding)


def put_all(sharding: Sharding | None, contents: list[np.ndarray]) -> list[jax.Array]:
    """Put several arrays of a kind with interleaved boxes, those of each array in another order."""
    puts, done = DevicePuts(), dict[int, jax.Array]()
    placement = placement_of(sharding, contents[0].shape)
    count = len(placement.boxes)
    for turn in range(count):
        for number, data in enumerate(contents):
            box = (turn * (1 if number % 2 else -1) + number) % count
            part = data[(*(slice(*side) for side in placement.boxes[box]), ...)]
            array = puts.put(number, placement, box, aligned(part))
            assert (array is None) is (turn < count - 1)
            if array is not None:
                done[number] = array
    return [done[number] for number in range(len(contents))]


def assert_alike(found: jax.Array, expected: jax.Array) -> None:
    """Fail unless a program can see no difference between two arrays."""
    assert raw(found) == raw(expected)
    assert (found.dtype, found.weak_type, found.committed) == (expected.dtype, expected.weak_type, expected.committed)
    assert found.aval == expected.aval
    assert found.sharding == expected.sharding
    assert found.sharding.memory_kind == expected.sharding.memory_kind
    shards = [[(s.device, s.index, s.replica_id, raw(s.data)) for s in a.addressable_shards] for a in (found, expected)]
    assert shards[0] == shards[1]


@every_sharding
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_those_that_jax_makes(fast_put: CountedFastPut | None, name: str, dtype: str) -> None:
    contents, sharding = [content(number, (8, 16), dtype) for number in range(3)], SHARDINGS[name]()
    for found, data in zip(put_all(sharding, contents), contents, strict=True):
        assert_alike(found, jax.device_put(data, sharding))
    if fast_put is not None:
        assert fast_put.calls >= 2  # all but the first of a kind


@pytest.mark.parametrize("name", ["uncommitted", "one device", "on all", "pinned"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,)])
def test_scalars_and_empty_arrays_are_put(fast_put: CountedFastPut | None, name: str, shape: tuple[int, ...]) -> None:
    contents, sharding = [content(number, shape, "bfloat16") for number in range(3)], SHARDINGS[name]()
    for found, data in zip(put_all(sharding, contents), contents, strict=True):
        assert_alike(found, jax.device_put(data, sharding))
    assert fast_put is None or fast_put.calls == 2


def test_kinds_are_distinguished(fast_put: CountedFastPut | None) -> None:
    """What is cached for one shape, dtype or sharding is not used for another."""
    puts = DevicePuts()
    whole = [SHARDINGS[name]() for name in ("uncommitted", "one device", "on all", "pinned")]
    whole += [SingleDeviceSharding(jax.devices()[0]), named(mesh(8, backwards=True)), named(mesh(4, 2))]
    cases = [
        (shape, dtype, sharding)
        for shape in ((4, 6), (6, 4), (24,))
        for dtype in ("float32", "int32", "uint32")
        for sharding in whole
    ]
    for turn in range(2):
        for number, (shape, dtype, sharding) in enumerate(cases):
            data = content(number + turn, shape, dtype)
            found = puts.put(number, placement_of(sharding, shape), 0, aligned(data))
            assert found is not None
            assert_alike(found, jax.device_put(data, sharding))


@pytest.mark.parametrize("name", ["uncommitted", "one device"])
def test_aligned_box_becomes_memory_of_device(fast_put: CountedFastPut | None, name: str) -> None:
    puts, sharding = DevicePuts(), SHARDINGS[name]()
    for number in range(3):
        box = aligned(content(number, (64, 64), "float32"))
        array = puts.put(number, placement_of(sharding, box.shape), 0, box)
        assert array is not None
        assert array.unsafe_buffer_pointer() == box.ctypes.data


def test_aligned_boxes_become_memory_of_sharded_array(fast_put: CountedFastPut | None) -> None:
    puts, sharding = DevicePuts(), SHARDINGS["over 4x2"]()
    placement = placement_of(sharding, (8, 16))
    for number in range(2):
        boxes = [aligned(content(box, (2, 8), "float32")) for box in range(8)]
        *_, array = [puts.put(number, placement, box, data) for box, data in enumerate(boxes)]
        assert array is not None
        addresses = {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        assert addresses == {device: boxes[box].ctypes.data for device, box in placement.devices}


def test_array_keeps_memory_of_its_box(fast_put: CountedFastPut | None) -> None:
    """An arena reclaims the pages of a box once nothing holds the box."""
    arena, puts, arrays = Arena(16 * 4096), DevicePuts(), list[jax.Array]()
    for number in range(4):
        box = arena.take(2 * 4096)
        box[:] = number + 1
        array = puts.put(number, place_array("x", box.shape, None), 0, box)
        assert array is not None
        arrays.append(array)
        del box
    gc.collect()
    assert [raw(array) for array in arrays] == [bytes([number + 1]) * 8192 for number in range(4)]
    del arrays, array, puts
    gc.collect()
    assert not any(arena._area[: 8 * 4096]), "the pages went back with the arrays"  # type: ignore[index]


def twice(array: jax.Array) -> jax.Array:
    return array * 2 + 1


@every_sharding
def test_put_arrays_can_be_used_and_donated(fast_put: CountedFastPut | None, name: str) -> None:
    contents, sharding = [content(number, (8, 16), "float32") for number in range(4)], SHARDINGS[name]()
    if sharding is not None and sharding.memory_kind == "pinned_host":
        sharding = sharding.with_memory_kind("device")
    arrays = put_all(sharding, contents)
    plain, step = jax.jit(twice), jax.jit(twice, donate_argnums=0)
    for number, data in enumerate(contents):
        result = step(arrays[number])
        assert arrays[number].is_deleted()
        assert_alike(result, plain(jax.device_put(data, sharding)))
        for other in range(number + 1, 4):
            assert raw(arrays[other]) == raw(contents[other])


@pytest.mark.parametrize("name", ["uncommitted", "one device", "on all"])
@pytest.mark.parametrize("dtype", ["int64", "float64", "uint64", "complex128"])
def test_64_bit_types_are_converted_in_every_array(fast_put: CountedFastPut | None, name: str, dtype: str) -> None:
    """With 64-bit types off, JAX makes 32-bit arrays; the 64-bit bytes must never be read as 32-bit values."""
    contents, sharding = [abs(content(number, (6,), "int8")).astype(dtype) for number in range(3)], SHARDINGS[name]()
    for found, data in zip(put_all(sharding, contents), contents, strict=True):
        assert found.dtype.itemsize == data.dtype.itemsize // 2
        assert_alike(found, jax.device_put(data, sharding))
        assert found.tolist() == data.tolist()
    with jax.enable_x64(True):
        for found, data in zip(put_all(sharding, contents), contents, strict=True):
            assert found.dtype == data.dtype
            assert_alike(found, jax.device_put(data, sharding))


def renamed(aval: Any, sharding: Any, xs: Any, devices: Any, commit: bool = True) -> Any: ...


def reordered(aval: Any, xs: Any, sharding: Any, devices: Any, committed: bool = True) -> Any: ...


def extended(aval: Any, sharding: Any, xs: Any, devices: Any, committed: bool = True, more: Any = None) -> Any: ...


@pytest.mark.parametrize(("internal", "taken"), [(renamed, False), (reordered, False), (extended, True)])
def test_internal_call_is_used_only_with_known_signature(
    monkeypatch: pytest.MonkeyPatch, internal: Any, taken: bool
) -> None:
    assert placing._find_fast_put() is pxla.batched_device_put
    monkeypatch.setattr(pxla, "batched_device_put", internal)
    assert (placing._find_fast_put() is internal) is taken
    assert taken or placing._find_fast_put() is None
    monkeypatch.delattr(pxla, "batched_device_put")
    assert placing._find_fast_put() is None


def test_put_arrays_are_strong_on_default_device(fast_put: CountedFastPut | None) -> None:
    with jax.default_device(jax.devices()[5]):
        arrays = put_all(None, [content(number, (3,), "float32") for number in range(3)])
    assert [array.devices() for array in arrays] == [{jax.devices()[5]}] * 3
    assert not any(array.committed or array.weak_type for array in arrays)
    assert (arrays[2] + jax.device_put(jnp.ones(3), jax.devices()[2])).devices() == {jax.devices()[2]}
