"""Leaf paths as text: unambiguous, readable, and turned back into typed keys.

Keys are joined by `/`. Integers (list positions, integer keys) are written as digits; a text key that looks like an
integer gets the mark `~s`. Within text, `~` is written `~0`, `/` `~1` and `@` `~2`, as in JSON pointers.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Collection, Iterator
from typing import Any

from jaxckpt_train.errors import UnsupportedLeafError

ROOT = "~"
MAX_DEPTH = 200
_CONTAINERS = (dict, list, tuple)


def refuse_too_deep(subject: str, tree: object) -> None:
    """Raise UnsupportedLeafError if dicts, lists and tuples hold each other in more levels than Python can follow.

    To be called before JAX walks the tree: an error in the midst of that leaves the thread at Python's limit for good.
    """
    level: dict[int, Any] = {0: tree} if isinstance(tree, _CONTAINERS) else {}
    for _ in range(2 * MAX_DEPTH):  # what is less deep is refused with the path of its leaf
        if not level:
            return
        children = (node.values() if isinstance(node, dict) else node for node in level.values())
        level = {id(child): child for some in children for child in some if isinstance(child, _CONTAINERS)}
    raise UnsupportedLeafError(
        f"{subject}: expected containers in at most {MAX_DEPTH} levels, found more than {2 * MAX_DEPTH}; flatten it, "
        "or look for a container that holds itself"
    )


@contextlib.contextmanager
def refused_if_too_deep(subject: str) -> Iterator[None]:
    """Within: a tree that is deeper than Python or JAX can follow raises UnsupportedLeafError; `subject` names it."""
    try:
        yield
    except (RecursionError, SystemError) as error:
        # JAX's C++ code raises SystemError where it did not expect the RecursionError of what it called.
        if not isinstance(error, RecursionError) and not isinstance(error.__cause__, RecursionError):
            raise
        raise UnsupportedLeafError(
            f"{subject}: expected containers in at most {MAX_DEPTH} levels, found more than Python can follow "
            f"({type(error).__name__}); flatten it, or look for a container that holds itself"
        ) from None  # its traceback has a thousand frames, and holds the tree


Key = Any  # str, int, bool, float, None, or a tuple of these

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WORDS = {"": "~e", "__metadata__": "~m"}
_WORDS_BACK = {text: word for word, text in _WORDS.items()} | {"~n": None, "~b0": False, "~b1": True}
_ESCAPES = (("~", "~0"), ("/", "~1"), ("@", "~2"), (",", "~3"))
_ESCAPED = re.compile("~[012s]")
HOW_ESCAPED = "in a key ~ is written ~0, / is ~1 and @ is ~2; ~s marks text that looks like an integer"


def key_text(key: Key, parent: str) -> str:
    """One key of a path as text.

    Raises:
        UnsupportedLeafError: a key that is no text, number, None or tuple of these; `parent` names where.
    """
    if isinstance(key, str):
        text = str.__str__(key)
        if text.isidentifier() and text != "__metadata__":
            return text
        if not text.isascii() and _has_surrogate(text):
            raise UnsupportedLeafError(f"a key below {parent!r}: text that is not valid Unicode, {text!r}; rename it")
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
    except ValueError as error:  # some thousands of digits, which Python neither writes nor reads
        raise UnsupportedLeafError(
            f"a key below {parent!r}: an integer of {operator.index(key).bit_length()} bits; convert the key to text"
        ) from error
    except TypeError:
        raise UnsupportedLeafError(
            f"a key below {parent!r}: expected text, a number, None or a tuple of these, "
            f"found {key!r} of type {type(key).__name__}; convert the key to text"
        ) from None


def _tuple_part(part: Key, parent: str) -> str:
    if isinstance(part, tuple):
        raise UnsupportedLeafError(f"a key below {parent!r}: a tuple within a tuple, {part!r}; convert the key to text")
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
    """The key that `key_text` wrote.

    Raises:
        ValueError, OverflowError: it writes no such text.
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
    """How keys are escaped, to be put into a message behind these paths; empty if none of them is."""
    return f" ({HOW_ESCAPED})" if _ESCAPED.search(paths) else ""


def join(parent: str, key: str) -> str:
    """The path of a child from its parent's path and its own key text."""
    return key if parent == ROOT else f"{parent}/{key}"


def split(path: str) -> list[str]:
    """The key texts of a path; none for the root."""
    return [] if path == ROOT else path.split("/")


def one_below_another(leaves: Collection[str]) -> tuple[str, str] | None:
    """A leaf path and another one that it lies below, which no tree can have; None: there is no such pair.

    Each container is looked at once, however many leaves there are.
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
