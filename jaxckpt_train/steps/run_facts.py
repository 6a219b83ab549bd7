"""What the history says of a process that begins: where it runs, and as which job of the scheduler."""

from __future__ import annotations

import os
import socket

SLURM_FACTS = {"SLURM_JOB_ID": "slurm_job_id", "SLURM_RESTART_COUNT": "slurm_restart_count"}


def run_facts() -> dict[str, str | int]:
    """The host and the process, and in a Slurm job its id and how often it was started again."""
    facts: dict[str, str | int] = {"host": socket.gethostname(), "pid": os.getpid()}
    for variable, name in SLURM_FACTS.items():
        value = os.environ.get(variable)
        if value:
            facts[name] = int(value) if value.isdecimal() else value
    return facts
