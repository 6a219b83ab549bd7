"""Linen: train states keep the live object's functions, boxed and unboxed parameters are the same on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from tests.support.same_trees import assert_same, raw


class Net(nn.Module):
    """Dense layers with batch norm and dropout; the first kernel may be boxed."""

    boxed: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        initializer: Any = nn.initializers.lecun_normal()
        if self.boxed:
            initializer = nn.with_partitioning(initializer, ("x", None))
        x = nn.Dense(8, kernel_init=initializer)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(2)(x)


class State(TrainState):
    """A train state with batch statistics and a key."""

    batch_stats: Any
    key: jax.Array


def new_state(seed: int, boxed: bool = False) -> State:
    model = Net(boxed)
    variables = model.init({"params": jax.random.key(seed), "dropout": jax.random.key(1)}, jnp.ones((4, 8)))
    return State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.adamw(1e-2),
        batch_stats=variables["batch_stats"],
        key=jax.random.key(seed + 7),
    )


@jax.jit
def train_step(state: State) -> State:
    x = jax.random.normal(jax.random.fold_in(state.key, 100 + state.step), (4, 8))

    def loss(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
        y, updates = state.apply_fn(variables, x, mutable=["batch_stats"], rngs=rngs)
        return jnp.mean(y**2), updates

    gradients, updates = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=updates["batch_stats"])


def test_train_state_resumes_with_live_functions(tmp_path: Path) -> None:
    state = new_state(0)
    for _ in range(3):
        state = train_step(state)
    jct.save(tmp_path / "c", state)
    target = train_step(new_state(1))  # its step is already an array, like that of the saved state
    found = jct.load(tmp_path / "c", target)
    assert found.apply_fn is target.apply_fn
    assert found.tx is target.tx
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert_same(found, state, structure=False)
    for _ in range(2):
        state, found = train_step(state), train_step(found)
    assert_same(found, state, structure=False)


def test_step_may_be_int_or_array(tmp_path: Path) -> None:
    fresh, stepped = new_state(0), train_step(new_state(0))
    assert type(fresh.step) is int
    jct.save(tmp_path / "fresh", fresh)
    jct.save(tmp_path / "stepped", stepped)
    loaded = jct.load(tmp_path / "fresh", stepped)
    assert isinstance(loaded.step, jax.Array)
    assert loaded.step == 0
    loaded = jct.load(tmp_path / "stepped", fresh)
    assert (type(loaded.step), loaded.step.weak_type) == (type(stepped.step), stepped.step.weak_type)
    assert loaded.step == 1
    abstract = jax.eval_shape(lambda: new_state(0))
    assert jct.load(tmp_path / "stepped", abstract).step == 1
    assert jct.load(tmp_path / "fresh", abstract).step == 0


@pytest.mark.parametrize("saved_boxed", [False, True])
@pytest.mark.parametrize("target_boxed", [False, True])
def test_boxed_and_unboxed_parameters_load_into_each_other(
    saved_boxed: bool, target_boxed: bool, tmp_path: Path
) -> None:
    saved, target = new_state(0, saved_boxed), new_state(1, target_boxed)
    jct.save(tmp_path / "c", saved)
    found = jct.load(tmp_path / "c", target)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert_same(nn.unbox(found).params, nn.unbox(saved).params)
    assert_same(nn.unbox(found).opt_state, nn.unbox(saved).opt_state)
    kernel = found.params["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) == target_boxed
    if target_boxed:
        assert kernel.names == ("x", None)
    assert "params/Dense_0/kernel" in jct.metadata(tmp_path / "c").checkpointables["state"].leaves


def test_boxed_abstract_state_loads_onto_named_mesh(tmp_path: Path) -> None:
    saved = new_state(0, boxed=True)
    jct.save(tmp_path / "c", saved)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    abstract = jax.eval_shape(lambda: new_state(0, boxed=True))
    found = jct.load(tmp_path / "c", abstract, shardings=nn.get_sharding(abstract, mesh))
    kernel = found.params["Dense_0"]["kernel"].value
    assert kernel.sharding == NamedSharding(mesh, PartitionSpec("x", None))
    assert raw(kernel) == raw(saved.params["Dense_0"]["kernel"].value)


def test_frozen_dicts_and_flax_dataclasses(tmp_path: Path) -> None:
    @struct.dataclass
    class Carry:
        hidden: Any
        name: str = struct.field(pytree_node=False, default="carry")

    tree = {"params": freeze({"a": {"b": np.arange(3)}}), "carry": Carry(jnp.ones(2), name="mine"), "no": freeze({})}
    jct.save(tmp_path / "c", tree)
    found = jct.load(tmp_path / "c", tree)
    assert_same(found, tree)
    assert isinstance(found["params"], FrozenDict)
    assert found["carry"].name == "mine"
    plain = jct.load(tmp_path / "c")
    assert type(plain["params"]) is dict
    assert set(plain["carry"]) == {"hidden"}


def test_load_without_target_needs_no_flax(tmp_path: Path, run_python: Any) -> None:
    state = new_state(0, boxed=True)
    jct.save(tmp_path / "c", state)
    script = """
import sys, jaxckpt_train as jct
found = jct.load(sys.argv[1])
print(found["params"]["Dense_0"]["kernel"].sum(), found["step"], sorted(found))
assert not {"flax", "optax"} & set(sys.modules)
"""
    out = run_python(script, tmp_path / "c", check=True, fresh=True).stdout.split(maxsplit=2)
    assert out[0] == str(np.asarray(state.params["Dense_0"]["kernel"].value).sum())
    assert out[1:] == ["0", "['batch_stats', 'key', 'opt_state', 'params', 'step']\n"]
