"""benchmarks.cost_model: the command writes its samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cost_model


def test_command_writes_all_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "out.json"
    sizes = ["--quick", "--axes", "leaves", "--largest", "100", "--repeats", "1"]
    cost_model.main([*sizes, "--dir", str(tmp_path / "work"), "--json", str(json_file)])
    assert "each leaf, us" in capsys.readouterr().out
    results = json.loads(json_file.read_text(encoding="utf-8"))["results"]
    assert results["leaves"]["summary"]["bytes"]["data"]["each"] == pytest.approx(16)
