"""What each leaf of a target wants: a host or device array, a key, a Python value, or to be left alone."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxckpt_train.errors import MismatchError, UnsupportedLeafError
from jaxckpt_train.tree.caller_context import get_mesh
from jaxckpt_train.tree.flatten import EMPTY, PLACEHOLDER
from jaxckpt_train.tree.leaf_values import is_key_array

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_PYTHON = (bool, int, float, complex, str, bytes)


class Want(NamedTuple):
    """What a leaf must become.

    Attributes:
        form: "jax", "numpy", "scalar" (numpy scalar), "key", "python", "none", "empty" or "skip".
        shape: of the array or key array.
        dtype: of the array.
        sharding: where a JAX array must lie; None: uncommitted, on the default device.
        impl: of a key array.
        python: the type of a Python value.
        weak: JAX's weak type.
    """

    form: Literal["jax", "numpy", "scalar", "key", "python", "none", "empty", "skip"]
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    sharding: jax.sharding.Sharding | None = None
    impl: str = ""
    python: type | None = None
    weak: bool = False


def wanted(name: str, leaf: Any, sharding: jax.sharding.Sharding | None) -> Want:
    """What a leaf of a target wants; `sharding` is used where the leaf brings none itself.

    Raises:
        UnsupportedLeafError: the leaf says nothing about what it wants.
        MismatchError: its sharding names an abstract mesh, and no concrete mesh is in effect that fits.
    """
    if leaf is PLACEHOLDER:
        return Want("skip")
    if leaf is None:
        return Want("none")
    if leaf is EMPTY:
        return Want("empty")
    if type(leaf) in _PYTHON:
        return Want("python", python=type(leaf))
    if isinstance(leaf, np.generic):
        return Want("scalar", dtype=leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return Want("numpy", leaf.shape, leaf.dtype)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise UnsupportedLeafError(
            f"leaf {name!r} of the target: a {type(leaf).__name__} does not say what to load; "
            "expected an array, jax.ShapeDtypeStruct, number, text, None or jaxckpt_train.PLACEHOLDER"
        )
    place = _place(name, leaf, sharding)
    if is_key_array(leaf):
        return Want("key", tuple(leaf.shape), None, place, _implementation(name, leaf))
    weak = bool(getattr(leaf, "weak_type", False))
    return Want("jax", tuple(leaf.shape), np.dtype(leaf.dtype), place, "", None, weak)


def _place(name: str, leaf: Any, default: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        sharding = None
    return concrete_sharding(name, default if sharding is None else sharding)


def concrete_sharding(name: str, sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """The sharding on real devices: an abstract mesh is replaced by the mesh in effect (`jax.set_mesh`).

    Raises:
        MismatchError: no mesh is in effect, or its axes differ.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or not isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        return sharding
    if sharding.mesh.empty:
        return None
    mesh = get_mesh()
    if mesh.empty or dict(mesh.shape) != dict(sharding.mesh.shape):
        found = "none is in effect" if mesh.empty else f"the mesh in effect is {dict(mesh.shape)}"
        raise MismatchError(
            f"leaf {name!r}: its sharding names an abstract mesh {dict(sharding.mesh.shape)}, but {found}; "
            "load inside `with jax.set_mesh(mesh):`, or give concrete shardings"
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _implementation(name: str, leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        return str(jax.random.key_impl(leaf))
    for impl in _IMPLEMENTATIONS:
        if jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype == leaf.dtype:
            return impl
    raise UnsupportedLeafError(
        f"leaf {name!r} of the target: an abstract key of unknown implementation {leaf.dtype}; pass a concrete key"
    )
