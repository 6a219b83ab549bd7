"""Builds HTML in which every text is escaped: only what was built here is taken as it is."""

from __future__ import annotations

import html
import re
from typing import Any

_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufdd0-\ufdef\ufffe\uffff]")
_VOID = {"meta", "input", "br"}


class Html(str):
    """Text that is HTML already."""


def escaped(value: object) -> Html:
    """A text as HTML; what is HTML already stays as it is, and letters that no page may have are shown as a mark."""
    if isinstance(value, Html):
        return value
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return Html(html.escape(_UNFIT.sub("\ufffd", text), quote=True))


def joined(*children: object) -> Html:
    """One after the other; None is nothing, and a list its items."""
    found = []
    for child in children:
        if isinstance(child, list | tuple):
            found.append(joined(*child))
        elif child is not None:
            found.append(escaped(child))
    return Html("".join(found))


def element(tag: str, *children: object, **attributes: Any) -> Html:
    """An element. Of a name of an attribute a `_` at its end goes, others become `-`; True: it has no value.

    None and False leave the attribute out.
    """
    told = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        plain = name.rstrip("_").replace("_", "-")
        told.append(f" {plain}" if value is True else f' {plain}="{escaped(str(value))}"')
    begin = f"<{tag}{''.join(told)}>"
    return Html(begin if tag in _VOID else f"{begin}{joined(*children)}</{tag}>")
