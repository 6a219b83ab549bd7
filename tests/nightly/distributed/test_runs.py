"""Runs of multi-process jobs: resumed by other numbers of processes, and with policies that adapt."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import jaxckpt_train as jct
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running
from tests.support.jobs.training import history, train


def whole(job_of: JobOf, directory: Path, steps: int = 20) -> dict[str, Any]:
    """An uninterrupted training."""
    answers = job_of(4, 2).call(train, str(directory), steps, {"save_interval_steps": 1000})
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_policies_that_tune_themselves_decide_for_all(tmp_path: Path, job_of: JobOf) -> None:
    budget = {"_target_": "jaxckpt_train.OverheadBudgetPolicy", "max_fraction": 0.9, "min_interval_secs": 0.01}
    options = {"save_policy": budget, "temporary_interval_secs": 0.2, "keep_latest": 2}
    answers = job_of(4, 2).call(train, str(tmp_path), 300, options)
    assert all(answer == answers[0] for answer in answers)
    saves = history(tmp_path, "save")
    assert saves[-1]["step"] == 300
    reasons = [save["reason"].partition(":")[0] for save in saves[:-1]]
    assert set(reasons) == {"OverheadBudgetPolicy(max_fraction=0.9)", "temporary"}
    assert len(jct.StepManager(tmp_path).steps) == 2
    assert job_of(4, 2).call(train, str(tmp_path), 301, {})[0]["started"] == 300


def test_run_resumes_with_other_process_counts(tmp_path: Path, job_of: JobOf) -> None:
    straight = whole(job_of, tmp_path / "whole")
    run = str(tmp_path / "run")
    losses = []
    for steps, (processes, devices) in zip((6, 12, 17, 20), ((4, 2), (2, 4), (8, 1), (4, 2)), strict=True):
        answers = job_of(processes, devices).call(train, run, steps, {"save_interval_steps": 4})
        assert all(answer == answers[0] for answer in answers)
        losses += answers[0]["losses"]
    assert losses == straight["losses"]
    assert answers[0]["seen"] == straight["seen"]


def test_processes_agree_without_preemption_service(tmp_path: Path) -> None:
    events = {"step": 30, "process": 3, "signal": signal.SIGTERM}
    with running(4, 1, preemption_service=False) as job:
        answers = job.call(train, str(tmp_path / "run"), 1_000_000, {"save_interval_steps": 1000}, events)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["preempted"] == [len(answers[0]["losses"]), 75]
