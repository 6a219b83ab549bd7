"""The tree that operations work on: leaves by path, each a record and, if it has data, a view of that."""

from __future__ import annotations

from typing import NamedTuple

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.surgery.views import View
from jaxckpt_train.tree.leaf_records import ArrayLeaf, KeyLeaf, LeafRecord


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
