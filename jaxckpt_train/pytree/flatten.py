"""Flattens any pytree to leaves that are named by their paths.

JAX identifies the children of a node that is registered without keys only by position. Their names are at best in the
static data of the node. That data is recorded as JSON where it has a form that is the same in every process: text,
numbers, enum members, and tuples, lists and dicts of these. Everything else is not compared.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import operator
from collections import OrderedDict
from collections.abc import Iterator, KeysView, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.pytree.leaves import EMPTY, MAX_DEPTH, ROOT, Flat, escapes_in, join, key_text, split
from jaxckpt_train.store.segment import is_storable

WITHOUT_FUNCTIONS = (
    "save and load only the arrays: for an Equinox module eqx.filter(model, eqx.is_array), whose result eqx.combine "
    "joins with the functions; in other trees keep functions in static fields, or outside of the tree"
)
_ANYTHING: dict[str, Any] = {}  # replaces values that have no stable form
_MAX_DEPTH = 8
_SHOWN = 200  # characters
_BYTES, _BYTES_OF_CHILD = 4096, 256
PLACEHOLDER = ...  # marks a leaf or a whole subtree of a target that a load skips
_transparent: dict[type, bool] = {}  # node types whose single child is stored under their own path, such as boxes
_known: OrderedDict[Any, _Known] = OrderedDict()  # a training loop saves the same structure repeatedly
_KNOWN_TREES, _KNOWN_LEAVES = 4, 64
_MARKS_OF_OTHER_KEYS = ("~b", "~f", "~n", "~t")


def is_key_array(value: Any) -> bool:
    """Return whether the value is a typed PRNG key array, or an abstract one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and _is_key_dtype(dtype)


def is_function(value: object) -> bool:
    """Return whether a leaf is a function or another callable that holds no data of its own."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "__array__")


@functools.cache
def _is_key_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def check_storable(name: str, value: Any) -> np.ndarray | np.generic:
    """Return the value, if it is a numpy array or scalar that can be stored; else raise UnsupportedLeafError."""
    if is_function(value):
        raise UnsupportedLeafError(
            f"leaf {name!r}: a function or other callable cannot be stored{escapes_in(name)}; {WITHOUT_FUNCTIONS}"
        )
    if not isinstance(value, np.generic) and type(value) not in (np.ndarray, np.memmap):
        raise UnsupportedLeafError(
            f"leaf {name!r}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored{escapes_in(name)}; "
            "expected arrays, numbers, text, bytes or None. Convert it, or register a handler "
            "(jaxckpt_train.register_handler); for a data set pass its iterator, iter(...)"
        )
    if not is_storable(value.dtype):
        raise UnsupportedLeafError(
            f"leaf {name!r}: numpy dtype {value.dtype} cannot be stored, because it has no fixed binary "
            "representation; convert it, for example to uint8 or text"
        )
    storable: np.ndarray | np.generic = value
    return storable


class _Known(NamedTuple):
    """The facts that all trees of one structure share; `others` are the leaves that JAX does not count as leaves."""

    names: Sequence[str]
    containers: dict[str, str]
    static: dict[str, str]
    others: dict[int, Any]


def flatten(tree: Any) -> Flat:
    """Flatten a pytree to named leaves; raise UnsupportedLeafError if a path has no text, or two leaves share one."""
    try:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        known = _known.get(structure) if len(leaves) >= _KNOWN_LEAVES else None
    except (TypeError, ValueError):  # no tree for JAX (the walk below says why), or static data that has no hash
        return _flatten_uncached(tree)
    if known is not None:
        return Flat(known.names, _merged(leaves, known.others), known.containers, structure, known.static)
    flat = dataclasses.replace(_flatten_uncached(tree), structure=structure)
    others = {number: leaf for number, leaf in enumerate(flat.leaves) if leaf is None or leaf is EMPTY}
    if len(leaves) + len(others) != len(flat.leaves):
        return flat  # JAX flattens a part of the tree in another way, through a registration of its own
    merged = _merged(leaves, others)
    if len(leaves) >= _KNOWN_LEAVES and all(map(operator.is_, merged, flat.leaves)) and _has_plain_keys(flat):
        _known[structure] = _Known(flat.names, flat.containers, flat.static, others)
        while len(_known) > _KNOWN_TREES:
            _known.popitem(last=False)
    return flat


def _has_plain_keys(flat: Flat) -> bool:
    """Return whether all keys are text or positions: keys 1, 1.0 and True give equal structures but other names."""
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


def _flatten_uncached(tree: Any) -> Flat:
    names, leaves = list[str](), list[Any]()
    flat = Flat(names, leaves, {})
    _walk(tree, ROOT, names, leaves, flat)
    for name in names:
        if name.count("/") >= MAX_DEPTH:
            raise UnsupportedLeafError(f"leaf {name[:200]!r}...: nested deeper than {MAX_DEPTH} levels")
    if len(set(names)) != len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise UnsupportedLeafError(f"leaf {twice!r}: two leaves of the tree have this path; rename one")
    return flat


def unflatten(tree: Any, leaves: Sequence[Any]) -> Any:
    """Build a tree like `tree` with other leaves, given in the order of `flatten(tree)`."""
    structure = jax.tree_util.tree_structure(tree, is_leaf=lambda node: node is None)
    return jax.tree_util.tree_unflatten(structure, [leaf for leaf in leaves if leaf is not EMPTY])


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
    """Return keys and children in JAX's order, and the static data of a node without keys; None for a leaf."""
    if node is None:
        return None
    kind = type(node)
    if kind is list or kind is tuple:
        return list(enumerate(node)), None
    if isinstance(node, tuple) and hasattr(kind, "_fields"):
        return list(zip(kind._fields, node, strict=True)), None  # JAX up to 0.10 names them by position
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
    return next((getattr(entry, each) for each in ("key", "name", "idx") if hasattr(entry, each)), entry)


def _is_transparent(kind: type) -> bool:
    if kind not in _transparent:  # Flax's boxes are known by name: Flax is not imported here
        _transparent[kind] = any(
            _transparent.get(each, each.__name__ in ("Variable", "AxisMetadata") and each.__module__[:5] == "flax.")
            for each in kind.__mro__
        )
    return _transparent[kind]


def _container(node: Any) -> str:
    kind = type(node)
    if kind in (list, tuple):
        return kind.__name__
    sort = "namedtuple" if isinstance(node, tuple) and hasattr(node, "_fields") else "object"
    return f"{sort} {kind.__module__}.{kind.__qualname__}"


def describe(static: Any, children: int) -> str | None:
    """Describe static data as JSON; None: nothing in it has a stable form, or it is too large for so few children."""
    found = _plain(static, 0)
    if found is None or found == _ANYTHING:
        return None
    try:
        text = json.dumps(found, ensure_ascii=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # for example integers of some thousands of digits
        return None
    return text if len(text) <= _BYTES + _BYTES_OF_CHILD * children else None


def shortened(text: str) -> str:
    """Shorten a description for a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def static_difference(saved: str, found: str, children: int) -> Literal["moved", "other"] | None:
    """Say how the static data of a checkpoint and of a target differ; None: not at all, as far as comparable.

    "moved": the name of a child is at another position, so that values would be exchanged.
    """
    try:
        return _difference(json.loads(saved), json.loads(found), children)
    except (ValueError, RecursionError):  # a later version may have written it
        return None


def nodes_with_other_static(
    saved: Mapping[str, str], found: Mapping[str, str], names: Sequence[str], loaded: Mapping[str, str]
) -> Iterator[tuple[str, Literal["moved", "other"]]]:
    """Find the nodes whose static data differs between a checkpoint and a target, and say how.

    Nodes below which leaves are renamed are left out, because the caller has assigned their values explicitly. `names`:
    paths of all leaves of the target; `loaded`: stored paths of those that are loaded.
    """
    for path in found.keys() & saved.keys():
        if saved[path] == found[path]:
            continue
        start = "" if path == ROOT else f"{path}/"
        below = {name: old for name, old in loaded.items() if name.startswith(start)}
        if not below or any(name != old for name, old in below.items()):
            continue
        children = len({name[len(start) :].partition("/")[0] for name in names if name.startswith(start)})
        difference = static_difference(saved[path], found[path], children)
        if difference is not None:
            yield path, difference


def _plain(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and value == value):
        return value
    if isinstance(value, enum.Enum):
        return ["enum", kind.__qualname__, value.name]
    if depth < _MAX_DEPTH:
        if isinstance(value, (tuple, list, KeysView)):
            return [_plain(each, depth + 1) for each in value]
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": {key: _plain(value[key], depth + 1) for key in sorted(value)}}
    return _ANYTHING


def _difference(old: Any, new: Any, children: int) -> Literal["moved", "other"] | None:
    if old == new or _ANYTHING in (old, new):
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if _have_moved(old, new, children):
            return "moved"
        pairs = list(zip(old, new, strict=True))
    elif isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        pairs = [(old[key], new[key]) for key in old]
    else:
        return "other"
    found = {_difference(a, b, children) for a, b in pairs}
    return "moved" if "moved" in found else "other" if "other" in found else None


def _have_moved(old: list[Any], new: list[Any], children: int) -> bool:
    """Return whether both lists name each child and a name that is in both has changed its position."""
    places = [{json.dumps(name): at for at, name in enumerate(names) if name != _ANYTHING} for names in (old, new)]
    is_named = len(old) == len(places[0]) == len(places[1]) == children
    return is_named and any(places[1].get(name, at) != at for name, at in places[0].items())
