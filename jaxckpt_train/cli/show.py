"""`jaxckpt show`: what is in a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import typer

from jaxckpt_train.cli.arguments import BACKEND, Checkpoint, Json, Part, Patterns, Step, absolute, step_number
from jaxckpt_train.cli.output import bytes_text, code_of, print_columns, print_json, print_text, told_errors
from jaxckpt_train.errors import CheckpointError, MismatchError
from jaxckpt_train.looking.leaf_diff import leaves_by_name
from jaxckpt_train.looking.opening import metadata_of, open_at
from jaxckpt_train.looking.part_diff import read_file
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord, FileRecord
from jaxckpt_train.tree.leaf_records import LeafRecord, describe_saved, has_tree, python_value
from jaxckpt_train.tree.patterns import Only, idle_pattern, keys_there, leaf_filter, suggestion

MOST_LETTERS = 60
MOST_EXACT = 1 << 53
MOST_VALUE_BYTES = 1 << 20
MOST_VALUE_LETTERS = 4000
MOST_FILES = 8  # of one checkpointable, for people


def show(
    path: Checkpoint, patterns: Patterns = None, step: Step = None, part: Part = None, as_json: Json = False
) -> None:
    """Show a checkpoint: leaf paths, shapes, dtypes, shardings, sizes, and JSON items. Reads no arrays."""
    with told_errors(as_json):
        opened = open_at(BACKEND, absolute(path), step_number(step))
        leaves = chosen_leaves(opened, part, patterns)
        items = [] if patterns else _items(opened, part)
        if as_json:
            print_json(_json_of(opened, leaves, items))
        else:
            _print(opened, leaves, items)
        error = next((item.error for item in items if item.error is not None), None)
        if error is not None:
            raise typer.Exit(int(code_of(error)))


class _Item(NamedTuple):
    """A JSON file of a checkpointable that is no tree: its value, or why there is none."""

    part: str
    file: str
    value: Any = None
    why_not: str = ""
    error: CheckpointError | None = None


def _items(opened: Opened, part: str | None) -> list[_Item]:
    return [
        _item(opened, each.name, file)
        for each in opened.committed.manifest.parts
        if part in (None, each.name) and not has_tree(each)
        for file in each.files
        if file.file.endswith(".json")
    ]


def _item(opened: Opened, part: str, file: FileRecord) -> _Item:
    if file.bytes > MOST_VALUE_BYTES:
        return _Item(part, file.file, why_not=f"{bytes_text(file.bytes)}, not shown")
    try:
        return _Item(part, file.file, json.loads(read_file(opened, file).tobytes(), parse_int=_whole))
    except CheckpointError as error:
        return _Item(part, file.file, why_not=str(error), error=error)
    except (ValueError, RecursionError):
        return _Item(part, file.file, why_not="no JSON")


def _whole(digits: str) -> int | str:
    return digits if len(digits) > len(str(MOST_EXACT)) or abs(int(digits)) > MOST_EXACT else int(digits)


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
        paths = [name.partition("/")[2] for name in leaves]
        raise MismatchError(
            f"{opened.path}: {idle!r} selects none of {len(leaves)} leaves{suggestion(idle, paths)}: "
            f"{keys_there(str(idle), paths)}"
        )
    selected = _selection(patterns)
    return {name: leaf for name, leaf in leaves.items() if selected(name)}


def _selection(only: Only) -> Callable[[str], bool]:
    """Of leaf paths with the name of their checkpointable before them."""
    chosen = leaf_filter(only)
    return lambda name: chosen(name) or chosen(name.partition("/")[2])


def nbytes_of(array: ArrayRecord | None) -> int:
    """Bytes of the data of a leaf."""
    return 0 if array is None else math.prod(array.shape) * DTYPES[array.dtype].itemsize


def _json_of(
    opened: Opened, leaves: dict[str, tuple[LeafRecord, ArrayRecord | None]], items: Sequence[_Item]
) -> dict[str, Any]:
    parts = opened.committed.manifest.parts
    return {
        "path": opened.path,
        "kind": opened.kind,
        **metadata_of(opened),
        "parts": [
            {"name": part.name, "kind": part.kind, "bytes": part_bytes(opened, part.name)}
            | _items_json([item for item in items if item.part == part.name])
            for part in parts
        ],
        "bytes": opened.committed.data_bytes,
        "leaves": [_leaf_json(opened, name, *leaf) for name, leaf in leaves.items()],
        "skipped": opened.skipped,
    }


def _items_json(items: Sequence[_Item]) -> dict[str, Any]:
    found = [{"file": item.file, "value": item.value, "problem": item.why_not or None} for item in items]
    return {"items": found} if found else {}


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
    return _cut(repr(value), MOST_LETTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} letters)"


def part_bytes(opened: Opened, name: str) -> int:
    """Bytes of the data of a checkpointable, by its name."""
    part = opened.part(name) if name in opened.trees else opened.committed.manifest.part(name)
    assert part is not None
    return sum(map(nbytes_of, part.arrays)) + sum(file.bytes for file in part.files)


def _print(opened: Opened, leaves: dict[str, tuple[LeafRecord, ArrayRecord | None]], items: Sequence[_Item]) -> None:
    about = metadata_of(opened)
    print_text(f"{opened.path}  ({opened.kind})")
    for name in ("step", "created", "metrics", "custom_metadata", "versions"):
        if about.get(name) not in (None, {}, ""):
            print_text(f"{name}: {about[name]}")
    for part in opened.committed.manifest.parts:
        print_text(f"part {part.name}: {part.kind}, {bytes_text(part_bytes(opened, part.name))}")
        own = [item for item in items if item.part == part.name]
        for item in own[:MOST_FILES]:
            print_text(f"  {item.file}: {item.why_not or _cut(json.dumps(item.value), MOST_VALUE_LETTERS)}")
        if len(own) > MOST_FILES:
            print(f"  and {len(own) - MOST_FILES:,} more files")
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
