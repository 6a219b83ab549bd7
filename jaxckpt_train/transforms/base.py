"""The base of operations on a checkpoint's tree: the leaves that they change, patterns of leaf paths, and checks."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxckpt_train._validation import nearest, refuse
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.pytree.leaves import (
    MAX_DEPTH,
    ArrayLeaf,
    KeyLeaf,
    LeafRecord,
    describe_keys,
    find_nested_leaves,
    parse_key,
    split,
    suggestion,
)
from jaxckpt_train.store.manifest import MAX_ARRAYS
from jaxckpt_train.store.segment import DTYPES, array_bytes
from jaxckpt_train.transforms.views import View

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
