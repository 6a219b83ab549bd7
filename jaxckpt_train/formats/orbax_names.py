"""The tree of an Orbax checkpoint in the form that a target has for the same leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxckpt_train.tree.flatten import EMPTY, Flat
from jaxckpt_train.tree.leaf_records import EmptyLeaf, LeafRecord, NoneLeaf, TreeRecord

VALUE = "/value"  # of a variable of Flax NNX, which Orbax takes for a container


def in_form_of(target: Flat, record: TreeRecord, names: Mapping[str, str]) -> tuple[TreeRecord, dict[str, str]]:
    """The leaves and their names, as far as the target has none of them, in another form that it has.

    Orbax does not say whether a key of a mapping was text or an integer, saves variables of NNX as mappings, and a
    NamedTuple without fields, such as some of Optax's states, as None.

    Args:
        target: its leaves.
        record: of the checkpoint.
        names: of its leaves by their paths there.
    """
    wanted = dict(zip(target.names, target.leaves, strict=True))
    taken, leaves, found = set(names.values()) & wanted.keys(), dict[str, LeafRecord](record.leaves), dict[str, str]()
    for saved, name in names.items():
        other = None if name in wanted else next((each for each in _forms(name) if each in wanted.keys() - taken), None)
        found[saved] = name if other is None else other
        taken.add(found[saved])
        if isinstance(leaves[saved], NoneLeaf) and wanted.get(found[saved]) is EMPTY:
            leaves[saved] = EmptyLeaf()
    return TreeRecord(record.containers, leaves), found


def _forms(name: str) -> Iterator[str]:
    plain = name.removesuffix(VALUE)
    for form in (plain, _with_text_keys(name), _with_text_keys(plain)):
        if form != name:
            yield form


def _with_text_keys(name: str) -> str:
    return "/".join(f"~s{key}" if key.removeprefix("-").isdigit() else key for key in name.split("/"))
