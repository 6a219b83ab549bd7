"""Facts of the environment: which Slurm job, and whether in a pod."""

from __future__ import annotations

import pytest

from jaxckpt_train.store.process_identity import SlurmJob, is_in_pod, slurm_job


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
def test_slurm_job_is_named_as_scontrol_takes_it(variables: dict[str, str], job: SlurmJob | None) -> None:
    assert slurm_job(variables) == job


def test_pod_is_known_by_address_of_its_api() -> None:
    assert is_in_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert not is_in_pod({"KUBERNETES_PORT": "443"})
