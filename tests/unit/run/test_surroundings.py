"""Facts of the environment: the Slurm job of a process, and whether it runs in a pod."""

from __future__ import annotations

import pytest

from jaxckpt_train.store.process_identity import SlurmJob, is_in_pod, slurm_job
from tests.support.cluster_programs import in_slurm_job


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "7"}, SlurmJob("7", 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "12"}, SlurmJob("7", 12)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "often"}, SlurmJob("7", 0)),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}, SlurmJob("5_0", 0)),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "5"}, SlurmJob("9", 0)),
        ({"SLURM_JOB_ID": ""}, None),
        ({"SLURM_RESTART_COUNT": "1"}, None),
    ],
)
def test_slurm_job_has_its_scontrol_name(
    variables: dict[str, str], job: SlurmJob | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slurm_job(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert slurm_job() == job


def test_pod_is_detected_by_its_api_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not is_in_pod()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert is_in_pod()
