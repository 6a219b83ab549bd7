"""What a target asks for, leaf by leaf, and how a checkpoint differs from it: all differences in one error.

The checkpoint decides the dtype and weak type; the target decides the form, shape and placement.
"""

from __future__ import annotations

import cmath
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import layout

from jaxckpt_train._validation import shown
from jaxckpt_train.errors import CheckpointError, MismatchError, SettingsError, UnsupportedLeafError
from jaxckpt_train.pytree._jax import get_mesh
from jaxckpt_train.pytree.flatten import PLACEHOLDER, WITHOUT_FUNCTIONS, flatten, is_function, is_key_array, shortened
from jaxckpt_train.pytree.leaves import (
    EMPTY,
    PYTHON_TYPES,
    ROOT,
    STORED,
    ArrayLeaf,
    BoolLeaf,
    ComplexLeaf,
    EmptyLeaf,
    FloatLeaf,
    IntLeaf,
    KeyLeaf,
    LeafRecord,
    NoneLeaf,
    Only,
    TreeRecord,
    describe_keys,
    describe_saved,
    escapes_in,
    leaf_filter,
    python_value,
    shape_text,
    suggestion,
)
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.segment import DTYPES

SHOWN_DIFFERENCES = 50
_HAS_FORMATS = hasattr(layout, "Format")  # since JAX 0.7
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_PYTHON = (bool, int, float, complex, str, bytes)
_DEFAULT_DTYPES = {BoolLeaf: "bool", IntLeaf: "int64", FloatLeaf: "float64", ComplexLeaf: "complex128"}
_ABSTRACT = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}
_CASTS = tuple(_ABSTRACT)  # `cast=True` converts within a kind of number, or to a later one
_ADVICE = (
    "If the model has changed, load the part that fits with options of `jaxckpt_train.load` (and save that) or with "
    '`init_from`: only= selects the leaves to load; missing="keep" keeps arrays (not ShapeDtypeStructs) of the target '
    "that are not in the checkpoint; rename= gives saved leaves other paths; transforms= changes shapes"
)


def is_format(value: object) -> bool:
    """Return whether a value is a sharding with a layout."""
    return _HAS_FORMATS and isinstance(value, layout.Format)


def with_layout(sharding: Any, asked: object) -> Any:
    """Combine a sharding with a layout to a format, if a layout is given."""
    return layout.Format(asked, sharding) if _HAS_FORMATS and isinstance(asked, layout.Layout) else sharding


def in_format_of(target: Any, value: Any) -> Any:
    """Put a restored array into the layout of its target: a function compiled for that layout accepts no other."""
    if value is target or not isinstance(value, jax.Array) or value.ndim < 2 or is_key_array(value):
        return value
    if not value.sharding.addressable_devices:  # the array lies on another process, where JAX knows no layout
        return value
    wanted_layout = _layout_of(target)
    if wanted_layout is None or _order(wanted_layout) == _order(_layout_of(value)):
        return value
    return jax.device_put(value, layout.Format(wanted_layout, value.sharding))


def _layout_of(leaf: Any) -> Any:
    return getattr(getattr(leaf, "format", None), "layout", None)  # None: none, or JAX before 0.7


def _order(found: Any) -> Any:
    return found and (found.major_to_minor, found.tiling or ())


class LeafRequest(NamedTuple):
    """The required form of a leaf. A weakly typed leaf of a target accepts any dtype."""

    form: Literal["jax", "numpy", "scalar", "key", "python", "none", "empty", "skip"]
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    sharding: jax.sharding.Sharding | None = None  # None: uncommitted, on the default device
    impl: str = ""  # of a key array
    python: type | None = None
    weak: bool = False

    def __str__(self) -> str:
        match self.form:
            case "key":
                return f"key<{self.impl}>{shape_text(self.shape)}"
            case "none":
                return "None"
            case "empty":
                return "an empty container"
            case "python":
                assert self.python is not None
                return f"Python {self.python.__name__}"
            case _:
                return f"{self.dtype}{shape_text(self.shape)}"


def leaf_request(name: str, leaf: Any, sharding: jax.sharding.Sharding | None) -> LeafRequest:
    """Return the required form of a leaf of a target; `sharding` is used if the leaf has none of its own."""
    if leaf is PLACEHOLDER:
        return LeafRequest("skip")
    if leaf is None:
        return LeafRequest("none")
    if leaf is EMPTY:
        return LeafRequest("empty")
    if type(leaf) in _PYTHON:
        is_on_all = sharding is not None and sharding.is_fully_replicated
        return LeafRequest("python", sharding=sharding if is_on_all else None, python=type(leaf))
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
    own = None if isinstance(leaf, jax.Array) and not leaf.committed else getattr(leaf, "sharding", None)
    place = concrete_sharding(name, sharding if own is None else own)
    if is_key_array(leaf):
        return LeafRequest("key", tuple(leaf.shape), None, place, _implementation(name, leaf))
    weak = bool(getattr(leaf, "weak_type", False))
    return LeafRequest("jax", tuple(leaf.shape), np.dtype(leaf.dtype), place, "", None, weak)


def request_without_target(
    name: str, saved: LeafRecord, array: ArrayRecord | None, sharding: jax.sharding.Sharding | None
) -> LeafRequest:
    """Return what a leaf becomes without a target: itself, on the host, or on devices if a sharding is given."""
    place = concrete_sharding(name, sharding)
    if isinstance(saved, ArrayLeaf) and array is not None:
        dtype = _own_dtype(saved, array)
        if place is not None and saved.host == "jax":
            return LeafRequest("jax", array.shape, dtype, place, weak=saved.weak)
        return LeafRequest("scalar" if saved.host == "scalar" else "numpy", array.shape, dtype, place)
    if isinstance(saved, KeyLeaf) and array is not None:
        return LeafRequest("key", array.shape[:-1], sharding=place, impl=saved.impl)
    return LeafRequest("empty" if isinstance(saved, EmptyLeaf) else "python")


def resolve_request(
    request: LeafRequest, saved: LeafRecord, array: ArrayRecord | None, *, has_types: bool
) -> LeafRequest:
    """Combine target and checkpoint: form, shape and placement of the target, dtype and weak type of the checkpoint.

    A weakly typed array and a Python number in a target accept any dtype; an explicit dtype of the target is kept.
    `has_types`: whether the checkpoint records weak types and Python numbers; those of other tools do not.
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
        dtype = stored if request.weak and _is_supported(stored) else request.dtype
        is_weak = saved.weak if has_types else request.weak
        return request._replace(dtype=dtype, weak=is_weak and (request.weak or stored == dtype))
    if request.form != "jax" or type(saved) not in _DEFAULT_DTYPES:
        return request
    assert request.dtype is not None
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(_DEFAULT_DTYPES[type(saved)])) if request.weak else request.dtype
    python = PYTHON_TYPES[type(saved)]
    return request._replace(dtype=dtype, weak=python is not bool and _kind(dtype) is python)


def _of_number(request: LeafRequest, saved: ArrayLeaf, array: ArrayRecord) -> LeafRequest:
    """Combine a saved array with a Python number in the target: the array, if JAX supports its dtype."""
    stored = DTYPES[array.dtype]
    is_number = request.python in (int, float, complex) or (request.python is bool and stored == np.bool_)
    if array.shape != () or not is_number:
        return request
    if saved.host != "jax":
        return LeafRequest("scalar" if saved.host == "scalar" else "numpy", (), _own_dtype(saved, array))
    return LeafRequest("jax", (), stored, request.sharding, weak=saved.weak) if _is_supported(stored) else request


def _own_dtype(saved: ArrayLeaf, array: ArrayRecord) -> np.dtype:
    dtype: np.dtype = DTYPES[array.dtype]
    return dtype.newbyteorder(">") if saved.big_endian else dtype


def _is_supported(dtype: np.dtype) -> bool:
    """Return whether JAX supports this dtype now: 64-bit types need `jax_enable_x64`."""
    return dtype.itemsize < 8 or bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)


def loses_type(saved: LeafRecord, request: LeafRequest) -> bool:
    """Return whether a load loses a weak type, a Python number, or a 64-bit JAX array (which needs x64)."""
    if request.form in ("numpy", "scalar"):
        is_weak = isinstance(saved, ArrayLeaf) and saved.weak
        return is_weak or isinstance(saved, (IntLeaf, FloatLeaf, ComplexLeaf))
    return request.form == "python" and isinstance(saved, ArrayLeaf)


def concrete_sharding(name: str, sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Replace an abstract mesh in a sharding by the mesh in effect; raise MismatchError if that does not fit."""
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
    known = dict(zip(flat.names, flat.leaves, strict=True))
    for name, leaf in known.items():
        if not isinstance(leaf, jax.sharding.Sharding) and leaf is not None and leaf is not EMPTY:
            raise SettingsError(
                f"shardings: leaf {name!r}: expected a jax.sharding.Sharding or None, found {leaf!r}; "
                "use jax.sharding.NamedSharding(mesh, spec) for a mesh and a PartitionSpec"
            )

    def find(name: str) -> jax.sharding.Sharding | None:
        while name not in known and "/" in name:
            name = name.rpartition("/")[0]
        found = known.get(name)
        return found if isinstance(found, jax.sharding.Sharding) else None

    return find


def requested_shardings(like: Any, only: Only, shardings: Any) -> Iterator[jax.sharding.Sharding | None]:
    """Find the shardings that a load asks for, before the checkpoint is opened, except for leaves in error."""
    try:
        given, selected = shardings_by_name(shardings), leaf_filter(only)
        flat = flatten(shardings if like is None else like)
    except CheckpointError:  # the load will raise it, and report it to the processes that these shardings span
        with contextlib.suppress(TypeError, ValueError):
            leaves = jax.tree_util.tree_leaves((like, shardings))
            yield from (leaf if isinstance(leaf, jax.sharding.Sharding) else _own_sharding(leaf) for leaf in leaves)
        return
    if like is None:  # the leaves are not known
        yield from (leaf for leaf in flat.leaves if isinstance(leaf, jax.sharding.Sharding))
        return
    for name, leaf in zip(flat.names, flat.leaves, strict=True):
        if selected(name):
            with contextlib.suppress(CheckpointError):
                yield leaf_request(name, leaf, given(name)).sharding


def _own_sharding(leaf: Any) -> jax.sharding.Sharding | None:
    found = getattr(leaf, "sharding", None)
    return found if isinstance(found, jax.sharding.Sharding) else None


def leaf_difference(
    name: str, saved: LeafRecord, array: ArrayRecord | None, request: LeafRequest, *, cast: bool
) -> str | None:
    """Describe in one line how a saved leaf differs from the target; None if the load can go ahead."""
    advice = _misfit(saved, array, request, cast)
    if advice is None:
        return None
    return f"leaf {name!r}: saved {describe_saved(saved, array)}, wanted {request}{advice and f'; {advice}'}"


def _misfit(saved: LeafRecord, array: ArrayRecord | None, request: LeafRequest, cast: bool) -> str | None:
    """Return None if a saved leaf fits a request, else advice, which may be empty."""
    same_kind = {"none": NoneLeaf, "empty": EmptyLeaf, "key": KeyLeaf}.get(request.form)
    if same_kind is not None or isinstance(saved, (NoneLeaf, EmptyLeaf, KeyLeaf)):
        if same_kind is None or not isinstance(saved, same_kind):
            return ""
        if not isinstance(saved, KeyLeaf) or array is None:
            return None
        return None if saved.impl == request.impl and array.shape[:-1] == request.shape else ""
    python = PYTHON_TYPES.get(type(saved))
    if request.form == "python":
        if array is not None:
            fits = array.shape == () and request.python is _kind(DTYPES[array.dtype])
        else:
            fits = request.python is python
        return None if fits else ""
    assert request.dtype is not None
    if array is not None:
        stored = DTYPES[array.dtype]
        if array.shape != request.shape:
            return ""
        if stored != request.dtype.newbyteorder("=") and not (cast and can_cast(stored, request.dtype)):
            if can_cast(stored, request.dtype):
                return "load(..., cast=True) converts it"
            return "the conversion would lose data"
    elif request.shape != () or python not in _CASTS or not _number_fits(python, request.dtype, cast):
        return ""
    if request.form == "jax" and not _is_supported(request.dtype):
        return 'JAX holds 64-bit types only with jax.config.update("jax_enable_x64", True)'
    return None


def _number_fits(python: type, dtype: np.dtype, cast: bool) -> bool:
    kind = _kind(dtype)
    return kind is python or (cast and kind is not None and _CASTS.index(python) <= _CASTS.index(kind))


def _kind(dtype: np.dtype) -> type | None:
    """Return the Python type of the numbers of a dtype, also of one of ml_dtypes."""
    return next((python for python, each in _ABSTRACT.items() if jax.numpy.issubdtype(dtype, each)), None)


def can_cast(saved: np.dtype, wanted: np.dtype) -> bool:
    """Return whether `cast=True` converts one dtype to the other: within a kind, or up from bool to int to float."""
    python = _kind(saved)
    return python is not None and _number_fits(python, wanted.newbyteorder("="), cast=True)


def exact_array(value: complex, dtype: np.dtype) -> np.ndarray | None:
    """Convert a Python number to a 0-d array; None if the dtype does not hold it exactly."""
    array = rounded_array(value, dtype)
    return array if array is not None and (array.item() == value or value != value) else None


def rounded_array(value: complex, dtype: np.dtype) -> np.ndarray | None:
    """Convert a Python number to a rounded 0-d array; None if it is out of the dtype's range."""
    try:
        with np.errstate(all="ignore"):
            array = np.asarray(value).astype(dtype)
    except (OverflowError, TypeError):  # beyond 64 bits
        return None
    return array if _is_finite(array.item()) == _is_finite(value) else None


def _is_finite(value: complex) -> bool:
    return isinstance(value, int) or cmath.isfinite(value)


def rename_map(names: Sequence[str], rules: Mapping[str, str]) -> dict[str, str]:
    """Map each saved leaf path to its new path by rules such as `{"old/**": "new/**"}`, or rules for single paths."""
    renamed, used = dict(zip(names, names, strict=True)), set[str]()
    for name in names if rules else ():
        for old, new in rules.items():
            is_pattern = old.endswith("**") and new.endswith("**")
            if name == old or (is_pattern and name.startswith(old[:-2])):
                renamed[name] = new[:-2] + name[len(old) - 2 :] if is_pattern else new
                used.add(old)
                break
    idle = [rule for rule in rules if rule not in used]
    if idle:
        raise MismatchError(
            f"rename: no saved leaf matches {', '.join(map(repr, idle))}{suggestion(idle, names)}; the checkpoint has "
            f"{describe_keys(idle[0], names)}"
        )
    olds = dict[str, str]()
    for old, new in renamed.items():
        if olds.setdefault(new, old) != old:
            raise MismatchError(f"rename: saved leaves {olds[new]!r} and {old!r} would both get the path {new!r}")
    return renamed


class Comparison:
    """Compares a stored tree with the leaves of a target, and collects the differences."""

    def __init__(
        self,
        subject: str,
        record: TreeRecord,
        arrays: Mapping[str, ArrayRecord],
        *,
        cast: bool = False,
        has_types: bool = True,
        kept: Collection[str] = (),  # leaves of the target that may be missing in the checkpoint
    ) -> None:
        self._subject, self._record, self._arrays = subject, record, arrays
        self._cast, self._has_types, self._kept = cast, has_types, kept
        self.lines = list[str]()

    def requests(self, asked: Mapping[str, LeafRequest], saved_names: Mapping[str, str]) -> dict[str, LeafRequest]:
        """Compare the leaves that a target asks for; return what each of those in the checkpoint must become."""
        found = dict[str, LeafRequest]()
        for name, wanted in asked.items():
            if wanted.form == "skip":
                continue
            if name not in saved_names:
                if name not in self._kept:
                    self.lines.append(f"leaf {name!r}: not in the checkpoint, wanted {wanted}")
                continue
            saved = self._record.leaves[saved_names[name]]
            array = self._arrays.get(saved_names[name])
            found[name] = request = resolve_request(wanted, saved, array, has_types=self._has_types)
            line = leaf_difference(name, saved, array, request, cast=self._cast)
            if line is None and request.dtype is not None and not isinstance(saved, STORED):
                value = python_value(name, saved, self._subject)
                is_rounded = wanted.weak and isinstance(value, (float, complex))  # as JAX does
                if (rounded_array if is_rounded else exact_array)(value, request.dtype) is None:
                    number = f"{describe_saved(saved, None)} {shown(value)}"
                    line = f"leaf {name!r}: saved {number}, wanted {request}, which does not hold it exactly"
            if line is not None:
                self.lines.append(line)
        return found

    def unexpected(
        self, names: Iterable[str], saved_names: Mapping[str, str], target: Collection[str], skipped: Iterable[str]
    ) -> None:
        """Add those of the saved leaves `names` that neither are in the target nor below a leaf that it skips."""
        above = tuple("" if name == ROOT else f"{name}/" for name in skipped)
        for name in names:
            if name not in target and not name.startswith(above):
                saved = saved_names[name]
                described = describe_saved(self._record.leaves[saved], self._arrays.get(saved))
                self.lines.append(f"leaf {name!r}: saved {described}, not in the target")

    def moved(self, path: str, saved: str, found: str) -> None:
        """Add a node without keys whose static data names the children in another order."""
        self.lines.append(
            f"node {path!r}: saved with the static data {shortened(saved)}, the target has {shortened(found)}; "
            "its values would be exchanged, because the type is registered without keys; "
            'rename={"node/0/**": "node/1/**", ...} assigns each saved position its new one'
        )

    def raise_all(self) -> None:
        """Raise one MismatchError for all differences, if there are any."""
        raise_differences(self._subject, self.lines, _ADVICE)


def raise_differences(subject: str, lines: Sequence[str], advice: str = "") -> None:
    """Raise one MismatchError for all differences, if there are any; the advice comes last."""
    if not lines:
        return
    shown = "\n".join(f"  {line}" for line in lines[:SHOWN_DIFFERENCES])
    more = f"\n  and {len(lines) - SHOWN_DIFFERENCES} more" if len(lines) > SHOWN_DIFFERENCES else ""
    raise MismatchError(
        f"{subject}: the checkpoint and the target differ in {len(lines)} "
        f"{'leaf' if len(lines) == 1 else 'leaves'}; nothing was read{escapes_in(shown)}:\n{shown}{more}"
        + (f"\n{advice}" if advice else ""),
        tuple(lines),
    )
