"""`resume` takes a function that makes the state: it is called on a fresh start, and otherwise only traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxckpt_train as jct
from tests.support.runs import Counter, made_run, state_of, step_of
from tests.support.same_trees import raw

STRUCT: Any = jax.ShapeDtypeStruct


def resumed(directory: Path, state: Any, num_steps: int, **options: Any) -> Any:
    """The state that a loop over `num_steps` resumes with; each update adds one to the leaf `w`."""
    with jct.CheckpointCallback(directory, save_interval_steps=1, **options) as ckpt:
        first = state = ckpt.resume(state)
        for _ in ckpt.steps(num_steps):
            state = {**state, "w": state["w"] + 1}
            ckpt(state)
    return first


class Maker:
    """Counts how often it is called for arrays, and how often it is traced."""

    def __init__(self) -> None:
        self.calls = self.traces = 0

    def __call__(self) -> dict[str, Any]:
        state = {"w": jnp.zeros(4), "n": 3, "name": "run", "key": jax.random.key(0), "host": np.arange(2.0)}
        if isinstance(state["w"], jax.core.Tracer):
            self.traces += 1
        else:
            self.calls += 1
        return state


def test_function_is_called_on_a_fresh_start_only(tmp_path: Path) -> None:
    make = Maker()
    fresh = resumed(tmp_path, make, 2)
    assert (make.calls, make.traces) == (1, 0)
    restored = resumed(tmp_path, make, 3)
    assert (make.calls, make.traces) == (1, 1)
    np.testing.assert_array_equal(restored["w"], np.full(4, 2.0))
    assert {name: type(leaf) for name, leaf in restored.items()} == {name: type(leaf) for name, leaf in fresh.items()}
    assert (restored["n"], restored["name"], restored["host"].tolist()) == (3, "run", [0.0, 1.0])
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(fresh["key"]).tolist()


def plain() -> Any:
    return {"w": jnp.zeros(2, jnp.bfloat16)}


def with_argument(size: int) -> Any:
    return {"w": jnp.zeros(size, jnp.bfloat16)}


class Trainer:
    def init(self) -> Any:
        return plain()


@pytest.mark.parametrize(
    "make", [plain, lambda: plain(), functools.partial(with_argument, 2), jax.jit(plain), Trainer().init]
)
def test_every_kind_of_function_may_make_state(tmp_path: Path, make: Callable[[], Any]) -> None:
    for num_steps in (1, 2):
        state = resumed(tmp_path, make, num_steps)
        assert raw(state["w"]) == raw(jnp.full(2, num_steps - 1, jnp.bfloat16))


@jax.tree_util.register_pytree_node_class
class CallableState(dict[str, Any]):
    """A pytree that can be called, like a module of Equinox."""

    def __call__(self) -> Any:
        raise AssertionError("it is a state")

    def tree_flatten(self) -> Any:
        return [self[name] for name in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, names: Any, leaves: Any) -> CallableState:
        return cls(zip(names, leaves, strict=True))


def test_state_that_can_be_called_is_a_state(tmp_path: Path) -> None:
    for number in (1, 2):
        with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
            state = ckpt.resume(CallableState(state_of(0)))
            assert isinstance(state, CallableState)
            assert step_of({"state": state}) == number - 1
            for _ in ckpt.steps(number):
                ckpt(CallableState(state_of(number)))


def test_shardings_are_those_of_the_function(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(lambda: {"w": jnp.zeros(16), "b": jnp.ones(3)}, out_shardings={"w": cut, "b": whole})

    def put() -> Any:
        return {"w": jax.device_put(jnp.zeros(16), cut), "b": jax.device_put(jnp.ones(3), whole)}

    for number, make in enumerate((jitted, lambda: jitted(), put)):
        for num_steps in (1, 2):
            state = resumed(tmp_path / str(number), make, num_steps)
            assert (state["w"].sharding, state["b"].sharding) == (cut, whole)
            np.testing.assert_array_equal(state["w"], np.full(16, num_steps - 1.0))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.layer.kernel


def make_model() -> tuple[Model, nnx.Optimizer[Any]]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def test_nnx_objects_are_made_abstractly_and_trained_on(tmp_path: Path) -> None:
    def train(state: Any, directory: Path, num_steps: int) -> Any:
        with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
            (model, optimizer), _data = ckpt.resume(state, Counter())
            for _ in ckpt.steps(num_steps):
                next(_data)
                grads = nnx.grad(lambda m: jnp.sum(m.dropout(m.layer(jnp.ones((1, 3)))) ** 2))(model)
                optimizer.update(model, grads)
                ckpt()  # what resume returned is what is saved
        assert model.tied is model.layer.kernel
        return [raw(leaf) for leaf in jax.tree.leaves(nnx.state((model, optimizer), (nnx.Param, nnx.OptState)))]

    whole = train(make_model(), tmp_path / "whole", 4)
    train(make_model, tmp_path / "parts", 2)
    assert train(make_model, tmp_path / "parts", 4) == whole


def test_nnx_module_keeps_shardings_of_its_variables(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def make() -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "x"))
        return nnx.Linear(2, 8, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh):
        for num_steps in (1, 2):
            with jct.CheckpointCallback(tmp_path) as ckpt:
                model = ckpt.resume(make)
                assert model.kernel[...].sharding == jax.sharding.NamedSharding(
                    mesh, jax.sharding.PartitionSpec(None, "x")
                )
                for _ in ckpt.steps(num_steps):
                    ckpt()


def test_abstract_state_is_refused_on_fresh_start(tmp_path: Path) -> None:
    abstract = {"w": STRUCT((3000,), jnp.float32), "step": STRUCT((), jnp.int32)}
    with jct.CheckpointCallback(tmp_path) as ckpt, pytest.raises(jct.SettingsError, match=r"leaf 'step'.*make_state"):
        ckpt.resume(abstract)
    with (
        jct.CheckpointCallback(tmp_path) as ckpt,
        pytest.raises(jct.SettingsError, match="ShapeDtypeStruct"),
    ):
        ckpt.resume(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    assert jct.StepManager(tmp_path).steps == []
    made_run(tmp_path, 4)
    with jct.CheckpointCallback(tmp_path) as ckpt:
        assert step_of({"state": ckpt.resume(abstract)}) == 4


def test_init_from_does_not_make_what_it_loads(tmp_path: Path) -> None:
    jct.save(tmp_path / "pretrained", {**Maker()(), "w": jnp.full(4, 7.0)})
    make = Maker()
    assert resumed(tmp_path / "all", make, 1, init_from=tmp_path / "pretrained")["w"].tolist() == [7.0] * 4
    assert make.calls == 0
    only = {"path": str(tmp_path / "pretrained"), "only": "w"}
    state = resumed(tmp_path / "some", make, 1, init_from=only)
    assert (make.calls, state["w"].tolist(), state["host"].tolist()) == (1, [7.0] * 4, [0.0, 1.0])


def test_disabled_callback_calls_the_function(tmp_path: Path) -> None:
    make = Maker()
    assert resumed(tmp_path, make, 1, enabled=False)["w"].tolist() == [0.0] * 4
    assert make.calls == 1


def test_further_checkpointables_may_be_made_too(tmp_path: Path) -> None:
    for num_steps, ema in ((1, 0.0), (2, 1.0)):
        with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
            state, average = ckpt.resume(plain, ema=lambda: {"w": jnp.zeros(2)})
            assert average["w"].tolist() == [ema] * 2
            for _ in ckpt.steps(num_steps):
                ckpt(state, ema={"w": average["w"] + 1})


MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
CUT = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("x"))


def test_untraced_arrays_keep_their_shardings(tmp_path: Path) -> None:
    outside = jax.device_put(jnp.arange(16.0), CUT)
    typed = jax.jit(lambda: jnp.arange(16.0), out_shardings=CUT)()
    constrained = jax.jit(lambda: jax.jit(lambda: jax.lax.with_sharding_constraint(jnp.arange(16.0), CUT))())
    makers: list[Callable[[], Any]] = [
        lambda: {"w": outside, "key": jax.random.key(1)},
        lambda: {"w": typed, "weak": jnp.asarray(1.0)},
        lambda: {"w": jax.make_array_from_callback((16,), CUT, lambda at: np.arange(16.0, dtype=np.float32)[at])},
        lambda: {"w": constrained()},
        lambda: {"w": jax.lax.with_sharding_constraint(jnp.arange(16.0), CUT)},
    ]
    for number, make in enumerate(makers):
        for num_steps in (1, 2):
            state = resumed(tmp_path / str(number), make, num_steps)
            assert state["w"].sharding == CUT
            assert state["w"].tolist() == [at + num_steps - 1.0 for at in range(16)]


def of_a_branch() -> dict[str, Any]:
    w = jax.device_put(jax.random.normal(jax.random.key(0), (16,)), CUT)
    return {"w": w if float(w.sum()) < 1000 else -w, "weak": jnp.asarray(2.0), "key": jax.random.key(1)}


def of_numpy() -> dict[str, Any]:
    return {"w": jax.device_put(np.asarray(jnp.ones(16)), CUT), "host": np.asarray(jnp.zeros(2)), "n": 3}


def of_a_mask() -> dict[str, Any]:
    w = jnp.arange(32.0)
    return {"w": jax.device_put(w[w >= 16], CUT), "n": int(w.sum())}


def of_nnx() -> nnx.Linear:
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert float(layer.bias[...].sum()) == 0
    return layer


@pytest.mark.parametrize("make", [of_a_branch, of_numpy, of_a_mask])
def test_function_that_needs_values_is_called(
    tmp_path: Path, make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    fresh = resumed(tmp_path, make, 1)
    assert not caplog.messages
    restored = resumed(tmp_path, make, 2)
    assert "cannot be traced" in caplog.text
    assert raw(restored["w"]) == raw(fresh["w"] + 1)
    assert (restored["w"].sharding, restored["w"].committed) == (CUT, True)
    for name in fresh.keys() - {"w"}:
        assert type(restored[name]) is type(fresh[name])
        assert getattr(restored[name], "weak_type", None) == getattr(fresh[name], "weak_type", None)
        assert raw(restored[name]) == raw(fresh[name])


def test_nnx_function_that_needs_values_is_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for num_steps in (1, 2):
        with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
            layer = ckpt.resume(of_nnx)
            assert layer.kernel[...].tolist() == (of_nnx().kernel[...] + (num_steps - 1)).tolist()
            for _ in ckpt.steps(num_steps):
                layer.kernel[...] = layer.kernel[...] + 1
                ckpt()
    assert "cannot be traced" in caplog.text


def test_large_unsharded_leaves_cause_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(rows: int) -> Any:
        params = jax.jit(lambda: {"w": jnp.ones((rows, 256))}, out_shardings=CUT)()
        return {**params, "moments": optax.adam(1e-2).init(params), "key": jax.random.PRNGKey(0)}

    whole = jax.jit(functools.partial(make, 1024), out_shardings=CUT.update(spec=jax.sharding.PartitionSpec()))
    for name, maker in (("small", functools.partial(make, 16)), ("whole", whole)):
        for num_steps in (1, 2):
            resumed(tmp_path / name, maker, num_steps)
    assert not caplog.messages
    for num_steps in (1, 2):
        resumed(tmp_path / "large", functools.partial(make, 1024), num_steps)
    (message,) = caplog.messages
    assert "'moments/0/mu/w'" in message
