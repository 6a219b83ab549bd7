"""Patterns of leaf paths whose wildcards are taken over into new paths."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.tree.patterns import keys_there, suggestion

INDEX = "{}"
_PIECES = re.compile(r"\*\*|\*|\{\}|[^*{]+|\{")
_MEANING = {"**": "(.*)", "*": "([^/]*)", INDEX: "(?P<index>0|[1-9][0-9]*)"}


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(_MEANING.get(piece, re.escape(piece)) for piece in _PIECES.findall(pattern)), re.DOTALL)


def wildcards(pattern: str) -> list[str]:
    """Its wildcards, `*`, `**` and `{}`, in order."""
    return [piece for piece in _PIECES.findall(pattern) if piece in _MEANING]


def taken(pattern: str, name: str) -> tuple[str, ...] | None:
    """What its wildcards stand for in a name, in order; None: it does not fit."""
    match = _expression(pattern).fullmatch(name)
    return None if match is None else match.groups()


def filled(template: str, texts: Sequence[str]) -> str:
    """A template with its wildcards replaced, in order."""
    left = iter(texts)
    return "".join(next(left) if piece in _MEANING else piece for piece in _PIECES.findall(template))


def check_template(subject: str, pattern: str, template: str) -> None:
    """Raise SettingsError unless a template has the wildcards of a pattern, in its order, but for the index."""
    wanted = [each for each in wildcards(pattern) if each != INDEX]
    found = [each for each in wildcards(template) if each != INDEX]
    if wanted != found:
        raise SettingsError(
            f"{subject}: expected the wildcards of {pattern!r} in {template!r}, in the same order, found "
            f"{' '.join(found) or 'none'} instead of {' '.join(wanted) or 'none'}"
        )


def check_pattern(subject: str, pattern: object) -> None:
    """Raise SettingsError unless it is a pattern: text with at most one index."""
    if not isinstance(pattern, str) or not pattern:
        raise SettingsError(
            f'{subject}: expected a leaf path or a pattern such as "layers/*/kernel", found {pattern!r}'
        )
    if wildcards(pattern).count(INDEX) > 1:
        raise SettingsError(f"{subject}: expected one {INDEX} at most, found {pattern!r}")


def matches(pattern: str, names: Collection[str], subject: str) -> dict[str, tuple[str, ...]]:
    """The names that fit a pattern, with what its wildcards stand for.

    Raises:
        MismatchError: none does.
    """
    found = {name: groups for name in names if (groups := taken(pattern, name)) is not None}
    if not found:
        hint = suggestion(pattern, names, lambda tried: lambda name: taken(tried, name) is not None)
        raise MismatchError(f"{subject}: no leaf fits {pattern!r}{hint or f'; there are {keys_there(pattern, names)}'}")
    return found
