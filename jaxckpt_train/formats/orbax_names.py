"""The tree of an Orbax checkpoint in the form that a target has for the same leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jaxckpt_train.formats.orbax_metadata import VALUE
from jaxckpt_train.tree.flatten import EMPTY, Flat
from jaxckpt_train.tree.leaf_records import EmptyLeaf, LeafRecord, NoneLeaf, TreeRecord

_NUMBER = re.compile(r"~s-?[0-9]+")


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
    plain = dict[str, list[str]]()
    for name in wanted:
        plain.setdefault(_plain(name), []).append(name)
    for saved, name in names.items():
        others = (each for form in _forms(name) for each in plain.get(form, ()) if each not in taken)
        found[saved] = name if name in wanted else next(others, name)
        taken.add(found[saved])
        if isinstance(leaves[saved], NoneLeaf) and wanted.get(found[saved]) is EMPTY:
            leaves[saved] = EmptyLeaf()
    return TreeRecord(record.containers, leaves), found


def _forms(name: str) -> Iterator[str]:
    yield _plain(name)
    if name.endswith(VALUE):
        yield _plain(name.removesuffix(VALUE))


def _plain(name: str) -> str:
    """With the digits alone of each key that may be text or an integer."""
    return "/".join(key[2:] if _NUMBER.fullmatch(key) else key for key in name.split("/"))
