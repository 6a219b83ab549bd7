"""benchmarks.accelerator: the whole command, on CPU devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import accelerator


def test_the_whole_benchmark_runs_on_cpu_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    arguments = ["--quick", "--platform", "cpu", "--dir", str(tmp_path), "--json", str(record), "--page", str(tmp_path)]
    accelerator.main(arguments)
    found = json.loads(record.read_text())["results"]
    assert found["device"]["platform"] == "cpu"
    assert found["failed"] == {}
    assert found["kept"] == dict.fromkeys(("auto", "host", "device", "stream"), "")
    assert list(found["turns"]) == list(accelerator.SUBJECTS)
    for turn in found["turns"].values():
        assert turn["state_bytes"] == found["raw"]["state_bytes"]
        assert min(turn["blocking_s"] + turn["save_s"] + turn["quiet_s"] + turn["during_s"]) > 0
        assert all(each["call_s"] <= each["finished_s"] <= each["durable_s"] for each in turn["alone"])
        assert turn["loads"][0]["load_s"] > 0
    page = (tmp_path / accelerator.PAGE).read_text()
    assert "no accelerator" in page
    assert page.count("\n| ours") == 4
    assert "orbax_v1" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accelerator.md", "record.json"]


def test_a_subject_whose_time_is_up_still_loads_what_it_saved(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = ["--quick", "--platform", "cpu", "--dir", str(tmp_path), "--json", str(record), "--subjects", "ours"]
    accelerator.main([*arguments, "--saves", "3", "--limit-s", "0"])
    found = json.loads(record.read_text())["results"]
    assert found["failed"] == {}
    assert [len(found["turns"]["ours"][name]) for name in ("blocking_s", "alone", "loads")] == [1, 1, 1]
