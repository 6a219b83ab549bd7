"""The pytest plugin: its entry point."""

from __future__ import annotations

import tomllib
from pathlib import Path


def test_plugin_has_an_entry_point(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"jaxckpt_train": "jaxckpt_train.pytest_plugin"}
