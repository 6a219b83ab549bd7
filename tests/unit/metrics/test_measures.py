"""What events measure: each figure once, as its kind of metric; unknown figures are gauges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from jaxckpt_train.metrics.exporters import KNOWN, figures, moment_s, samples
from tests.support.metric_events import (
    DELETED,
    DRAINED,
    FAILED,
    PREEMPTED,
    RESTORED,
    RESTORED_FAST,
    SAVED,
    TAKEN_OVER,
    TIME,
    TIME_S,
)


def measured(event: Mapping[str, Any]) -> dict[str, float]:
    found = {sample.measure.name + (f"/{sample.series}" if sample.series else ""): sample for sample in samples(event)}
    return {name: sample.value for name, sample in found.items()}


def test_committed_save_sets_duration_and_last_step() -> None:
    assert measured(SAVED) == {
        "events/save": 1, "saves/committed": 1, "save.blocked": 0.5, "save.wait": 0.25, "save.snapshot": 0.125,
        "save.duration": 2.0, "save.write": 1.0, "save.commit": 0.25, "saved": 4096, "last_saved_step": 100,
        "last_save.size": 4096, "last_save.rate": 3277, "last_save.timestamp": TIME_S,
    }  # fmt: skip


def test_device_wait_is_measured_separately() -> None:
    found = measured({**SAVED, "device_wait_s": 3.5})
    assert (found["save.device_wait"], found["save.blocked"]) == (3.5, 0.5)
    assert measured({**FAILED, "device_wait_s": 0.0})["save.device_wait"] == 0.0


def test_failed_save_measures_only_blocked_time() -> None:
    assert measured(FAILED) == {
        "events/save": 1, "saves/failed": 1, "save.blocked": 0.5, "save.wait": 0.25, "save.snapshot": 0.125
    }  # fmt: skip


def test_restore_counts_skipped_steps() -> None:
    assert measured(RESTORED) == {
        "events/restore": 1, "restores": 1, "restore.skipped_steps": 2, "restore.duration": 4.0, "restored": 8192,
        "last_restored_step": 90, "last_restore.rate": 2048, "last_restore.timestamp": TIME_S,
        "last_restore.from_fast_tier": 0,
    }  # fmt: skip
    assert (
        measured({name: value for name, value in RESTORED.items() if name != "skipped"})["restore.skipped_steps"] == 0
    )


def test_restore_from_fast_tier_is_marked() -> None:
    found = measured(RESTORED_FAST)
    assert (found["last_restore.from_fast_tier"], found["last_restore.ahead_steps"]) == (1, 40)


def test_drain_measures_duration_and_lag() -> None:
    assert measured(DRAINED) == {
        "events/drain": 1, "drains": 1, "drain.duration": 3.0, "drain.lag": 5.5, "drained": 4096,
        "last_drained_step": 100, "last_drain.lag_steps": 20, "last_drain.timestamp": TIME_S,
    }  # fmt: skip


@pytest.mark.parametrize("event", [DELETED, PREEMPTED, TAKEN_OVER])
def test_event_without_figures_is_counted(event: Mapping[str, Any]) -> None:
    assert measured(event) == {f"events/{event['event']}": 1}


def test_unknown_figures_become_gauges() -> None:
    event = {
        "event": "end",
        "time": TIME,
        "goodput": 0.75,
        "lost_s": 3,
        "read_bytes": 5,
        "a-b_bytes_per_s": 7,
        "why": "x",
    }
    found = [sample for sample in samples(event) if sample.measure.name != "events"]
    assert [(each.measure.name, each.measure.unit, each.value) for each in found] == [
        ("end.goodput", "", 0.75), ("end.lost", "s", 3), ("end.read", "By", 5), ("end.a_b", "By/s", 7)
    ]  # fmt: skip
    assert {each.measure.kind for each in found} == {"gauge"}


def test_a_figure_is_a_finite_number() -> None:
    event = {
        "event": "x",
        "time": TIME,
        "a": 1,
        "b": True,
        "c": math.inf,
        "d": math.nan,
        "e": None,
        "f": "3",
        "g": [1],
        "pid": 7,
        "job_id": 8,
    }
    assert figures(event) == {"a": 1.0, "b": 1.0}


def test_no_two_measures_have_one_name() -> None:
    names = [
        measure.name
        for measure in {*KNOWN, *(sample.measure for each in (SAVED, RESTORED) for sample in samples(each))}
    ]
    assert len(names) == len(set(names))


def test_event_time_is_read_in_any_zone() -> None:
    assert moment_s(SAVED) == moment_s({"time": "2026-03-01T14:00:30.250+02:00"}) == TIME_S
