"""Write the tables of docs/reference/settings.md from the dataclasses that state the settings.

The page chooses the groups and the order of the rows. Defaults and descriptions come from `CheckpointConfig`,
`StoreSettings`, `ObjectStoreSettings` and `FastTierSettings`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from jaxckpt_train.config import CallbackOptions, CheckpointConfig
from jaxckpt_train.settings import FastTierSettings, ObjectStoreSettings, StoreSettings

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"
SECTIONS = {
    "## `CheckpointCallback`": (CheckpointConfig, CallbackOptions),
    "## `StoreSettings`": (StoreSettings, StoreSettings),
    "## `ObjectStoreSettings`": (ObjectStoreSettings, ObjectStoreSettings),
    "## `FastTierSettings`": (FastTierSettings, FastTierSettings),
}
_ROW = re.compile(r"^\| `(\w+)` \| .*$", re.MULTILINE)


def descriptions(settings: type) -> dict[str, str]:
    """The description of each field, from the docstring of its class."""
    text = inspect.getdoc(settings) or ""
    text = text.partition("Attributes:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^    (\w+): (.+(?:\n {8,}.+)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def default_text(value: Any) -> str:
    """A default as the page shows it."""
    if value is None or value in ((), dataclasses.MISSING):  # a mapping has no default, but makes an empty one
        return "none"
    if isinstance(value, ObjectStoreSettings):
        return "its defaults"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, (bool, str)):
        return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value:g}"


def written(page: str) -> str:
    """The page with the current defaults and descriptions; raise ValueError unless it lists each setting once."""
    for heading, (kind, described) in SECTIONS.items():
        before, _, rest = page.partition(f"{heading}\n")
        section, separator, after = rest.partition("\n## ")
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        listed, meanings = _ROW.findall(section), descriptions(described)
        if sorted(listed) != sorted(defaults):
            raise ValueError(f"{heading}: expected each setting once, found {set(listed) ^ set(defaults) or listed}")
        rows = {name: f"| `{name}` | {default_text(defaults[name])} | {meanings[name]} |" for name in listed}
        section = _ROW.sub(lambda row: rows[row[1]], section)  # noqa: B023  # called at once
        page = f"{before}{heading}\n{section}{separator}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.stdout.write(f"wrote {PAGE}\n")
