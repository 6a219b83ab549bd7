"""What each leaf of a target wants: a host or device array, a key, a Python value, or to be left alone.

What decides results (dtype, weak type) comes from the checkpoint; the target says the form, the shape and the place.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxckpt_train.errors import MismatchError, UnsupportedLeafError
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.tree.caller_context import get_mesh
from jaxckpt_train.tree.flatten import EMPTY, PLACEHOLDER
from jaxckpt_train.tree.leaf_records import (
    PYTHON_TYPES,
    ArrayLeaf,
    BoolLeaf,
    ComplexLeaf,
    FloatLeaf,
    IntLeaf,
    LeafRecord,
)
from jaxckpt_train.tree.leaf_values import WITHOUT_FUNCTIONS, is_function, is_key_array
from jaxckpt_train.tree.paths import escapes_in

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_PYTHON = (bool, int, float, complex, str, bytes)
_DEFAULT_DTYPES = {BoolLeaf: "bool", IntLeaf: "int64", FloatLeaf: "float64", ComplexLeaf: "complex128"}
_KINDS = {IntLeaf: np.integer, FloatLeaf: np.floating, ComplexLeaf: np.complexfloating}


class Want(NamedTuple):
    """What a leaf must become.

    Attributes:
        form: "jax", "numpy", "scalar" (numpy scalar), "key", "python", "none", "empty" or "skip".
        shape: of the array or key array.
        dtype: of the array.
        sharding: where a JAX array must lie; None: uncommitted, on the default device.
        impl: of a key array.
        python: the type of a Python value.
        weak: JAX's weak type. Such a leaf of a target accepts any dtype.
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
        return Want("python", sharding=_replicated(sharding), python=type(leaf))
    if isinstance(leaf, np.generic):
        return Want("scalar", dtype=leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return Want("numpy", leaf.shape, leaf.dtype)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        if is_function(leaf):
            raise UnsupportedLeafError(
                f"leaf {name!r} of the target: a function or other callable cannot be loaded{escapes_in(name)}; "
                f"{WITHOUT_FUNCTIONS}"
            )
        raise UnsupportedLeafError(
            f"leaf {name!r} of the target: a {type(leaf).__name__} does not say what to load{escapes_in(name)}; "
            "expected an array, jax.ShapeDtypeStruct, number, text, None or jaxckpt_train.PLACEHOLDER"
        )
    place = _place(name, leaf, sharding)
    if is_key_array(leaf):
        return Want("key", tuple(leaf.shape), None, place, _implementation(name, leaf))
    weak = bool(getattr(leaf, "weak_type", False))
    return Want("jax", tuple(leaf.shape), np.dtype(leaf.dtype), place, "", None, weak)


def settled(want: Want, saved: LeafRecord, array: ArrayRecord | None, *, has_types: bool) -> Want:
    """What a leaf becomes: the form, shape and place of the target, with the dtype and weak type of the checkpoint.

    A weakly typed array and a Python number of a target accept any dtype. A dtype that the target insists on stays:
    the comparison refuses it, or `cast=True` converts to it.

    Args:
        want: what the target says.
        saved: the leaf in the checkpoint.
        array: its array, if it is one.
        has_types: whether the checkpoint records weak types and Python numbers; those of other tools do not.
    """
    if isinstance(saved, ArrayLeaf):
        if want.form == "jax" and not want.weak and not saved.weak:
            return want  # as most leaves are
        assert array is not None
        if want.form == "python" and has_types:
            return _of_number(want, saved, array)
        if want.form != "jax":
            return want
        stored = DTYPES[array.dtype]
        dtype = stored if want.weak and is_held(stored) else want.dtype
        is_weak = saved.weak if has_types else want.weak
        return want._replace(dtype=dtype, weak=is_weak and (want.weak or stored == dtype))
    if want.form != "jax" or type(saved) not in _DEFAULT_DTYPES:
        return want
    assert want.dtype is not None
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(_DEFAULT_DTYPES[type(saved)])) if want.weak else want.dtype
    kind = _KINDS.get(type(saved))
    return want._replace(dtype=dtype, weak=kind is not None and bool(jax.numpy.issubdtype(dtype, kind)))


def _of_number(want: Want, saved: ArrayLeaf, array: ArrayRecord) -> Want:
    """A saved array where the target has a Python number: the array, if JAX can hold its dtype."""
    stored = DTYPES[array.dtype]
    is_number = want.python in (int, float, complex) or (want.python is bool and stored == np.bool_)
    if array.shape != () or not is_number:
        return want
    if saved.host != "jax":
        return Want("scalar" if saved.host == "scalar" else "numpy", (), own_dtype(saved, array))
    return Want("jax", (), stored, want.sharding, weak=saved.weak) if is_held(stored) else want


def own_dtype(saved: ArrayLeaf, array: ArrayRecord) -> np.dtype:
    """The dtype of a saved array, in the byte order that it had."""
    dtype: np.dtype = DTYPES[array.dtype]
    return dtype.newbyteorder(">") if saved.big_endian else dtype


def is_held(dtype: np.dtype) -> bool:
    """Whether JAX holds this dtype now: 64-bit types need `jax_enable_x64`."""
    return dtype.itemsize < 8 or bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)


def lost_type(saved: LeafRecord, want: Want) -> str | None:
    """What a load cannot take from the checkpoint of a leaf's type, and what to do; None: nothing is lost."""
    if want.form == "jax":
        return None
    if want.form in ("numpy", "scalar"):
        if isinstance(saved, ArrayLeaf) and saved.weak:
            return "saved weakly typed, loaded as a NumPy array, which has no weak type; use a JAX array as the target"
        if type(saved) in _KINDS:
            number = f"Python {PYTHON_TYPES[type(saved)].__name__}"
            return f"saved as a {number}, loaded as NumPy {want.dtype}; use a {number} as the target"
    if want.form == "python" and isinstance(saved, ArrayLeaf):
        assert want.python is not None
        return f"saved as a 64-bit JAX array, loaded as a Python {want.python.__name__}; enable jax_enable_x64"
    return None


def _replicated(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    return sharding if sharding is not None and sharding.is_fully_replicated else None


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
