"""What tells one start of a run from another: host, process, and the Slurm job with its restarts."""

from __future__ import annotations

import os

from jaxckpt_train.notices.surroundings import slurm_job
from jaxckpt_train.store.machine import this_process


def run_facts() -> dict[str, str | int]:
    """The facts of this process, in types that JSON has.

    Returns:
        `host` and `pid`; in a job of Slurm also `slurm_job_id`, as `scontrol` and `sacct` take it ("1234", "1200_7"),
        and `slurm_restart_count`, which is 0 in the first start.
    """
    facts: dict[str, str | int] = {"host": this_process().host, "pid": os.getpid()}
    job = slurm_job()
    if job is not None:
        facts |= {"slurm_job_id": job.id, "slurm_restart_count": job.restarts}
    return facts
