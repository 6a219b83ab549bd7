"""The operation that averages leaves over several checkpoints, such as the last steps of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import Box, box_shape
from jaxckpt_train.store.dtypes import is_inexact
from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.store.transaction import open_committed
from jaxckpt_train.surgery.fitting import converted
from jaxckpt_train.surgery.leaves import Leaf, Leaves
from jaxckpt_train.surgery.names import matches, taken
from jaxckpt_train.surgery.operate import leaves_of
from jaxckpt_train.surgery.operation import Change, Operation
from jaxckpt_train.surgery.views import Piece, View, cut
from jaxckpt_train.tree.leaf_records import ArrayLeaf, ComplexLeaf, FloatLeaf, has_tree, python_value
from jaxckpt_train.value_checks import absolute_path, text

DEFAULT_PART = "state"


@dataclasses.dataclass(frozen=True)
class Average(Operation):
    """Average floating-point leaves with those of other checkpoints of this package.

    Sums are made in float64 (complex128 of complex numbers), and the mean is rounded once to the dtype of the leaf.
    What is no floating-point number (integers, PRNG keys, text) has to be the same in all of them.

    Args:
        leaves: a path or pattern; leaves that do not fit it stay those of the checkpoint that is changed.
        with_: paths of the other checkpoints; written `with` in YAML, JSON and on the command line.
        part: the name of the checkpointable in the others; None: `state`, or the only tree.
    """

    name = "average"
    leaves: str
    with_: Sequence[str]
    part: str | None = None

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        if isinstance(self.with_, str) or not isinstance(self.with_, Sequence) or not self.with_:
            raise SettingsError(f"average: with: expected a list of paths of checkpoints, found {self.with_!r}")
        paths = tuple(absolute_path("average: with", path) for path in self.with_)
        object.__setattr__(self, "with_", paths)
        if self.part is not None:
            text("average: part", self.part)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        names = list(matches(self.leaves, leaves, subject))
        others = [(path, self._leaves_at(path, subject)) for path in self.with_]
        for path, other in others:
            differing = {name for name in other if taken(self.leaves, name) is not None}.symmetric_difference(names)
            if differing:
                raise MismatchError(f"{subject}: leaf {min(differing)!r} is in one alone of this checkpoint and {path}")
        new = {name: _mean(name, leaves[name], [(path, other[name]) for path, other in others]) for name in names}
        averaged = [name for name in names if new[name].record != leaves[name].record or _is_float(new[name])]
        if not averaged:
            raise MismatchError(f"{subject}: {self.leaves!r} selects no floating-point leaves")
        leaves.update(new)
        count = len(others) + 1
        return [(f"{name} {leaves[name].text()}", f"the mean of {count}") for name in averaged]

    def _leaves_at(self, path: str, subject: str) -> Leaves:
        backend = LocalBackend()
        committed = open_committed(backend, path)
        trees = [part.name for part in committed.manifest.parts if has_tree(part)]
        name = self.part or (trees[0] if len(trees) == 1 else DEFAULT_PART)
        part = committed.manifest.part(name)
        if part is None or not has_tree(part):
            there = ", ".join(map(repr, trees)) or "none"
            raise MismatchError(f"{subject}: {path}: expected a tree {name!r}, found {there}")
        return leaves_of(backend, committed, part, StoreSettings())


def _is_float(leaf: Leaf) -> bool:
    if leaf.view is not None:
        return isinstance(leaf.record, ArrayLeaf) and is_inexact(leaf.view.dtype)
    return isinstance(leaf.record, FloatLeaf | ComplexLeaf)


def _mean(name: str, leaf: Leaf, others: Sequence[tuple[str, Leaf]]) -> Leaf:
    """A leaf averaged with others; where it is no floating-point number, the leaf itself, if all are the same.

    Raises:
        MismatchError: they differ in what they are, or in a value that has no mean.
    """
    for path, other in others:
        same_sort = type(other.record) is type(leaf.record) and other.text() == leaf.text()
        if not same_sort or (leaf.view is None and not _is_float(leaf) and other.record != leaf.record):
            raise MismatchError(
                f"average: leaf {name!r} is {leaf.text()}, and {other.text()} in {path}, or has another value there; "
                "choose leaves without it"
            )
    if leaf.view is not None:
        views = [other.view for _, other in others if other.view is not None]
        if _is_float(leaf):
            return leaf.with_view(Mean([*views, leaf.view], name))  # in the order of the steps
        return leaf.with_view(Same([leaf.view, *views], name, [path for path, _ in others]))
    if not _is_float(leaf):
        return leaf
    values = [python_value(name, each.record, name) for each in (leaf, *(other for _, other in others))]
    with np.errstate(all="ignore"):
        mean = np.mean(np.array(values)).item()
    record = FloatLeaf(mean.hex()) if isinstance(mean, float) else ComplexLeaf(mean.real.hex(), mean.imag.hex())
    return Leaf(record)


class _OfSeveral:
    """A view of several arrays of one shape and dtype, read in bands of the pieces of the first."""

    def __init__(self, inner: Sequence[View], name: str) -> None:
        self._inner, self._name = list(inner), name
        self.shape, self.dtype = inner[0].shape, inner[0].dtype
        self._wide = np.dtype(np.complex128 if "complex" in self.dtype.name else np.float64)

    def pieces(self) -> Sequence[Piece]:
        """Bands of the pieces of the first array."""
        return [Piece(band) for piece in self._inner[0].pieces() for band in cut(piece.box, self._wide.itemsize)]

    def _read(self, view: View, box: Box) -> np.ndarray:
        found = np.empty(box_shape(box), self.dtype)
        view.read(box, found)
        return found


class Mean(_OfSeveral):
    """The mean of floating-point arrays."""

    def read(self, box: Box, target: np.ndarray) -> None:
        """Fill `target` with the mean of a box."""
        total = np.zeros(box_shape(box), self._wide)
        with np.errstate(all="ignore"):  # nan and inf of the arrays are those of the mean
            for view in self._inner:
                total += self._read(view, box).astype(self._wide)
            total /= len(self._inner)
        target[...] = converted(total, self.dtype, f"average: leaf {self._name!r}", [start for start, _ in box])


class Same(_OfSeveral):
    """Arrays that have no mean, and have to be the same; `paths` are those of all but the first, for messages."""

    def __init__(self, inner: Sequence[View], name: str, paths: Sequence[str]) -> None:
        super().__init__(inner, name)
        self._paths = list(paths)

    def read(self, box: Box, target: np.ndarray) -> None:
        """Fill `target` with a box.

        Raises:
            MismatchError: it is another one in one of the arrays.
        """
        first = self._read(self._inner[0], box)
        for view, path in zip(self._inner[1:], self._paths, strict=True):
            if self._read(view, box).tobytes() != first.tobytes():
                raise MismatchError(
                    f"average: leaf {self._name!r} of {self.dtype.name} has no mean, and other values in {path}; "
                    "choose leaves without it: it stays that of the newest"
                )
        target[...] = first
