"""Compares two opened checkpoints: their leaves, their containers, and checkpointables that are not trees.

Arrays with equal digests are not read. Others are read in pieces, ahead on other threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxckpt_train.inspection.runs import nbytes_of
from jaxckpt_train.inspection.stats import has_complex, sum_of_squares
from jaxckpt_train.opened import Opened
from jaxckpt_train.pytree.leaves import (
    ROOT,
    EmptyLeaf,
    LeafRecord,
    TreeRecord,
    describe_saved,
    has_tree,
    join,
    python_value,
    split,
)
from jaxckpt_train.store.boxes import Box, box_elements, cut_box, full_box
from jaxckpt_train.store.copy import BoxAhead, LazyBox, ReadAhead
from jaxckpt_train.store.files import read_recorded
from jaxckpt_train.store.manifest import ArrayRecord, FileRecord, PartRecord
from jaxckpt_train.store.segment import DTYPES

PIECE_BYTES = 16 << 20
KNOWN = 1024  # pieces planned before they are needed, so that small ones are read together with their successors
AT_ONCE = 4  # concurrent reads of each checkpoint
BLOCK = 1 << 16  # values compared at a time
Leaf = tuple[LeafRecord, ArrayRecord | None]


@dataclasses.dataclass
class LeafDiff:
    """The comparison of a leaf.

    `difference` and `norm` are the roots of the sums of squares of the differences, and of the values in `a`.
    """

    name: str  # its checkpointable and leaf path
    kind: str  # "only_a", "only_b", "form" (shape, dtype or kind differ), "value", "equal"
    a: str  # its description in each checkpoint; "": it does not exist there
    b: str
    value_a: Any = None  # the values of plain Python leaves
    value_b: Any = None
    differing: int = 0  # the number of values that differ bit by bit
    count: int = 0
    max_abs: float | None = None  # the largest difference of arrays that differ
    difference: float = 0.0
    norm: float = 0.0

    @property
    def relative(self) -> float | None:
        """The norm of the finite differences divided by that of the values in `a`. nan: no difference is finite."""
        if self.max_abs is None:
            return None
        if not self.difference and not math.isfinite(self.max_abs):
            return math.nan
        return self.difference / self.norm if self.norm else math.inf if self.difference else 0.0


def leaves_by_name(opened: Opened) -> dict[str, Leaf]:
    """Return the leaves of all trees, by checkpointable and leaf path."""
    arrays = opened.arrays()
    return {
        f"{part}/{name}": (leaf, arrays.get(f"{part}/{name}"))
        for part, record in opened.trees.items()
        for name, leaf in record.leaves.items()
    }


def diff_leaves(
    a: Opened, b: Opened, selected: Callable[[str], bool], progress: Callable[[int], object]
) -> list[LeafDiff]:
    """Compare all leaves, in the order of `a`, then those only in `b`. Equal leaves are included.

    Values are compared bit by bit: nan equals itself, and 0 and -0 differ.
    """
    of_a, of_b = leaves_by_name(a), leaves_by_name(b)
    found: dict[str, LeafDiff] = {}
    to_read: dict[str, tuple[ArrayRecord, ArrayRecord]] = {}
    for name in filter(selected, of_a | of_b):
        one, other = of_a.get(name), of_b.get(name)
        found[name] = diff = _compare_form(name, one, other)
        diff.value_a, diff.value_b = _plain_value(a, name, one), _plain_value(b, name, other)
        if diff.kind != "value" or one is None or other is None:
            continue
        if one[1] is None or other[1] is None:
            diff.kind = "equal" if one[0] == other[0] else "value"
            continue
        diff.count = math.prod(one[1].shape)
        if _same_digests(a, one[1], b, other[1]):
            diff.kind = "equal"
            progress(2 * nbytes_of(one[1]))
        else:
            to_read[name] = one[1], other[1]
    distances = {name: Distance() for name in to_read}
    wanted = (piece for name, arrays in to_read.items() for piece in pieces_of(name, arrays))
    for piece, (first, second) in over_pieces((a, b), wanted):
        distances[piece.name] = distances[piece.name].plus(distance(first, second))
        progress(piece.nbytes)
    for name, each in distances.items():
        diff = found[name]
        diff.differing, diff.difference, diff.norm = each.differing, each.difference, each.norm
        diff.kind, diff.max_abs = ("value", each.max_abs) if each.differing else ("equal", None)
    return [*found.values()]


def _compare_form(name: str, one: Leaf | None, other: Leaf | None) -> LeafDiff:
    a, b = ("" if each is None else describe_saved(*each) for each in (one, other))
    if one is None or other is None:
        return LeafDiff(name, "only_b" if one is None else "only_a", a, b)
    return LeafDiff(name, "value" if a == b else "form", a, b)


def _plain_value(opened: Opened, name: str, leaf: Leaf | None) -> Any:
    return None if leaf is None or leaf[1] is not None else python_value(name, leaf[0], opened.path)


def _have_same_blocks(a: Opened, b: Opened) -> bool:
    first, second = a.committed.manifest, b.committed.manifest
    return (first.digest, first.block_bytes) == (second.digest, second.block_bytes)


def _same_digests(a: Opened, one: ArrayRecord, b: Opened, other: ArrayRecord) -> bool:
    """Return whether digests prove that two arrays are equal. Arrays with different chunks cannot be compared."""
    mine, theirs = ([(chunk.box, chunk.digests) for chunk in array.chunks] for array in (one, other))
    return _have_same_blocks(a, b) and mine == theirs and all(digests for _, digests in mine)


def diff_containers(a: Opened, b: Opened, selected: Callable[[str], bool]) -> Iterator[LeafDiff]:
    """Compare containers that exist in both checkpoints, and yield those of different kinds.

    A container is selected by its own path. If it is empty in only one checkpoint, the comparison of leaves shows it.
    Checkpoints of different tools are not compared, because other tools do not record all kinds.
    """
    of_b = b.trees if a.kind == b.kind else {}
    for part, mine in a.trees.items():
        if part not in of_b:
            continue
        theirs = of_b[part]
        pairs = {
            path: (mine.containers.get(path, "dict"), theirs.containers.get(path, "dict"))
            for path in {**mine.containers, **theirs.containers}
        }
        differing = {path: pair for path, pair in pairs.items() if pair[0] != pair[1] and selected(f"{part}/{path}")}
        if differing:
            (filled, empty), (filled_too, empty_too) = _containers(mine), _containers(theirs)
            in_both = (filled & filled_too) | (empty & empty_too)
            yield from (LeafDiff(f"{part}/{path}", "form", *differing[path]) for path in differing if path in in_both)


def _containers(record: TreeRecord) -> tuple[set[str], set[str]]:
    """Return the paths of the containers that have leaves, and of the empty ones."""
    filled, empty = set[str](), {name for name, leaf in record.leaves.items() if isinstance(leaf, EmptyLeaf)}
    for name in record.leaves:
        path = ROOT
        for key in split(name):
            filled.add(path)
            path = join(path, key)
    return filled, empty


def parts_to_compare(a: Opened, b: Opened) -> dict[str, tuple[PartRecord | None, PartRecord | None]]:
    """Return the pairs of checkpointables that are not trees in both, in the order of `a`. None: it does not exist."""
    of_a, of_b = ({part.name: part for part in each.committed.manifest.parts} for each in (a, b))
    pairs = {name: (of_a.get(name), of_b.get(name)) for name in of_a | of_b}
    return {name: pair for name, pair in pairs.items() if any(each is not None and not has_tree(each) for each in pair)}


def diff_parts(a: Opened, b: Opened, selected: Callable[[str], bool]) -> Iterator[LeafDiff]:
    """Compare all checkpointables that are not trees, by name. Equal ones are included.

    Their files are compared by digests if both checkpoints have the same kind, otherwise by bytes. JSON files of
    different tools are compared by their values.
    """
    for name, (one, other) in parts_to_compare(a, b).items():
        if not selected(name):
            continue
        kinds = "" if one is None else one.kind, "" if other is None else other.kind
        if one is None or other is None:
            yield LeafDiff(name, "only_b" if one is None else "only_a", *kinds)
        elif one.kind != other.kind or has_tree(one) != has_tree(other):
            yield LeafDiff(name, "form", *kinds)
        else:
            mine, theirs = ({file.file: file for file in part.files} for part in (one, other))
            count = len(mine | theirs)
            differing = count - sum(_is_same(a, mine[file], b, theirs[file]) for file in mine.keys() & theirs.keys())
            yield LeafDiff(name, "value" if differing else "equal", *kinds, differing=differing, count=count)


def _is_same(a: Opened, one: FileRecord, b: Opened, other: FileRecord) -> bool:
    if one.digests and other.digests and _have_same_blocks(a, b):
        return (one.bytes, one.digests) == (other.bytes, other.digests)
    is_json = a.kind != b.kind  # two tools format the same JSON differently
    if one.bytes != other.bytes and not is_json:
        return False
    mine, theirs = read_file(a, one), read_file(b, other)
    return np.array_equal(mine, theirs) or (is_json and _is_same_json(mine, theirs))


def read_file(opened: Opened, file: FileRecord) -> np.ndarray:
    """Read a file of a checkpointable as a flat uint8 array."""
    manifest = opened.committed.manifest
    digest = manifest.digest if opened.settings.verify_on_load and file.digests else None
    return read_recorded(opened.files, opened.path, file, digest, manifest.block_bytes)


def _is_same_json(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        mine, theirs = (json.dumps(json.loads(each.tobytes()), sort_keys=True) for each in (one, other))
    except (ValueError, RecursionError):
        return False
    return mine == theirs


class Wanted(NamedTuple):
    """A box to read from one array, or from two arrays of the same shape."""

    name: str
    box: Box
    arrays: Sequence[ArrayRecord]

    @property
    def nbytes(self) -> int:
        """The size in bytes of the box in all arrays."""
        return box_elements(self.box) * sum(DTYPES[array.dtype].itemsize for array in self.arrays)


def pieces_of(name: str, arrays: Sequence[ArrayRecord]) -> Iterator[Wanted]:
    """Yield the pieces of an array, or of two arrays of the same shape."""
    itemsize = max(DTYPES[array.dtype].itemsize for array in arrays)
    for box in cut_box(full_box(arrays[0].shape), itemsize, PIECE_BYTES):
        if box_elements(box):
            yield Wanted(name, box, arrays)


def over_pieces(opened: Sequence[Opened], wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, list[np.ndarray]]]:
    """Yield each piece in order, with its content in each checkpoint. Other threads read ahead within the read budget.

    The caller processes pieces on its own thread, because several threads slow each other down in short calls of numpy.
    The memory of an array is reused if the caller drops it before the next piece.
    """
    with contextlib.ExitStack() as stack:
        aheads = [
            stack.enter_context(ReadAhead(each.settings.read_budget_bytes // len(opened), each.path, AT_ONCE))
            for each in opened
        ]
        known: deque[tuple[Wanted, list[BoxAhead]]] = deque()
        for each in wanted:
            boxes = [
                LazyBox(one.files, one.committed, array, each.box, one.settings)
                for one, array in zip(opened, each.arrays, strict=True)
            ]
            known.append((each, [ahead.of([box])[0] for ahead, box in zip(aheads, boxes, strict=True)]))
            if len(known) > KNOWN:
                piece, ready = known.popleft()
                yield piece, [box.fetch() for box in ready]
        while known:
            piece, ready = known.popleft()
            yield piece, [box.fetch() for box in ready]


class Distance(NamedTuple):
    """The distance of two arrays, as in `LeafDiff`, which is summed up over pieces."""

    differing: int = 0
    max_abs: float = 0.0  # nan: a value is nan in only one of the arrays
    difference: float = 0.0
    norm: float = 0.0

    def plus(self, other: Distance) -> Distance:
        """Return the distance of both pieces together."""
        # max() alone would drop a nan in the other piece; a nan in this piece stays, because it is the first argument.
        largest = math.nan if math.isnan(other.max_abs) else max(self.max_abs, other.max_abs)
        difference, norm = math.hypot(self.difference, other.difference), math.hypot(self.norm, other.norm)
        return Distance(self.differing + other.differing, largest, difference, norm)


def distance(first: np.ndarray, second: np.ndarray) -> Distance:
    """Return the distance of two arrays of the same shape and dtype.

    Values with the same bits are equal, and so are all nan. 0 and -0 differ, by 0. For complex numbers the absolute
    value of the difference counts. 64-bit integers are rounded only for the norm.
    """
    one, other = (np.ascontiguousarray(each).reshape(-1) for each in (first, second))
    # Memory for a block of both in double precision. Allocating it each time would double the time.
    memory = np.empty((2, min(BLOCK, one.size)), np.complex128 if has_complex(one.dtype) else np.float64)
    found = Distance()
    with np.errstate(all="ignore"):
        for at in range(0, len(one), BLOCK):
            mine, theirs = one[at : at + BLOCK], other[at : at + BLOCK]
            found = found.plus(_block_distance(mine, theirs, memory[:, : len(mine)]))
    return found


def _block_distance(one: np.ndarray, other: np.ndarray, memory: np.ndarray) -> Distance:
    values = memory[0]
    np.copyto(values, one, casting="unsafe")
    norm = _norm(values)
    differs = _bits_differ(one, other)
    differing = int(np.count_nonzero(differs))
    if not differing:
        return Distance(norm=norm)
    apart = _absolute_difference(one, other, memory)
    largest = float(apart.max())
    if not math.isfinite(largest):
        apart[~differs] = 0.0  # the difference of two equal infinities is nan
        apart[np.isnan(values) & np.isnan(other.astype(values.dtype))] = 0.0
        largest = float(apart.max())
    return Distance(differing, largest, _norm(apart), norm)


def _bits_differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    size = one.dtype.itemsize
    bits = f"u{min(size, 8)}"
    found = np.asarray(one.view(bits) != other.view(bits), np.bool_)
    return found if size <= 8 else np.asarray(found.reshape(len(one), -1).any(axis=1))


def _absolute_difference(one: np.ndarray, other: np.ndarray, memory: np.ndarray) -> np.ndarray:
    if one.dtype.kind in "iu" and one.dtype.itemsize == 8:
        up, down = other.view("u8") - one.view("u8"), one.view("u8") - other.view("u8")
        return np.asarray(np.where(one > other, down, up), np.float64)
    np.copyto(memory[1], other, casting="unsafe")
    found = np.subtract(memory[0], memory[1], out=memory[1])
    return np.asarray(np.abs(found) if found.dtype.kind == "c" else np.abs(found, out=found))


def _norm(values: np.ndarray) -> float:
    """Return the root of the sum of squares of the finite values, which may be of any magnitude."""
    squares = sum_of_squares(values.view(np.float64))
    if 1e-240 < squares < 1e240:
        return math.sqrt(squares)
    finite = values[np.isfinite(values)].view(np.float64)
    exponent = math.frexp(float(np.abs(finite).max(initial=0.0)))[1]
    return float(np.ldexp(math.sqrt(sum_of_squares(np.ldexp(finite, -exponent))), exponent))
