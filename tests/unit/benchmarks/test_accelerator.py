"""Tests of benchmarks.accelerator: all of it runs on CPU devices, and bytes that change after the call are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accelerator, accelerator_turn


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


@pytest.mark.parametrize("mode", accelerator_turn.MODES)
def test_bytes_that_change_after_the_call_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    host_bytes = accelerator_turn._host_bytes
    seen: list[Any] = []

    def of_another_save(leaf: Any) -> bytes:
        seen.append(leaf)
        return host_bytes(leaf)[:-1] + b"\xff" if len(seen) == 5 else host_bytes(leaf)

    assert accelerator_turn._difference(tmp_path, mode, 1) == ""
    monkeypatch.setattr(accelerator_turn, "_host_bytes", of_another_save)
    assert "differs" in accelerator_turn._difference(tmp_path, mode, 1)


def test_targets_are_judged_on_an_accelerator_only() -> None:
    turn = {
        "quiet_s": [0.1], "during_s": [0.105], "blocking_s": [0.02], "save_s": [1.0], "host_peak_bytes": 0,
        "device_peak_bytes": 0, "alone": [{"call_s": 0.02, "finished_s": 1.0, "durable_s": 1.0}],
        "loads": [{"load_s": 1.5, "first_step_s": 0.1}],
    }  # fmt: skip
    raw = {"to_host": [0.01], "to_device": [0.5], "write": [1.0], "read": [1.0], "state_bytes": 1 << 30}
    found = {
        "device": {"platform": "gpu", "kind": "a device"}, "raw": {**raw, "memory_kind": "pinned_host"},
        "turns": {"ours_host": turn, "ours_device": turn}, "kept": {"host": ""}, "failed": {}, "took_s": 1.0,
    }  # fmt: skip
    lines = accelerator.remarks(found)
    assert [line.partition(":")[0] for line in lines[2:]] == [
        "target missed",  # the call takes twice the copy
        "target missed",  # 20 ms
        "target met",
        "target missed",  # 1.5 times what the disk takes
        "target met",
        "target missed",
    ]
    assert not any("target" in line for line in accelerator.remarks({**found, "device": {"platform": "cpu"}}))
