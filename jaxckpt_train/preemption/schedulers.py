"""Notice sources for schedulers: `SlurmNotice` requeues a job after its shutdown, `KubernetesNotice` checks signals."""

from __future__ import annotations

import logging
import subprocess

from jaxckpt_train._validation import flag, seconds, shown
from jaxckpt_train.preemption.sources import Notice
from jaxckpt_train.store.process_identity import command_name, is_in_pod, slurm_job

SHELLS = ("ash", "bash", "busybox", "dash", "ksh", "sh", "zsh")
_log = logging.getLogger("jaxckpt_train")
_SHOWN = 300
ENDING_S = 1.0  # to end `scontrol` and to log that
_NOT_REQUEUED = "Slurm job %s is not requeued: scontrol %s; submit it again"
_UNKNOWN = (  # after `scontrol` was killed, as Slurm may have received the request
    "Slurm job %s may not be requeued: scontrol %s; look for the job with squeue, and submit it again if it is not "
    "listed"
)


class KubernetesNotice:
    """Checks whether the SIGTERM of Kubernetes can reach this process. The signal itself is watched like any other.

    Kubernetes sends it only to process 1 of the container. A shell does not forward it: the pod would be killed at the
    end of its grace period without a save.
    """

    def start(self) -> None:
        """Log a warning for each problem."""
        if not is_in_pod():
            _log.warning("KubernetesNotice: expected a Kubernetes pod, found no KUBERNETES_SERVICE_HOST")
        first = command_name(1)
        if first in SHELLS:
            text = "process 1 of this container is a shell (%s), which does not forward SIGTERM: use `exec python ...`"
            _log.warning("KubernetesNotice: " + text, first)

    def stop(self) -> None:
        """Do nothing."""

    def notice(self) -> Notice | None:
        """Return None: the signal is watched separately."""
        return None


class SlurmNotice:
    """Requeues the Slurm job after it has shut down on request. The request itself is the signal of `sbatch --signal`.

    The primary calls `scontrol requeue Incomplete <job>` when the last step is committed and the run directory is
    released. "Incomplete" excludes a job that Slurm is already ending, for example after `scancel`. A job preempted
    with PreemptMode=REQUEUE is requeued by Slurm itself. The job must be started by `sbatch` and allow requeueing
    (`--requeue`). After the call, Slurm ends the rest of the job.

    Args:
        requeue: whether to requeue; False: only log the facts of the job.
        timeout_s: the seconds that `scontrol` may take; it is killed then. The job does not wait for it beyond the
            grace period.

    Raises:
        SettingsError: an argument is wrong.

    Sources: slurm.schedmd.com/scontrol.html and slurm.schedmd.com/sbatch.html
    """

    def __init__(self, requeue: bool = True, timeout_s: float = 10.0) -> None:
        self._requeue = flag("SlurmNotice: requeue", requeue)
        self._timeout_s = seconds("SlurmNotice: timeout_s", timeout_s)
        self.left_timeout_s = self._timeout_s + ENDING_S

    def start(self) -> None:
        """Log which job this is."""
        job = slurm_job()
        if job is None:
            _log.warning("SlurmNotice: expected a Slurm job, found no SLURM_JOB_ID: nothing will be requeued")
        else:
            _log.info("Slurm job %s, requeued %d times", job.id, job.restarts)

    def stop(self) -> None:
        """Do nothing."""

    def notice(self) -> Notice | None:
        """Return None: signals are watched separately."""
        return None

    def left(self, step: int | None) -> None:
        """Requeue the job; log a warning if that fails."""
        job = slurm_job()
        if job is None or not self._requeue:
            return
        try:
            done = subprocess.run(
                ["scontrol", "requeue", "Incomplete", job.id],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self._timeout_s,
                start_new_session=True,  # shields it from signals to this job
                check=False,
            )
        except OSError as error:
            _log.warning(_NOT_REQUEUED, job.id, f"was not started: {error}")
            return
        except subprocess.TimeoutExpired:
            _log.warning(_UNKNOWN, job.id, f"timed out after {self._timeout_s:g} seconds")
            return
        if done.returncode == 0:
            begins = "starts from scratch, as no step is saved" if step is None else f"continues from step {step}"
            _log.warning("Slurm was asked to requeue job %s, which %s", job.id, begins)
            return
        said = shown(done.stdout[: _SHOWN + 1].decode(errors="replace").strip(), _SHOWN)
        problem = f"exited with {done.returncode}: {said}"
        _log.warning(_UNKNOWN if done.returncode < 0 else _NOT_REQUEUED, job.id, problem)
