"""Runs that cannot be compared: the error says why, and shows the last output of the process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxckpt_train.testing import ResumeNotProvenError, assert_resume_exact
from tests.support.faulty_runs import train


def failure(fault: str, tmp_path: Path, **more: Any) -> str:
    with pytest.raises(ResumeNotProvenError) as caught:
        assert_resume_exact(functools.partial(train, fault=fault), directory=tmp_path, **{"kill_at": 3, **more})
    return str(caught.value)


def test_crashing_run_is_reported_with_its_error(tmp_path: Path) -> None:
    text = failure("crash", tmp_path)
    assert "process 1 ended by itself with exit code 1 after update 1" in text.splitlines()[0]
    assert text.splitlines()[-1].strip() == "| ValueError: the loss went to the dogs"


def test_run_that_crashes_after_resume_is_reported(tmp_path: Path) -> None:
    text = failure("crash after the resume", tmp_path)
    assert "process 2 (resumed at 2) ended by itself with exit code 1" in text.splitlines()[0]
    assert "ValueError: no such file" in text


def test_hanging_run_is_killed_with_its_children(tmp_path: Path) -> None:
    text = failure("hang", tmp_path, timeout_s=15)
    assert "process 1 did not end in 15 s" in text.splitlines()[0]
    assert "faulty_runs.py" in text
    assert "in hang" in text
    worker = int((tmp_path / "interrupted" / "run" / "worker.txt").read_text())
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def test_run_without_sigterm_handler_is_reported(tmp_path: Path) -> None:
    text = failure("no signals", tmp_path, how="preempt")
    assert "process 1 was ended by SIGTERM in update 3" in text
