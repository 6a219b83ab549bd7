"""The static data of pytree nodes that are registered without keys: whether it names the children in another order.

JAX gives the children of such a node by position alone. Their names are at best in the static data of the node, as the
keys of a dict are. That data is recorded as JSON where it has a form that is the same in each process: text, numbers,
enum members, and tuples, lists and dicts of these. Everything else (functions, arrays, objects) is not compared.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, KeysView, Mapping, Sequence
from typing import Any, Literal

from jaxckpt_train.tree.paths import ROOT

_ANYTHING: dict[str, Any] = {}  # in the place of what has no stable form
_MAX_DEPTH = 8
_SHOWN = 200  # characters
_BYTES, _BYTES_OF_CHILD = 4096, 256


def describe(static: Any, children: int) -> str | None:
    """The static data as JSON; None: nothing in it has a stable form, or it is large for a node of so few children."""
    found = _plain(static, 0)
    if found is None or found == _ANYTHING:
        return None
    try:
        text = json.dumps(found, ensure_ascii=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # integers of some thousands of digits
        return None
    return text if len(text) <= _BYTES + _BYTES_OF_CHILD * children else None


def shortened(text: str) -> str:
    """A description for a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def static_difference(saved: str, found: str, children: int) -> Literal["moved", "other"] | None:
    """How the static data of a checkpoint and of a target differ.

    "moved": a name of a child is at another position, so that values would change places. None: not at all, as far as
    they are comparable.
    """
    try:
        return _difference(json.loads(saved), json.loads(found), children)
    except (ValueError, RecursionError):  # of a later version
        return None


def other_static(
    saved: Mapping[str, str], found: Mapping[str, str], names: Sequence[str], loaded: Mapping[str, str]
) -> Iterator[tuple[str, Literal["moved", "other"]]]:
    """The nodes whose static data differs between a checkpoint and a target, and how.

    Nodes below which leaves are renamed are left out: the caller has said which value goes where.

    Args:
        saved: static data of the checkpoint, by path.
        found: static data of the target, by path.
        names: paths of all leaves of the target.
        loaded: paths of those that are loaded, in the target and in the checkpoint.
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
    """Whether both lists name each child, and a name that both have is at another position."""
    places = [{json.dumps(name): at for at, name in enumerate(names) if name != _ANYTHING} for names in (old, new)]
    if not len(old) == len(new) == len(places[0]) == len(places[1]) == children:
        return False
    return any(places[1].get(name, at) != at for name, at in places[0].items())
