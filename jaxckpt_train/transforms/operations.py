"""The operations on a checkpoint's tree, their base class, patterns of leaf paths, and checks of the result.

docs/how-to/other-formats.md describes the operations and their arguments.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxckpt_train._validation import nearest, refuse
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.pytree.leaves import (
    MAX_DEPTH,
    ROOT,
    ArrayLeaf,
    KeyLeaf,
    LeafRecord,
    describe_keys,
    find_nested_leaves,
    join,
    key_text,
    parse_key,
    split,
    suggestion,
)
from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.manifest import MAX_ARRAYS
from jaxckpt_train.store.segment import DTYPES, array_bytes
from jaxckpt_train.transforms import views
from jaxckpt_train.transforms.views import View

_MAX_LISTED = 8
_CONSTANTS = {"zeros": 0.0, "ones": 1.0}
MOST_BYTES = 1 << 44
"""The limit of an array that an operation makes: 16 TiB, in a million pieces."""
INDEX = "{}"
_PIECES = re.compile(r"\*\*|\*|\{\}|[^*{]+|\{")
_EXPRESSIONS = {"**": "(.*)", "*": "([^/]*)", INDEX: "(?P<index>0|[1-9][0-9]*)"}
Change = tuple[str, str]
"""The old and the new state of a leaf, as text."""


class Leaf(NamedTuple):
    """A leaf: its record, and its data if it is stored outside the record."""

    record: LeafRecord
    view: View | None = None

    def describe(self) -> str:
        """Return its type, or its dtype and shape."""
        if self.view is None:
            return type(self.record).__name__.removesuffix("Leaf").lower()
        shape = ",".join(map(str, self.view.shape))
        kind = f"key<{self.record.impl}> " if isinstance(self.record, KeyLeaf) else ""
        return f"{kind}{self.view.dtype.name}[{shape}]"


Leaves = dict[str, Leaf]


def require_array(leaves: Leaves, name: str, subject: str) -> View:
    """Return the data of a leaf, or raise MismatchError if it is not an array."""
    leaf = leaves[name]
    if leaf.view is None or not isinstance(leaf.record, ArrayLeaf):
        raise MismatchError(f"{subject}: leaf {name!r}: expected an array, found {leaf.describe()}")
    return leaf.view


def replace_leaves(leaves: Leaves, new: Mapping[str, View], removed: Sequence[str], subject: str) -> None:
    """Replace leaves by new ones with the record of the first of them, at the first of their positions."""
    gone = set(removed)
    conflicts = [name for name in new if name in leaves and name not in gone]
    if conflicts:
        raise MismatchError(f"{subject}: leaf {conflicts[0]!r} already exists; rename or drop it first")
    old = dict(leaves)
    added = {path: Leaf(old[removed[0]].record, view) for path, view in new.items()}
    leaves.clear()
    for name, leaf in old.items():
        leaves.update(added if name in gone else {name: leaf})  # later updates keep the place of the first


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """A change of a tree. `name` is its name in YAML and on the command line."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the fields that mean the same in all operations."""
        for field in dataclasses.fields(self):
            subject, value = f"{self.name}: {field.name.removesuffix('_')}", getattr(self, field.name)
            if field.name in ("leaves", "to", "from_", "leaf") and field.type == "str":
                check_pattern(subject, value)
            elif field.type == "Sequence[str]":
                # Not `list_of`: it accepts sets, whose order is random.
                if isinstance(value, str) or not isinstance(value, Sequence) or not value:
                    refuse(subject, "a list of paths", value)
                self._set(field.name, tuple(value))
                for pattern in value:
                    check_pattern(subject, pattern)
            elif str(field.type).startswith("Sequence[int") and value is not None:
                may_be_none = "int | None" in str(field.type)
                least = -1 if self.name == "reshape" else 0
                sizes = [None if each is None and may_be_none else whole_number(subject, each, least) for each in value]
                self._set(field.name, tuple(sizes))
            elif field.name == "axis":
                whole_number(subject, value)
            elif field.name == "dtype":
                if value not in DTYPES:
                    hint = nearest(value, DTYPES)
                    raise SettingsError(f'{subject}: expected a dtype such as "bfloat16", found {value!r}{hint}')
        for pattern, template in itertools.product(self._texts("leaves", "from_"), self._texts("to", "into")):
            wanted, found = ([each for each in wildcards(text) if each != INDEX] for text in (pattern, template))
            if wanted != found:
                raise SettingsError(
                    f"{self.name}: expected the wildcards of {pattern!r} in {template!r}, in the same order, found "
                    f"{' '.join(found) or 'none'}"
                )

    def _texts(self, *fields: str) -> list[str]:
        found = [getattr(self, field) for field in fields if hasattr(self, field)]
        return [text for value in found for text in ([value] if isinstance(value, str) else value)]

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    @abc.abstractmethod
    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """Change the leaves, without reading data, and return the changes as text.

        Raises:
            MismatchError: the operation does not fit the leaves. The message begins with `subject`.
        """


def check_leaves(leaves: Leaves, before: Leaves, subject: str) -> None:
    """Raise MismatchError if leaves could not be written to a checkpoint and opened. `before` are the old ones."""
    if len(leaves) > MAX_ARRAYS:
        raise MismatchError(f"{subject}: expected at most {MAX_ARRAYS:,} leaves, found {len(leaves):,} as its result")
    for name in leaves.keys() - before.keys():
        try:
            for key in split(name):
                parse_key(key)
        except (ValueError, OverflowError) as error:
            raise MismatchError(f"{subject}: {name!r:.200} is not a leaf path: {error}") from error
        if name.count("/") >= MAX_DEPTH:
            raise MismatchError(f"{subject}: leaf {name!r:.200}: expected at most {MAX_DEPTH} levels, found more")
    pair = find_nested_leaves(leaves) if leaves.keys() != before.keys() else None
    if pair is not None:
        raise MismatchError(f"{subject}: leaf {pair[0]!r} would be below leaf {pair[1]!r}; drop or rename one")
    known = {id(leaf.view) for leaf in before.values()}
    for name, leaf in leaves.items():
        if leaf.view is not None and id(leaf.view) not in known:
            size = array_bytes(leaf.view.shape, leaf.view.dtype.itemsize)
            if size is None or size > MOST_BYTES:
                wanted = f"expected a valid shape of at most {MOST_BYTES >> 40} TiB"
                raise MismatchError(f"{subject}: leaf {name!r}: {wanted}, found {leaf.describe():.200}")


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    pieces = _PIECES.findall(pattern)
    return re.compile("".join(_EXPRESSIONS.get(piece, re.escape(piece)) for piece in pieces), re.DOTALL)


def wildcards(pattern: str) -> list[str]:
    """Return the wildcards of a pattern, `*`, `**` and `{}`, in order."""
    return [piece for piece in _PIECES.findall(pattern) if piece in _EXPRESSIONS]


def match_pattern(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the texts that the wildcards match in a name, in order, or None if the name does not match."""
    match = _expression(pattern).fullmatch(name)
    return None if match is None else match.groups()


def fill_template(template: str, texts: Sequence[str]) -> str:
    """Replace the wildcards of a template by texts, in order."""
    left = iter(texts)
    return "".join(next(left) if piece in _EXPRESSIONS else piece for piece in _PIECES.findall(template))


def matches(pattern: str, names: Collection[str], subject: str) -> dict[str, tuple[str, ...]]:
    """Return the names that match a pattern, with the texts that its wildcards match, or raise MismatchError."""
    found = {name: groups for name in names if (groups := match_pattern(pattern, name)) is not None}
    if not found:
        hint = suggestion(pattern, names, lambda tried: lambda name: match_pattern(tried, name) is not None)
        hint = hint or f"; there are {describe_keys(pattern, names)}"
        raise MismatchError(f"{subject}: no leaf matches {pattern!r}{hint}")
    return found


def check_pattern(subject: str, pattern: object) -> None:
    """Raise SettingsError unless a value is a pattern: text with at most one index."""
    if not isinstance(pattern, str) or not pattern:
        example = '"layers/*/kernel"'
        raise SettingsError(f"{subject}: expected a leaf path or a pattern such as {example}, found {pattern!r}")
    if wildcards(pattern).count(INDEX) > 1:
        raise SettingsError(f"{subject}: expected one {INDEX} at most, found {pattern!r}")


def whole_number(subject: str, value: object, least: int | None = None) -> int:
    """Return the value, or raise SettingsError unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        wanted = "a whole number" if least is None else f"a whole number from {least}"
        raise SettingsError(f"{subject}: expected {wanted}, found {value!r}")
    return value


def check_axis(axis: int, dimensions: int, name: str, subject: str) -> int:
    """Return an axis as a number from 0, or raise MismatchError if a leaf lacks this axis."""
    if not -dimensions <= axis < dimensions:
        raise MismatchError(f"{subject}: leaf {name!r}: expected an array with axis {axis}, found {dimensions} axes")
    return axis % dimensions


def _move(leaves: Leaves, new: Mapping[str, str], subject: str) -> list[Change]:
    """Give leaves the paths in `new`."""
    for name, path in new.items():
        if path in leaves and path not in new:
            raise MismatchError(f"{subject}: leaf {name!r} would become {path!r}, which already exists")
    if len(set(new.values())) != len(new):
        raise MismatchError(f"{subject}: several leaves would get the same path; rename them first, or add wildcards")
    renamed = {new.get(name, name): leaf for name, leaf in leaves.items()}
    leaves.clear()
    leaves.update(renamed)
    return list(new.items())


@dataclasses.dataclass(frozen=True)
class Rename(Operation):
    """Change leaf paths: `Rename("model/**", "params/**")`, with the same wildcards in the same order."""

    name = "rename"
    leaves: str
    to: str

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        found = matches(self.leaves, leaves, subject)
        return _move(leaves, {name: fill_template(self.to, texts) for name, texts in found.items()}, subject)


@dataclasses.dataclass(frozen=True)
class Copy(Operation):
    """Copy leaves to a second path, such as an output layer that shares its weights with an embedding."""

    name = "copy"
    from_: str
    to: str

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        found = {name: fill_template(self.to, texts) for name, texts in matches(self.from_, leaves, subject).items()}
        for name, new in found.items():
            if new in leaves:
                raise MismatchError(f"{subject}: leaf {new!r} already exists; drop it first")
            leaves[new] = leaves[name]
        return [(f"{name} {leaves[name].describe()}", f"{name}, {new}") for name, new in found.items()]


@dataclasses.dataclass(frozen=True)
class Nest(Operation):
    """Split keys that contain a separator: `Nest(".")` turns the key `a.b` into the path `a/b`."""

    name = "nest"
    separator: str = "."
    leaves: str = "**"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.separator, str) or not self.separator:
            raise SettingsError(f'nest: separator: expected text such as ".", found {self.separator!r}')

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        nested = {name: self._nested(name) for name in matches(self.leaves, leaves, subject)}
        return _move(leaves, {name: new for name, new in nested.items() if new != name}, subject)

    def _nested(self, name: str) -> str:
        path = ROOT
        for whole in split(name):
            for key in str(parse_key(whole)).split(self.separator):
                path = join(path, key if key.isdigit() else key_text(key, path))
        return path


@dataclasses.dataclass(frozen=True)
class Drop(Operation):
    """Leave out leaves."""

    name = "drop"
    leaves: str

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        found = matches(self.leaves, leaves, subject)
        return [(f"{name} {leaves.pop(name).describe()}", "nothing") for name in found]


class _EachArray(Operation):
    leaves: str

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        changes = []
        for name in matches(self.leaves, leaves, subject):
            old, view = leaves[name], require_array(leaves, name, subject)
            leaves[name] = Leaf(old.record, self._changed(view, f"{subject}: leaf {name!r}"))
            changes.append((f"{name} {old.describe()}", leaves[name].describe()))
        return changes

    @abc.abstractmethod
    def _changed(self, view: View, leaf: str) -> View:
        """Return the changed array, or raise MismatchError. Messages begin with `leaf`."""


@dataclasses.dataclass(frozen=True)
class Transpose(_EachArray):
    """Reorder axes: axis `n` of the new array is axis `axes[n]` of the old one. None reverses the axes."""

    name = "transpose"
    leaves: str
    axes: Sequence[int] | None = None

    def _changed(self, view: View, leaf: str) -> View:
        places = list(range(len(view.shape)))
        axes = places[::-1] if self.axes is None else self.axes
        if sorted(axes) != places:
            raise MismatchError(f"{leaf}: axes: expected each of {places} once, found {list(axes)}")
        return views.Transposed(view, axes)


@dataclasses.dataclass(frozen=True)
class Reshape(_EachArray):
    """Change the shape of arrays, and keep their elements in row-major order. One size may be -1: what remains."""

    name = "reshape"
    leaves: str
    shape: Sequence[int]

    def _changed(self, view: View, leaf: str) -> View:
        count, known = math.prod(view.shape), math.prod(size for size in self.shape if size != -1)
        left = count // known if known else 0
        shape = [left if size == -1 else size for size in self.shape]
        if math.prod(shape) != count:
            raise MismatchError(f"{leaf}: expected a shape that fits {list(self.shape)}, found {list(view.shape)}")
        return views.Reshaped(view, shape)


@dataclasses.dataclass(frozen=True)
class Cast(_EachArray):
    """Convert arrays to another dtype. Floats are rounded, and may become infinite; integers must fit."""

    name = "cast"
    leaves: str
    dtype: str

    def _changed(self, view: View, leaf: str) -> View:
        new = DTYPES[self.dtype]
        if _dtype_class(view.dtype) > _dtype_class(new):
            raise MismatchError(f"{leaf} cannot be cast from {view.dtype.name} to {new.name}, because that loses data")
        return views.Cast(view, new, f"{leaf} of {view.dtype.name}")


def _dtype_class(dtype: np.dtype) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats and 3 for complex numbers."""
    if "complex" in dtype.name:
        return 3
    return 2 if "float" in dtype.name else 0 if dtype.name == "bool" else 1


def _new_shape(view: View, wanted: Sequence[int | None], leaf: str, *, larger: bool) -> tuple[int, ...]:
    """Return a shape with the size of the array for None, or raise MismatchError if it does not fit."""
    if len(wanted) != len(view.shape):
        raise MismatchError(f"{leaf}: expected {len(wanted)} axes, found {len(view.shape)}")
    shape = tuple(old if size is None else size for old, size in zip(view.shape, wanted, strict=True))
    if any((new < old) if larger else (new > old) for old, new in zip(view.shape, shape, strict=True)):
        fits = f"not {'larger' if larger else 'smaller'} than {list(shape)}"
        raise MismatchError(f"{leaf}: expected a shape that is {fits}, found {list(view.shape)}")
    return shape


@dataclasses.dataclass(frozen=True)
class Pad(_EachArray):
    """Enlarge arrays at their ends with a value, such as the vocabulary of an embedding. None keeps a size."""

    name = "pad"
    leaves: str
    shape: Sequence[int | None]
    value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.value):
            raise SettingsError(f"pad: value: expected a number, found {self.value!r}")

    def _changed(self, view: View, leaf: str) -> View:
        shape = _new_shape(view, self.shape, leaf, larger=True)
        return views.Padded(view, shape, _number_of(self.value, view.dtype, leaf))


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _number_of(value: float, dtype: np.dtype, leaf: str) -> np.ndarray:
    number = views.number_as(value, dtype)
    if number is None:
        raise MismatchError(f"{leaf} of {dtype.name} cannot hold the value {value!r:.99}")
    return number


@dataclasses.dataclass(frozen=True)
class Truncate(_EachArray):
    """Cut arrays off at their ends. None keeps a size."""

    name = "truncate"
    leaves: str
    shape: Sequence[int | None]

    def _changed(self, view: View, leaf: str) -> View:
        return views.Sliced(view, full_box(_new_shape(view, self.shape, leaf, larger=False)))


@dataclasses.dataclass(frozen=True)
class Stack(Operation):
    """Stack the arrays of all layers along a new axis: `Stack("layers/{}/**", "layers/**")`; numbers start at 0."""

    name = "stack"
    leaves: str
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        check_pattern("stack: leaves", self.leaves)
        if INDEX not in wildcards(self.leaves):
            raise SettingsError(f"stack: leaves: expected {INDEX} for the layer's number, found {self.leaves!r}")
        super().__post_init__()
        if INDEX in wildcards(self.to):
            raise SettingsError(f"stack: expected no {INDEX} in to, the path of a single array, found {self.to!r}")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        place = wildcards(self.leaves).index(INDEX)
        groups: dict[str, dict[int, str]] = {}
        for name, texts in matches(self.leaves, leaves, subject).items():
            new = fill_template(self.to, texts[:place] + texts[place + 1 :])
            groups.setdefault(new, {})[int(texts[place])] = name
        changes = []
        for new, layers in groups.items():
            if sorted(layers) != list(range(len(layers))):
                raise MismatchError(f"{subject}: {new!r}: expected layers 0 to {max(layers)}, found {sorted(layers)}")
            names = [layers[number] for number in sorted(layers)]
            changes.append(_join(leaves, names, new, self.axis, subject, new=True))
        return changes


@dataclasses.dataclass(frozen=True)
class Unstack(Operation):
    """Make an array for each layer out of one for all, without their axis: `Unstack("layers/**", "layers/{}/**")`."""

    name = "unstack"
    leaves: str
    to: str
    axis: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if INDEX not in wildcards(self.to) or INDEX in wildcards(self.leaves):
            found = f"{self.to!r} and {self.leaves!r}"
            raise SettingsError(f"unstack: expected {INDEX} in to, and not in leaves, found {found}")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        place, changes = wildcards(self.to).index(INDEX), []
        for name, texts in matches(self.leaves, leaves, subject).items():
            view, old = require_array(leaves, name, subject), leaves[name].describe()
            axis = check_axis(self.axis, len(view.shape), name, subject)
            if view.shape[axis] > MAX_ARRAYS:
                found = f"expected at most {MAX_ARRAYS:,} layers, found {view.shape[axis]:,}"
                raise MismatchError(f"{subject}: leaf {name!r}: {found}")
            into = [*texts[:place], INDEX, *texts[place:]]
            new: dict[str, View] = {}
            for number in range(view.shape[axis]):
                into[place] = str(number)
                new[fill_template(self.to, into)] = views.Sliced(view, _band(view, axis, number, number + 1), (axis,))
            into[place] = INDEX
            changes.append((f"{name} {old}", f"{len(new)} of {fill_template(self.to, into)}"))
            replace_leaves(leaves, new, [name], subject)
        return changes


def _band(view: View, axis: int, start: int, stop: int) -> Box:
    box = full_box(view.shape)
    return (*box[:axis], (start, stop), *box[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class Split(Operation):
    """Cut arrays along an axis: `Split("*/qkv", ["*/q", "*/k", "*/v"], axis=0)`. Without `sizes`, parts are equal."""

    name = "split"
    leaves: str
    into: Sequence[str]
    axis: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        twice = [template for template in self.into if self.into.count(template) > 1]
        if twice:
            raise SettingsError(f"split: into: expected a different path for each part, found {twice[0]!r} twice")
        if self.sizes is not None and len(self.sizes) != len(self.into):
            raise SettingsError(f"split: expected a size for each of {len(self.into)} parts, found {len(self.sizes)}")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        changes = []
        for name, texts in matches(self.leaves, leaves, subject).items():
            view, old = require_array(leaves, name, subject), leaves[name].describe()
            axis = check_axis(self.axis, len(view.shape), name, subject)
            new, at = dict[str, View](), 0
            for template, size in zip(self.into, self._sizes(view.shape[axis], name, subject), strict=True):
                new[fill_template(template, texts)] = views.Sliced(view, _band(view, axis, at, at + size))
                at += size
            replace_leaves(leaves, new, [name], subject)
            changes.append((f"{name} {old}", _describe(leaves, list(new))))
        return changes

    def _sizes(self, width: int, name: str, subject: str) -> Sequence[int]:
        sizes = self.sizes or [width // len(self.into)] * len(self.into)
        if sum(sizes) != width:
            raise MismatchError(f"{subject}: leaf {name!r}: expected sizes that add up to {width}, found {list(sizes)}")
        return sizes


@dataclasses.dataclass(frozen=True)
class Fuse(Operation):
    """Join arrays along an axis: `Fuse(["*/q", "*/k", "*/v"], "*/qkv", axis=0)`, all with the same wildcards."""

    name = "fuse"
    leaves: Sequence[str]
    to: str
    axis: int = 0

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        changes = []
        for texts in dict.fromkeys(matches(self.leaves[0], leaves, subject).values()):
            names = [fill_template(pattern, texts) for pattern in self.leaves]
            missing = [name for name in names if name not in leaves]
            if missing:
                raise MismatchError(f"{subject}: leaf {missing[0]!r}, to be joined with {names[0]!r}, does not exist")
            changes.append(_join(leaves, names, fill_template(self.to, texts), self.axis, subject, new=False))
        return changes


def _join(leaves: Leaves, names: Sequence[str], to: str, axis: int, subject: str, *, new: bool) -> Change:
    """Join arrays along an axis, which is a new one with `new`."""
    arrays = [require_array(leaves, name, subject) for name in names]
    place = check_axis(axis, len(arrays[0].shape) + new, names[0], subject)

    def fixed(array: View) -> tuple[Any, ...]:
        return array.dtype, len(array.shape), array.shape[:place], array.shape[place + (not new) :]

    for name, array in zip(names, arrays, strict=True):
        if fixed(array) != fixed(arrays[0]):
            alike = "the same shape and dtype" if new else f"the same dtype, and the same shape except on axis {place}"
            found = f"expected {alike}, found {_describe(leaves, [names[0], name])}"
            raise MismatchError(f"{subject}: leaf {name!r} does not fit {names[0]!r}: {found}")
    old = _describe(leaves, names)
    replace_leaves(leaves, {to: views.Joined(arrays, place, new=new)}, names, subject)
    return old, f"{to} {leaves[to].describe()}"


def _describe(leaves: Leaves, names: Sequence[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > _MAX_LISTED else ""
    return ", ".join(f"{name} {leaves[name].describe()}" for name in names[:_MAX_LISTED]) + more


@dataclasses.dataclass(frozen=True)
class Add(Operation):
    """Add an array, such as an adapter that is not in the checkpoint.

    `init` is "zeros", "ones" or a number.
    """

    name = "add"
    leaf: str
    shape: Sequence[int]
    dtype: str = "float32"
    init: str | float = "zeros"

    def __post_init__(self) -> None:
        super().__post_init__()
        if wildcards(self.leaf):
            raise SettingsError(f"add: leaf: expected a path without wildcards, found {self.leaf!r}")
        if not (_is_number(self.init) or self.init in ("zeros", "ones")):
            raise SettingsError(f"add: init: expected zeros, ones or a number, found {self.init!r}")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        if self.leaf in leaves:
            raise MismatchError(f"{subject}: leaf {self.leaf!r} already exists; drop it first, or omit this operation")
        number = _CONSTANTS[self.init] if isinstance(self.init, str) else self.init
        value = _number_of(number, DTYPES[self.dtype], f"{subject}: leaf {self.leaf!r}")
        leaves[self.leaf] = Leaf(ArrayLeaf(), views.Constant(self.shape, value))
        return [("nothing", f"{self.leaf} {leaves[self.leaf].describe()}")]


_KINDS = (Rename, Nest, Drop, Copy, Stack, Unstack, Split, Fuse, Transpose, Reshape, Cast, Pad, Truncate, Add)
OPERATIONS: dict[str, type[Any]] = {kind.name: kind for kind in _KINDS}
