"""Saves, restores and marks, from hand-made events."""

from __future__ import annotations

import datetime
from typing import Any

from jaxckpt_train.report.series import Mark, Restore, Save, save_of
from tests.support.history_events import at
from tests.support.report_runs import history_of
from tests.support.runs import START

SAVED = {
    "step": 100, "name": "step-0000000100", "reason": "forced", "ok": True, "decide_s": 0.25, "wait_s": 0.5,
    "snapshot_s": 1.0, "stage_s": 0.0, "blocked_s": 2.0, "write_s": 4.0, "commit_s": 1.0, "save_s": 8.0, "bytes": 1000,
    "bytes_per_s": 200, "metrics": {"loss": 0.5, "bad": "nan", "none": []},
}  # fmt: skip


def second(number: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=number)


def saves_of(*events: dict[str, Any]) -> list[Save]:
    return [save_of(event) for event in history_of(*events).saves.items]


def restores_of(*events: dict[str, Any]) -> list[Restore]:
    return history_of(*events).restores.items


def marks_of(*events: dict[str, Any]) -> list[Mark]:
    return history_of(*events).marks.items


def test_save_spans_call_to_commit() -> None:
    (save,) = saves_of(at(0, "start"), at(10, "save", **SAVED))
    assert (save.began, save.ended) == (second(2), second(10))
    assert (save.blocked_s, save.background_s, save.save_s) == (2.0, 6.0, 8.0)
    assert (save.step, save.name, save.ok, save.reason, save.error) == (100, "step-0000000100", True, "forced", "")
    assert (save.bytes, save.bytes_per_s) == (1000, 200.0)
    assert list(save.phases.items()) == [
        ("decide_s", 0.25), ("wait_s", 0.5), ("snapshot_s", 1.0), ("stage_s", 0.0), ("write_s", 4.0), ("commit_s", 1.0)
    ]  # fmt: skip
    assert save.metrics["loss"] == 0.5
    assert save.metrics["bad"] != save.metrics["bad"]
    assert len(save.metrics) == 2


def test_save_excludes_device_work_before_it() -> None:
    queued = {**SAVED, "save_s": 15.0, "device_wait_s": 7.0}
    (save,) = saves_of(at(0, "start"), at(20, "save", **queued))
    assert (save.began, save.ended, save.blocked_s, save.background_s) == (second(12), second(20), 2.0, 6.0)
    assert save.phases["device_wait_s"] == 7.0
    (save,) = saves_of(at(20, "save", **{**queued, "device_wait_s": 1e9}))
    assert (save.began, save.background_s) == (second(18), 0.0)


def test_failed_save_has_error_and_no_rate() -> None:
    (save,) = saves_of(at(10, "save", **{**SAVED, "ok": False, "error": "no space"}))
    assert (save.ok, save.error, save.bytes_per_s) == (False, "no space", None)


def test_save_without_details_is_shown() -> None:
    (save,) = saves_of(at(10, "save"))
    assert (save.began, save.ended, save.step, save.ok, save.bytes) == (second(10), second(10), None, False, None)


def test_save_is_never_shorter_than_what_it_blocked() -> None:
    (save,) = saves_of(at(10, "save", blocked_s=3.0, save_s=1.0))
    assert (save.save_s, save.background_s) == (3.0, 0.0)


def test_restore_lists_skipped_steps() -> None:
    event = at(10, "restore", step=90, name="a", bytes=80, restore_s=4.0, bytes_per_s=20, skipped=["b", "c"])
    (restore,) = restores_of(event, at(11, "resumed", step=90))
    assert (restore.began, restore.ended, restore.restore_s) == (second(6), second(10), 4.0)
    assert (restore.step, restore.bytes, restore.bytes_per_s, restore.skipped) == (90, 80, 20.0, ("b", "c"))


def test_other_events_are_marks() -> None:
    marks = marks_of(
        at(1, "take_over", host="node-1", pid=7),
        at(2, "preempted", step=5, reason="signal SIGTERM", plan="saving step 5"),
        at(3, "set_aside", step=4, name="step-0000000004", problem="a byte is wrong"),
        at(4, "progress", step=6),
    )
    assert [(mark.time, mark.kind, mark.step, mark.text) for mark in marks] == [
        (second(1), "take_over", None, "from process 7 on node-1"),
        (second(2), "preempted", 5, "signal SIGTERM; saving step 5"),
        (second(3), "set_aside", 4, "step-0000000004: a byte is wrong"),
    ]


def test_events_are_counted_by_kind() -> None:
    assert history_of(at(1, "save"), at(2, "x"), at(3, "save")).events == {"save": 2, "x": 1}


def test_copies_have_their_lag() -> None:
    drained = {"step": 100, "name": "step-0000000100", "bytes": 1000, "drain_s": 3.0, "lag_s": 5.0, "lag_steps": 20}
    (drain,) = history_of(at(10, "drain", **drained)).drains.items
    assert (drain.began, drain.ended, drain.lag_s, drain.lag_steps) == (second(7), second(10), 5.0, 20)


def test_tiers_of_saves_and_restores_are_kept() -> None:
    assert [save.tier for save in saves_of(at(1, "save", **SAVED), at(2, "save", **SAVED, tier="fast"))] == [
        "slow", "fast"
    ]  # fmt: skip
    slow, fast = restores_of(at(1, "restore", step=5), at(2, "restore", step=9, tier="fast", ahead_steps=4))
    assert (slow.tier, slow.ahead_steps, fast.tier, fast.ahead_steps) == ("slow", None, "fast", 4)
