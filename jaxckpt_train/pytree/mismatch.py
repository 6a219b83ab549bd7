"""Compares a checkpoint with a target, and reports all differences in one error, with advice."""

from __future__ import annotations

import cmath
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.pytree.flatten import shortened
from jaxckpt_train.pytree.leaves import (
    PYTHON_TYPES,
    ArrayLeaf,
    EmptyLeaf,
    KeyLeaf,
    LeafRecord,
    NoneLeaf,
    TreeRecord,
    describe_saved,
    shape_text,
)
from jaxckpt_train.pytree.paths import ROOT, describe_keys, escapes_in, similar_names, suggestion
from jaxckpt_train.pytree.target import LeafRequest, is_supported, resolve_request
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord

_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
SHOWN_DIFFERENCES = 50
_Category = Literal["missing", "without value", "unexpected", "shape", "moved", "other"]


def leaf_difference(
    name: str, saved: LeafRecord, array: ArrayRecord | None, request: LeafRequest, *, cast: bool
) -> str | None:
    """Describe in one line how a saved leaf differs from the target; None if the load can go ahead."""
    if request.form == "skip":
        return None
    same_kind = {"none": NoneLeaf, "empty": EmptyLeaf, "key": KeyLeaf}.get(request.form)
    if same_kind is not None or isinstance(saved, (NoneLeaf, EmptyLeaf, KeyLeaf)):
        if same_kind is None or not isinstance(saved, same_kind):
            return _describe(name, saved, array, request, "")
        return _key_difference(name, saved, array, request) if isinstance(saved, KeyLeaf) else None
    if isinstance(saved, ArrayLeaf):
        assert array is not None
        return _array_difference(name, saved, array, request, cast)
    if request.form == "python":
        return None if PYTHON_TYPES[type(saved)] is request.python else _describe(name, saved, array, request, "")
    return _number_difference(name, saved, request, cast)


def _key_difference(name: str, saved: KeyLeaf, array: ArrayRecord | None, request: LeafRequest) -> str | None:
    assert array is not None
    same = saved.impl == request.impl and array.shape[: len(request.shape)] == request.shape
    return None if same and len(array.shape) == len(request.shape) + 1 else _describe(name, saved, array, request, "")


def _array_difference(name: str, saved: ArrayLeaf, array: ArrayRecord, request: LeafRequest, cast: bool) -> str | None:
    stored = DTYPES[array.dtype]
    if request.form == "python":
        fits = (
            array.shape == ()
            and request.python in (bool, int, float, complex)
            and _number_kind(stored) == _python_kind(request)
        )
        return None if fits else _describe(name, saved, array, request, "")
    assert request.dtype is not None
    if array.shape != request.shape:
        return _describe(name, saved, array, request, "")
    if stored != request.dtype.newbyteorder("=") and not (cast and can_cast(stored, request.dtype)):
        hint = (
            "load(..., cast=True) converts it"
            if can_cast(stored, request.dtype) and not cast
            else "the conversion would lose data"
        )
        return _describe(name, saved, array, request, hint)
    return _x64_difference(name, saved, array, request)


def _x64_difference(name: str, saved: LeafRecord, array: ArrayRecord | None, request: LeafRequest) -> str | None:
    assert request.dtype is not None
    if request.form == "jax" and not is_supported(request.dtype):
        return _describe(
            name, saved, array, request, 'JAX holds 64-bit types only with jax.config.update("jax_enable_x64", True)'
        )
    return None


def _number_difference(name: str, saved: LeafRecord, request: LeafRequest, cast: bool) -> str | None:
    """Compare a saved Python number with a 0-d array, whose dtype must hold it exactly."""
    assert request.dtype is not None
    python = PYTHON_TYPES[type(saved)]
    if request.shape != () or python in (str, bytes):
        return _describe(name, saved, None, request, "")
    kind = {bool: "b", int: "i", float: "f", complex: "c"}[python]
    if kind != _number_kind(request.dtype) and not (
        cast and _ORDER[kind] <= _ORDER.get(_number_kind(request.dtype), -1)
    ):
        return _describe(name, saved, None, request, "")
    return _x64_difference(name, saved, None, request)


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


def inexact_line(name: str, value: complex, request: LeafRequest) -> str:
    """Describe a saved Python number that the wanted dtype cannot hold."""
    found = f"of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 128 else repr(value)
    return (
        f"leaf {name!r}: saved Python {type(value).__name__} {found}, wanted {describe_request(request)}, "
        "which does not hold it exactly"
    )


def _number_kind(dtype: np.dtype) -> str:
    """Return the kind of number: b, i (all integers), f or c; it knows ml_dtypes too."""
    for kind, numpy_type in (("b", np.bool_), ("i", np.integer), ("f", np.floating), ("c", np.complexfloating)):
        if jax.numpy.issubdtype(dtype, numpy_type):
            return kind
    return "?"


def _python_kind(request: LeafRequest) -> str:
    return {bool: "b", int: "i", float: "f", complex: "c"}.get(request.python or str, "?")


def can_cast(saved: np.dtype, request: np.dtype) -> bool:
    """Return whether `cast=True` converts one dtype to the other: within a kind, or up from bool to int to float."""
    low, high = _ORDER.get(_number_kind(saved), 9), _ORDER.get(_number_kind(request.newbyteorder("=")), -1)
    return low <= high


def missing_line(name: str, request: LeafRequest) -> str:
    """Describe a leaf that is in the target but not in the checkpoint."""
    return f"leaf {name!r}: not in the checkpoint, wanted {describe_request(request)}"


def unexpected_line(name: str, saved: LeafRecord, array: ArrayRecord | None, near: Sequence[str]) -> str:
    """Describe a leaf that is in the checkpoint but not in the target; `near`: leaves of the target with like names."""
    there = f", which has {', '.join(map(repr, near))}" if near else ""
    return f"leaf {name!r}: saved {describe_saved(saved, array)}, not in the target{there}"


def _describe(name: str, saved: LeafRecord, array: ArrayRecord | None, request: LeafRequest, hint: str) -> str:
    advice = f"; {hint}" if hint else ""
    return f"leaf {name!r}: saved {describe_saved(saved, array)}, wanted {describe_request(request)}{advice}"


def describe_request(request: LeafRequest) -> str:
    """Describe what a target leaf asks for, in the words of `describe_saved`."""
    match request.form:
        case "key":
            return f"key<{request.impl}>{shape_text(request.shape)}"
        case "none":
            return "None"
        case "empty":
            return "an empty container"
        case "python":
            assert request.python is not None
            return f"Python {request.python.__name__}"
        case _:
            return f"{request.dtype}{shape_text(request.shape)}"


def rename_map(names: Sequence[str], rules: Mapping[str, str]) -> dict[str, str]:
    """Map each saved leaf path to its new path by rules such as `{"old/**": "new/**"}`, or rules for single paths.

    Raises:
        MismatchError: a rule applies to no leaf, or two leaves get one path.
    """
    renamed, used = {}, set()
    for name in names:
        renamed[name] = name
        for old, new in rules.items():
            if old.endswith("**") and new.endswith("**") and name.startswith(old[:-2]):
                renamed[name] = new[:-2] + name[len(old) - 2 :]
                used.add(old)
                break
            if name == old:
                renamed[name] = new
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


class Differences:
    """Collects the differences of one load.

    Args:
        subject: what is loaded.
        keeps: whether leaves that are not in the checkpoint keep the target's value.
    """

    def __init__(self, subject: str, *, keeps: bool) -> None:
        self._subject, self._keeps = subject, keeps
        self._lines = list[str]()
        self._categories = set[_Category]()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def missing(self, name: str, request: LeafRequest) -> None:
        """Add a leaf that is in the target but not in the checkpoint."""
        self._lines.append(missing_line(name, request))
        self._categories.add("without value" if self._keeps else "missing")

    def unexpected(self, name: str, saved: LeafRecord, array: ArrayRecord | None, free: Collection[str]) -> None:
        """Add a leaf that is in the checkpoint but not in the target; `free`: target leaves that it may belong to."""
        near = similar_names(name, free) if len(self._lines) < SHOWN_DIFFERENCES else []  # later lines are not shown
        self._lines.append(unexpected_line(name, saved, array, near))
        self._categories.add("unexpected")

    def unlike(self, line: str, array: ArrayRecord | None, request: LeafRequest) -> None:
        """Add a leaf that both have, with a line that says how it differs."""
        self._lines.append(line)
        other_shape = array is not None and request.form in ("jax", "numpy") and array.shape != request.shape
        self._categories.add("shape" if other_shape else "other")

    def moved(self, path: str, saved: str, found: str) -> None:
        """Add a node without keys whose static data names the children in another order."""
        self._lines.append(
            f"node {path!r}: saved with the static data {shortened(saved)}, the target has {shortened(found)}; "
            "its values would be exchanged, because the type is registered without keys"
        )
        self._categories.add("moved")

    def raise_all(self) -> None:
        """Raise one MismatchError for all differences, if there are any."""
        raise_differences(self._subject, self._lines, self._advice())

    def _advice(self) -> str:
        hints = []
        if "missing" in self._categories:
            hints.append('missing="keep" keeps leaves of the target that are not in the checkpoint')
        if "without value" in self._categories:
            hints.append(
                'missing="keep" needs arrays in the target where the checkpoint has none, not ShapeDtypeStructs'
            )
        if self._categories & {"missing", "without value", "unexpected"}:
            hints.append("rename= gives saved leaves other paths")
        if "moved" in self._categories:
            hints.append('rename={"node/0/**": "node/1/**", ...} assigns each saved position its new one')
        if "shape" in self._categories:
            hints.append("transforms= changes shapes (pad, truncate, reshape, transpose, ...)")
        if self._categories & {"unexpected", "shape", "other"}:
            hints.append("only= selects the leaves to load")
        return (
            "If the model has changed, load the part that fits with options of `jaxckpt_train.load` (and save that) "
            f"or with `init_from`: {'; '.join(hints)}"
        )


def tree_differences(
    subject: str, record: TreeRecord, arrays: Mapping[str, ArrayRecord], requests: Mapping[str, LeafRequest]
) -> Differences:
    """Compare a stored tree with a target, leaf by leaf under the same paths.

    Args:
        subject: what is compared.
        record: the stored tree.
        arrays: its arrays, by leaf path.
        requests: what the leaves of the target ask for, by leaf path.
    """
    found = Differences(subject, keeps=False)
    skipped = tuple("" if name == ROOT else f"{name}/" for name, request in requests.items() if request.form == "skip")
    for name, asked in requests.items():
        saved, array = record.leaves.get(name), arrays.get(name)
        request = asked if saved is None else resolve_request(asked, saved, array, has_types=True)
        line = None if saved is None else leaf_difference(name, saved, array, request, cast=False)
        if saved is None and request.form != "skip":
            found.missing(name, request)
        elif line is not None:
            found.unlike(line, array, request)
    free = [name for name in requests if name not in record.leaves]
    for name, saved in record.leaves.items():
        if name not in requests and not name.startswith(skipped):
            found.unexpected(name, saved, arrays.get(name), free)
    return found


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
