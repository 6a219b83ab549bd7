"""A resumed run computes in the dtypes of the uninterrupted one: weak types and Python numbers are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from jaxckpt_train.pytree import placing
from jaxckpt_train.pytree._jax import enable_x64
from tests.support.same_trees import assert_same

S = jax.ShapeDtypeStruct
FAST = jct.StoreSettings(durability="none")


def weak_vector(*values: float) -> jax.Array:
    vector = jnp.full(len(values), 0.0).at[...].set(jnp.asarray(values))
    assert vector.weak_type
    return vector


UPDATES: list[tuple[str, Any, Callable[[Any], Any]]] = [
    ("weak, then strong", jnp.asarray(1.0), lambda x: x + jnp.float32(0.25)),
    ("weak int, then weak float", jnp.asarray(0), lambda x: x + 0.5),
    ("strong, then weak", jnp.float32(1.0), lambda x: 2.0),
    ("Python int, then weak array", 0, lambda x: x + 1),
    ("Python int, then strong float", 0, lambda x: x + jnp.float32(1)),
    ("Python float, then bfloat16", 1.0, lambda x: x * jnp.ones((), jnp.bfloat16)),
    ("strong vector, then weak", jnp.ones(3), lambda x: jnp.full(3, 2.0)),
    ("weak vector, then strong", jnp.full(3, 2.0), lambda x: x * jnp.float32(3)),
    ("weak matrix that stays weak", jnp.full((2, 3), 2), lambda x: x + 1),
]


@pytest.mark.parametrize("abstract", [False, True], ids=["concrete target", "abstract target"])
@pytest.mark.parametrize(("fresh", "update"), [c[1:] for c in UPDATES], ids=[c[0] for c in UPDATES])
def test_a_resume_computes_as_the_uninterrupted_run(
    fresh: Any, update: Callable[[Any], Any], abstract: bool, tmp_path: Path
) -> None:
    step = jax.jit(lambda state: {"x": update(state["x"])})
    use = jax.jit(lambda state: state["x"] * jnp.full((), 1.5, jnp.bfloat16))
    state = step({"x": fresh})
    jct.save(tmp_path / "c", state, settings=FAST)
    target = jax.eval_shape(lambda: {"x": fresh}) if abstract else {"x": fresh}
    loaded = jct.load(tmp_path / "c", target)
    assert_same(loaded, state)
    assert_same(use(loaded), use(state))


@pytest.mark.parametrize("target", [S((3,), jnp.float32), S((3,), jnp.float32, weak_type=True), jnp.zeros(3)])
def test_weak_vector_stays_weak_whatever_target_says(target: Any, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"x": weak_vector(1, 2, 3)}, settings=FAST)
    found = jct.load(tmp_path / "c", {"x": target})["x"]
    assert_same(found, weak_vector(1, 2, 3))


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("x"), PartitionSpec("x", "y")], ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (4, 2, 3)], ids=str)
def test_weak_arrays_keep_their_sharding(spec: PartitionSpec, shape: tuple[int, ...], tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, spec)
    weak = jax.device_put(jnp.full(shape, 0.0).at[...].set(jnp.arange(np.prod(shape)).reshape(shape)), place)
    jct.save(tmp_path / "c", weak, settings=FAST)
    assert_same(jct.load(tmp_path / "c", S(shape, jnp.float32, sharding=place)), weak)
    assert_same(jct.load(tmp_path / "c", shardings=place), weak)


def test_weak_types_without_internal_call_kept_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd = placing.weakly_typed("odd", jnp.ones(3, jnp.bfloat16))
    tree = {"f": weak_vector(1, 2, 3), "n": jnp.full((2,), 7), "s": jnp.asarray(2.0)}
    jct.save(tmp_path / "c", tree, settings=FAST)
    jct.save(tmp_path / "odd", {"odd": odd}, settings=FAST)
    monkeypatch.setattr(placing, "_fast_put", None)
    assert_same(jct.load(tmp_path / "c", tree), tree)
    assert not caplog.messages
    assert not jct.load(tmp_path / "odd", {"odd": odd})["odd"].weak_type
    assert "leaf 'odd'" in caplog.text


@pytest.mark.parametrize(
    ("saved", "target"),
    [(jnp.full(2, 1.0), np.zeros(2, np.float32)), (3, np.int64(0)), (0.5, np.zeros((), np.float32))],
)
def test_types_that_numpy_cannot_have_are_reported_once(
    saved: Any, target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jct.save(tmp_path / "c", {"a": {"x": saved}, "b": jnp.ones(2)}, settings=FAST)
    found = jct.load(tmp_path / "c", {"a": {"x": target}, "b": np.zeros(2, np.float32)})
    assert found["a"]["x"].dtype == target.dtype
    assert ["leaf 'a/x'" in message for message in caplog.messages] == [True]


def test_64_bit_arrays_load_without_x64_if_lossless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with enable_x64(True):
        tree = {"weak": jnp.asarray(0.1), "n": jnp.asarray(2**40)}
        jct.save(tmp_path / "c", tree, settings=FAST)
        assert_same(jct.load(tmp_path / "c", {"weak": 0.0, "n": 0}), tree)
        assert_same(jct.load(tmp_path / "c", {"weak": jnp.asarray(0), "n": jnp.asarray(0)}), tree)
    assert jct.load(tmp_path / "c", {"weak": 0.0, "n": 0}) == {"weak": 0.1, "n": 2**40}
    assert ["leaf 'n'" in message for message in caplog.messages] == [True]
    with pytest.raises(jct.MismatchError, match=r"leaf 'n': saved int64\[\]"):
        jct.load(tmp_path / "c", {"weak": 0.0, "n": jnp.asarray(0)})
    found = jct.load(tmp_path / "c", {"weak": jnp.asarray(0.0), "n": 0}, cast=True)["weak"]
    assert_same(found, jnp.asarray(0.1))


def test_nnx_variables_take_weak_type_of_checkpoint(tmp_path: Path) -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.scale, self.count = nnx.Param(jnp.asarray(1.0)), nnx.Variable(jnp.asarray(0))

    model, fresh = Model(), Model()
    model.scale[...] = jnp.float32(2.5)
    model.count.set_value(jnp.float32(3))
    jct.save(tmp_path / "c", model, settings=FAST)
    jct.load(tmp_path / "c", fresh)
    assert_same(nnx.to_pure_dict(nnx.state(fresh)), nnx.to_pure_dict(nnx.state(model)))


def test_one_sharding_for_whole_tree_leaves_numbers_alone(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")), ("x",), axis_types=(AxisType.Auto,))
    tree = {"w": jnp.arange(8.0), "step": jnp.asarray(4)}
    jct.save(tmp_path / "c", tree, settings=FAST)
    spread = NamedSharding(mesh, PartitionSpec("x"))
    found = jct.load(tmp_path / "c", {"w": S((8,), jnp.float32), "step": 0}, shardings=spread)
    assert (found["w"].sharding, found["step"].committed) == (spread, False)
    assert_same(found["step"], tree["step"])
    everywhere = NamedSharding(mesh, PartitionSpec())
    found = jct.load(tmp_path / "c", {"w": S((8,), jnp.float32), "step": 0}, shardings=everywhere)
    assert found["step"].sharding == everywhere
