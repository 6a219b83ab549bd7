"""Patterns of leaf paths: `params/**`, `*/kernel`, a list of patterns, or any predicate."""

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
_MOST_COMPARED = 1000  # comparing more takes seconds
_PIECES = re.compile(r"\*\*|\*|\?|[^*?]+")
_MEANING = {"**": ".*", "*": "[^/]*", "?": "[^/]"}


def leaf_filter(only: Only) -> Callable[[str], bool]:
    """Compile patterns to a predicate of the leaf path. `**` matches anything, `*` anything within one key.

    Raises:
        SettingsError: `only` is not a pattern, a list of patterns or a predicate.
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
    """Return the first pattern that selects nothing, probably because it is misspelt; None: all select something."""
    if only is None or callable(only) or isinstance(only, str) or not only:
        return None if only is None or any(map(leaf_filter(only), names)) else only
    known = set(names)
    return next((each for each in only if each not in known and not any(map(leaf_filter(each), names))), None)


def refuse_idle_pattern(subject: str, only: Only, names: Collection[str]) -> None:
    """Raise MismatchError if a pattern of a load selects nothing."""
    idle = idle_pattern(only, names)
    if idle is not None:
        raise MismatchError(
            f"{subject}: only={idle!r} selects none of {len(names)} leaves{suggestion(idle, names)}: "
            f"{describe_keys(idle if isinstance(idle, str) else '', names)}"
        )


def describe_keys(pattern: str, names: Collection[str]) -> str:
    """List what exists where a pattern that selects nothing leaves the tree, as patterns to use instead.

    If a key is escaped, the text explains how keys are escaped.
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


def similar_names(name: str, names: Collection[str]) -> list[str]:
    """Return the few names that end like this one, the shortest first; otherwise names that resemble it."""
    same_ending = [each for each in names if each.endswith(f"/{name}")]
    similar = same_ending or (
        difflib.get_close_matches(name, names, _MOST_NAMED, 0.7) if len(names) <= _MOST_COMPARED else []
    )
    return sorted(similar, key=len)[:_MOST_NAMED] if same_ending else similar


def suggestion(only: Only, names: Collection[str], fits: Callable[[str], Callable[[str], bool]] = leaf_filter) -> str:
    """Suggest, as a question, a similar pattern that selects something; empty if there is none.

    Args:
        only: the patterns that select nothing.
        names: of leaves.
        fits: makes a predicate from a pattern.
    """
    patterns = [only] if isinstance(only, str) else only
    if callable(patterns) or patterns is None:
        return ""
    for given in patterns:
        pattern = given.strip()
        plain = pattern.strip("/").removesuffix("/*").removesuffix("/**")
        tops = difflib.get_close_matches(plain.partition("/")[0], {name.partition("/")[0] for name in names}, 1)
        _, slash, rest = plain.partition("/")
        corrected = _correct_keys(pattern, names)
        ways = (f"{top}{slash}{rest}/**" for top in tops)
        escaped = _escape_keys(pattern, names)
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


def _escape_keys(pattern: str, names: Collection[str]) -> str:
    """Return the path of the leaf whose plain keys are given, or the pattern with its unknown keys escaped."""
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


def _correct_keys(pattern: str, names: Collection[str]) -> str:
    """Replace each unknown key without wildcards by the most similar known key."""
    known = {key for name in names for key in name.split("/")}
    if len(known) > _MOST_COMPARED:
        return pattern
    keys = pattern.split("/")
    unknown = [number for number, key in enumerate(keys) if key not in known and not set(key) & set("*?{")]
    for number in unknown:
        keys[number] = next(iter(difflib.get_close_matches(keys[number], known, 1)), keys[number])
    return "/".join(keys)
