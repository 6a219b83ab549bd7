"""Loaded arrays that are donated to a computation give it their memory, also on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxckpt_train as jct
from jaxckpt_train.pytree import placing
from jaxckpt_train.pytree._jax import enable_x64
from tests.support.same_trees import raw
from tests.unit.pytree.test_device_put import SHARDINGS, aligned, assert_alike, content, every_sharding, placement_of
from tests.unit.pytree.test_restore_memory import BUDGET, LEAF_BYTES, LEAVES, MIB, path, watch  # noqa: F401

DTYPES = ("float32", "bfloat16", "bool", "complex64", "int8")


def state(put: Callable[[np.ndarray], jax.Array] = jnp.asarray) -> dict[str, jax.Array]:
    """Small, middle and large leaves, several of a kind, a weakly typed and an empty one."""
    kinds = {name: put(content(7, (64, 3), name)) for name in DTYPES}
    large = {f"large{number}": put(np.arange(number, number + (1 << 20), dtype=np.float32)) for number in range(3)}
    return {**kinds, **large, "scalar": put(np.float32(3)), "weak": jnp.asarray(2.5), "empty": put(np.zeros((0, 4)))}


def pointers(tree: Any) -> list[int]:
    """Return the addresses of the shards of all arrays that are not empty."""
    arrays = [array for array in jax.tree.leaves(tree) if array.size]
    return [shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards]


def same_or_more(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: ~leaf if leaf.dtype == bool else leaf + 1, tree)


def reused(tree: Any) -> float:
    """Return the fraction of the buffers of a tree that a step reuses when the tree is donated to it."""
    before = pointers(tree)
    after = pointers(jax.block_until_ready(jax.jit(same_or_more, donate_argnums=0)(tree)))
    return sum(first == second for first, second in zip(before, after, strict=True)) / len(before)


@pytest.fixture(params=["fast", "public"])
def fast_put(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With JAX's internal call for arrays, and without."""
    if request.param == "public":
        monkeypatch.setattr(placing, "_fast_put", None)


@every_sharding
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("fast_put")
def test_copied_boxes_are_the_arrays_that_jax_makes(name: str, dtype: str) -> None:
    sharding, puts = SHARDINGS[name](), placing.DevicePuts()
    placement = placement_of(sharding, (8, 16))
    for number in range(3):
        whole, array = content(number, (8, 16), dtype), None
        for box, sides in enumerate(placement.boxes):
            part = aligned(whole[(*(slice(*side) for side in sides), ...)])
            array = puts.put(number, placement, box, part, donatable=True)
            part[...] = part[::-1].copy()  # later changes of that memory must not change the array
        assert array is not None
        assert_alike(array, jax.device_put(whole, sharding))


@pytest.mark.usefixtures("fast_put")
@pytest.mark.parametrize("donatable", [None, True])
def test_step_reuses_memory_of_what_load_returned(tmp_path: Path, donatable: bool | None) -> None:
    made = state()
    jct.save(tmp_path / "c", made)
    loaded = jct.load(tmp_path / "c", made, donatable=donatable)
    jax.tree.map(assert_alike, loaded, made)
    assert reused(state()) == 1
    assert reused(loaded) == 1


def test_arrays_loaded_into_jax_arrays_are_donatable(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {name: jnp.arange(1 << 18, dtype=jnp.float32) for name in "ab"})
    like = {"a": jnp.zeros(1 << 18), "b": jax.ShapeDtypeStruct((1 << 18,), jnp.float32)}
    loaded = jct.load(tmp_path / "c", like)
    assert raw(loaded["a"]) == raw(loaded["b"])
    assert reused(loaded["a"]) == 1
    assert reused(loaded["b"]) == 0
    assert reused(jct.load(tmp_path / "c", jax.tree.map(jnp.zeros_like, loaded), donatable=False)) == 0


def test_nnx_objects_that_were_loaded_can_be_donated(tmp_path: Path) -> None:
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    jct.save(tmp_path / "c", model)
    loaded = nnx.Linear(64, 64, rngs=nnx.Rngs(1))
    jct.load(tmp_path / "c", loaded)
    assert raw(loaded.kernel.get_value()) == raw(model.kernel.get_value())
    assert reused(nnx.to_pure_dict(nnx.state(loaded))) == 1


@pytest.mark.parametrize("name", ["one device", "on all", "over 4x2", "over 4 and on 2"])
def test_shards_loaded_without_target_can_be_donated(tmp_path: Path, name: str) -> None:
    sharding = SHARDINGS[name]()
    made = {f"a{number}": jax.device_put(np.arange(4096.0).reshape(64, 64), sharding) for number in range(2)}
    jct.save(tmp_path / "c", made)
    loaded = jct.load(tmp_path / "c", shardings=sharding, donatable=True)
    jax.tree.map(assert_alike, loaded, made)
    assert reused(loaded) == 1


@every_sharding
@pytest.mark.parametrize("shape", [(0, 16), (8, 0), (0, 0)])
def test_empty_arrays_are_loaded_in_each_sharding(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    made = {dtype: jax.device_put(jnp.zeros(shape, dtype), SHARDINGS[name]()) for dtype in ("float32", "int4", "bool")}
    jct.save(tmp_path / "c", made)
    jax.tree.map(assert_alike, jct.load(tmp_path / "c", made), made)
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1) as ckpt:
        ckpt(ckpt.resume(made))
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1) as ckpt:
        jax.tree.map(assert_alike, ckpt.resume(made), made)


def test_converted_arrays_can_be_donated(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"a": np.arange(4096.0), "b": np.arange(4096.0)})
    like = {name: jax.ShapeDtypeStruct((4096,), jnp.float32) for name in "ab"}
    loaded = jct.load(tmp_path / "c", like, cast=True, donatable=True)
    assert raw(loaded["b"]) == np.arange(4096, dtype=np.float32).tobytes()
    assert reused(loaded) == 1


def test_resumed_and_restored_state_can_be_donated(tmp_path: Path) -> None:
    made = state()
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1) as ckpt:
        ckpt.resume(state())
        ckpt(made)
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1) as ckpt:
        resumed = ckpt.resume(state())
        jax.tree.map(assert_alike, resumed, made)
        assert reused(resumed) == 1
        assert reused(ckpt.manager.restore({"state": state()})) == 1


def test_state_from_init_from_can_be_donated(tmp_path: Path) -> None:
    made = state()
    jct.save(tmp_path / "c", made)
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1, init_from=tmp_path / "c") as ckpt:
        begun = ckpt.resume(state)  # a function, which is only traced
    jax.tree.map(assert_alike, begun, made)
    assert reused(begun) == 1


def test_memory_that_is_read_into_stays_within_budget(path: Path, watch: Any) -> None:  # noqa: F811
    like = {f"x{n:02d}": jax.ShapeDtypeStruct((LEAF_BYTES // 8,), np.float64) for n in range(LEAVES)}
    with enable_x64(True):
        found = jct.load(path, like, donatable=True, settings=BUDGET)
        assert reused(found) == 1
    assert watch.most <= BUDGET.read_budget_bytes + 2 * MIB


def test_loads_work_without_internal_copying_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_copying_put", None)
    jct.save(tmp_path / "c", state())
    jax.tree.map(assert_alike, jct.load(tmp_path / "c", state(), donatable=True), state())
