"""The API reference covers the public names, and shows only members that exist."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest
import yaml

import jaxckpt_train
import jaxckpt_train.testing

ENTRY = re.compile(r"^::: (?P<name>[\w.]+)\n(?P<options>(?:    .*\n)*)", re.MULTILINE)


@pytest.fixture(scope="module")
def entries(repo_root: Path) -> list[tuple[str, dict[str, object]]]:
    """The name and the options of each entry in the reference."""
    text = "\n".join(page.read_text() for page in sorted((repo_root / "docs/reference/api").glob("*.md")))
    return [
        (entry["name"], (yaml.safe_load(entry["options"]) or {}).get("options", {})) for entry in ENTRY.finditer(text)
    ]


def test_every_public_name_has_one_entry(entries) -> None:
    public = {f"jaxckpt_train.{name}" for name in jaxckpt_train.__all__} - {"jaxckpt_train.testing"}
    public |= {f"jaxckpt_train.testing.{name}" for name in jaxckpt_train.testing.__all__}
    counts = collections.Counter(name for name, _ in entries)
    assert public - set(counts) == set()
    assert {name: count for name, count in counts.items() if count > 1} == {}


def test_listed_members_exist(entries) -> None:
    members = {name.removeprefix("jaxckpt_train."): options.get("members") or () for name, options in entries}
    listed = {name: members[name] for name in jaxckpt_train.__all__ if members.get(name)}
    assert "StepManager" in listed
    for name, shown in listed.items():
        assert [each for each in shown if not hasattr(getattr(jaxckpt_train, name), each)] == [], name
