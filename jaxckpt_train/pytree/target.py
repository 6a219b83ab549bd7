"""Derive from a target the form and the placement of each leaf that a load returns.

The checkpoint decides the dtype and weak type; the target decides the form, shape and placement.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import layout

from jaxckpt_train.errors import CheckpointError, MismatchError, SettingsError, UnsupportedLeafError
from jaxckpt_train.pytree._jax import get_mesh
from jaxckpt_train.pytree.flatten import PLACEHOLDER, WITHOUT_FUNCTIONS, flatten, is_function, is_key_array
from jaxckpt_train.pytree.leaves import (
    EMPTY,
    PYTHON_TYPES,
    ArrayLeaf,
    BoolLeaf,
    ComplexLeaf,
    FloatLeaf,
    IntLeaf,
    LeafRecord,
)
from jaxckpt_train.pytree.paths import Only, escapes_in, leaf_filter
from jaxckpt_train.store.boxes import Box, box_from_index, full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord

_HAS_FORMATS = hasattr(layout, "Format")  # since JAX 0.7
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_PYTHON = (bool, int, float, complex, str, bytes)
_DEFAULT_DTYPES = {BoolLeaf: "bool", IntLeaf: "int64", FloatLeaf: "float64", ComplexLeaf: "complex128"}
_KINDS = {IntLeaf: np.integer, FloatLeaf: np.floating, ComplexLeaf: np.complexfloating}


def is_format(value: object) -> bool:
    """Return whether a value is a sharding with a layout."""
    return _HAS_FORMATS and isinstance(value, layout.Format)


def with_layout(sharding: Any, asked: object) -> Any:
    """Combine a sharding with a layout to a format, if a layout is given."""
    return layout.Format(asked, sharding) if _HAS_FORMATS and isinstance(asked, layout.Layout) else sharding


def in_format_of(target: Any, value: Any) -> Any:
    """Put a restored array into the layout of its target: a function compiled for that layout accepts no other.

    A load uses the default layout of the device, which is nearly always the layout of the target too.
    """
    if value is target or not isinstance(value, jax.Array) or value.ndim < 2 or is_key_array(value):
        return value
    if not value.sharding.addressable_devices:  # the array lies on another process, where JAX knows no layout
        return value
    wanted_layout = _layout_of(target)
    if wanted_layout is None or _order(wanted_layout) == _order(_layout_of(value)):
        return value
    return jax.device_put(value, layout.Format(wanted_layout, value.sharding))


def _layout_of(leaf: Any) -> Any:
    """Return the layout of an array, or the one that an abstract array asks for; None: none, or JAX before 0.7."""
    return getattr(getattr(leaf, "format", None), "layout", None)


def _order(found: Any) -> Any:
    return found and (found.major_to_minor, found.tiling or ())


class LeafRequest(NamedTuple):
    """The required form of a leaf.

    Attributes:
        form: "jax", "numpy", "scalar" (numpy scalar), "key", "python", "none", "empty" or "skip".
        shape: of the array or key array.
        dtype: of the array.
        sharding: of a JAX array; None: uncommitted, on the default device.
        impl: of a key array.
        python: type of a Python value.
        weak: JAX's weak type. A weakly typed leaf of a target accepts any dtype.
    """

    form: Literal["jax", "numpy", "scalar", "key", "python", "none", "empty", "skip"]
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    sharding: jax.sharding.Sharding | None = None
    impl: str = ""
    python: type | None = None
    weak: bool = False


def leaf_request(name: str, leaf: Any, sharding: jax.sharding.Sharding | None) -> LeafRequest:
    """Return the required form of a leaf of a target; `sharding` is used if the leaf has none of its own.

    Raises:
        UnsupportedLeafError: the leaf does not say what to load.
        MismatchError: its sharding names an abstract mesh, and no concrete mesh in effect fits.
    """
    if leaf is PLACEHOLDER:
        return LeafRequest("skip")
    if leaf is None:
        return LeafRequest("none")
    if leaf is EMPTY:
        return LeafRequest("empty")
    if type(leaf) in _PYTHON:
        return LeafRequest("python", sharding=_replicated(sharding), python=type(leaf))
    if isinstance(leaf, np.generic):
        return LeafRequest("scalar", dtype=leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return LeafRequest("numpy", leaf.shape, leaf.dtype)
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
        return LeafRequest("key", tuple(leaf.shape), None, place, _implementation(name, leaf))
    weak = bool(getattr(leaf, "weak_type", False))
    return LeafRequest("jax", tuple(leaf.shape), np.dtype(leaf.dtype), place, "", None, weak)


def resolve_request(
    request: LeafRequest, saved: LeafRecord, array: ArrayRecord | None, *, has_types: bool
) -> LeafRequest:
    """Combine target and checkpoint: form, shape and placement of the target, dtype and weak type of the checkpoint.

    A weakly typed array and a Python number in a target accept any dtype. An explicit dtype of the target is kept: the
    comparison then refuses the leaf, or `cast=True` converts it.

    Args:
        request: what the target asks for.
        saved: the leaf in the checkpoint.
        array: its array, if it has one.
        has_types: whether the checkpoint records weak types and Python numbers; those of other tools do not.
    """
    if isinstance(saved, ArrayLeaf):
        if request.form == "jax" and not request.weak and not saved.weak:
            return request  # the most frequent case
        assert array is not None
        if request.form == "python" and has_types:
            return _of_number(request, saved, array)
        if request.form != "jax":
            return request
        stored = DTYPES[array.dtype]
        dtype = stored if request.weak and is_supported(stored) else request.dtype
        is_weak = saved.weak if has_types else request.weak
        return request._replace(dtype=dtype, weak=is_weak and (request.weak or stored == dtype))
    if request.form != "jax" or type(saved) not in _DEFAULT_DTYPES:
        return request
    assert request.dtype is not None
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(_DEFAULT_DTYPES[type(saved)])) if request.weak else request.dtype
    kind = _KINDS.get(type(saved))
    return request._replace(dtype=dtype, weak=kind is not None and bool(jax.numpy.issubdtype(dtype, kind)))


def _of_number(request: LeafRequest, saved: ArrayLeaf, array: ArrayRecord) -> LeafRequest:
    """Combine a saved array with a Python number in the target: the array, if JAX supports its dtype."""
    stored = DTYPES[array.dtype]
    is_number = request.python in (int, float, complex) or (request.python is bool and stored == np.bool_)
    if array.shape != () or not is_number:
        return request
    if saved.host != "jax":
        return LeafRequest("scalar" if saved.host == "scalar" else "numpy", (), own_dtype(saved, array))
    return LeafRequest("jax", (), stored, request.sharding, weak=saved.weak) if is_supported(stored) else request


def own_dtype(saved: ArrayLeaf, array: ArrayRecord) -> np.dtype:
    """Return the dtype of a saved array, in its original byte order."""
    dtype: np.dtype = DTYPES[array.dtype]
    return dtype.newbyteorder(">") if saved.big_endian else dtype


def is_supported(dtype: np.dtype) -> bool:
    """Return whether JAX supports this dtype now: 64-bit types need `jax_enable_x64`."""
    return dtype.itemsize < 8 or bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)


def lost_type(saved: LeafRecord, request: LeafRequest) -> str | None:
    """Say which part of a leaf's type the load loses, and how to keep it; None: nothing is lost."""
    if request.form == "jax":
        return None
    if request.form in ("numpy", "scalar"):
        if isinstance(saved, ArrayLeaf) and saved.weak:
            return "saved weakly typed, but loaded as a NumPy array, which has no weak type; use a JAX array as target"
        if type(saved) in _KINDS:
            number = f"Python {PYTHON_TYPES[type(saved)].__name__}"
            return f"saved as a {number}, but loaded as NumPy {request.dtype}; use a {number} as the target"
    if request.form == "python" and isinstance(saved, ArrayLeaf):
        assert request.python is not None
        return f"saved as a 64-bit JAX array, but loaded as a Python {request.python.__name__}; enable jax_enable_x64"
    return None


def _replicated(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    return sharding if sharding is not None and sharding.is_fully_replicated else None


def _place(name: str, leaf: Any, default: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        sharding = None
    return concrete_sharding(name, default if sharding is None else sharding)


def concrete_sharding(name: str, sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Replace an abstract mesh in a sharding by the mesh in effect (`jax.set_mesh`).

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


def shardings_by_name(shardings: Any) -> Callable[[str], jax.sharding.Sharding | None]:
    """Turn one sharding, or a tree of shardings that may end above the leaves, into a function of the leaf path."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return lambda name: shardings
    flat = flatten(shardings)
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if not isinstance(leaf, jax.sharding.Sharding) and leaf is not None and leaf is not EMPTY:
            raise SettingsError(
                f"shardings: leaf {name!r}: expected a jax.sharding.Sharding or None, found {leaf!r}; "
                "use jax.sharding.NamedSharding(mesh, spec) for a mesh and a PartitionSpec"
            )
    known = dict(zip(flat.names, flat.leaves, strict=True))

    def find(name: str) -> jax.sharding.Sharding | None:
        while True:
            if name in known:
                return known[name] if isinstance(known[name], jax.sharding.Sharding) else None
            if "/" not in name:
                return None
            name = name.rpartition("/")[0]

    return find


def requested_shardings(like: Any, only: Only, shardings: Any) -> Iterator[jax.sharding.Sharding]:
    """Find the shardings that a load with these arguments asks for, as far as known before the checkpoint is opened.

    A leaf that is in error is skipped; the load itself reports it.
    """
    try:
        given, selected = shardings_by_name(shardings), leaf_filter(only)
        flat = flatten(shardings if like is None else like)
    except CheckpointError:  # the load will raise it
        with contextlib.suppress(TypeError, ValueError):
            yield from _shardings_in(jax.tree_util.tree_leaves((like, shardings)))
        return
    if like is None:  # the leaves are not known
        yield from _shardings_in(flat.leaves)
        return
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if selected(name):
            with contextlib.suppress(CheckpointError):
                yield from _shardings_in([leaf_request(name, leaf, given(name)).sharding])


def _shardings_in(found: Iterable[Any]) -> Iterator[jax.sharding.Sharding]:
    """Yield the shardings among the values, and those of concrete and abstract arrays."""
    for each in found:
        sharding = each if isinstance(each, jax.sharding.Sharding) else getattr(each, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding):
            yield sharding


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one array goes: the distinct boxes to read, and for every device the number of its box.

    Without devices, the array stays on the host.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    boxes: Sequence[Box]
    devices: Sequence[tuple[jax.Device, int]]


def host_placement(shape: tuple[int, ...]) -> Placement:
    """Place the whole array as one box, on the host or uncommitted on the default device."""
    return Placement(shape, None, (full_box(shape),), ())


def device_placement(name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Placement:
    """Find the boxes that the devices of this process need; replicas share one box.

    Raises:
        MismatchError: the sharding does not fit the shape.
    """
    try:
        if isinstance(sharding, jax.sharding.NamedSharding):  # before JAX 0.7 other shardings cannot check a shape
            sharding.check_compatible_aval(shape)
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise MismatchError(f"leaf {name!r}: shape {shape} does not fit its sharding {sharding}: {error}") from error
    numbers: dict[Box, int] = {}
    devices = []
    for device, index in indices.items():
        box = full_box(shape) if index is None else box_from_index(index, shape)
        devices.append((device, numbers.setdefault(box, len(numbers))))
    return Placement(shape, sharding, tuple(numbers), tuple(devices))


def default_platform() -> str:
    """Return the platform of the device on which JAX puts an array without a sharding."""
    (device,) = jax.device_put(np.zeros((), np.bool_)).devices()
    platform: str = device.platform
    return platform
