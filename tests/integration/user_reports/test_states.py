"""Problems of other checkpointers with special states and data: reused batches, adapters, boxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from tests.support.runs import Counter
from tests.support.same_trees import assert_same, raw
from tests.support.tiers import nightly_after

OPTIMIZER = optax.adamw(1e-2)
Train = Callable[[Path, int], Any]  # trains to a step and returns its state


def assert_resumes(train: Train, directory: Path, stops: tuple[int, ...] = (3,)) -> None:
    """Check that runs of 6 steps, stopped at the given steps, end like an uninterrupted run."""
    whole = train(directory / "whole", 6)
    for stop in stops:
        train(directory / f"stopped-{stop}", stop)
        assert_same(train(directory / f"stopped-{stop}", 6), whole)


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


# Several updates of one batch.
def one_step_for_a_batch(directory: Path, stop: int) -> Any:
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(3)}, Counter())
        for _ in ckpt.steps(stop):
            batch = next(data)
            for _ in range(2):
                state = {"w": state["w"] * 0.9 + batch}
            ckpt(state)
    return state


def batch_in_the_state(directory: Path, stop: int) -> Any:
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(3), "batch": jnp.int32(0)}, Counter())
        for step in ckpt.steps(stop):
            batch = jnp.int32(next(data)) if step % 2 == 0 else state["batch"]
            state = {"w": state["w"] * 0.9 + batch, "batch": batch}
            ckpt(state)
    return state


@pytest.mark.parametrize("train", [one_step_for_a_batch, batch_in_the_state])
def test_batch_of_several_updates_resumes_exactly(tmp_path: Path, train: Train) -> None:
    assert_resumes(train, tmp_path, stops=(2, 3))


def test_save_within_a_batch_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
        state, data = ckpt.resume({"w": jnp.zeros(3)}, Counter())
        for _ in range(3):
            batch = next(data)
            for _ in range(2):
                state = {"w": state["w"] * 0.9 + batch}
                ckpt(state)
    assert ["several updates use one batch" in message for message in caplog.messages] == [True]


# The state of NumPy's generators, whose integers have 128 bits, among the leaves.
@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_numpy_generators_in_the_state_resume(tmp_path: Path, kind: Any) -> None:
    def train(directory: Path, stop: int) -> Any:
        rng = np.random.Generator(kind(42))
        with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
            state = ckpt.resume({"w": jnp.zeros(4), "rng": rng.bit_generator.state})
            rng.bit_generator.state = state["rng"]
            for _ in ckpt.steps(stop):
                drawn = rng.normal(size=4) + rng.integers(0, 9, dtype=np.uint32)
                state = {"w": state["w"] * 0.9 + drawn, "rng": rng.bit_generator.state}
                ckpt(state)
        return state

    assert_resumes(train, tmp_path)


# Adapters, which are trained and saved without their model.
class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs) for _ in range(12)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.dropout(nnx.relu(layer(x)))
        return x


@nnx.jit
def update_adapters(model: Adapted, optimizer: nnx.Optimizer[Adapted], batch: jax.Array) -> None:
    loss = nnx.grad(lambda model: jnp.mean((model(batch) - 1) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))
    optimizer.update(model, loss(model))


def train_adapters(directory: Path, stop: int) -> Any:
    model = Adapted(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        trained = ckpt.resume((nnx.state(model, (nnx.LoRAParam, nnx.RngState)), nnx.state(optimizer)))
        nnx.update(model, trained[0])
        nnx.update(optimizer, trained[1])
        for step in ckpt.steps(stop):
            update_adapters(model, optimizer, jax.random.normal(jax.random.key(step), (4, 8)))
            ckpt((nnx.state(model, (nnx.LoRAParam, nnx.RngState)), nnx.state(optimizer)))
    return jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))


def test_adapters_resume_and_load_into_another_model(tmp_path: Path) -> None:
    assert_resumes(train_adapters, tmp_path)
    path = tmp_path / "whole" / "step-0000000006"
    assert "kernel" not in jct.load(path)[0]["layers"][0]  # the model itself was not saved
    other = Adapted(nnx.Rngs(5))
    rest = jax.tree.leaves(nnx.state(other, nnx.Not(nnx.LoRAParam)))
    jct.load(path, (other,), only=["0/**/lora_a", "0/**/lora_b"])
    assert_same(jax.tree.leaves(nnx.state(other, nnx.Not(nnx.LoRAParam))), rest)
    saved = jct.load(path)[0]["layers"][11]["lora"]["lora_b"]
    assert raw(other.layers[11].lora.lora_b[...]) == raw(saved)
    assert saved.any()


# Shardings by logical names.
def logically_sharded(names: tuple[str, str], rules: tuple[tuple[str, str], ...]) -> Callable[[], Any]:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, sharding_rules=rules)

    def make() -> tuple[nnx.Module, nnx.Optimizer[nnx.Module]]:
        model = nnx.Linear(16, 16, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    return make


def matrices_of(model: Any, optimizer: Any) -> list[jax.Array]:
    """The kernel and its moments."""
    return [leaf for leaf in jax.tree.leaves((nnx.state(model), nnx.state(optimizer))) if leaf.ndim == 2]


@pytest.mark.parametrize("form", ["objects", "maker"])
@pytest.mark.parametrize("axes", nightly_after(1, [{"x": 2, "y": 2, "z": 2}, {"a": 2, "b": 4}, {"y": 1, "x": 8}]))
def test_resume_follows_logical_axes_of_new_mesh(tmp_path: Path, form: str, axes: dict[str, int]) -> None:
    before: list[np.ndarray] = []
    for mesh, rows, columns in [(mesh_of(a=2, b=4), "a", "b"), (mesh_of(**axes), *list(axes)[:2])]:
        make = logically_sharded(("rows", "columns"), (("rows", rows), ("columns", columns)))
        with jax.set_mesh(mesh), jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
            model, optimizer = ckpt.resume(make() if form == "objects" else make)
            found = matrices_of(model, optimizer)
            assert [each.sharding.spec for each in found] == [PartitionSpec(rows, columns)] * 3
            if before:
                assert_same([np.asarray(each) for each in found], before)
            for _ in ckpt.steps(2):
                optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
                ckpt()
            before = [np.asarray(each) for each in matrices_of(model, optimizer)]


def test_a_linen_state_of_logically_partitioned_boxes_resumes(tmp_path: Path) -> None:
    init = flax.linen.with_logical_partitioning(flax.linen.initializers.lecun_normal(), ("rows", "columns"))
    model = flax.linen.Dense(8, kernel_init=init)

    def make(key: jax.Array) -> train_state.TrainState:
        params = model.init(key, jnp.ones((4, 8)))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)

    specs = flax.linen.get_partition_spec(jax.eval_shape(make, jax.random.key(0)))
    rules = (("rows", "data"), ("columns", "model"))
    shardings = flax.linen.logical_to_mesh_sharding(specs, mesh_of(data=4, model=2), rules)
    sharded = jax.jit(make, out_shardings=shardings)

    @jax.jit
    def update(state: train_state.TrainState, batch: jax.Array) -> train_state.TrainState:
        loss = jax.grad(lambda params: jnp.mean((state.apply_fn({"params": params}, batch) - 1) ** 2))
        return state.apply_gradients(grads=loss(state.params))

    def train(directory: Path, stop: int) -> Any:
        with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
            state = ckpt.resume(lambda: sharded(jax.random.key(0)))
            box = state.params["kernel"]
            assert (box.names, box.value.sharding.spec) == (("rows", "columns"), PartitionSpec("data", "model"))
            for step in ckpt.steps(stop):
                state = update(state, jax.random.normal(jax.random.key(step), (4, 8)))
                ckpt(state)
        return state

    assert_resumes(train, tmp_path)


# Moments that are kept in host memory.
@pytest.mark.parametrize("form", ["state", "maker"])
def test_offloaded_moments_come_back_to_the_host(tmp_path: Path, form: str) -> None:
    cut, whole = (NamedSharding(mesh_of(d=8), spec) for spec in (PartitionSpec("d"), PartitionSpec()))
    if "pinned_host" not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        pytest.skip("this JAX has no pinned host memory on the CPU")

    def moved(moments: Any, kind: str) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, (cut if x.ndim else whole).with_memory_kind(kind)), moments)

    def make() -> dict[str, Any]:
        params = {"w": jax.device_put(jnp.arange(16.0), cut)}
        return {"params": params, "moments": moved(OPTIMIZER.init(params), "pinned_host")}

    def train(directory: Path, stop: int) -> Any:
        with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
            state = ckpt.resume(make if form == "maker" else make())
            assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state["moments"])} == {"pinned_host"}
            for _ in ckpt.steps(stop):
                moments = moved(state["moments"], "device")
                updates, moments = OPTIMIZER.update(state["params"], moments, state["params"])
                params = optax.apply_updates(state["params"], updates)
                state = {"params": params, "moments": moved(moments, "pinned_host")}
                ckpt(state)
        return state

    assert_resumes(train, tmp_path)
