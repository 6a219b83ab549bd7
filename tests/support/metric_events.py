"""Events as runs record them, for the tests of sinks."""

from __future__ import annotations

from typing import Any

TIME = "2026-03-01T12:00:30.250+00:00"
TIME_S = 1772366430.25
SAVED: dict[str, Any] = {
    "event": "save",
    "time": TIME,
    "step": 100,
    "decide_s": 0.0001,
    "wait_s": 0.25,
    "reason": "forced",
    "name": "step_100",
    "blocked_s": 0.5,
    "save_s": 2.0,
    "snapshot_s": 0.125,
    "stage_s": 0.0,
    "write_s": 1.0,
    "commit_s": 0.25,
    "bytes": 4096,
    "ok": True,
    "bytes_per_s": 3277,
}
FAILED: dict[str, Any] = {
    **{name: value for name, value in SAVED.items() if name != "bytes_per_s"},
    "step": 110,
    "ok": False,
    "bytes": 17,
    "error": "no space left",
}
RESTORED: dict[str, Any] = {
    "event": "restore",
    "time": TIME,
    "step": 90,
    "name": "step_90",
    "bytes": 8192,
    "restore_s": 4.0,
    "bytes_per_s": 2048,
    "skipped": ["step_100", "step_95"],
}
RESTORED_FAST: dict[str, Any] = {**RESTORED, "tier": "fast", "ahead_steps": 40}
DRAINED: dict[str, Any] = {
    "event": "drain",
    "time": TIME,
    "step": 100,
    "name": "step_100",
    "bytes": 4096,
    "drain_s": 3.0,
    "lag_s": 5.5,
    "lag_steps": 20,
}
DELETED: dict[str, Any] = {"event": "delete", "time": TIME, "name": "step_80"}
PREEMPTED: dict[str, Any] = {"event": "preempted", "time": TIME, "step": 100, "reason": "signal SIGTERM"}
TAKEN_OVER: dict[str, Any] = {"event": "take_over", "time": TIME, "host": "a", "pid": 4711}
