"""Arrays in a custom layout are restored in that layout, so that functions compiled for it accept them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxckpt_train as jct
from jaxckpt_train.pytree.target import in_format_of
from tests.support.same_trees import assert_same

if not hasattr(layout, "Format"):
    pytest.skip("formats came with JAX 0.7", allow_module_level=True)

FAST = jct.StoreSettings(durability="none")
ORDERS = [(1, 0), (2, 0, 1), (0, 2, 1)]


def shardings() -> dict[str, jax.sharding.Sharding]:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return {
        "single": SingleDeviceSharding(jax.devices()[1]),
        "cut": NamedSharding(mesh, PartitionSpec("x", "y")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
    }


def ordered(order: tuple[int, ...], place: str = "single") -> Any:
    """The format of arrays that are stored by this order of dimensions."""
    return layout.Format(layout.Layout(major_to_minor=order), shardings()[place])


def order_of(array: Any) -> Any:
    return array.format.layout.major_to_minor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("place", ["single", "cut", "replicated"])
@pytest.mark.parametrize("order", ORDERS)
def test_layout_of_the_target_is_taken(tmp_path: Path, order: tuple[int, ...], place: str, dtype: str) -> None:
    values = np.arange(4**4, dtype=np.int32).reshape((8, -1) if len(order) == 2 else (8, 4, -1)) % 100
    array = jax.device_put(jnp.asarray(values, dtype), ordered(order, place))
    jct.save(tmp_path / "c", {"w": array}, settings=FAST)
    abstract: Any = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.format)
    for target in (array, abstract):
        found = jct.load(tmp_path / "c", {"w": target})["w"]
        assert order_of(found) == order
        assert_same({"w": found}, {"w": array})
    usual: Any = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    assert order_of(jct.load(tmp_path / "c", {"w": usual})["w"]) == tuple(range(len(order)))


FORMAT_FORMS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "state": lambda make: make(),
    "jitted": lambda make: make,
    "function": lambda make: lambda: {**make()},
    "put": lambda make: lambda: {"w": jax.device_put(jnp.zeros((32, 16)), ordered((1, 0)))},
}


@pytest.mark.parametrize("form", FORMAT_FORMS)
def test_training_that_is_compiled_for_a_layout_resumes(tmp_path: Path, form: str) -> None:
    kind = ordered((1, 0))
    make = jax.jit(lambda: {"w": jnp.zeros((32, 16))}, out_shardings={"w": kind})
    update = jax.jit(lambda w, x: w * 0.9 + x, in_shardings=(kind, None), out_shardings=kind, donate_argnums=0)

    def train(directory: Path, stop: int) -> Any:
        with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
            state = ckpt.resume(FORMAT_FORMS[form](make))
            for step in ckpt.steps(stop):
                state = {"w": update(state["w"], jnp.arange(512.0).reshape(32, 16) + step)}
                ckpt(state)
        return state

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "stopped", 3)
    found = train(tmp_path / "stopped", 6)
    assert_same(found, whole)
    assert order_of(found["w"]) == (1, 0)


class Table(nnx.Module):
    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(3))
        self.rows = nnx.Param(jax.device_put(jnp.zeros((16, 8)), ordered((1, 0))))


def test_variables_of_nnx_keep_their_layout(tmp_path: Path) -> None:
    for stop in (2, 4):
        with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
            table = ckpt.resume(Table())
            assert order_of(jax.tree.leaves(nnx.state(table, nnx.Param))[0]) == (1, 0)
            for _ in ckpt.steps(stop):
                table.count[...] += 1
                ckpt()
    assert table.count[...].tolist() == [4.0] * 3


@pytest.mark.parametrize(
    "leaf",
    [
        np.zeros((4, 4)),
        functools.partial(jnp.zeros, 4),
        functools.partial(jnp.zeros, (4, 4)),
        lambda: jax.random.split(jax.random.key(0), (2, 2)),
        3,
        None,
    ],
    ids=["numpy", "vector", "matrix", "keys", "number", "none"],
)
def test_arrays_of_the_usual_layout_are_left_alone(leaf: Any) -> None:
    value, target = (leaf(), leaf()) if callable(leaf) else (leaf, leaf)
    assert in_format_of(target, value) is value
