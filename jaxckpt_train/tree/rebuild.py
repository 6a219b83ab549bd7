"""Rebuilds a tree from a checkpoint alone: nested dicts, lists and tuples, without the types that made it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.tree.flatten import PLACEHOLDER
from jaxckpt_train.tree.leaf_records import EmptyLeaf, TreeRecord
from jaxckpt_train.tree.paths import ROOT, Key, join, parse_key, split


def rebuild(record: TreeRecord, leaves: Mapping[str, Any], subject: str) -> Any:
    """Nested containers with the given leaves; a NamedTuple or object becomes a dict of its fields.

    Leaves of the record that are not given are left out, and so are containers without any that is; in a list or tuple
    PLACEHOLDER keeps their position.

    Raises:
        CorruptCheckpointError: the paths contradict each other, or are none that a save writes.
    """
    root: dict[str, Any] = {}
    for name in record.leaves:
        node = root
        keys = split(name)
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CorruptCheckpointError(f"{subject}: leaf {name!r} lies below another leaf")
        last = keys[-1] if keys else ROOT
        if last in node:
            raise CorruptCheckpointError(f"{subject}: leaf {name!r} is also a container")
        node[last] = _Leaf(name)
    if ROOT in record.leaves and len(record.leaves) > 1:
        raise CorruptCheckpointError(f"{subject}: the root is a leaf, but there are others")
    return _finish(root.get(ROOT, root), ROOT, record, leaves, subject)


class _Leaf:
    def __init__(self, name: str) -> None:
        self.name = name


def _finish(node: Any, path: str, record: TreeRecord, leaves: Mapping[str, Any], subject: str) -> Any:
    sort = record.containers.get(path, "dict").partition(" ")[0]
    if isinstance(node, _Leaf):
        if isinstance(record.leaves[node.name], EmptyLeaf) and node.name in leaves:
            return {"list": list, "tuple": tuple}.get(sort, dict)()
        return leaves.get(node.name, PLACEHOLDER)
    children = {key: _finish(child, join(path, key), record, leaves, subject) for key, child in node.items()}
    if children and all(child is PLACEHOLDER for child in children.values()):
        return PLACEHOLDER
    if sort in ("list", "tuple"):
        try:
            ordered = [children.pop(str(number)) for number in range(len(children))]
        except KeyError:
            raise CorruptCheckpointError(f"{subject}: the positions of the {sort} {path!r} have a gap") from None
        return ordered if sort == "list" else tuple(ordered)
    return {_parsed(key, path, subject): child for key, child in children.items() if child is not PLACEHOLDER}


def _parsed(key: str, path: str, subject: str) -> Key:
    try:
        return parse_key(key)
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"{subject}: {key!r:.100} below {path!r:.100} is no key: {error}") from error
