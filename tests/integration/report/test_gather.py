"""The report of a real run that was preempted, killed and finished matches what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.report.gather import gathered_json
from tests.support.report_runs import LAST_STEP, gathered_of


def test_processes_ended_as_they_did(preempted_run: Path) -> None:
    gathered = gathered_of(preempted_run)
    assert [(row.how, row.first_step) for row in gathered.processes] == [
        ("preempted", 0), ("killed", 24), ("finished", 40)
    ]  # fmt: skip
    assert gathered.processes[0].last_step == 24
    assert gathered.processes[2].last_step == LAST_STEP
    assert not gathered.is_live


def test_goodput_matches_the_library(preempted_run: Path) -> None:
    totals, found = gathered_of(preempted_run).totals, jct.StepManager(preempted_run).goodput()
    assert (totals.share, totals.useful_s, totals.wall_s, totals.between_s, totals.blocked_s, totals.to_resume_s) == (
        found.share, found.useful_s, found.wall_s, found.between_s, found.blocked_s, found.to_resume_s
    )  # fmt: skip
    assert (totals.useful_steps, totals.redone_steps, totals.saves) == (LAST_STEP, found.redone_steps, found.saves)


def test_saves_restores_and_preemption_are_reported(preempted_run: Path) -> None:
    gathered = gathered_of(preempted_run)
    events = [json.loads(line) for line in (preempted_run / "history.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "save"]
    assert [save.step for save in gathered.saves] == [5, 10, 15, 20, 24, 25, 30, 35, 40, *range(45, LAST_STEP + 1, 5)]
    assert [(save.blocked_s, save.bytes, save.reason) for save in gathered.saves] == [
        (event["blocked_s"], event["bytes"], event["reason"]) for event in saves
    ]
    for save, event in zip(gathered.saves, saves, strict=True):
        assert save.blocked_s + save.background_s == pytest.approx(event["save_s"] - event["device_wait_s"])
    assert [restore.step for restore in gathered.restores] == [24, 40]
    preempted, taken = gathered.marks
    assert (preempted.kind, preempted.step, "SIGTERM" in preempted.text) == ("preempted", 24, True)
    assert taken.kind == "take_over"
    assert gathered.saves[4].ended >= preempted.time or gathered.saves[4].reason.startswith("preemption")


def test_steps_are_those_of_the_directory(preempted_run: Path) -> None:
    gathered = gathered_of(preempted_run)
    there = {path.name for path in preempted_run.iterdir() if path.name.startswith("step-")}
    assert {step.name for step in gathered.steps if step.is_there} == there
    assert {step.step for step in gathered.steps if step.state == "kept"} == {20, 40, 50, 55, 60}
    assert {step.state for step in gathered.steps} == {"kept", "deleted"}
    assert gathered.disk_use[-1].steps == len(there)


def test_tree_and_changes_are_those_of_newest_steps(preempted_run: Path) -> None:
    gathered = gathered_of(preempted_run)
    assert gathered.tree is not None
    assert gathered.tree.step == LAST_STEP
    assert {leaf.name: leaf.bytes for leaf in gathered.tree.leaves} == {
        "state/params/bias": 12, "state/params/kernel": 24000, "state/step": 4
    }  # fmt: skip
    assert [(pair.before, pair.after) for pair in gathered.changes.pairs] == [(20, 40), (40, 50), (50, 55), (55, 60)]
    for pair in gathered.changes.pairs:
        assert ([leaf.name for leaf in pair.leaves], pair.equal) == (["state/params/kernel", "state/step"], 1)
        assert pair.leaves[1].relative == pytest.approx((pair.after - pair.before) / pair.before)


def test_json_keys_are_stable(preempted_run: Path) -> None:
    found = gathered_json(gathered_of(preempted_run))
    assert sorted(found) == [
        "changes", "counts", "disk_use", "drains", "events", "is_live", "made", "marks", "metrics", "processes",
        "restores", "run", "saves", "steps", "totals", "tree", "warnings",
    ]  # fmt: skip
    assert {step["state"] for step in found["steps"]} == {"kept", "deleted"}
    assert found["metrics"]["loss"][0] == {"step": 5, "value": 0.2}
