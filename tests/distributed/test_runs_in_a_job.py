"""Runs of jobs of several processes: saved and resumed by all of them together, on as many and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.distributed.conftest import JobOf
from tests.distributed.training import history, train


def whole(job_of: JobOf, directory: Path, steps: int = 20) -> dict[str, Any]:
    """An uninterrupted training."""
    answers = job_of(4, 2).call(train, str(directory), steps, {"save_interval_steps": 1000})
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize(
    "options",
    [
        {"save_interval_steps": 5},
        {"save_interval_secs": 0.01},
        {"save_interval_steps": 3, "if_busy": "skip", "keep_latest": 2},
    ],
)
def test_a_run_goes_on_exactly(tmp_path: Path, job_of: JobOf, options: dict[str, Any]) -> None:
    straight = whole(job_of, tmp_path / "whole")
    run = str(tmp_path / "run")
    first = job_of(4, 2).call(train, run, 12, options)
    second = job_of(4, 2).call(train, run, 20, options)
    for before, after in zip(first, second, strict=True):
        assert after["started"] == 12
        assert before["losses"] + after["losses"] == straight["losses"]
        assert after["seen"] == straight["seen"]
    assert history(tmp_path / "run", "save")[-1]["step"] == 20
