"""Applies operations to an opened checkpoint, and parses operations."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxckpt_train._validation import known_keys, nearest, shown
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.formats.foreign import ForeignFiles, Segments
from jaxckpt_train.pytree.leaves import (
    ROOT,
    TreeRecord,
    decode_tree,
    encode_tree,
    has_tree,
    split,
)
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.committed import Committed, completed
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord
from jaxckpt_train.store.reader import read_box
from jaxckpt_train.store.segment import DTYPES, dtype_name
from jaxckpt_train.transforms.operations import OPERATIONS, Change, Leaf, Leaves, Operation, check_leaves
from jaxckpt_train.transforms.views import Stored, View


class Transformed(NamedTuple):
    """The result of operations: the checkpoint, with one checkpointable changed."""

    files: Opener  # of the stored and the computed segments
    committed: Committed
    plan: tuple[tuple[str, tuple[Change, ...]], ...]  # for each operation, its name and its changes as text


def apply_operations(
    files: Opener, committed: Committed, name: str, operations: Sequence[Operation], settings: StoreSettings
) -> Transformed:
    """Apply operations in order to the tree of the checkpointable `name`, without reading data."""
    committed = completed(files, committed)
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
    segments = Segments(committed.manifest.segments)
    arrays = [
        _array_record(leaf, found.view, segments, committed.directory)
        for leaf, found in leaves.items()
        if found.view is not None
    ]
    containers = _remaining_containers(decode_tree(part, committed.directory).containers, leaves)
    record = TreeRecord(containers, {leaf: found.record for leaf, found in leaves.items()})
    changed = PartRecord(part.name, part.kind, tuple(arrays), part.files, encode_tree(record))
    parts = tuple(changed if each is part else each for each in committed.manifest.parts)
    manifest = msgspec.structs.replace(committed.manifest, parts=parts, segments=tuple(segments.records))
    changed_checkpoint = dataclasses.replace(committed, manifest=manifest)
    return Transformed(ForeignFiles(segments.opens, files), changed_checkpoint, tuple(plan))


def _tree_leaves(files: Opener, committed: Committed, part: PartRecord, settings: StoreSettings) -> Leaves:
    views = {
        array.name: Stored(
            array.shape, DTYPES[array.dtype], array.chunks, functools.partial(_read, files, committed, array, settings)
        )
        for array in part.arrays
    }
    record = decode_tree(part, committed.directory)
    return {name: Leaf(leaf, views.get(name)) for name, leaf in record.leaves.items()}


def _read(
    files: Opener, committed: Committed, array: ArrayRecord, settings: StoreSettings, box: Box, target: np.ndarray
) -> None:
    assert target.flags.c_contiguous  # otherwise the bytes would go to a copy
    read_box(files, committed, array, box, target.reshape(-1).view(np.uint8), settings)


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


def _array_record(name: str, view: View, segments: Segments, directory: str) -> ArrayRecord:
    """Return the record of an array. Its unchanged chunks stay; a new segment computes the others."""
    pieces = view.pieces() if math.prod(view.shape) else ()
    boxes = [piece.box for piece in pieces if piece.stored is None]
    computed = iter(segments.decode(f"{directory}: leaf {name!r}", view.dtype, boxes, view.read) if boxes else ())
    chunks = [
        next(computed) if piece.stored is None else msgspec.structs.replace(piece.stored, box=piece.box)
        for piece in pieces
    ]
    return ArrayRecord(name, view.shape, dtype_name(view.dtype), tuple(chunks))


def parse_operations(subject: str, given: object, total: int | None = None) -> tuple[Operation, ...]:
    """Return operations that are given as such, or as mappings. `total`: more follow in another list."""
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise SettingsError(f"{subject}: expected a list of operations, found {shown(given)}")
    total = total or len(given)
    return tuple(_parse_item(f"{subject}: operation {number} of {total}", each) for number, each in enumerate(given, 1))


def _kind(subject: str, name: object) -> type[Any]:
    kind = OPERATIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        expected = ", ".join(OPERATIONS)
        raise SettingsError(f"{subject}: op: expected one of {expected}, found {name!r}{nearest(name, OPERATIONS)}")
    return kind


def _fields(kind: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the arguments of an operation. A trailing underscore in Python is for a reserved word."""
    return {field.name.removesuffix("_"): field for field in dataclasses.fields(kind)}


def _parse_item(subject: str, given: object) -> Operation:
    if isinstance(given, Operation):
        return given
    if not isinstance(given, Mapping) or "op" not in given:
        example = '{"op": "drop", "leaves": "head/**"}'
        raise SettingsError(f"{subject}: expected an operation such as {example}, found {shown(given)}")
    kind = _kind(subject, given["op"])
    subject, fields = f"{subject} ({kind.name})", _fields(kind)
    arguments = known_keys(subject, {key: value for key, value in given.items() if key != "op"}, tuple(fields))
    missing = [name for name, each in fields.items() if each.default is dataclasses.MISSING and name not in arguments]
    if missing:
        raise SettingsError(f"{subject}: expected {', '.join(missing)}")
    try:
        operation: Operation = kind(**{fields[name].name: value for name, value in arguments.items()})
    except (SettingsError, TypeError) as error:
        raise SettingsError(f"{subject}: {str(error).removeprefix(f'{kind.name}: ')}") from error
    return operation


def parse_operation(text: str, number: int = 1, total: int = 1) -> Operation:
    """Parse an operation from the command line: `rename a/** b/**`, `cast ** bfloat16`, `stack l/{} l axis=1`, or JSON.

    The words after the name are its arguments, in order or as `name=value`. Lists use commas. A list of numbers may
    have brackets, and is `[]` or `()` if it is empty. `number` of `total` is its place among all, for messages.
    """
    subject = f"{text!r}: operation {number} of {total}"
    if text.lstrip().startswith("{"):
        try:
            return _parse_item(subject, msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            raise SettingsError(f"{subject}: expected JSON, found something else: {error}") from error
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise SettingsError(f"{subject}: {error}") from error
    arguments = _parse_words(f"{subject} ({name})", _fields(_kind(subject, name)), words)
    return _parse_item(subject, {"op": name, **arguments})


def _parse_words(subject: str, fields: Mapping[str, dataclasses.Field[Any]], words: Sequence[str]) -> dict[str, Any]:
    names, given = list(fields), dict[str, Any]()
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name not in names and (hint := nearest(name, names)):  # it would become a path
            raise SettingsError(f'{subject}: unknown argument "{name}"{hint} The arguments are {", ".join(names)}')
        if not equals or name not in names:
            if place >= len(names):
                raise SettingsError(f"{subject}: expected at most {len(names)} arguments ({', '.join(names)})")
            name, value = names[place], word
        parsed = _parse_value(str(fields[name].type), value)
        if name in given:
            raise SettingsError(f"{subject}: {name}: expected it once, found {given[name]!r} and then {parsed!r}")
        given[name] = parsed
    return given


def _parse_value(kind: str, text: str) -> Any:
    """Parse an argument of a type: text, a list, or otherwise a number if it looks like one."""
    if kind == "str":
        return text
    if kind == "Sequence[str]":
        return text.split(",")
    if not kind.startswith("Sequence"):
        return _parse_single(text)
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1].strip().removesuffix(",")
        if not text:
            return []
    return [_parse_single(each) for each in text.split(",")]


def _parse_single(text: str) -> Any:
    if text.lower() in ("none", "null", ""):
        return None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
