"""One machine of a job gets a preemption notice: all processes save the same step, and process 0 requeues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

import jaxckpt_train as jct
from tests.support.cluster_programs import in_slurm_job, put_on_path
from tests.support.jobs.job import running
from tests.support.jobs.training import train
from tests.support.metadata_servers import Gce, Handler, Server


def train_in_the_cloud(directory: str, url: str) -> dict[str, Any]:
    """Train with a notice source of GCE in process 1 only."""
    notices: list[Any] = ["slurm"]
    if jax.process_index() == 1:
        notices.append(jct.GceNotice(url=url, poll_s=0.02))
    return train(directory, 1_000_000, {"save_interval_steps": 5, "notices": notices})


@pytest.mark.parametrize("service", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_notice_of_one_process_preempts_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: bool) -> None:
    log = put_on_path(tmp_path / "bin", "scontrol", 'echo "$@" >> $LOG', monkeypatch)
    in_slurm_job(monkeypatch)
    gce = Gce()

    def respond(handler: Handler, server: Server) -> None:
        if any((tmp_path / "run").glob("step-*")):  # in the middle of the training
            gce.values["preempted"] = "TRUE"
        gce(handler, server)

    with Server(respond) as server, running(2, 1, preemption_service=service) as job:
        answers = job.call(train_in_the_cloud, str(tmp_path / "run"), server.url)
    assert answers[0] == answers[1]
    step, code = answers[0]["preempted"]
    assert code == 75
    assert step == len(answers[0]["losses"]) >= 5
    assert jct.StepManager(tmp_path / "run").latest == step
    assert log.read_text() == "requeue Incomplete 1234\n", "by process 0 alone"
