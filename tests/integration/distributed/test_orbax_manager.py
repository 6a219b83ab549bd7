"""The Orbax-style manager in a job: its processes get the same answers and stay in step."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running
from tests.support.jobs.orbax_form import fails, is_asked, saves_and_restores


def test_all_processes_save_keep_and_restore_the_same(tmp_path: Path, job_of: JobOf) -> None:
    answers = job_of(2, 2).call(saves_and_restores, str(tmp_path))
    assert answers[0] == answers[1]
    due = [[step % 2 == 0, step % 2 == 0, step - step % 2] for step in range(9)]
    kept = [[[4, 6, 8], 6], [[4, 8], 4, {"loss": 1.0}], [[4.0, 4.0], 8], [[8.0, 8.0], False, True]]
    assert answers[0] == [*due, *kept]
    assert jct.StepManager(tmp_path).steps == [4, 8]


def test_failed_save_counts_in_no_process(tmp_path: Path, job_of: JobOf) -> None:
    answers = job_of(2, 2).call(fails, str(tmp_path))
    assert answers[0] == answers[1]
    assert answers[0][:2] == [True, True]
    assert answers[0][2] == "NonFiniteError"
    assert jct.StepManager(tmp_path).steps == answers[0][3][2]


@pytest.mark.parametrize("saves_first", [True, False])
def test_request_to_one_process_stops_all(tmp_path: Path, saves_first: bool) -> None:
    with running(2, 2) as job:  # its own job: JAX cannot withdraw a request to end
        answers = job.call(is_asked, str(tmp_path), 1, saves_first)
    assert answers[0] == answers[1]
    step, is_saved = answers[0]
    assert step >= 5
    assert is_saved
    assert jct.StepManager(tmp_path).steps == [0, step]
