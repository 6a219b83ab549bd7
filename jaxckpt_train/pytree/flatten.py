"""Flattens any pytree to leaves that are named by their paths.

A leaf path joins the keys by `/`; it is readable, unambiguous, and can be parsed back into typed keys. Integers (list
positions, integer keys) are written as digits, and a text key that looks like an integer is marked with `~s`. Within
text, `~` is written `~0`, `/` `~1` and `@` `~2`, as in JSON pointers.

JAX identifies the children of a node that is registered without keys only by position. Their names are at best in the
static data of the node, as the keys of a dict are. That data is recorded as JSON where it has a form that is the same
in every process: text, numbers, enum members, and tuples, lists and dicts of these. Everything else (functions, arrays,
objects) is not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import operator
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxckpt_train.errors import UnsupportedLeafError

ROOT = "~"
MAX_DEPTH = 200
_CONTAINERS = (dict, list, tuple)
Key = Any  # str, int, bool, float, None, or a tuple of these
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WORDS = {"": "~e", "__metadata__": "~m"}
_WORDS_BACK = {text: word for word, text in _WORDS.items()} | {"~n": None, "~b0": False, "~b1": True}
_ESCAPES = (("~", "~0"), ("/", "~1"), ("@", "~2"), (",", "~3"))
_ESCAPED = re.compile("~[012s]")
HOW_ESCAPED = "in a key ~ is written ~0, / is ~1 and @ is ~2; ~s marks text that looks like an integer"
_ANYTHING: dict[str, Any] = {}  # replaces values that have no stable form
_MAX_DEPTH = 8
_SHOWN = 200  # characters
_BYTES, _BYTES_OF_CHILD = 4096, 256
PLACEHOLDER = ...
"""Marks a leaf or a whole subtree of a target that a load skips."""
_transparent: dict[type, bool] = {}
_known: OrderedDict[Any, _Known] = OrderedDict()
_KNOWN_TREES, _KNOWN_LEAVES = 4, 64
_MARKS_OF_OTHER_KEYS = ("~b", "~f", "~n", "~t")


class Empty:
    """The leaf of a container without children, which is no leaf for JAX but is one for a checkpoint."""


EMPTY = Empty()


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flattened pytree.

    Attributes:
        names: leaf paths.
        leaves: the leaves, including None and EMPTY.
        containers: for every container that is not a plain dict, its path and its kind: "list", "tuple",
            "namedtuple module.Type" or "object module.Type".
        structure: JAX's tree definition, for comparisons; None for a tree whose structure cannot be compared.
        static: path and static data (JSON) of each node that is registered without keys.
    """

    names: Sequence[str]
    leaves: Sequence[Any]
    containers: dict[str, str]
    structure: Any = None
    static: dict[str, str] = dataclasses.field(default_factory=dict)


def register_transparent(kind: type) -> None:
    """Declare a pytree node type with a single child that is stored under the node's own path (a box around a value).

    The boxes of Flax NNX and Linen need no declaration.
    """
    _transparent[kind] = True


class _Known(NamedTuple):
    """What all trees of one structure share; `others` are the leaves that JAX does not count as leaves."""

    names: Sequence[str]
    containers: dict[str, str]
    static: dict[str, str]
    others: dict[int, Any]


def flatten(tree: Any) -> Flat:
    """Flatten a pytree to named leaves.

    The names of the last few large structures are cached, because a training loop saves the same structure repeatedly.

    Raises:
        UnsupportedLeafError: a key cannot be written as text, or two leaves have the same path.
    """
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
    names: list[str] = []
    leaves: list[Any] = []
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
    """Return whether `kind` is a base class of Flax's boxes, by its name: Flax is not imported here."""
    return kind.__name__ in ("Variable", "AxisMetadata") and kind.__module__.startswith("flax.")


def _container(node: Any) -> str:
    kind = type(node)
    if kind in (list, tuple):
        return kind.__name__
    sort = "namedtuple" if isinstance(node, tuple) and hasattr(node, "_fields") else "object"
    return f"{sort} {kind.__module__}.{kind.__qualname__}"


def refuse_too_deep(subject: str, tree: object) -> None:
    """Raise UnsupportedLeafError if dicts, lists and tuples are nested more deeply than Python can follow.

    Call it before JAX walks the tree: a RecursionError in the middle of that walk leaves the thread at Python's limit.
    """
    level: dict[int, Any] = {0: tree} if isinstance(tree, _CONTAINERS) else {}
    for _ in range(2 * MAX_DEPTH):  # `flatten` refuses what is less deep, with the path of the leaf
        if not level:
            return
        children = (node.values() if isinstance(node, dict) else node for node in level.values())
        level = {id(child): child for some in children for child in some if isinstance(child, _CONTAINERS)}
    raise UnsupportedLeafError(
        f"{subject}: expected containers nested at most {MAX_DEPTH} levels deep, found more than {2 * MAX_DEPTH}; "
        "flatten the tree, or look for a container that holds itself"
    )


@contextlib.contextmanager
def refused_if_too_deep(subject: str) -> Iterator[None]:
    """Convert the error that Python or JAX raises for a tree that is too deep to UnsupportedLeafError.

    Args:
        subject: names the tree in the message.
    """
    try:
        yield
    except (RecursionError, SystemError) as error:
        # JAX's C++ code raises SystemError where it does not expect a RecursionError from a function that it calls.
        if not isinstance(error, RecursionError) and not isinstance(error.__cause__, RecursionError):
            raise
        raise UnsupportedLeafError(
            f"{subject}: expected containers nested at most {MAX_DEPTH} levels deep, found more than Python can "
            f"follow ({type(error).__name__}); flatten the tree, or look for a container that holds itself"
        ) from None  # the traceback has a thousand frames and would keep the tree alive


def key_text(key: Key, parent: str) -> str:
    """Write one key of a path as text.

    Raises:
        UnsupportedLeafError: the key is not text, a number, None or a tuple of these; the message names `parent`.
    """
    if isinstance(key, str):
        text = str.__str__(key)
        if text.isidentifier() and text != "__metadata__":
            return text
        if not text.isascii() and _has_surrogate(text):
            raise UnsupportedLeafError(f"a key below {parent!r}: {text!r} is not valid Unicode; rename it")
        return _escape(text)
    if isinstance(key, bool):
        return f"~b{int(key)}"
    if key is None:
        return "~n"
    if isinstance(key, float):
        return f"~f{key.hex()}"
    if isinstance(key, tuple):
        return "~t" + ",".join(_tuple_part(part, parent) for part in key)
    try:
        return str(operator.index(key))
    except ValueError as error:  # Python neither writes nor reads integers of some thousands of digits
        raise UnsupportedLeafError(
            f"a key below {parent!r}: an integer of {operator.index(key).bit_length()} bits is too large; "
            "convert the key to text"
        ) from error
    except TypeError:
        raise UnsupportedLeafError(
            f"a key below {parent!r}: expected text, a number, None or a tuple of these, "
            f"found {key!r} of type {type(key).__name__}; convert the key to text"
        ) from None


def _tuple_part(part: Key, parent: str) -> str:
    if isinstance(part, tuple):
        raise UnsupportedLeafError(
            f"a key below {parent!r}: a tuple within a tuple is not supported, found {part!r}; convert the key to text"
        )
    return key_text(part, parent).replace(",", "~3")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _escape(text: str) -> str:
    if text in _WORDS:
        return _WORDS[text]
    mark = "~s" if _INTEGER.fullmatch(text) else ""
    for plain, escaped in _ESCAPES[:3]:
        text = text.replace(plain, escaped)
    return mark + text


def parse_key(text: str) -> Key:
    """Parse text that `key_text` wrote.

    Raises:
        ValueError, OverflowError: `key_text` never writes such text.
    """
    if "~" not in text:
        return int(text) if _INTEGER.fullmatch(text) else text
    if text in _WORDS_BACK:
        return _WORDS_BACK[text]
    mark, rest = text[:2], text[2:]
    if mark == "~t":
        return tuple(_parse_part(part) for part in rest.split(",")) if rest else ()
    if mark == "~f":
        return float.fromhex(rest)
    if mark == "~s":
        text = rest
    for plain, escaped in reversed(_ESCAPES):
        text = text.replace(escaped, plain)
    return text


def _parse_part(text: str) -> Key:
    if text.startswith("~t"):
        raise ValueError("a tuple within a tuple")
    return parse_key(text)


def escapes_in(paths: str) -> str:
    """Return a remark on how keys are escaped, to append to these paths in a message; empty if none is escaped."""
    return f" ({HOW_ESCAPED})" if _ESCAPED.search(paths) else ""


def join(parent: str, key: str) -> str:
    """Return the path of a child from the path of its parent and its own key text."""
    return key if parent == ROOT else f"{parent}/{key}"


def split(path: str) -> list[str]:
    """Split a path into its key texts; the root has none."""
    return [] if path == ROOT else path.split("/")


def find_nested_leaves(leaves: Collection[str]) -> tuple[str, str] | None:
    """Find a leaf path and another leaf path above it, a pair that no tree can have; None: there is no such pair.

    The function visits each container once, however many leaves there are.
    """
    containers: set[str] = set()
    for name in leaves:
        at = name.rfind("/")
        while at >= 0 and (container := name[:at]) not in containers:
            containers.add(container)
            at = container.rfind("/")
    if ROOT in leaves:
        return next(((name, ROOT) for name in leaves if name != ROOT), None)
    above = next((name for name in leaves if name in containers), None)
    return None if above is None else next((name, above) for name in leaves if name.startswith(f"{above}/"))


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
    """Say how the static data of a checkpoint and of a target differ.

    Returns:
        "moved": the name of a child is at another position, so that values would be exchanged. "other": any other
        difference. None: no difference, as far as the two are comparable.
    """
    try:
        return _difference(json.loads(saved), json.loads(found), children)
    except (ValueError, RecursionError):  # a later version may have written it
        return None


def nodes_with_other_static(
    saved: Mapping[str, str], found: Mapping[str, str], names: Sequence[str], loaded: Mapping[str, str]
) -> Iterator[tuple[str, Literal["moved", "other"]]]:
    """Find the nodes whose static data differs between a checkpoint and a target, and say how.

    Nodes below which leaves are renamed are left out, because the caller has assigned their values explicitly.

    Args:
        saved: static data of the checkpoint, by path.
        found: static data of the target, by path.
        names: paths of all leaves of the target.
        loaded: paths of the leaves that are loaded: the path in the target to the path in the checkpoint.
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
    if isinstance(old, list) and isinstance(new, list):
        if _have_moved(old, new, children):
            return "moved"
        if len(old) == len(new):
            return _worst([_difference(a, b, children) for a, b in zip(old, new, strict=True)])
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return _worst([_difference(old[key], new[key], children) for key in old])
    return "other"


def _worst(found: list[Literal["moved", "other"] | None]) -> Literal["moved", "other"] | None:
    return "moved" if "moved" in found else "other" if "other" in found else None


def _have_moved(old: list[Any], new: list[Any], children: int) -> bool:
    """Return whether both lists name each child and a name that is in both has changed its position."""
    places = [{json.dumps(name): at for at, name in enumerate(names) if name != _ANYTHING} for names in (old, new)]
    if not len(old) == len(new) == len(places[0]) == len(places[1]) == children:
        return False
    return any(places[1].get(name, at) != at for name, at in places[0].items())
