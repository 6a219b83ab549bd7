"""The operations on a checkpoint's tree.

In order: names (rename, copy, nest, drop), single arrays (transpose, reshape, cast, pad, truncate), several arrays
(stack, unstack, split, fuse), and new arrays (add). `apply` has the operation that averages checkpoints.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.pytree.leaves import ArrayLeaf
from jaxckpt_train.pytree.paths import ROOT, join, key_text, parse_key, split
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.dtypes import DTYPES, is_inexact
from jaxckpt_train.store.manifest import MAX_ARRAYS
from jaxckpt_train.store.process_identity import memory_bytes
from jaxckpt_train.transforms.base import (
    INDEX,
    Change,
    Leaf,
    Leaves,
    Operation,
    check_axis,
    check_dtype,
    check_pattern,
    check_template,
    fill_template,
    matches,
    replace_leaves,
    require_array,
    whole_number,
    wildcards,
)
from jaxckpt_train.transforms.views import Cast as CastView
from jaxckpt_train.transforms.views import (
    Constant,
    Filled,
    Joined,
    Padded,
    Reshaped,
    Sliced,
    Transposed,
    View,
    number_as,
)

_MAX_LISTED = 8
_NORMAL_BYTES = 8  # the size of a random number before its conversion
_INITIALIZERS = ("zeros", "ones", "normal")
Initializer = Callable[[tuple[int, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rename(Operation):
    """Change leaf paths: `Rename("model/**", "params/**")`.

    Args:
        leaves: a path or pattern.
        to: the new path, with the same wildcards in the same order.
    """

    name = "rename"
    leaves: str
    to: str

    def __post_init__(self) -> None:
        self._check_patterns("leaves", "to")
        check_template("rename", self.leaves, self.to)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        found = {name: fill_template(self.to, groups) for name, groups in matches(self.leaves, leaves, subject).items()}
        for name, new in found.items():
            if new in leaves and new not in found:
                raise MismatchError(f"{subject}: leaf {name!r} would become {new!r}, which already exists")
        if len(set(found.values())) != len(found):
            raise MismatchError(f"{subject}: several leaves would get the same path; add wildcards to {self.to!r}")
        renamed = {found.get(name, name): leaf for name, leaf in leaves.items()}
        leaves.clear()
        leaves.update(renamed)
        return list(found.items())


@dataclasses.dataclass(frozen=True)
class Copy(Operation):
    """Copy leaves to a second path, such as an output layer that shares its weights with an embedding.

    Args:
        from_: a path or pattern. Its name is `from` in YAML, JSON and on the command line.
        to: the second path, with the same wildcards in the same order.
    """

    name = "copy"
    from_: str
    to: str

    def __post_init__(self) -> None:
        check_pattern("copy: from", self.from_)
        self._check_patterns("to")
        check_template("copy", self.from_, self.to)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        found = {name: fill_template(self.to, groups) for name, groups in matches(self.from_, leaves, subject).items()}
        for name, new in found.items():
            if new in leaves:
                raise MismatchError(
                    f"{subject}: leaf {new!r} already exists, and cannot be a copy of {name!r}; drop it first"
                )
            leaves[new] = leaves[name]
        return [(f"{name} {leaves[name].describe()}", f"{name}, {new}") for name, new in found.items()]


@dataclasses.dataclass(frozen=True)
class Nest(Operation):
    """Split keys that contain a separator: `Nest(".")` turns the key `a.b` into the path `a/b`.

    Args:
        separator: the separator in the keys.
        leaves: a path or pattern of the leaves to change.
    """

    name = "nest"
    separator: str = "."
    leaves: str = "**"

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        if not isinstance(self.separator, str) or not self.separator:
            raise SettingsError(f'nest: separator: expected text such as ".", found {self.separator!r}')

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        new = {name: self._nested(name) for name in matches(self.leaves, leaves, subject)}
        found = {name: nested for name, nested in new.items() if nested != name}
        renamed = {found.get(name, name): leaf for name, leaf in leaves.items()}
        if len(renamed) != len(leaves):
            raise MismatchError(f"{subject}: several leaves would get the same path; rename them first")
        leaves.clear()
        leaves.update(renamed)
        return list(found.items())

    def _nested(self, name: str) -> str:
        keys = [part for key in split(name) for part in str(parse_key(key)).split(self.separator)]
        path = ROOT
        for key in keys:
            path = join(path, key if key.isdigit() else key_text(key, path))
        return path


@dataclasses.dataclass(frozen=True)
class Drop(Operation):
    """Leave out leaves.

    Args:
        leaves: a path or pattern.
    """

    name = "drop"
    leaves: str

    def __post_init__(self) -> None:
        self._check_patterns("leaves")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        found = matches(self.leaves, leaves, subject)
        return [(f"{name} {leaves.pop(name).describe()}", "nothing") for name in found]


class _EachArray(Operation):
    """The base of operations that change each array separately."""

    leaves: str

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        changes = []
        for name in matches(self.leaves, leaves, subject):
            leaf = leaves[name]
            leaves[name] = leaf.with_view(self._changed(require_array(leaf, name, subject), name, subject))
            changes.append((f"{name} {leaf.describe()}", leaves[name].describe()))
        return changes

    @abc.abstractmethod
    def _changed(self, view: View, name: str, subject: str) -> View:
        """Return the changed array."""


@dataclasses.dataclass(frozen=True)
class Transpose(_EachArray):
    """Reorder axes.

    Args:
        leaves: a path or pattern.
        axes: for each axis of the new array, the axis of the old one. None: reverse the axes.
    """

    name = "transpose"
    leaves: str
    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        if self.axes is not None:
            axes = tuple(whole_number("transpose: axes", axis, least=0) for axis in self.axes)
            if len(set(axes)) != len(axes):
                raise SettingsError(f"transpose: axes: expected each axis once, found {list(axes)}")
            object.__setattr__(self, "axes", axes)

    def _changed(self, view: View, name: str, subject: str) -> View:
        axes = tuple(reversed(range(len(view.shape)))) if self.axes is None else self.axes
        if sorted(axes) != list(range(len(view.shape))):
            last = len(view.shape) - 1
            wanted = f"each of 0 to {last} once" if last > 0 else "only 0" if last == 0 else "none"
            raise MismatchError(
                f"{subject}: leaf {name!r} has {last + 1} axes: axes: expected {wanted}, found {list(axes)}"
            )
        return Transposed(view, axes)


@dataclasses.dataclass(frozen=True)
class Reshape(_EachArray):
    """Change the shape of arrays, and keep their elements in row-major order.

    Args:
        leaves: a path or pattern.
        shape: the new shape. One size may be -1, which is then derived from the number of elements.
    """

    name = "reshape"
    leaves: str
    shape: Sequence[int]

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        shape = tuple(whole_number("reshape: shape", size, least=-1) for size in self.shape)
        if shape.count(-1) > 1:
            raise SettingsError(f"reshape: shape: expected -1 at most once, found {list(shape)}")
        object.__setattr__(self, "shape", shape)

    def _changed(self, view: View, name: str, subject: str) -> View:
        count, known = math.prod(view.shape), math.prod(size for size in self.shape if size != -1)
        left = count // known if known else 0
        shape = [left if size == -1 else size for size in self.shape]
        if math.prod(shape) != count:
            raise MismatchError(
                f"{subject}: leaf {name!r}: expected a shape that fits {list(self.shape)}, found {list(view.shape)}"
            )
        return Reshaped(view, shape)


@dataclasses.dataclass(frozen=True)
class Cast(_EachArray):
    """Convert arrays to another dtype. Floats are rounded, and may become infinite.

    Reading an integer that does not fit raises an error.

    Args:
        leaves: a path or pattern.
        dtype: the name of the dtype, such as "bfloat16".
    """

    name = "cast"
    leaves: str
    dtype: str

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        check_dtype("cast: dtype", self.dtype)

    def _changed(self, view: View, name: str, subject: str) -> View:
        new = DTYPES[self.dtype]
        if _dtype_class(view.dtype) > _dtype_class(new):
            raise MismatchError(
                f"{subject}: leaf {name!r} cannot be cast from {view.dtype.name} to {new.name}, because that loses data"
            )
        return CastView(view, new, f"{subject}: leaf {name!r} of {view.dtype.name}")


def _dtype_class(dtype: np.dtype) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats and 3 for complex numbers."""
    if "complex" in dtype.name:
        return 3
    return 2 if "float" in dtype.name else 0 if dtype.name == "bool" else 1


class _Resize(_EachArray):
    """The base of operations that change sizes. None in the shape keeps a size."""

    shape: Sequence[int | None]

    def _check_shape(self) -> None:
        self._check_patterns("leaves")
        shape = tuple(
            None if size is None else whole_number(f"{self.name}: shape", size, least=0) for size in self.shape
        )
        object.__setattr__(self, "shape", shape)

    def _new_shape(self, view: View, name: str, subject: str, *, larger: bool) -> tuple[int, ...]:
        if len(self.shape) != len(view.shape):
            raise MismatchError(f"{subject}: leaf {name!r}: expected {len(self.shape)} axes, found {len(view.shape)}")
        shape = tuple(old if size is None else size for old, size in zip(view.shape, self.shape, strict=True))
        if any((new < old) if larger else (new > old) for old, new in zip(view.shape, shape, strict=True)):
            raise MismatchError(
                f"{subject}: leaf {name!r}: expected a shape that is not {'larger' if larger else 'smaller'} than "
                f"{list(shape)}, found {list(view.shape)}"
            )
        return shape


@dataclasses.dataclass(frozen=True)
class Pad(_Resize):
    """Enlarge arrays at their ends, such as the vocabulary of an embedding.

    Args:
        leaves: a path or pattern.
        shape: the new shape. None keeps a size.
        value: the value of the new elements.
    """

    name = "pad"
    leaves: str
    shape: Sequence[int | None]
    value: float = 0.0

    def __post_init__(self) -> None:
        self._check_shape()
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise SettingsError(f"pad: value: expected a number, found {self.value!r}")

    def _changed(self, view: View, name: str, subject: str) -> View:
        value = number_as(self.value, view.dtype)
        if value is None:
            raise MismatchError(
                f"{subject}: leaf {name!r} of {view.dtype.name} cannot hold the value {self.value!r:.99}"
            )
        return Padded(view, self._new_shape(view, name, subject, larger=True), value)


@dataclasses.dataclass(frozen=True)
class Truncate(_Resize):
    """Cut arrays off at their ends.

    Args:
        leaves: a path or pattern.
        shape: the new shape. None keeps a size.
    """

    name = "truncate"
    leaves: str
    shape: Sequence[int | None]

    def __post_init__(self) -> None:
        self._check_shape()

    def _changed(self, view: View, name: str, subject: str) -> View:
        return Sliced(view, full_box(self._new_shape(view, name, subject, larger=False)))


@dataclasses.dataclass(frozen=True)
class Stack(Operation):
    """Stack the arrays of all layers: `Stack("layers/{}/**", "layers/**")`.

    Args:
        leaves: a pattern in which `{}` is the number of the layer. Numbers start at 0 and have no gaps.
        to: the same pattern without `{}`.
        axis: the new axis.
    """

    name = "stack"
    leaves: str
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        self._check_patterns("leaves", "to")
        whole_number("stack: axis", self.axis)
        if INDEX not in wildcards(self.leaves):
            raise SettingsError(
                f"stack: expected {INDEX} in leaves at the position of the layer's number, found {self.leaves!r}; "
                f"write for example {_with_index(self.leaves)!r}"
            )
        if INDEX in wildcards(self.to):
            raise SettingsError(f"stack: expected no {INDEX} in to, the path of a single array, found {self.to!r}")
        check_template("stack", self.leaves, self.to)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        place = wildcards(self.leaves).index(INDEX)
        groups: dict[str, dict[int, str]] = {}
        for name, texts in matches(self.leaves, leaves, subject).items():
            new = fill_template(self.to, [text for number, text in enumerate(texts) if number != place])
            groups.setdefault(new, {})[int(texts[place])] = name
        changes: list[Change] = []
        for new, layers in groups.items():
            names = [layers[number] for number in sorted(layers)]
            if sorted(layers) != list(range(len(layers))):
                raise MismatchError(f"{subject}: {new!r}: expected layers 0 to {max(layers)}, found {sorted(layers)}")
            _join(leaves, names, new, self.axis, subject, changes, new=True)
        return changes


def _with_index(pattern: str) -> str:
    """Return a pattern with the index at its most likely position, or an example."""
    keys = pattern.split("/")
    for place, key in enumerate(keys):
        if key == "*" or key.isdigit():
            return "/".join([*keys[:place], INDEX, *keys[place + 1 :]])
    return f"layers/{INDEX}/**"


@dataclasses.dataclass(frozen=True)
class Unstack(Operation):
    """Make an array for each layer out of one array for all: `Unstack("layers/**", "layers/{}/**")`.

    Args:
        leaves: a path or pattern.
        to: the same pattern with `{}` for the number of the layer.
        axis: the axis of the layers, which is removed.
    """

    name = "unstack"
    leaves: str
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        self._check_patterns("leaves", "to")
        check_template("unstack", self.leaves, self.to)
        whole_number("unstack: axis", self.axis)
        if INDEX not in wildcards(self.to) or INDEX in wildcards(self.leaves):
            raise SettingsError(
                f"unstack: expected {INDEX} in to, and not in leaves, found {self.to!r} and {self.leaves!r}"
            )

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        place, changes = wildcards(self.to).index(INDEX), list[Change]()
        for name, texts in matches(self.leaves, leaves, subject).items():
            leaf, view = leaves[name], require_array(leaves[name], name, subject)
            axis = check_axis(self.axis, len(view.shape), name, subject)
            if view.shape[axis] > MAX_ARRAYS:
                raise MismatchError(
                    f"{subject}: leaf {name!r}: expected at most {MAX_ARRAYS:,} layers, found {view.shape[axis]:,}"
                )
            new: Leaves = {}
            for number in range(view.shape[axis]):
                box = list(full_box(view.shape))
                box[axis] = (number, number + 1)
                into = fill_template(self.to, [*texts[:place], str(number), *texts[place:]])
                new[into] = leaf.with_view(Sliced(view, tuple(box), (axis,)))
            pattern = fill_template(self.to, [*texts[:place], INDEX, *texts[place:]])
            changes.append((f"{name} {leaf.describe()}", f"{len(new)} of {pattern}"))
            replace_leaves(leaves, new, {name}, subject)
        return changes


@dataclasses.dataclass(frozen=True)
class Split(Operation):
    """Cut arrays along an axis: `Split("*/qkv", ["*/q", "*/k", "*/v"], axis=0)`.

    Args:
        leaves: a path or pattern.
        into: the paths of the parts, each with the same wildcards.
        axis: the axis to cut.
        sizes: the sizes of the parts along it. None: equal parts.
    """

    name = "split"
    leaves: str
    into: Sequence[str]
    axis: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        object.__setattr__(self, "into", _patterns("split: into", self.into))
        for template in self.into:
            check_template("split", self.leaves, template)
            if self.into.count(template) > 1:
                raise SettingsError(f"split: into: expected a different path for each part, found {template!r} twice")
        whole_number("split: axis", self.axis)
        if self.sizes is not None:
            sizes = tuple(whole_number("split: sizes", size, least=0) for size in self.sizes)
            if len(sizes) != len(self.into):
                raise SettingsError(f"split: expected a size for each of {len(self.into)} parts, found {len(sizes)}")
            object.__setattr__(self, "sizes", sizes)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        changes: list[Change] = []
        for name, texts in matches(self.leaves, leaves, subject).items():
            leaf, view = leaves[name], require_array(leaves[name], name, subject)
            axis = check_axis(self.axis, len(view.shape), name, subject)
            new, at = dict[str, Leaf](), 0
            for template, size in zip(self.into, self._sizes(view.shape[axis], name, subject), strict=True):
                box = list(full_box(view.shape))
                box[axis], at = (at, at + size), at + size
                new[fill_template(template, texts)] = leaf.with_view(Sliced(view, tuple(box)))
            parts = ", ".join(f"{each} {part.describe()}" for each, part in new.items())
            changes.append((f"{name} {leaf.describe()}", parts))
            replace_leaves(leaves, new, {name}, subject)
        return changes

    def _sizes(self, width: int, name: str, subject: str) -> Sequence[int]:
        if self.sizes is None:
            if width % len(self.into):
                raise MismatchError(
                    f"{subject}: leaf {name!r}: {width} cannot be cut into {len(self.into)} equal parts; pass sizes"
                )
            return [width // len(self.into)] * len(self.into)
        if sum(self.sizes) != width:
            raise MismatchError(
                f"{subject}: leaf {name!r}: expected sizes that add up to {width}, found {sum(self.sizes)}"
            )
        return self.sizes


@dataclasses.dataclass(frozen=True)
class Fuse(Operation):
    """Join arrays along an axis: `Fuse(["*/q", "*/k", "*/v"], "*/qkv", axis=0)`.

    Args:
        leaves: paths or patterns with the same wildcards, in order.
        to: the path of the joined array, with the same wildcards.
        axis: the axis along which the arrays are joined.
    """

    name = "fuse"
    leaves: Sequence[str]
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", _patterns("fuse: leaves", self.leaves))
        self._check_patterns("to")
        for pattern in self.leaves:
            check_template("fuse", pattern, self.to)
        whole_number("fuse: axis", self.axis)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        changes: list[Change] = []
        for texts in dict.fromkeys(matches(self.leaves[0], leaves, subject).values()):
            names = [fill_template(pattern, texts) for pattern in self.leaves]
            missing = [name for name in names if name not in leaves]
            if missing:
                raise MismatchError(f"{subject}: leaf {missing[0]!r}, to be joined with {names[0]!r}, does not exist")
            _join(leaves, names, fill_template(self.to, texts), self.axis, subject, changes, new=False)
        return changes


def _join(
    leaves: Leaves, names: list[str], to: str, axis: int, subject: str, changes: list[Change], *, new: bool
) -> None:
    views = [require_array(leaves[name], name, subject) for name in names]
    first = views[0]
    place = check_axis(axis, len(first.shape) + new, names[0], subject)
    for name, view in zip(names, views, strict=True):
        sizes = [size for number, size in enumerate(view.shape) if new or number != place]
        wanted = [size for number, size in enumerate(first.shape) if new or number != place]
        if view.dtype != first.dtype or len(view.shape) != len(first.shape) or sizes != wanted:
            alike = "the same shape and dtype" if new else f"the same dtype, and the same shape except on axis {place}"
            found = _describe(leaves, [*names[:1], name] if new else names)
            raise MismatchError(f"{subject}: leaf {name!r} does not fit {names[0]!r}: expected {alike}, found {found}")
    joined = leaves[names[0]].with_view(Joined(views, place, new=new))
    if new:  # all layers have the same shape and dtype
        old = ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
        old = f"{old} {leaves[names[0]].describe()}"
    else:
        old = _describe(leaves, names)
    changes.append((old, f"{to} {joined.describe()}"))
    replace_leaves(leaves, {to: joined}, set(names), subject)


def _describe(leaves: Leaves, names: Sequence[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > _MAX_LISTED else ""
    return ", ".join(f"{name} {leaves[name].describe()}" for name in names[:_MAX_LISTED]) + more


def _patterns(subject: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise SettingsError(f"{subject}: expected a list of leaf paths or patterns, found {given!r}")
    for pattern in given:
        check_pattern(subject, pattern)
    return tuple(given)


@dataclasses.dataclass(frozen=True)
class Add(Operation):
    """Add an array, such as an adapter that is not in the checkpoint.

    Args:
        leaf: the path of the array.
        shape: its shape.
        dtype: the name of its dtype.
        init: "zeros", "ones", a number, "normal" (with `stddev`), or in Python a function of the shape.
        stddev: the standard deviation of "normal".
        seed: the seed of "normal". A leaf path and a seed give the same values on every machine.
    """

    name = "add"
    leaf: str
    shape: Sequence[int]
    dtype: str = "float32"
    init: str | float | Initializer = "zeros"
    stddev: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_patterns("leaf")
        if wildcards(self.leaf):
            raise SettingsError(f"add: leaf: expected a path without wildcards, found {self.leaf!r}")
        object.__setattr__(self, "shape", tuple(whole_number("add: shape", size, least=0) for size in self.shape))
        check_dtype("add: dtype", self.dtype)
        is_number = isinstance(self.init, int | float) and not isinstance(self.init, bool)
        if not (is_number or callable(self.init) or self.init in _INITIALIZERS):
            expected = ", ".join(_INITIALIZERS)
            raise SettingsError(f"add: init: expected {expected}, a number or a function, found {self.init!r}")
        whole_number("add: seed", self.seed, least=0)
        stddev: Any = self.stddev
        is_number = isinstance(stddev, numbers.Real) and not isinstance(stddev, bool)
        if not (is_number and 0 <= stddev < math.inf):
            raise SettingsError(f"add: stddev: expected a finite number of at least 0, found {self.stddev!r}")
        if self.init == "normal" and not is_inexact(DTYPES[self.dtype]):
            raise SettingsError(f"add: dtype: expected a float dtype for normal, found {self.dtype!r}")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        if self.leaf in leaves:
            raise MismatchError(f"{subject}: leaf {self.leaf!r} already exists; drop it first, or omit this operation")
        leaves[self.leaf] = Leaf(ArrayLeaf(), self._view(subject))
        return [("nothing", f"{self.leaf} {leaves[self.leaf].describe()}")]

    def _view(self, subject: str) -> View:
        dtype, whole = DTYPES[self.dtype], f"{subject}: leaf {self.leaf!r}"
        if callable(self.init) or self.init == "normal":
            size = math.prod(self.shape) * (dtype.itemsize if callable(self.init) else _NORMAL_BYTES)
            if size > memory_bytes():
                raise MismatchError(
                    f"{whole}: creating {list(self.shape)} needs {size:,} bytes at once, but this machine has "
                    f"{memory_bytes():,} bytes of memory; add it with zeros, or in parts"
                )
            return Filled(self.shape, dtype, self._make, whole)
        given = {"zeros": 0.0, "ones": 1.0}[self.init] if isinstance(self.init, str) else self.init
        value = number_as(given, dtype)
        if value is None:
            raise MismatchError(f"{whole} of {self.dtype} cannot hold the value {given!r:.99}")
        return Constant(self.shape, value)

    def _is_complex(self) -> bool:
        return np.issubdtype(DTYPES[self.dtype], np.complexfloating)

    def _make(self, shape: tuple[int, ...]) -> np.ndarray:
        if callable(self.init):
            made = np.asarray(self.init(shape))
            if made.shape != shape:
                raise MismatchError(f"add {self.leaf!r}: init gave shape {list(made.shape)}, expected {list(shape)}")
            if np.iscomplexobj(made) and not self._is_complex():
                raise MismatchError(f"add {self.leaf!r}: init gave {made.dtype}, which {self.dtype} cannot hold")
            return made
        leaf_seed = int.from_bytes(hashlib.sha256(self.leaf.encode()).digest()[:8], "little")
        return np.random.Generator(np.random.Philox([self.seed, leaf_seed])).standard_normal(shape) * self.stddev
