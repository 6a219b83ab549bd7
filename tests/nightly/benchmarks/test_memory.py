"""benchmarks.memory: the command writes its samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import memory


def test_command_writes_all_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "out.json"
    parts = ["--parts", "series", "--subjects", "ours", "--saves", "5"]
    memory.main(["--quick", *parts, "--dir", str(tmp_path / "work"), "--json", str(json_file)])
    assert "series: resident memory after each of 5 saves" in capsys.readouterr().out
    results = json.loads(json_file.read_text(encoding="utf-8"))["results"]
    assert len(results["series"][1]["runs"][0]["rss_bytes"]) == 5
