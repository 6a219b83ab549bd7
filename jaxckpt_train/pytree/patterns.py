"""Patterns of leaf paths: `params/**`, `*/kernel`, a list of them, or any predicate."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence

from jaxckpt_train._validation import shown
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.pytree.flatten import HOW_ESCAPED, ROOT, key_text, parse_key, split

Only = str | Sequence[str] | Callable[[str], bool] | None
_MOST_NAMED = 3
_MOST_KEYS = 8
_MOST_COMPARED = 1000  # more take seconds
_PIECES = re.compile(r"\*\*|\*|\?|[^*?]+")
_MEANING = {"**": ".*", "*": "[^/]*", "?": "[^/]"}


def leaf_filter(only: Only) -> Callable[[str], bool]:
    """A predicate of the leaf path. In a pattern `**` stands for anything, `*` for anything within one key.

    Raises:
        SettingsError: `only` is none of the forms.
    """
    if only is None:
        return lambda name: True
    if callable(only):
        return only
    patterns: object = (only,) if isinstance(only, str) else only
    if not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SettingsError(
            f'only: expected a pattern such as "params/**", a list of them or a predicate, found {shown(only)}'
        )
    exact = {pattern for pattern in patterns if not set(pattern) & set("*?")}
    compiled = [re.compile(_expression(pattern), re.DOTALL) for pattern in patterns if pattern not in exact]
    return lambda name: name in exact or any(expression.fullmatch(name) for expression in compiled)


def idle_pattern(only: Only, names: Collection[str]) -> Only:
    """The first of the patterns that selects nothing: one that is misspelt must not pass for chosen. None: all do."""
    if only is None or callable(only) or isinstance(only, str) or not only:
        return None if only is None or any(map(leaf_filter(only), names)) else only
    known = set(names)
    return next((each for each in only if each not in known and not any(map(leaf_filter(each), names))), None)


def refuse_idle_pattern(subject: str, only: Only, names: Collection[str]) -> None:
    """Raise MismatchError if one of the patterns of a load selects nothing."""
    idle = idle_pattern(only, names)
    if idle is not None:
        raise MismatchError(
            f"{subject}: only={idle!r} selects none of {len(names)} leaves{suggestion(idle, names)}: "
            f"{keys_there(idle if isinstance(idle, str) else '', names)}"
        )


def keys_there(pattern: str, names: Collection[str]) -> str:
    """The leaves and containers where a pattern that selects nothing parts from the tree, as patterns to use instead.

    Where a key is escaped, how to write one is added.
    """
    inside, above = list(names), ""
    for key in pattern.strip().split("/"):
        below = [name for name in inside if name.startswith(f"{above}{key}/")]
        if not below or set(key) & set("*?{"):
            break
        inside, above = below, f"{above}{key}/"
    keys = {name[len(above) :].partition("/") for name in inside}
    found = sorted({f"{above}{key}/**" if slash else f"{above}{key}" for key, slash, _ in keys})
    listed = ", ".join(map(repr, found[:_MOST_KEYS])) + (", ..." if len(found) > _MOST_KEYS else "")
    is_escaped = any("~" in each for each in (pattern, *found[:_MOST_KEYS]) if each != ROOT)
    return (listed or "none") + (f"; {HOW_ESCAPED}" if is_escaped else "")


def _expression(pattern: str) -> str:
    return "".join(_MEANING.get(piece, re.escape(piece)) for piece in _PIECES.findall(pattern))


def alike(name: str, names: Collection[str]) -> list[str]:
    """The few of the names that end as this one does, the shortest first; else those that resemble it."""
    ends = [each for each in names if each.endswith(f"/{name}")]
    near = ends or (difflib.get_close_matches(name, names, _MOST_NAMED, 0.7) if len(names) <= _MOST_COMPARED else [])
    return sorted(near, key=len)[:_MOST_NAMED] if ends else near


def suggestion(only: Only, names: Collection[str], fits: Callable[[str], Callable[[str], bool]] = leaf_filter) -> str:
    """A question that names a pattern like those given that does select something; empty if none is found.

    Args:
        only: the patterns that select nothing.
        names: of leaves.
        fits: what makes a predicate of a pattern.
    """
    patterns = [only] if isinstance(only, str) else only
    if callable(patterns) or patterns is None:
        return ""
    for given in patterns:
        pattern = given.strip()
        plain = pattern.strip("/").removesuffix("/*").removesuffix("/**")
        tops = difflib.get_close_matches(plain.partition("/")[0], {name.partition("/")[0] for name in names}, 1)
        _, slash, rest = plain.partition("/")
        corrected = _with_known_keys(pattern, names)
        ways = (f"{top}{slash}{rest}/**" for top in tops)
        escaped = _with_escapes(pattern, names)
        for tried in (
            pattern,
            plain,
            f"{plain}/**",
            escaped,
            pattern.replace(".", "/"),
            corrected,
            f"{corrected}/**",
            *ways,
            *tops,
        ):
            if any(map(fits(tried), names)):
                return f', did you mean "{tried}"?'
    return ""


def _with_escapes(pattern: str, names: Collection[str]) -> str:
    """The path of a leaf whose keys are given as they are, or a pattern with the keys that are none escaped."""
    for name in names:
        if "~" in name and pattern == "/".join(str(_key(text)) for text in split(name)):
            return name
    known = {key for name in names for key in name.split("/")}
    keys = pattern.split("/")
    for place, key in enumerate(keys):
        if key not in known and key.isprintable() and key and not set(key) & set("*?{"):
            keys[place] = key_text(key, ROOT)
    return "/".join(keys)


def _key(text: str) -> object:
    try:
        return parse_key(text)
    except (ValueError, OverflowError):
        return text


def _with_known_keys(pattern: str, names: Collection[str]) -> str:
    """A pattern with the nearest key that there is for each one without wildcards that is none."""
    known = {key for name in names for key in name.split("/")}
    if len(known) > _MOST_COMPARED:
        return pattern
    keys = pattern.split("/")
    unknown = [number for number, key in enumerate(keys) if key not in known and not set(key) & set("*?{")]
    for number in unknown:
        keys[number] = next(iter(difflib.get_close_matches(keys[number], known, 1)), keys[number])
    return "/".join(keys)
