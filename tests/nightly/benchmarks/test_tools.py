"""The benchmark of the tools: the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tools


@pytest.mark.timeout(600)
def test_command_measures_and_writes_everything(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    tools.main(["--quick", "--dir", str(tmp_path), "--json", str(file), "--page", str(tmp_path)])
    results = json.loads(file.read_text())["results"]
    assert set(results["imports"]) == {"v0", "v1"}
    for turns in [*results["imports"].values(), results["diff"]]:
        assert all(sample["seconds"] > 0 for each in turns.values() for sample in each)
    assert set(results["diff"]) == {"read both, raw", "read both, verified", "load both", "diff"}
    assert len(results["commands"]) == 4
    assert "| import |" in (tmp_path / "tools.md").read_text()
