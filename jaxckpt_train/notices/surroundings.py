"""What the environment says of where this process runs: in which Slurm job, in a pod of Kubernetes. Facts, no knobs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A batch job of Slurm.

    Attributes:
        id: as `scontrol` takes it: "1234", of one task of an array "1200_7". The number that the last task of an array
            has in SLURM_JOB_ID is that of the whole array.
        restarts: how often it was requeued.
    """

    id: str
    restarts: int


def slurm_job(environment: Mapping[str, str] | None = None) -> SlurmJob | None:
    """The Slurm job that this process belongs to; None: none.

    Args:
        environment: variables; None: those of this process.
    """
    variables = os.environ if environment is None else environment
    number, array = variables.get("SLURM_JOB_ID"), variables.get("SLURM_ARRAY_JOB_ID")
    if not number:
        return None
    task = variables.get("SLURM_ARRAY_TASK_ID")
    restarts = variables.get("SLURM_RESTART_COUNT", "")  # there is none in the first start
    return SlurmJob(f"{array}_{task}" if array and task else number, int(restarts) if restarts.isdecimal() else 0)


def is_in_pod(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process runs in a pod of Kubernetes, which gives every container the address of its API.

    Args:
        environment: variables; None: those of this process.
    """
    return bool((os.environ if environment is None else environment).get("KUBERNETES_SERVICE_HOST"))
