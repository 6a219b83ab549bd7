"""The benchmark of object stores: the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import objects


@pytest.mark.timeout(600)
def test_command_measures_and_writes_everything(tmp_path: Path) -> None:
    file = tmp_path / "objects.json"
    asked = ["--quick", "--server", "stand-in", "--mib", "16"]
    objects.main([*asked, "--dir", str(tmp_path / "work"), "--json", str(file), "--page", str(tmp_path)])
    results = json.loads(file.read_text())["results"]
    assert [len(samples) for samples in results["speed"].values()] == [1] * 4
    assert {"list"}.isdisjoint(results["requests"]["manager"][0])
    assert "| save, ours |" in (tmp_path / "objects.md").read_text()
    assert list((tmp_path / "work").iterdir()) == []
