"""Facts that identify each start of a run."""

from __future__ import annotations

import json
import os
import socket

import pytest

from jaxckpt_train.run.history import run_facts
from tests.support.cluster_programs import in_slurm_job


def test_host_and_process_are_always_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slurm_job(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert run_facts() == {"host": socket.gethostname(), "pid": os.getpid()}


def test_slurm_job_and_restarts_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slurm_job(monkeypatch)
    first = run_facts()
    assert (first["slurm_job_id"], first["slurm_restart_count"]) == ("1234", 0)
    in_slurm_job(monkeypatch, SLURM_ARRAY_JOB_ID="1200", SLURM_ARRAY_TASK_ID="7", SLURM_RESTART_COUNT="2")
    facts = run_facts()
    assert (facts["slurm_job_id"], facts["slurm_restart_count"]) == ("1200_7", 2)
    assert json.loads(json.dumps(facts)) == facts
