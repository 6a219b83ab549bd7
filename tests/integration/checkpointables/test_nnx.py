"""NNX objects: restored in place, with plain leaf names, alone and among other leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from tests.support.same_trees import assert_same, raw


class Net(nnx.Module):
    """A list of layers, normalisation with statistics, dropout with a stream, a counter and plain attributes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layers = [nnx.Linear(4, 4, rngs=rngs) for _ in range(12)]
        tables = {"a/b": nnx.Param(jnp.ones(2)), "c": nnx.Param(jnp.zeros((), jnp.bfloat16))}
        has_containers = hasattr(nnx, "List")  # before Flax 0.12 plain lists and dicts were nodes
        self.layers = nnx.List(layers) if has_containers else layers
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))
        self.tables = nnx.Dict(tables) if has_containers else tables
        self.name = "net"
        self.width = 4

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        for layer in self.layers:
            x = x + layer(x)
        return self.dropout(self.norm(x))


def new(seed: int) -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(params=seed, dropout=seed + 1))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer) -> jax.Array:
    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def states(*objects: Any) -> Any:
    return [nnx.to_pure_dict(nnx.state(each)) for each in objects]


def test_model_and_optimizer_are_restored_in_place(tmp_path: Path) -> None:
    model, optimizer = new(0)
    for _ in range(3):
        train_step(model, optimizer)
    jct.save(tmp_path / "c", (model, optimizer))
    other, other_optimizer = new(5)
    kernel, layers = other.layers[0].kernel, other.layers
    found = jct.load(tmp_path / "c", (other, other_optimizer))
    assert found[0] is other
    assert found[1] is other_optimizer
    assert other.layers is layers
    assert other.layers[0].kernel is kernel
    assert_same(states(other, other_optimizer), states(model, optimizer))
    assert other.calls[...] == 3
    for _ in range(3):  # dropout and statistics included
        assert raw(train_step(other, other_optimizer)) == raw(train_step(model, optimizer))
    assert_same(states(other, other_optimizer), states(model, optimizer))


def test_leaves_are_named_by_attributes_and_positions(tmp_path: Path) -> None:
    model, _ = new(0)
    jct.save(tmp_path / "c", model)
    leaves = jct.metadata(tmp_path / "c").checkpointables["state"].leaves
    assert leaves["layers/11/kernel"].description == "float32[4,4]"
    assert leaves["dropout/rngs/key"].description == "key<threefry2x32>[]"
    assert leaves["norm/mean"].description == "float32[4]"
    assert "tables/a~1b" in leaves
    assert not [name for name in leaves if "value" in name]
    plain = jct.load(tmp_path / "c")
    assert set(plain["layers"]) == set(range(12))
    assert all(type(key) is int for key in plain["layers"])
    assert raw(plain["layers"][3]["kernel"]) == raw(model.layers[3].kernel[...])
    assert plain["tables"]["c"].dtype == jnp.bfloat16


def test_modules_and_plain_leaves_in_one_tree(tmp_path: Path) -> None:
    model, optimizer = new(0)
    tree = {
        "model": model,
        "parts": [optimizer, {"ema": jnp.arange(3)}],
        "step": 7,
        "none": None,
        "key": jax.random.key(1),
    }
    jct.save(tmp_path / "c", tree)
    other, other_optimizer = new(5)
    target = {
        "model": other,
        "parts": [other_optimizer, {"ema": jax.ShapeDtypeStruct((3,), jnp.int32)}],
        "step": 0,
        "none": None,
        "key": jax.random.key(2),
    }
    found = jct.load(tmp_path / "c", target)
    assert found["model"] is other
    assert found["parts"][0] is other_optimizer
    assert_same(states(other, other_optimizer), states(model, optimizer))
    assert_same(found["parts"][1], {"ema": jnp.arange(3)})
    assert_same([found["step"], found["none"], found["key"]], [7, None, jax.random.key(1)])


class Tied(nnx.Module):
    def __init__(self, seed: int) -> None:
        self.embed = nnx.Param(jax.random.normal(jax.random.key(seed), (8, 4)))
        self.head = self.embed
        self.inner = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
        self.again = self.inner


def test_shared_variables_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    saved, target = Tied(0), Tied(1)
    jct.save(tmp_path / "c", saved)
    assert len(jct.metadata(tmp_path / "c").checkpointables["state"].leaves) == 3
    jct.load(tmp_path / "c", target)
    assert target.head is target.embed
    assert target.again is target.inner
    assert raw(target.head[...]) == raw(saved.embed[...])
    assert raw(target.again.kernel[...]) == raw(saved.inner.kernel[...])


def test_mismatch_leaves_objects_unchanged(tmp_path: Path) -> None:
    model, optimizer = new(0)
    jct.save(tmp_path / "c", (model, optimizer))
    other, other_optimizer = new(5)
    other.extra = nnx.Param(jnp.ones(2))
    before = states(other, other_optimizer)
    with pytest.raises(jct.MismatchError, match="leaf '0/extra': not in the checkpoint"):
        jct.load(tmp_path / "c", (other, other_optimizer))
    assert_same(states(other, other_optimizer), before)
    jct.load(tmp_path / "c", (other, other_optimizer), missing="keep")
    assert raw(other.extra[...]) == raw(np.ones(2, np.float32))
    assert raw(other.layers[0].kernel[...]) == raw(model.layers[0].kernel[...])


def test_part_of_model_is_loaded_by_pattern(tmp_path: Path) -> None:
    model, _ = new(0)
    jct.save(tmp_path / "c", model)
    other, _ = new(5)
    norm = raw(other.norm.scale[...])
    other.norm.scale[...] = other.norm.scale[...] + 1
    jct.load(tmp_path / "c", other, only="layers/**")
    assert raw(other.layers[3].kernel[...]) == raw(model.layers[3].kernel[...])
    assert raw(other.norm.scale[...]) != norm


def test_an_abstract_model_becomes_a_concrete_one(tmp_path: Path) -> None:
    model, _ = new(0)
    jct.save(tmp_path / "c", model)
    abstract = nnx.eval_shape(lambda: new(0)[0])
    found = jct.load(tmp_path / "c", abstract)
    assert found is abstract
    assert_same(states(found), states(model))


def test_model_is_restored_onto_mesh_of_live_one(tmp_path: Path) -> None:
    model, _ = new(0)
    jct.save(tmp_path / "c", model)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("x"))
    other, _ = new(5)
    other.layers[0].kernel[...] = jax.device_put(other.layers[0].kernel[...], place)
    jct.load(tmp_path / "c", other)
    assert other.layers[0].kernel[...].sharding == place
    assert raw(other.layers[0].kernel[...]) == raw(model.layers[0].kernel[...])


@pytest.mark.parametrize(
    "make", [lambda m: nnx.state(m), lambda m: nnx.to_pure_dict(nnx.state(m))], ids=["State", "dict"]
)
def test_state_and_object_itself_are_same_on_disk(make: Any, tmp_path: Path) -> None:
    model, _ = new(0)
    other, _ = new(5)
    jct.save(tmp_path / "state", make(model))
    jct.load(tmp_path / "state", other)
    assert_same(states(other), states(model))
    jct.save(tmp_path / "object", model)
    target = make(new(6)[0])
    found = jct.load(tmp_path / "object", target)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert_same(nnx.to_pure_dict(found) if isinstance(found, nnx.State) else found, states(model)[0])


def test_unsortable_keys_are_refused_with_flax_imported(tmp_path: Path) -> None:
    with pytest.raises(jct.UnsupportedLeafError, match="'state': 'a': "):
        jct.save(tmp_path / "c", {"a": {1: 1, "b": 2}})


def test_a_single_variable_is_a_leaf(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"p": nnx.Param(jnp.arange(3.0)), "boxes": nnx.Variable({"a": jnp.ones(1)})})
    assert set(jct.metadata(tmp_path / "c").checkpointables["state"].leaves) == {"p", "boxes/a"}
    found = jct.load(tmp_path / "c", {"p": nnx.Param(jnp.zeros(3)), "boxes": nnx.Variable({"a": jnp.zeros(1)})})
    assert isinstance(found["p"], nnx.Param)
    assert raw(found["p"][...]) == raw(np.arange(3, dtype=np.float32))
