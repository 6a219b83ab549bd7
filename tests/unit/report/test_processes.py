"""Processes as rows, and how their time was spent."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from jaxckpt_train.report.gather import Process, processes_of
from jaxckpt_train.run.goodput import Goodput, settled
from tests.support.history_events import at
from tests.support.report_runs import history_of
from tests.support.runs import START

RUN = (
    at(0, "start", host="node-1", pid=11, slurm_job_id="7", slurm_restart_count=2),
    at(10, "resumed", step=0, resume_s=10.0),
    at(60, "save", step=50, ok=True, blocked_s=5.0),
    at(65, "save", step=55, ok=False, blocked_s=5.0),
    at(110, "progress", step=100),
    at(130, "start", host="node-2", pid=12),
    at(150, "resumed", step=50, resume_s=20.0),
    at(230, "save", step=130, ok=True),
    at(230, "end", how="finished", step=130),
    at(240, "start", pid=13, tends=True),
    at(245, "end", how="closed"),
)


def found(*events: dict[str, Any], is_live: bool = False) -> tuple[list[Process], Goodput]:
    history = history_of(*events)
    return processes_of(settled(history.attempts, is_live=is_live), history.places)


def test_each_process_has_row_and_ending() -> None:
    rows, _ = found(*RUN)
    assert [(row.number, row.how, row.where) for row in rows] == [
        (1, "killed", "node-1, process 11, Slurm job 7, restart 2"),
        (2, "finished", "node-2, process 12"),
    ]
    assert [(row.first_step, row.last_step, row.useful_steps, row.redone_steps) for row in rows] == [
        (0, 100, 50, 50), (50, 130, 80, 0)
    ]  # fmt: skip
    assert [(row.saves, row.failed_saves) for row in rows] == [(1, 1), (1, 0)]
    assert rows[1].began == START + datetime.timedelta(seconds=130)


def test_parts_of_the_time_add_up() -> None:
    rows, totals = found(*RUN)
    assert [(row.useful_s, row.lost_s, row.other_s, row.blocked_s, row.to_resume_s) for row in rows] == [
        (45.0, 45.0, 0.0, 10.0, 10.0), (80.0, 0.0, 0.0, 0.0, 20.0)
    ]  # fmt: skip
    for row in rows:
        parts = (row.useful_s, row.lost_s, row.other_s, row.blocked_s, row.to_resume_s)
        assert sum(parts) == pytest.approx(row.wall_s)
    parts = (totals.useful_s, totals.lost_s, totals.other_s, totals.blocked_s, totals.to_resume_s, totals.between_s)
    assert sum(parts) == pytest.approx(totals.wall_s) == pytest.approx(230.0)
    assert totals.share == pytest.approx(125 / 230)
    assert (totals.saves, totals.failed_saves, totals.redone_steps) == (2, 1, 50)


def test_last_process_of_live_run_is_running() -> None:
    assert [row.how for row in found(*RUN[:5], is_live=True)[0]] == ["running"]
    assert [row.how for row in found(*RUN[:5])[0]] == ["killed"]


def test_empty_history_has_no_process() -> None:
    rows, totals = found()
    assert (rows, totals.wall_s, totals.share) == ([], 0.0, 0.0)
