"""The snapshot: the state at the call of save, whatever happens to it afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from jaxckpt_train.pytree.snapshot import describe_sharding, snapshot
from tests.support.same_trees import raw

FAST = jct.StoreSettings(durability="none")
TIMES = 200


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def spread(array: jax.Array, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def donated_states(sharded: bool) -> tuple[dict[str, jax.Array], Any]:
    mesh = mesh_of(4, 2)
    state = {"w": jnp.arange(4096.0).reshape(64, 64), "b": jnp.arange(64, dtype=jnp.int32), "n": jnp.int32(0)}
    if sharded:
        state = {
            "w": spread(state["w"], mesh, "x", "y"),
            "b": spread(state["b"], mesh, None),
            "n": spread(state["n"], mesh),
        }
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    first = step(state)
    assert all(leaf.is_deleted() for leaf in state.values()), "the step donates the state"
    return first, step


@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "eight devices"])
def test_donation_after_save_does_not_change_checkpoint(sharded: bool, tmp_path: Path) -> None:
    state, step = donated_states(sharded)
    for number in range(TIMES):
        expected = {name: raw(leaf) for name, leaf in state.items()} if number % 20 == 0 else None
        pending = jct.save_async(tmp_path / "c", state, overwrite=True, settings=FAST)
        state = step(state)
        jax.block_until_ready(state)
        pending.wait()
        loaded = jct.load(tmp_path / "c")
        assert loaded["n"] == number + 1
        assert raw(loaded["w"]) == raw(np.arange(4096, dtype=np.float32) + number + 1)
        assert raw(loaded["b"]) == raw(np.arange(64, dtype=np.int32) + number + 1)
        if expected is not None:
            assert {name: raw(leaf) for name, leaf in loaded.items()} == expected


def test_steps_continue_during_several_saves(tmp_path: Path) -> None:
    state, step = donated_states(sharded=True)
    pending = []
    for number in range(5):
        pending.append(jct.save_async(tmp_path / str(number), state, settings=FAST))
        state = step(step(state))
    for number, save in enumerate(pending):
        save.wait()
        assert jct.load(tmp_path / str(number))["n"] == 2 * number + 1
        assert raw(jct.load(tmp_path / str(number))["w"]) == raw(np.arange(4096, dtype=np.float32) + 2 * number + 1)


def test_key_donated_after_save_is_saved_unchanged(tmp_path: Path) -> None:
    key = jax.random.split(jax.random.key(7), 4)
    expected = raw(key)
    pending = jct.save_async(tmp_path / "c", {"key": key}, settings=FAST)
    jax.jit(lambda keys: jax.vmap(lambda one: jax.random.fold_in(one, 1))(keys), donate_argnums=0)(key)
    pending.wait()
    assert raw(jct.load(tmp_path / "c")["key"]) == expected


def test_numpy_leaves_are_snapshot_at_call(tmp_path: Path) -> None:
    memory = np.memmap(tmp_path / "memory", np.int64, "w+", shape=(1000,))
    tree = {
        "plain": np.zeros(1000),
        "columns": np.zeros((10, 100), order="F"),
        "part": np.zeros((8, 8))[::2],
        "m": memory,
    }
    for number in range(20):
        for leaf in tree.values():
            leaf[...] = number
        pending = jct.save_async(tmp_path / "c", tree, overwrite=True, settings=FAST)
        for leaf in tree.values():
            leaf[...] = -1
        pending.wait()
        assert all((leaf == number).all() for leaf in jct.load(tmp_path / "c").values())


def test_numpy_leaves_that_share_memory_are_copied() -> None:
    array = np.arange(6.0)
    taken = snapshot({"a": array, "b": array[2:]})
    array[:] = -1
    assert [source.chunks[0].data.tolist() for source in taken.arrays] == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5]]


def test_a_deleted_array_is_refused_by_name(tmp_path: Path) -> None:
    array = jnp.arange(4.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    with pytest.raises(jct.UnsupportedLeafError, match=r"'state': leaf 'params/w': .* donated"):
        jct.save_async(tmp_path / "c", {"params": {"w": array}})
    key = jax.random.key(0)
    jax.random.key_data(key).delete()
    key.delete()
    with pytest.raises(jct.UnsupportedLeafError, match=r"leaf 'key': .* donated"):
        jct.save_async(tmp_path / "c", {"key": key})
    assert list(tmp_path.iterdir()) == []


def test_a_traced_value_is_refused_by_name(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        jct.save(tmp_path / "c", {"x": x})
        return x

    with pytest.raises(jct.UnsupportedLeafError, match=r"leaf 'x': .* traced value"):
        step(jnp.ones(3))
    assert list(tmp_path.iterdir()) == []


def test_float0_has_nothing_to_store() -> None:
    gradient = jax.grad(lambda x: 1.0, allow_int=True)(3)
    with pytest.raises(jct.UnsupportedLeafError, match=r"leaf 'g': .*cannot be stored"):
        snapshot({"g": gradient})


@pytest.mark.parametrize(
    ("spec", "boxes"),
    [
        (("x", "y"), 8),
        (("x",), 4),
        ((None, "y"), 2),
        ((("x", "y"),), 8),
        ((None, ("y", "x")), 8),
        ((), 1),
    ],
)
def test_every_element_is_taken_exactly_once(spec: tuple[Any, ...], boxes: int) -> None:
    array = spread(jnp.arange(1024.0).reshape(32, 32), mesh_of(4, 2), *spec)
    (source,) = snapshot({"a": array}).arrays
    assert len({chunk.box for chunk in source.chunks}) == len(source.chunks) == boxes
    whole = np.full((32, 32), -1, np.float32)
    for chunk in source.chunks:
        place = tuple(slice(start, stop) for start, stop in chunk.box)
        assert (whole[place] == -1).all()
        whole[place] = chunk.data
    assert raw(whole) == raw(array)
    assert sum(chunk.data.nbytes for chunk in source.chunks) == array.nbytes


def test_sharding_is_described_by_mesh_and_spec() -> None:
    mesh = mesh_of(4, 2)
    assert describe_sharding(NamedSharding(mesh, PartitionSpec(("x", "y"), None))) == {
        "mesh": {"x": 4, "y": 2},
        "spec": [["x", "y"], None],
    }
    positional = spread(jnp.arange(8), mesh_of(8), "x").sharding
    assert describe_sharding(positional) == {"mesh": {"x": 8}, "spec": ["x"]}


class HalfStatic(NamedTuple):
    """A node whose fields are all leaves here, while its JAX registration makes `n` static data."""

    w: Any
    n: int


def test_namedtuple_that_jax_flattens_otherwise_keeps_its_fields() -> None:
    jax.tree_util.register_pytree_node(HalfStatic, lambda s: ((s.w,), s.n), lambda n, w: HalfStatic(w[0], n))
    taken = snapshot({"a": HalfStatic(np.ones(3), 5), "z": None})
    assert list(taken.record.leaves) == ["a/w", "a/n", "z"]
    assert [array.name for array in taken.arrays] == ["a/w"]
