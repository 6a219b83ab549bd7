"""Flattens any pytree to named leaves, and names its containers."""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.tree.paths import MAX_DEPTH, ROOT, join, key_text, split
from jaxckpt_train.tree.static_data import describe

PLACEHOLDER = ...
"""Stands in a target for a leaf, or a whole subtree, that a load skips."""


class Empty:
    """Stands for a container without children; such a container is no leaf for JAX but is one for a checkpoint."""


EMPTY = Empty()
_transparent: dict[type, bool] = {}


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened pytree.

    Attributes:
        names: leaf paths.
        leaves: the leaves, None and EMPTY included.
        containers: for every container that is no plain dict, its path and what it is: "list", "tuple",
            "namedtuple module.Type" or "object module.Type".
        structure: what JAX says of it, for comparing; None for a tree whose structure cannot be compared.
        static: of nodes that are registered without keys, the path and their static data as JSON.
    """

    names: Sequence[str]
    leaves: Sequence[Any]
    containers: dict[str, str]
    structure: Any = None
    static: dict[str, str] = dataclasses.field(default_factory=dict)


def register_transparent(kind: type) -> None:
    """Declare a pytree node with a single child that is stored under the node's own path (a box around a value).

    The boxes of Flax NNX and Linen are known without it.
    """
    _transparent[kind] = True


class _Known(NamedTuple):
    """What is the same for all trees of one structure; `others` are the leaves that JAX does not count as such."""

    names: Sequence[str]
    containers: dict[str, str]
    static: dict[str, str]
    others: dict[int, Any]


_known: OrderedDict[Any, _Known] = OrderedDict()
_KNOWN_TREES, _KNOWN_LEAVES = 4, 64
_MARKS_OF_OTHER_KEYS = ("~b", "~f", "~n", "~t")


def flatten(tree: Any) -> Flat:
    """Flatten a pytree to named leaves.

    The names of the last few large structures are kept: a loop saves the same one again and again.

    Raises:
        UnsupportedLeafError: a key cannot be written as text, or two leaves get the same path.
    """
    try:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        known = _known.get(structure) if len(leaves) >= _KNOWN_LEAVES else None
    except (TypeError, ValueError):  # no tree for JAX, which is told below; or static data that cannot be compared
        return _flatten_anew(tree)
    if known is not None:
        return Flat(known.names, _merged(leaves, known.others), known.containers, structure, known.static)
    flat = dataclasses.replace(_flatten_anew(tree), structure=structure)
    others = {number: leaf for number, leaf in enumerate(flat.leaves) if leaf is None or leaf is EMPTY}
    if len(leaves) + len(others) != len(flat.leaves):
        return flat  # JAX flattens a part of it otherwise, by a registration of its own
    merged = _merged(leaves, others)
    if len(leaves) >= _KNOWN_LEAVES and all(map(operator.is_, merged, flat.leaves)) and _has_plain_keys(flat):
        _known[structure] = _Known(flat.names, flat.containers, flat.static, others)
        while len(_known) > _KNOWN_TREES:
            _known.popitem(last=False)
    return flat


def _has_plain_keys(flat: Flat) -> bool:
    """Whether all keys are text or positions: structures with 1, 1.0 or True as a key are equal, their names not."""
    for name in flat.names:
        path = ROOT
        for key in split(name):
            is_number = key.lstrip("-").isdigit()
            if key[:2] in _MARKS_OF_OTHER_KEYS or (is_number and flat.containers.get(path) not in ("list", "tuple")):
                return False
            path = join(path, key)
    return True


def _merged(leaves: Sequence[Any], others: dict[int, Any]) -> Sequence[Any]:
    if not others:
        return leaves
    rest = iter(leaves)
    return [others[n] if n in others else next(rest) for n in range(len(leaves) + len(others))]


def _flatten_anew(tree: Any) -> Flat:
    names: list[str] = []
    leaves: list[Any] = []
    flat = Flat(names, leaves, {})
    _walk(tree, ROOT, names, leaves, flat)
    for name in names:
        if name.count("/") >= MAX_DEPTH:
            raise UnsupportedLeafError(f"leaf {name[:200]!r}...: deeper than {MAX_DEPTH} levels")
    if len(set(names)) != len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise UnsupportedLeafError(f"leaf {twice!r}: two leaves of the tree have this path; rename one")
    return flat


def unflatten(tree: Any, leaves: Sequence[Any]) -> Any:
    """A tree like `tree` with other leaves, given in the order of `flatten(tree)`."""
    structure = jax.tree_util.tree_structure(tree, is_leaf=_is_none)
    return jax.tree_util.tree_unflatten(structure, [leaf for leaf in leaves if leaf is not EMPTY])


def _is_none(value: object) -> bool:
    return value is None


def _walk(node: Any, path: str, names: list[str], leaves: list[Any], flat: Flat) -> None:
    found = _children(node, path)
    if found is None:
        names.append(path)
        leaves.append(node)
        return
    children, static = found
    kind = type(node)
    if len(children) == 1 and _is_transparent(kind):
        _walk(children[0][1], path, names, leaves, flat)
        return
    if kind is not dict:
        flat.containers[path] = _container(node)
    if static is not None:
        flat.static[path] = static
    if not children:
        names.append(path)
        leaves.append(EMPTY)
    for key, child in children:
        _walk(child, join(path, key_text(key, path)), names, leaves, flat)


def _children(node: Any, path: str) -> tuple[Sequence[tuple[Any, Any]], str | None] | None:
    """Keys and children in JAX's order, and the static data of a node without keys; None for a leaf."""
    if node is None:
        return None
    kind = type(node)
    if kind is list or kind is tuple:
        return list(enumerate(node)), None
    if isinstance(node, tuple) and hasattr(kind, "_fields"):
        return list(zip(kind._fields, node, strict=True)), None  # JAX names them by position up to 0.10
    try:
        found = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
    except ValueError as error:
        raise UnsupportedLeafError(f"{path!r}: JAX cannot flatten this {kind.__name__}: {error}") from error
    if found is None:
        return None
    pairs = [(_plain_key(key), child) for key, child in found[0]]
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        return [(number, child) for number, (_, child) in enumerate(pairs)], None
    has_no_keys = pairs and all(type(key) is jax.tree_util.FlattenedIndexKey for key, _ in found[0])
    return pairs, describe(found[1], len(pairs)) if has_no_keys else None


def _plain_key(entry: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def _is_transparent(kind: type) -> bool:
    known = _transparent.get(kind)
    if known is None:
        known = _transparent[kind] = any(_transparent.get(parent, _is_flax_box(parent)) for parent in kind.__mro__)
    return known


def _is_flax_box(kind: type) -> bool:
    """Whether it is one of Flax's bases of boxes, by name: Flax is not imported here."""
    return kind.__name__ in ("Variable", "AxisMetadata") and kind.__module__.startswith("flax.")


def _container(node: Any) -> str:
    kind = type(node)
    if kind in (list, tuple):
        return kind.__name__
    sort = "namedtuple" if isinstance(node, tuple) and hasattr(node, "_fields") else "object"
    return f"{sort} {kind.__module__}.{kind.__qualname__}"
