"""Slurm: a job that has left on request is put into the queue again."""

from __future__ import annotations

import logging
import subprocess

from jaxckpt_train.notices.source import Notice
from jaxckpt_train.notices.surroundings import slurm_job
from jaxckpt_train.value_checks import flag, seconds

_log = logging.getLogger("jaxckpt_train")
_SHOWN = 300


class SlurmNotice:
    """Requeues the Slurm job once it has left on request. The request itself is the signal of `sbatch --signal`.

    `scontrol requeue Incomplete <job>` is called by process 0 when the last step is committed and the run directory is
    let go of. "Incomplete": what Slurm is ending already it does not bring back, as after `scancel`; a job that Slurm
    preempts with PreemptMode=REQUEUE it requeues by itself. The job must be one of `sbatch` that may be requeued
    (`--requeue`). Slurm ends what is left of the job then.

    Args:
        requeue: False: only the facts are told.
        timeout_s: seconds that `scontrol` may take.

    Raises:
        SettingsError: an argument is wrong.

    Sources: slurm.schedmd.com/scontrol.html and slurm.schedmd.com/sbatch.html
    """

    def __init__(self, requeue: bool = True, timeout_s: float = 10.0) -> None:
        self._requeue = flag("SlurmNotice: requeue", requeue)
        self._timeout_s = seconds("SlurmNotice: timeout_s", timeout_s)

    def start(self) -> None:
        """Say which job this is."""
        job = slurm_job()
        if job is None:
            _log.warning(
                "SlurmNotice: expected a job of Slurm, found no SLURM_JOB_ID: nothing will be requeued; start it by "
                "sbatch, or leave this source out of `notices`"
            )
        else:
            _log.info("Slurm job %s, requeued %d times", job.id, job.restarts)

    def stop(self) -> None:
        """Nothing to end."""

    def notice(self) -> Notice | None:
        """None: signals are noticed as such."""
        return None

    def left(self, step: int | None) -> None:
        """Requeue the job; what hinders that is told."""
        job = slurm_job()
        if job is None or not self._requeue:
            return
        problem = self._problem(["scontrol", "requeue", "Incomplete", job.id])
        if problem is None:
            begins = "begins anew, as no step is saved" if step is None else f"goes on from step {step}"
            _log.warning("Slurm was asked to requeue job %s, which %s", job.id, begins)
        else:
            _log.warning("Slurm job %s is not requeued: %s; submit it again", job.id, problem)

    def _problem(self, command: list[str]) -> str | None:
        """Run it; why it did not work."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self._timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{' '.join(command)}: {error}"
        if done.returncode == 0:
            return None
        said = done.stdout[:_SHOWN].decode(errors="replace").strip()
        return f"{' '.join(command)} left with {done.returncode}: {said}"
