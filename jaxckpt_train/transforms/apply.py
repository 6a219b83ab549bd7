"""Applies operations to an opened checkpoint, parses operations, and averages checkpoints.

The result of `apply_operations` is an opened checkpoint, whose changed arrays are computed when they are read.
Operations come as plain data, from YAML, JSON or the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from jaxckpt_train._validation import absolute_path, known_keys, nearest, shown, text
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.formats.foreign import DecodedArraySource, ForeignFiles, Open, segment_size
from jaxckpt_train.pytree.leaves import (
    ArrayLeaf,
    ComplexLeaf,
    FloatLeaf,
    TreeRecord,
    decode_tree,
    encode_tree,
    has_tree,
    python_value,
)
from jaxckpt_train.pytree.paths import ROOT, split
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener, Source
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.boxes import Box, box_elements, box_shape
from jaxckpt_train.store.committed import Committed, open_committed
from jaxckpt_train.store.dtypes import DTYPES, dtype_name, is_inexact
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, PartRecord, SegmentRecord
from jaxckpt_train.store.reader import read_box
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.transforms.base import Change, Leaf, Leaves, Operation, check_leaves, match_pattern, matches
from jaxckpt_train.transforms.operations import (
    Add,
    Cast,
    Copy,
    Drop,
    Fuse,
    Nest,
    Pad,
    Rename,
    Reshape,
    Split,
    Stack,
    Transpose,
    Truncate,
    Unstack,
)
from jaxckpt_train.transforms.views import Piece, Stored, View, convert_array, cut

DEFAULT_PART = "state"
_NAMING, _JOINING = (Rename, Nest, Drop, Copy), (Stack, Unstack, Split, Fuse)
_SIZES = {"axes", "shape", "sizes"}  # lists of whole numbers, which may be empty: () or []
_LISTS = _SIZES | {"into", "with"}
_TEXTS = {"leaves", "from", "to", "leaf", "dtype", "separator"}


class Transformed(NamedTuple):
    """The result of operations.

    Attributes:
        files: opens the stored and the computed segments.
        committed: the checkpoint, with one checkpointable changed.
        plan: for each operation, its name and its changes as text.
    """

    files: Opener
    committed: Committed
    plan: tuple[tuple[str, tuple[Change, ...]], ...]


def apply_operations(
    files: Opener, committed: Committed, name: str, operations: Sequence[Operation], settings: StoreSettings
) -> Transformed:
    """Apply operations in order to the tree of one checkpointable, without reading data.

    Args:
        files: opens the files of the checkpoint.
        committed: the opened checkpoint.
        name: the name of the checkpointable.
        operations: the operations.
        settings: how the stored arrays are read.

    Raises:
        MismatchError: the checkpoint has no such tree, or an operation does not fit it.
    """
    part = committed.manifest.part(name)
    if part is None or not has_tree(part):
        there = ", ".join(repr(part.name) for part in committed.manifest.parts)
        raise MismatchError(f"{committed.directory}: expected a tree {name!r} to change, found {there or 'nothing'}")
    leaves = _tree_leaves(files, committed, part, settings)
    plan = []
    for number, operation in enumerate(operations):
        subject = f"{committed.directory}: operation {number + 1} of {len(operations)} ({operation.name})"
        before = dict(leaves)
        plan.append((operation.name, tuple(operation.apply(leaves, subject))))
        check_leaves(leaves, before, subject)
    return _transformed(files, committed, part, leaves, tuple(plan))


def _tree_leaves(files: Opener, committed: Committed, part: PartRecord, settings: StoreSettings) -> Leaves:
    """Return the leaves of a tree, with views of their arrays."""
    record = decode_tree(part, committed.directory)
    arrays = {array.name: array for array in part.arrays}
    found: Leaves = {}
    for name, leaf in record.leaves.items():
        array = arrays.get(name)
        view = None
        if array is not None:
            read = functools.partial(_read, files, committed, array, settings)
            view = Stored(array.shape, DTYPES[array.dtype], array.chunks, read)
        found[name] = Leaf(leaf, view)
    return found


def _read(
    files: Opener, committed: Committed, array: ArrayRecord, settings: StoreSettings, box: Box, target: np.ndarray
) -> None:
    if target.flags.c_contiguous:
        read_box(files, committed, array, box, target.reshape(-1).view(np.uint8), settings)
        return
    whole = np.empty(target.shape, target.dtype)
    read_box(files, committed, array, box, whole.reshape(-1).view(np.uint8), settings)
    target[...] = whole


def _transformed(
    files: Opener,
    committed: Committed,
    part: PartRecord,
    leaves: Leaves,
    plan: tuple[tuple[str, tuple[Change, ...]], ...],
) -> Transformed:
    segments, opens = list(committed.manifest.segments), dict[str, Open]()
    arrays = []
    for name, leaf in leaves.items():
        if leaf.view is not None:
            arrays.append(_array_record(name, leaf.view, segments, opens, committed.directory))
    containers = _remaining_containers(decode_tree(part, committed.directory).containers, leaves)
    record = TreeRecord(containers, {name: leaf.record for name, leaf in leaves.items()})
    changed = PartRecord(part.name, part.kind, tuple(arrays), part.files, encode_tree(record))
    parts = tuple(changed if each is part else each for each in committed.manifest.parts)
    manifest = msgspec.structs.replace(committed.manifest, parts=parts, segments=tuple(segments))
    return Transformed(ForeignFiles(opens, files), dataclasses.replace(committed, manifest=manifest), plan)


def _remaining_containers(containers: Mapping[str, str], leaves: Leaves) -> dict[str, str]:
    """Return the kinds of the containers that still exist. A list with a missing position becomes a mapping."""
    children: dict[str, set[str]] = {}
    for name in leaves:
        keys = split(name)
        for depth, key in enumerate(keys):
            children.setdefault("/".join(keys[:depth]) or ROOT, set()).add(key)
    kept = {}
    for path, kind in containers.items():
        inside = children.get(path, set())
        is_whole = inside == {str(number) for number in range(len(inside))}
        if path in leaves or (inside and (is_whole or kind not in ("list", "tuple"))):
            kept[path] = kind
    return kept


def _array_record(
    name: str, view: View, segments: list[SegmentRecord], opens: dict[str, Open], directory: str
) -> ArrayRecord:
    """Return the record of an array. Its unchanged chunks stay; a new segment computes the others."""
    chunks, computed, at = list[ChunkRecord](), list[ChunkRecord](), 0
    own = len(segments)
    for piece in view.pieces() if math.prod(view.shape) else ():
        if piece.stored is not None:
            chunks.append(ChunkRecord(piece.box, *_location(piece.stored)))
            continue
        length = box_elements(piece.box) * view.dtype.itemsize
        chunk = ChunkRecord(piece.box, own, at, length, "")
        at += -(-length // ALIGNMENT) * ALIGNMENT
        chunks.append(chunk)
        computed.append(chunk)
    if computed:
        file = f"made/{own:06d}"
        segments.append(SegmentRecord(file, segment_size(computed), 0, ""))
        opens[file] = functools.partial(_source, f"{directory}: leaf {name!r}", view, computed)
    return ArrayRecord(name, view.shape, dtype_name(view.dtype), tuple(chunks))


def _location(chunk: ChunkRecord) -> tuple[int, int, int, str]:
    return chunk.segment, chunk.offset, chunk.length, chunk.digests


def _source(subject: str, view: View, chunks: Sequence[ChunkRecord], direct: object) -> Source:
    return cast("Source", DecodedArraySource(subject, view.dtype, chunks, view.read))


@dataclasses.dataclass(frozen=True)
class Average(Operation):
    """Average floating-point leaves with those of other checkpoints of this library.

    Sums are computed in float64 (complex128 for complex numbers), and the mean is rounded once to the dtype of the
    leaf. Other leaves (integers, PRNG keys, text) must be equal in all checkpoints.

    Args:
        leaves: a path or pattern. Other leaves keep the values of the changed checkpoint.
        with_: the paths of the other checkpoints. Its name is `with` in YAML, JSON and on the command line.
        part: the name of the checkpointable in the others. None: `state`, or the only tree.
    """

    name = "average"
    leaves: str
    with_: Sequence[str]
    part: str | None = None

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        if isinstance(self.with_, str) or not isinstance(self.with_, Sequence) or not self.with_:
            raise SettingsError(f"average: with: expected a list of checkpoint paths, found {self.with_!r}")
        paths = tuple(absolute_path("average: with", path) for path in self.with_)
        object.__setattr__(self, "with_", paths)
        if self.part is not None:
            text("average: part", self.part)

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """See `Operation.apply`."""
        names = list(matches(self.leaves, leaves, subject))
        others = [(path, self._leaves_at(path, subject)) for path in self.with_]
        for path, other in others:
            selected = {name for name in other if match_pattern(self.leaves, name) is not None}
            differing = selected.symmetric_difference(names)
            if differing:
                raise MismatchError(
                    f"{subject}: leaf {min(differing)!r}: expected it in this checkpoint and in {path}, found it in "
                    "one of them"
                )
        new = {name: _mean(name, leaves[name], [(path, other[name]) for path, other in others]) for name in names}
        averaged = [name for name in names if new[name].record != leaves[name].record or _is_float(new[name])]
        if not averaged:
            raise MismatchError(f"{subject}: {self.leaves!r} selects no floating-point leaves")
        leaves.update(new)
        count = len(others) + 1
        return [(f"{name} {leaves[name].describe()}", f"the mean of {count}") for name in averaged]

    def _leaves_at(self, path: str, subject: str) -> Leaves:
        backend = LocalBackend()
        committed = open_committed(backend, path)
        trees = [part.name for part in committed.manifest.parts if has_tree(part)]
        name = self.part or (trees[0] if len(trees) == 1 else DEFAULT_PART)
        part = committed.manifest.part(name)
        if part is None or not has_tree(part):
            there = ", ".join(map(repr, trees)) or "none"
            raise MismatchError(f"{subject}: {path}: expected a tree {name!r}, found {there}")
        return _tree_leaves(backend, committed, part, StoreSettings())


def _is_float(leaf: Leaf) -> bool:
    if leaf.view is not None:
        return isinstance(leaf.record, ArrayLeaf) and is_inexact(leaf.view.dtype)
    return isinstance(leaf.record, FloatLeaf | ComplexLeaf)


def _mean(name: str, leaf: Leaf, others: Sequence[tuple[str, Leaf]]) -> Leaf:
    """Return the mean of a leaf and others. If it is not a floating-point number, return it unchanged.

    Raises:
        MismatchError: the leaves differ in type, or in a value that has no mean.
    """
    for path, other in others:
        same_type = type(other.record) is type(leaf.record) and other.describe() == leaf.describe()
        if not same_type or (leaf.view is None and not _is_float(leaf) and other.record != leaf.record):
            raise MismatchError(
                f"average: leaf {name!r} is {leaf.describe()} in the first checkpoint, but {other.describe()} or "
                f"another value in {path}; select leaves without it"
            )
    if leaf.view is not None:
        views = [other.view for _, other in others if other.view is not None]
        if _is_float(leaf):
            return leaf.with_view(Mean([*views, leaf.view], name))  # in the order of the steps
        return leaf.with_view(Equal([leaf.view, *views], name, [path for path, _ in others]))
    if not _is_float(leaf):
        return leaf
    values = [python_value(name, each.record, name) for each in (leaf, *(other for _, other in others))]
    with np.errstate(all="ignore"):
        mean = np.mean(np.array(values)).item()
    record = FloatLeaf(mean.hex()) if isinstance(mean, float) else ComplexLeaf(mean.real.hex(), mean.imag.hex())
    return Leaf(record)


class _SeveralInputs:
    """The base of views of several arrays of one shape and dtype.

    Their pieces are bands of the first array's pieces.
    """

    def __init__(self, inner: Sequence[View], name: str) -> None:
        self._inner, self._name = list(inner), name
        self.shape, self.dtype = inner[0].shape, inner[0].dtype
        self._wide = np.dtype(np.complex128 if "complex" in self.dtype.name else np.float64)

    def pieces(self) -> Sequence[Piece]:
        """Return bands of the pieces of the first array."""
        return [Piece(band) for piece in self._inner[0].pieces() for band in cut(piece.box, self._wide.itemsize)]

    def _read(self, view: View, box: Box) -> np.ndarray:
        found = np.empty(box_shape(box), self.dtype)
        view.read(box, found)
        return found


class Mean(_SeveralInputs):
    """The mean of floating-point arrays."""

    def read(self, box: Box, target: np.ndarray) -> None:
        """Fill `target` with the mean of a box."""
        total = np.zeros(box_shape(box), self._wide)
        with np.errstate(all="ignore"):  # nan and inf in the arrays make the mean nan or inf, without a warning
            for view in self._inner:
                total += self._read(view, box).astype(self._wide)
            total /= len(self._inner)
        target[...] = convert_array(total, self.dtype, f"average: leaf {self._name!r}", [start for start, _ in box])


class Equal(_SeveralInputs):
    """Arrays without a mean, which must be equal. `paths` are those of all but the first, for messages."""

    def __init__(self, inner: Sequence[View], name: str, paths: Sequence[str]) -> None:
        super().__init__(inner, name)
        self._paths = list(paths)

    def read(self, box: Box, target: np.ndarray) -> None:
        """Fill `target` with a box.

        Raises:
            MismatchError: the box differs in one of the arrays.
        """
        first = self._read(self._inner[0], box)
        for view, path in zip(self._inner[1:], self._paths, strict=True):
            if self._read(view, box).tobytes() != first.tobytes():
                raise MismatchError(
                    f"average: leaf {self._name!r} of {self.dtype.name} cannot be averaged, so it must be equal in "
                    f"all checkpoints, but it differs in {path}; select leaves without it, to keep its values of the "
                    "newest checkpoint"
                )
        target[...] = first


_REFORMING, _MAKING = (Transpose, Reshape, Cast, Pad, Truncate), (Add, Average)
OPERATIONS: dict[str, type[Any]] = {each.name: each for each in (*_NAMING, *_JOINING, *_REFORMING, *_MAKING)}


def parse_operations(subject: str, given: object, total: int | None = None) -> tuple[Operation, ...]:
    """Return operations that are given as such, or as mappings: `{"op": "rename", "leaves": "a/**", "to": "b/**"}`.

    Args:
        subject: the source of the operations, for messages.
        given: the list of operations.
        total: the number of all operations, if more follow in another list.

    Raises:
        SettingsError: an item is not an operation, or has other arguments. The message begins with `subject`.
    """
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise SettingsError(f"{subject}: expected a list of operations, found {shown(given)}")
    return tuple(
        _parse_item(f"{subject}: {operation_label(number, total or len(given))}", each)
        for number, each in enumerate(given, 1)
    )


def operation_label(number: int, total: int) -> str:
    """Return the text for one of several operations in messages."""
    return f"operation {number} of {total}"


def _parse_item(subject: str, given: object) -> Operation:
    if isinstance(given, Operation):
        return given
    if not isinstance(given, Mapping) or "op" not in given:
        raise SettingsError(
            f'{subject}: expected an operation such as {{"op": "drop", "leaves": "head/**"}}, found {shown(given)}'
        )
    name = given["op"]
    kind = OPERATIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SettingsError(
            f"{subject}: op: expected one of {', '.join(OPERATIONS)}, found {name!r}{nearest(name, OPERATIONS)}"
        )
    # The fields from_ and with_ have their names without the underscore, since Python reserves these words.
    fields = {field.name.removesuffix("_"): field for field in dataclasses.fields(kind)}
    arguments = known_keys(
        f"{subject} ({name})", {key: value for key, value in given.items() if key != "op"}, tuple(fields)
    )
    missing = [
        field for field, each in fields.items() if each.default is dataclasses.MISSING and field not in arguments
    ]
    if missing:
        raise SettingsError(f"{subject} ({name}): expected {', '.join(missing)}")
    try:
        operation: Operation = kind(**{fields[name].name: value for name, value in arguments.items()})
    except SettingsError as error:
        raise SettingsError(f"{subject} ({name}): {str(error).removeprefix(f'{name}: ')}") from error
    except TypeError as error:
        raise SettingsError(f"{subject} ({name}): {error}") from error
    return operation


def parse_operation(text: str, number: int = 1, total: int = 1) -> Operation:
    """Parse an operation from the command line: `rename a/** b/**`, `cast ** bfloat16`, `stack l/{} l axis=1`, or JSON.

    The words after the name are its arguments, in order or as `name=value`. Lists use commas. A list of numbers may
    have brackets, and is `[]` or `()` if it is empty.

    Args:
        text: the operation.
        number: its number, from 1.
        total: the number of all operations.

    Raises:
        SettingsError: the text is not an operation.
    """
    subject = f"{text!r}: {operation_label(number, total)}"
    if text.lstrip().startswith("{"):
        try:
            return _parse_item(subject, msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            raise SettingsError(f"{subject}: expected JSON, found something else: {error}") from error
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"{subject}: {error}") from error
    kind = OPERATIONS.get(words[0]) if words else None
    if kind is None:
        name = words[0] if words else ""
        raise SettingsError(
            f"{subject}: expected one of {', '.join(OPERATIONS)}, found {name!r}{nearest(name, OPERATIONS)}"
        )
    return _parse_item(subject, {"op": kind.name, **_parse_arguments(f"{subject} ({kind.name})", kind, words[1:])})


def _parse_arguments(subject: str, kind: type[Any], words: Sequence[str]) -> dict[str, Any]:
    fields = [field.name.removesuffix("_") for field in dataclasses.fields(kind)]
    given: dict[str, Any] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name not in fields and (hint := nearest(name, fields)):
            raise SettingsError(f'{subject}: unknown argument "{name}"{hint} The arguments are {", ".join(fields)}')
        if not equals or name not in fields:
            if place >= len(fields):
                raise SettingsError(f"{subject}: expected at most {len(fields)} arguments ({', '.join(fields)})")
            name, value = fields[place], word
        if name in given:
            before, again = given[name], _parse_value(name, value)
            raise SettingsError(f"{subject}: {name}: expected it once, found {before!r} and then {again!r}")
        given[name] = _parse_value(name, value)
    return given


def _parse_value(name: str, text: str) -> Any:
    """Parse an argument as a list if its name requires one, as a number if it looks like one, otherwise as text."""
    if name in _SIZES and text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1].strip().removesuffix(",")
        if not text:
            return []
    if name in _LISTS or "," in text:
        return [_parse_single(each) for each in text.split(",")]
    return text if name in _TEXTS else _parse_single(text)


def _parse_single(text: str) -> Any:
    if text.lower() in ("none", "null", ""):
        return None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
