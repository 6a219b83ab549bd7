"""benchmarks.accelerator: changed bytes are found, and targets apply to accelerators only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import accelerator, accelerator_turn


@pytest.mark.parametrize("mode", accelerator_turn.MODES)
def test_changed_bytes_after_the_call_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    host_bytes = accelerator_turn._host_bytes
    seen: list[Any] = []

    def changed_bytes(leaf: Any) -> bytes:
        seen.append(leaf)
        return host_bytes(leaf)[:-1] + b"\xff" if len(seen) == 5 else host_bytes(leaf)

    assert accelerator_turn._difference(tmp_path, mode, 1) == ""
    monkeypatch.setattr(accelerator_turn, "_host_bytes", changed_bytes)
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
        "target missed",  # 1.5 times the time of the disk
        "target met",
        "target missed",
    ]
    assert not any("target" in line for line in accelerator.remarks({**found, "device": {"platform": "cpu"}}))
