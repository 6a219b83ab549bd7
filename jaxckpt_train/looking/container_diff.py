"""Where the containers of two trees differ: a list from a tuple or a mapping, a NamedTuple from another one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from jaxckpt_train.looking.leaf_diff import LeafDiff
from jaxckpt_train.opened import Opened
from jaxckpt_train.tree.leaf_records import EmptyLeaf, TreeRecord
from jaxckpt_train.tree.paths import ROOT, join, split


def diff_containers(a: Opened, b: Opened, selected: Callable[[str], bool] = lambda name: True) -> Iterator[LeafDiff]:
    """The containers that both have, and that are not of the same kind.

    One is selected if all leaves in it are, in both; one without children is itself a leaf. Where only one of the two
    has children the leaves tell it. Checkpoints of different tools are not compared: others do not tell all kinds.

    Raises:
        CorruptCheckpointError: the record of a tree is damaged.
    """
    if a.kind != b.kind:
        return
    of_b = b.trees
    for part, mine in a.trees.items():
        theirs = of_b.get(part)
        paths = [] if theirs is None else _of_other_kinds(mine.containers, theirs.containers)
        if theirs is None or not paths:
            continue
        one, other = (_emptiness(part, record, set(paths), selected) for record in (mine, theirs))
        for path in paths:
            if path in one and path in other and one[path] == other[path]:
                yield LeafDiff(f"{part}/{path}", "form", _kind(mine.containers, path), _kind(theirs.containers, path))


def _of_other_kinds(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Paths of which the kinds differ, as far as there are containers at all."""
    paths = [*mine, *(path for path in theirs if path not in mine)]
    return [path for path in paths if _kind(mine, path) != _kind(theirs, path)]


def _kind(containers: Mapping[str, str], path: str) -> str:
    return containers.get(path, "dict")


def _emptiness(
    part: str, record: TreeRecord, paths: Collection[str], selected: Callable[[str], bool]
) -> dict[str, bool]:
    """Whether a container has no children, of those of these paths that are there and selected."""
    found, left_out = dict[str, bool](), set[str]()
    for name, leaf in record.leaves.items():
        around = [*_parents(name), name] if isinstance(leaf, EmptyLeaf) else list(_parents(name))
        inside = [path for path in around if path in paths]
        found.update({path: path == name for path in inside})
        if inside and not selected(f"{part}/{name}"):
            left_out.update(inside)
    return {path: is_empty for path, is_empty in found.items() if path not in left_out}


def _parents(name: str) -> Iterator[str]:
    path = ROOT
    for key in split(name):
        yield path
        path = join(path, key)
