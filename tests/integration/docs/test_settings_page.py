"""docs/reference/settings.md lists every setting with its default, and docs/reference/overview.md every public name."""

from __future__ import annotations

import dataclasses
import re

import pytest

import jaxckpt_train as jct
from jaxckpt_train.config import CheckpointConfig
from tests.support.pages import ROOT

SETTINGS = (ROOT / "docs" / "reference" / "settings.md").read_text()
OVERVIEW = (ROOT / "docs" / "reference" / "overview.md").read_text()
WORDS = {"none": None, "`True`": True, "`False`": False, "`0`": 0}


def rows(text: str) -> dict[str, str]:
    """The default of each setting of a table, as the page writes it."""
    found = re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", text, re.MULTILINE)
    return {name: default for names, default in found for name in re.findall(r"`([a-z_]+)`", names)}


@pytest.mark.parametrize(
    ("heading", "settings"), [("## `CheckpointCallback`", CheckpointConfig), ("## `StoreSettings`", jct.StoreSettings)]
)
def test_settings_are_listed_with_defaults(heading: str, settings: type) -> None:
    listed = rows(SETTINGS.partition(f"{heading}\n")[2].partition("\n## ")[0])
    fields = {field.name: field.default for field in dataclasses.fields(settings)}
    assert set(listed) == set(fields)
    for name, text in listed.items():
        if text in WORDS or text.startswith('`"'):
            expected = WORDS[text] if text in WORDS else text.strip("`").strip('"')
            assert fields[name] == expected or (expected is None and fields[name] is dataclasses.MISSING), name
        elif (size := re.fullmatch(r"(\d+)( MiB| GiB)?", text)) is not None:
            assert fields[name] == int(size[1]) * {None: 1, " MiB": 2**20, " GiB": 2**30}[size[2]], name


def test_overview_names_every_public_name() -> None:
    policies = (ROOT / "docs" / "reference" / "policies.md").read_text()
    assert [name for name in vars(jct)["__all__"] if name not in OVERVIEW + policies] == []
