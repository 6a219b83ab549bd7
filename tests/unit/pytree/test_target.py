"""Target leaves: which kind of leaf, dtype, shape and sharding each one requests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxckpt_train.errors import MismatchError, UnsupportedLeafError
from jaxckpt_train.pytree._jax import set_mesh
from jaxckpt_train.pytree.flatten import PLACEHOLDER
from jaxckpt_train.pytree.leaves import EMPTY
from jaxckpt_train.pytree.target import LeafRequest, concrete_sharding, leaf_request

PLACE = SingleDeviceSharding(jax.devices("cpu")[1])


@pytest.mark.parametrize(
    ("leaf", "want"),
    [
        (PLACEHOLDER, LeafRequest("skip")),
        (None, LeafRequest("none")),
        (EMPTY, LeafRequest("empty")),
        (True, LeafRequest("python", python=bool)),
        (3, LeafRequest("python", python=int)),
        (1.5, LeafRequest("python", python=float)),
        (1j, LeafRequest("python", python=complex)),
        ("x", LeafRequest("python", python=str)),
        (b"x", LeafRequest("python", python=bytes)),
        (np.float64(1), LeafRequest("scalar", dtype=np.dtype("float64"))),
        (np.bool_(1), LeafRequest("scalar", dtype=np.dtype("bool"))),
        (np.zeros((2, 3), ">i4"), LeafRequest("numpy", (2, 3), np.dtype(">i4"))),
        (jax.ShapeDtypeStruct((2,), jnp.int4), LeafRequest("jax", (2,), np.dtype(jnp.int4))),
        (jax.ShapeDtypeStruct((2,), "float32", sharding=PLACE), LeafRequest("jax", (2,), np.dtype("float32"), PLACE)),
    ],
)
def test_target_leaf_determines_the_request(leaf: Any, want: LeafRequest) -> None:
    assert leaf_request("x", leaf, None) == want


def test_only_uncommitted_arrays_take_default_sharding() -> None:
    loose, fixed = jnp.ones(2), jax.device_put(jnp.ones(2), PLACE)
    assert leaf_request("x", loose, None).sharding is None
    assert leaf_request("x", loose, PLACE).sharding == PLACE
    other = SingleDeviceSharding(jax.devices("cpu")[2])
    assert leaf_request("x", fixed, other).sharding == PLACE
    assert leaf_request("x", jax.ShapeDtypeStruct((2,), "float32"), other).sharding == other


def test_weak_types_are_requested() -> None:
    assert leaf_request("x", jnp.asarray(1.0), None).weak
    assert not leaf_request("x", jnp.float32(1.0), None).weak
    assert leaf_request("x", jax.eval_shape(lambda: 1.0), None).weak


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_requested_by_implementation(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    assert leaf_request("x", keys, None) == LeafRequest("key", (3,), impl=impl)
    abstract = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), 3))
    assert leaf_request("x", abstract, None) == LeafRequest("key", (3,), impl=impl)


@pytest.mark.parametrize(("leaf", "name"), [(object(), "object"), ({1}, "set"), (np.dtype("f4"), "DType")])
def test_unusable_target_leaf_is_refused(leaf: Any, name: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=f"leaf 'x' of the target: a .*{name}"):
        leaf_request("x", leaf, None)


def test_an_abstract_mesh_becomes_the_mesh_in_effect() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    abstract = NamedSharding(AbstractMesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("b"))
    with set_mesh(mesh):
        found = concrete_sharding("x", abstract)
    assert found == NamedSharding(mesh, PartitionSpec("b"))
    concrete = NamedSharding(mesh, PartitionSpec("a"))
    assert concrete_sharding("x", concrete) is concrete
    assert concrete_sharding("x", None) is None


def test_abstract_mesh_without_matching_mesh_is_refused() -> None:
    sharding = NamedSharding(AbstractMesh((4, 2), ("a", "b")), PartitionSpec("b"))
    with pytest.raises(MismatchError, match=r"leaf 'x': .*jax.set_mesh\(mesh\)"):
        concrete_sharding("x", sharding)
    other = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    with set_mesh(other), pytest.raises(MismatchError, match=r"leaf 'x': .*\{'a': 8\}"):
        concrete_sharding("x", sharding)
