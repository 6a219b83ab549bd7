"""The pytest plugin: its fixture proves loops of test files, and costs nothing until it is used."""

from __future__ import annotations

import tomllib
from pathlib import Path


def test_pytest_finds_it_by_its_entry_point(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"jaxckpt_train": "jaxckpt_train.pytest_plugin"}
