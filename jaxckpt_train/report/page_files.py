"""Reads the style and the script of the page, which lie beside this file."""

from __future__ import annotations

from pathlib import Path


def own_file(name: str) -> str:
    """The text of one of them."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
