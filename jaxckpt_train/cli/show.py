"""`jaxckpt show`: what is in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxckpt_train.cli.arguments import BACKEND, Checkpoint, Json, Part, Patterns, Step, absolute, step_number
from jaxckpt_train.cli.output import bytes_text, print_columns, print_json, print_text, told_errors
from jaxckpt_train.errors import MismatchError
from jaxckpt_train.looking.leaf_diff import leaves_by_name
from jaxckpt_train.looking.opening import metadata_of, open_at
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.tree.leaf_records import LeafRecord, describe_saved, python_value
from jaxckpt_train.tree.patterns import Only, idle_pattern, leaf_filter, suggestion

MOST_LETTERS = 60
MOST_EXACT = 1 << 53


def show(
    path: Checkpoint, patterns: Patterns = None, step: Step = None, part: Part = None, as_json: Json = False
) -> None:
    """Show the tree of a checkpoint: leaf paths, shapes, dtypes, shardings and sizes. Reads no data."""
    with told_errors(as_json):
        opened = open_at(BACKEND, absolute(path), step_number(step))
        leaves = chosen_leaves(opened, part, patterns)
        if as_json:
            print_json(_json_of(opened, leaves))
        else:
            _print(opened, leaves)


def chosen_leaves(
    opened: Opened, part: str | None, patterns: list[str] | None
) -> dict[str, tuple[LeafRecord, ArrayRecord | None]]:
    """The leaves that a user has chosen, by the name of their checkpointable and their leaf path.

    A pattern is of the leaf path, or of that with the name of the checkpointable before it.

    Raises:
        MismatchError: it chooses none.
    """
    leaves = leaves_by_name(opened)
    if part is not None:
        opened.part(part)
        leaves = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{part}/")}
    if not patterns:
        return leaves
    idle = idle_pattern(patterns, [*leaves, *(name.partition("/")[2] for name in leaves)])
    if idle is not None:
        hint = suggestion(idle, [name.partition("/")[2] for name in leaves])
        raise MismatchError(f"{opened.path}: {idle!r} selects none of {len(leaves)} leaves{hint}")
    selected = _selection(patterns)
    return {name: leaf for name, leaf in leaves.items() if selected(name)}


def _selection(only: Only) -> Callable[[str], bool]:
    """Of leaf paths with the name of their checkpointable before them."""
    chosen = leaf_filter(only)
    return lambda name: chosen(name) or chosen(name.partition("/")[2])


def nbytes_of(array: ArrayRecord | None) -> int:
    """Bytes of the data of a leaf."""
    return 0 if array is None else math.prod(array.shape) * DTYPES[array.dtype].itemsize


def _json_of(opened: Opened, leaves: dict[str, tuple[LeafRecord, ArrayRecord | None]]) -> dict[str, Any]:
    parts = opened.committed.manifest.parts
    return {
        "path": opened.path,
        "kind": opened.kind,
        **metadata_of(opened),
        "parts": [{"name": part.name, "kind": part.kind, "bytes": part_bytes(opened, part.name)} for part in parts],
        "bytes": opened.committed.data_bytes,
        "leaves": [_leaf_json(opened, name, *leaf) for name, leaf in leaves.items()],
        "skipped": opened.skipped,
    }


def _leaf_json(opened: Opened, name: str, leaf: LeafRecord, array: ArrayRecord | None) -> dict[str, Any]:
    part, _, path = name.partition("/")
    found: dict[str, Any] = {"part": part, "path": path, "form": describe_saved(leaf, array)}
    if array is None:
        return {**found, "value": json_value(python_value(name, leaf, opened.path))}
    return {
        **found,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "bytes": nbytes_of(array),
        "chunks": len(array.chunks),
        "sharding": array.sharding,
    }


def json_value(value: Any) -> Any:
    """A plain value as JSON can hold it: integers that readers of JSON would round, complex and bytes are text."""
    if isinstance(value, int) and abs(value) > MOST_EXACT:
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def value_text(value: Any) -> str:
    """A plain value for people, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}... ({len(text):,} letters)"


def part_bytes(opened: Opened, name: str) -> int:
    """Bytes of the data of a checkpointable, by its name."""
    part = opened.part(name) if name in opened.trees else opened.committed.manifest.part(name)
    assert part is not None
    return sum(map(nbytes_of, part.arrays)) + sum(file.bytes for file in part.files)


def _print(opened: Opened, leaves: dict[str, tuple[LeafRecord, ArrayRecord | None]]) -> None:
    about = metadata_of(opened)
    print_text(f"{opened.path}  ({opened.kind})")
    for name in ("step", "created", "metrics", "custom_metadata", "versions"):
        if about.get(name) not in (None, {}, ""):
            print_text(f"{name}: {about[name]}")
    for part in opened.committed.manifest.parts:
        print_text(f"part {part.name}: {part.kind}, {bytes_text(part_bytes(opened, part.name))}")
    rows = [
        [
            name,
            describe_saved(leaf, array),
            bytes_text(nbytes_of(array)) if array else "",
            _last(opened, name, leaf, array),
        ]
        for name, (leaf, array) in leaves.items()
    ]
    print_columns(["leaf", "form", "size", "sharding or value"], rows, [False, False, True, False])
    total = sum(nbytes_of(array) for _, array in leaves.values())
    print(f"{len(leaves):,} {'leaf' if len(leaves) == 1 else 'leaves'}, {bytes_text(total)}")


def _last(opened: Opened, name: str, leaf: LeafRecord, array: ArrayRecord | None) -> str:
    if array is None:
        return value_text(python_value(name, leaf, opened.path))
    sharding = array.sharding
    if not isinstance(sharding, dict):
        return ""
    mesh, spec = sharding.get("mesh"), sharding.get("spec")
    if not isinstance(mesh, dict) or not isinstance(spec, list):
        return ""
    return f"{'x'.join(map(str, mesh.values()))} {','.join('-' if each is None else str(each) for each in spec)}"
