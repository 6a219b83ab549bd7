"""How the checkpointables of two checkpoints differ that are no trees, such as JSON values and iterators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np

from jaxckpt_train.looking.leaf_diff import LeafDiff
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.manifest import FileRecord, PartRecord
from jaxckpt_train.store.plain_files import read_recorded
from jaxckpt_train.tree.leaf_records import has_tree


def parts_to_compare(a: Opened, b: Opened) -> dict[str, tuple[PartRecord | None, PartRecord | None]]:
    """Those that are no tree in one of the two, in the order of `a`, then what only `b` has; None: it is not there."""
    of_a, of_b = ({part.name: part for part in each.committed.manifest.parts} for each in (a, b))
    names = [*of_a, *(name for name in of_b if name not in of_a)]
    pairs = {name: (of_a.get(name), of_b.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if any(each is not None and not has_tree(each) for each in pair)}


def diff_parts(a: Opened, b: Opened, selected: Callable[[str], bool] = lambda name: True) -> Iterator[LeafDiff]:
    """The differences of all checkpointables that are no trees, by their names; equal ones too.

    What counts is files, of the same names: their digests, where both have the same ones, else every byte; of values
    of different tools what the JSON stands for.

    Raises:
        CorruptCheckpointError: a file is not what was saved.
        StorageError: it cannot be read.
    """
    for name, (one, other) in parts_to_compare(a, b).items():
        if not selected(name):
            continue
        if one is None or other is None:
            yield LeafDiff(name, "only_b" if one is None else "only_a", _kind(one), _kind(other))
        elif one.kind != other.kind or has_tree(one) != has_tree(other):
            yield LeafDiff(name, "form", _kind(one), _kind(other))
        else:
            mine, theirs = ({file.file: file for file in part.files} for part in (one, other))
            count = len(mine.keys() | theirs.keys())
            differing = count - sum(_is_same(a, mine[file], b, theirs[file]) for file in mine.keys() & theirs.keys())
            yield LeafDiff(
                name, "value" if differing else "equal", one.kind, other.kind, differing=differing, count=count
            )


def _kind(part: PartRecord | None) -> str:
    return "" if part is None else part.kind


def _is_same(a: Opened, one: FileRecord, b: Opened, other: FileRecord) -> bool:
    first, second = a.committed.manifest, b.committed.manifest
    if one.digests and other.digests and (first.digest, first.block_bytes) == (second.digest, second.block_bytes):
        return (one.bytes, one.digests) == (other.bytes, other.digests)
    is_json = a.kind != b.kind  # each writes it in a way of its own
    if one.bytes != other.bytes and not is_json:
        return False
    mine, theirs = read_file(a, one), read_file(b, other)
    return np.array_equal(mine, theirs) or (is_json and _is_same_json(mine, theirs))


def read_file(opened: Opened, file: FileRecord) -> np.ndarray:
    """All bytes of a file of a checkpointable, as a flat uint8 array.

    Raises:
        CorruptCheckpointError: it is not what was saved.
        StorageError: it cannot be read.
    """
    manifest = opened.committed.manifest
    digest = manifest.digest if opened.settings.verify_on_load and file.digests else None
    return read_recorded(opened.files, opened.path, file, digest, manifest.block_bytes)


def _is_same_json(one: np.ndarray, other: np.ndarray) -> bool:
    try:
        mine, theirs = (json.dumps(json.loads(each.tobytes()), sort_keys=True) for each in (one, other))
    except (ValueError, RecursionError):
        return False
    return mine == theirs
