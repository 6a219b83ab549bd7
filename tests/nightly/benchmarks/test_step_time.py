"""benchmarks.step_time: the command writes its samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import step_time
from benchmarks.step_time_summary import summarise
from benchmarks.step_time_turn import Cycle


def test_command_writes_all_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "out.json"
    size = ["--layers", "1", "--width", "64", "--rounds", "1", "--saves", "1"]
    step_time.main(["--quick", *size, "--subjects", "ours", "--dir", str(tmp_path / "work"), "--json", str(json_file)])
    assert "target 1.10x" in capsys.readouterr().out
    document = json.loads(json_file.read_text(encoding="utf-8"))
    (turn,) = document["results"]["turns"]["ours"]
    assert summarise([[Cycle(**cycle) for cycle in turn]]).during_steps >= 1
    assert document["machine"]["cores"] >= 1
    shutil.rmtree(tmp_path / "work")
