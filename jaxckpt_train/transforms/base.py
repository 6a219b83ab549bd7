"""What an operation on a checkpoint's tree is.

Patterns of leaf paths whose wildcards are taken over into new paths.

What must hold of the leaves after each operation: that a checkpoint of them can be written, and opened again.

The tree that operations work on: leaves by path, each a record and, if it has data, a view of that.
"""

from __future__ import annotations

import abc
import functools
import re
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

from jaxckpt_train._validation import nearest
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.pytree.flatten import MAX_DEPTH, one_below_another, parse_key, split
from jaxckpt_train.pytree.leaves import ArrayLeaf, KeyLeaf, LeafRecord
from jaxckpt_train.pytree.patterns import describe_keys, suggestion
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import MAX_ARRAYS
from jaxckpt_train.store.segment import array_bytes
from jaxckpt_train.transforms.views import View

MOST_BYTES = 1 << 44
"""No operation makes a larger array: 16 TiB, a million pieces."""
INDEX = "{}"
_PIECES = re.compile(r"\*\*|\*|\{\}|[^*{]+|\{")
_MEANING = {"**": "(.*)", "*": "([^/]*)", INDEX: "(?P<index>0|[1-9][0-9]*)"}
Change = tuple[str, str]
"""What was, and what is instead of it, as text."""


class Leaf(NamedTuple):
    """A leaf: its record, and its data if it has some."""

    record: LeafRecord
    view: View | None = None

    def text(self) -> str:
        """What it is, in a few words."""
        if self.view is None:
            return type(self.record).__name__.removesuffix("Leaf").lower()
        shape = ",".join(map(str, self.view.shape))
        kind = f"key<{self.record.impl}> " if isinstance(self.record, KeyLeaf) else ""
        return f"{kind}{self.view.dtype.name}[{shape}]"

    def with_view(self, view: View) -> Leaf:
        """The same with other data."""
        return Leaf(self.record, view)


Leaves = dict[str, Leaf]


def array_of(leaf: Leaf, name: str, subject: str) -> View:
    """The data of a leaf that is an array.

    Raises:
        MismatchError: it is none.
    """
    if leaf.view is None or not isinstance(leaf.record, ArrayLeaf):
        raise MismatchError(f"{subject}: leaf {name!r} is {leaf.text()}, expected an array")
    return leaf.view


def put(leaves: Leaves, new: Leaves, removed: set[str], subject: str) -> None:
    """Replace some leaves by others, which come where the first of those was.

    Raises:
        MismatchError: a name is taken by one that stays.
    """
    taken = [name for name in new if name in leaves and name not in removed]
    if taken:
        raise MismatchError(f"{subject}: leaf {taken[0]!r} is there already; rename or drop it first")
    old = dict(leaves)
    leaves.clear()
    waiting: Leaves | None = new
    for name, leaf in old.items():
        if name in removed:
            if waiting is not None:
                leaves.update(waiting)
                waiting = None
            continue
        leaves[name] = leaf
    leaves.update(waiting or {})


def check_leaves(leaves: Leaves, before: Leaves, subject: str) -> None:
    """Check what an operation has made.

    Args:
        leaves: all that there are.
        before: those that there were.
        subject: the operation, for messages.

    Raises:
        MismatchError: a leaf lies below another one, its path is none, an array is too large, or there are too many.
    """
    if len(leaves) > MAX_ARRAYS:
        raise MismatchError(f"{subject}: makes {len(leaves):,} leaves, expected at most {MAX_ARRAYS:,}")
    if leaves.keys() != before.keys():
        _check_paths(leaves, before, subject)
    known = {id(leaf.view) for leaf in before.values()}
    for name, leaf in leaves.items():
        if leaf.view is not None and id(leaf.view) not in known:
            size = array_bytes(leaf.view.shape, leaf.view.dtype.itemsize)
            if size is None or size > MOST_BYTES:
                raise MismatchError(
                    f"{subject}: leaf {name!r} would be {leaf.text():.200}, expected a shape that arrays can have, of "
                    f"at most {MOST_BYTES >> 40} TiB"
                )


def _check_paths(leaves: Leaves, before: Leaves, subject: str) -> None:
    for name in leaves.keys() - before.keys():
        try:
            for key in split(name):
                parse_key(key)
        except (ValueError, OverflowError) as error:
            raise MismatchError(f"{subject}: {name!r:.200} is no path of a leaf: {error}") from error
        if name.count("/") >= MAX_DEPTH:
            raise MismatchError(f"{subject}: leaf {name!r:.200} is deeper than {MAX_DEPTH} levels")
    pair = one_below_another(leaves)
    if pair is not None:
        raise MismatchError(
            f"{subject}: leaf {pair[0]!r} would lie below leaf {pair[1]!r}; drop one, or give it another path"
        )


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(_MEANING.get(piece, re.escape(piece)) for piece in _PIECES.findall(pattern)), re.DOTALL)


def wildcards(pattern: str) -> list[str]:
    """Its wildcards, `*`, `**` and `{}`, in order."""
    return [piece for piece in _PIECES.findall(pattern) if piece in _MEANING]


def taken(pattern: str, name: str) -> tuple[str, ...] | None:
    """What its wildcards stand for in a name, in order; None: it does not fit."""
    match = _expression(pattern).fullmatch(name)
    return None if match is None else match.groups()


def filled(template: str, texts: Sequence[str]) -> str:
    """A template with its wildcards replaced, in order."""
    left = iter(texts)
    return "".join(next(left) if piece in _MEANING else piece for piece in _PIECES.findall(template))


def check_template(subject: str, pattern: str, template: str) -> None:
    """Raise SettingsError unless a template has the wildcards of a pattern, in its order, but for the index."""
    wanted = [each for each in wildcards(pattern) if each != INDEX]
    found = [each for each in wildcards(template) if each != INDEX]
    if wanted != found:
        raise SettingsError(
            f"{subject}: expected the wildcards of {pattern!r} in {template!r}, in the same order, found "
            f"{' '.join(found) or 'none'} instead of {' '.join(wanted) or 'none'}"
        )


def check_pattern(subject: str, pattern: object) -> None:
    """Raise SettingsError unless it is a pattern: text with at most one index."""
    if not isinstance(pattern, str) or not pattern:
        raise SettingsError(
            f'{subject}: expected a leaf path or a pattern such as "layers/*/kernel", found {pattern!r}'
        )
    if wildcards(pattern).count(INDEX) > 1:
        raise SettingsError(f"{subject}: expected one {INDEX} at most, found {pattern!r}")


def matches(pattern: str, names: Collection[str], subject: str) -> dict[str, tuple[str, ...]]:
    """The names that fit a pattern, with what its wildcards stand for.

    Raises:
        MismatchError: none does.
    """
    found = {name: groups for name in names if (groups := taken(pattern, name)) is not None}
    if not found:
        hint = suggestion(pattern, names, lambda tried: lambda name: taken(tried, name) is not None)
        known = f"; there are {describe_keys(pattern, names)}"
        raise MismatchError(f"{subject}: no leaf fits {pattern!r}{hint or known}")
    return found


class Operation(abc.ABC):
    """One change of a tree."""

    name: ClassVar[str]
    """In YAML and on the command line."""

    @abc.abstractmethod
    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """Change the leaves; nothing is read. What has changed, as text.

        Raises:
            MismatchError: it does not fit them; the message begins with `subject`.
        """

    def _check_patterns(self, *fields: str) -> None:
        for field in fields:
            check_pattern(f"{self.name}: {field}", getattr(self, field))


def check_dtype(subject: str, name: object) -> None:
    """Raise SettingsError, with the one that may be meant, unless it is the name of a dtype."""
    if name in DTYPES:
        return
    short = re.fullmatch("(bf|fp|f)([0-9]+)", str(name))
    meant = f"{'bfloat' if short[1] == 'bf' else 'float'}{short[2]}" if short else ""
    hint = f', did you mean "{meant}"?' if meant in DTYPES else nearest(name, DTYPES)
    raise SettingsError(f'{subject}: expected the name of a dtype such as "bfloat16", found {name!r}{hint}')


def whole_number(subject: str, value: object, *, least: int | None = None) -> int:
    """The value, or SettingsError if it is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise SettingsError(
            f"{subject}: expected a whole number{'' if least is None else f' from {least}'}, found {value!r}"
        )
    return value


def axis_of(axis: int, dimensions: int, name: str, subject: str) -> int:
    """An axis counted from the first one, or MismatchError if a leaf with so many has none such."""
    if not -dimensions <= axis < dimensions:
        raise MismatchError(f"{subject}: leaf {name!r} has {dimensions} axes, expected one with axis {axis}")
    return axis % dimensions
