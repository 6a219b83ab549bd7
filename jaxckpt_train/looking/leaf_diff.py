"""How the leaves of two checkpoints differ: which there are, and how far their values are apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxckpt_train.looking.leaf_reads import over_pieces, pieces_of
from jaxckpt_train.looking.value_distance import Distance, distance
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.tree.leaf_records import LeafRecord, describe_saved, python_value


@dataclasses.dataclass
class LeafDiff:
    """How a leaf differs.

    Attributes:
        name: its checkpointable and leaf path.
        kind: "only_a", "only_b", "form" (shape, dtype or kind differ), "value", "equal".
        a, b: what it is in each, as text; "": it is not there.
        value_a, value_b: the values of plain Python leaves; None: of an array, or of nothing.
        differing, count: how many values differ bit by bit, of how many.
        max_abs: the largest difference; None: of a leaf that is no array, or has none of numbers.
        difference, norm: square roots of the sums of squares, of the differences and of the values in `a`.
    """

    name: str
    kind: str
    a: str
    b: str
    value_a: Any = None
    value_b: Any = None
    differing: int = 0
    count: int = 0
    max_abs: float | None = None
    difference: float = 0.0
    norm: float = 0.0

    @property
    def relative(self) -> float | None:
        """The norm of the finite differences by that of the values in `a`; nan: none is finite."""
        if self.max_abs is None:
            return None
        if not self.difference and not math.isfinite(self.max_abs):
            return math.nan
        return self.difference / self.norm if self.norm else math.inf if self.difference else 0.0


def leaves_by_name(opened: Opened) -> dict[str, tuple[LeafRecord, ArrayRecord | None]]:
    """All leaves of all trees, by the name of the checkpointable and the leaf path."""
    arrays = opened.arrays()
    found = {}
    for part, record in opened.trees.items():
        for name, leaf in record.leaves.items():
            full = f"{part}/{name}"
            found[full] = (leaf, arrays.get(full))
    return found


def diff_leaves(
    a: Opened,
    b: Opened,
    selected: Callable[[str], bool] = lambda name: True,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Iterator[LeafDiff]:
    """The differences of all leaves, in the order of `a`, then what only `b` has; equal ones too.

    What has the same digests is not read. Values are compared bit by bit, so that nan is equal to itself, and 0 and -0
    differ.

    Raises:
        CorruptCheckpointError: bytes are not what was saved.
        StorageError: they cannot be read.
    """
    of_a, of_b = leaves_by_name(a), leaves_by_name(b)
    found: dict[str, LeafDiff] = {}
    to_read: list[tuple[str, ArrayRecord, ArrayRecord]] = []
    for name in [*of_a, *(name for name in of_b if name not in of_a)]:
        if not selected(name):
            continue
        one, other = of_a.get(name), of_b.get(name)
        found[name] = diff = _form(name, one, other)
        diff.value_a, diff.value_b = _plain_value(a, name, one), _plain_value(b, name, other)
        if diff.kind != "value":
            continue
        assert one is not None
        assert other is not None
        if one[1] is None or other[1] is None:
            diff.kind = "equal" if one[0] == other[0] else "value"
        elif _same_digests(a, one[1], b, other[1]):
            diff.kind, diff.count = "equal", math.prod(one[1].shape)
            progress(2 * _nbytes(one[1]))
        else:
            to_read.append((name, one[1], other[1]))
    _compare(a, b, found, to_read, progress)
    yield from found.values()


def _form(
    name: str, one: tuple[LeafRecord, ArrayRecord | None] | None, other: tuple[LeafRecord, ArrayRecord | None] | None
) -> LeafDiff:
    a, b = ("" if each is None else describe_saved(*each) for each in (one, other))
    if one is None or other is None:
        return LeafDiff(name, "only_b" if one is None else "only_a", a, b)
    return LeafDiff(name, "value" if a == b else "form", a, b)


def _plain_value(opened: Opened, name: str, leaf: tuple[LeafRecord, ArrayRecord | None] | None) -> Any:
    return None if leaf is None or leaf[1] is not None else python_value(name, leaf[0], opened.path)


def _same_digests(a: Opened, one: ArrayRecord, b: Opened, other: ArrayRecord) -> bool:
    """Whether the digests say that both are equal; they say nothing where chunks are cut otherwise."""
    first, second = a.committed.manifest, b.committed.manifest
    if (first.digest, first.block_bytes) != (second.digest, second.block_bytes):
        return False
    mine, theirs = ([(chunk.box, chunk.digests) for chunk in array.chunks] for array in (one, other))
    return mine == theirs and all(digests for _, digests in mine)


def _nbytes(array: ArrayRecord) -> int:
    return math.prod(array.shape) * DTYPES[array.dtype].itemsize


def _compare(
    a: Opened,
    b: Opened,
    found: dict[str, LeafDiff],
    to_read: list[tuple[str, ArrayRecord, ArrayRecord]],
    progress: Callable[[int], object],
) -> None:
    for name, one, _ in to_read:
        found[name].count = math.prod(one.shape)
    wanted = (piece for name, one, other in to_read for piece in pieces_of(name, (one, other)))
    sums = {name: Distance() for name, *_ in to_read}
    for piece, (first, second) in over_pieces((a, b), wanted):
        sums[piece.name] = sums[piece.name].plus(distance(first, second))
        progress(piece.nbytes)
    for name, each in sums.items():
        diff = found[name]
        diff.differing, diff.difference, diff.norm = each.differing, each.difference, each.norm
        diff.kind, diff.max_abs = ("value", each.max_abs) if each.differing else ("equal", None)
