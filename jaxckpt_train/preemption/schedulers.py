"""Notice sources for schedulers: `SlurmNotice` requeues a job after its shutdown, `KubernetesNotice` checks signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess

from jaxckpt_train._validation import flag, seconds, shown
from jaxckpt_train.preemption.sources import Notice
from jaxckpt_train.store.process_identity import command_name, is_in_pod, slurm_job
from jaxckpt_train.store.threads import Latch

SHELLS = ("ash", "bash", "busybox", "dash", "ksh", "sh", "zsh")
_log = logging.getLogger("jaxckpt_train")
_SHOWN = 300
ENDING_S = 1.0  # the time to end a running `scontrol` and to log that


class KubernetesNotice:
    """Checks whether the SIGTERM of Kubernetes can reach this process. The signal itself is watched like any other.

    Kubernetes sends it only to process 1 of the container. A shell does not forward it: the pod would be killed at the
    end of its grace period without a save.
    """

    def start(self) -> None:
        """Log a warning for each problem."""
        if not is_in_pod():
            _log.warning(
                "KubernetesNotice: expected a Kubernetes pod, found no KUBERNETES_SERVICE_HOST: remove this source "
                "from `notices` outside of Kubernetes"
            )
        first = command_name(1)
        if first in SHELLS:
            _log.warning(
                "KubernetesNotice: process 1 of this container is a shell (%s), which does not forward SIGTERM to this "
                "process without a trap: start Python by `exec python ...`, or without a shell",
                first,
            )

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
        timeout_s: the seconds that `scontrol` may take, limited by the rest of the grace period; it is killed then.

    Attributes:
        left_timeout_s: the seconds that `left` may take.

    Raises:
        SettingsError: an argument is wrong.

    Sources: slurm.schedmd.com/scontrol.html and slurm.schedmd.com/sbatch.html
    """

    def __init__(self, requeue: bool = True, timeout_s: float = 10.0) -> None:
        self._requeue = flag("SlurmNotice: requeue", requeue)
        self._timeout_s = seconds("SlurmNotice: timeout_s", timeout_s)
        self.left_timeout_s = self._timeout_s + ENDING_S
        self._command: _Command | None = None

    def start(self) -> None:
        """Log which job this is."""
        job = slurm_job()
        if job is None:
            _log.warning(
                "SlurmNotice: expected a Slurm job, found no SLURM_JOB_ID: nothing will be requeued; start it by "
                "sbatch, or remove this source from `notices`"
            )
        else:
            _log.info("Slurm job %s, requeued %d times", job.id, job.restarts)

    def stop(self) -> None:
        """Kill a running `scontrol`, which `left` then logs."""
        if self._command is not None:
            self._command.end()

    def notice(self) -> Notice | None:
        """Return None: signals are watched separately."""
        return None

    def left(self, step: int | None) -> None:
        """Requeue the job; log a warning if that fails."""
        job = slurm_job()
        if job is None or not self._requeue:
            return
        self._command = command = _Command("scontrol", "requeue", "Incomplete", job.id)
        try:
            problem = command.problem(self._timeout_s)
            if problem is None:
                begins = "starts from scratch, as no step is saved" if step is None else f"continues from step {step}"
                _log.warning("Slurm was asked to requeue job %s, which %s", job.id, begins)
            elif command.was_ended:  # Slurm may have received the request nevertheless
                advice = "look for it with squeue, and submit it again if it is not listed"
                _log.warning("Slurm job %s may not be requeued: %s; %s", job.id, problem, advice)
            else:
                _log.warning("Slurm job %s is not requeued: %s; submit it again", job.id, problem)
        finally:
            command.is_logged.open()


class _Command:
    """A program that runs once; if it takes too long, it is killed together with all processes that it has started.

    Attributes:
        was_ended: whether it was killed.
        is_logged: opened by the caller after it has logged the result.
    """

    def __init__(self, *command: str) -> None:
        self._command, self._text = command, " ".join(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self.was_ended, self.is_logged = os.getpid(), False, Latch()

    def problem(self, timeout_s: float) -> str | None:
        """Run the program; return why it failed, None if it succeeded."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # allows to kill all its processes, and shields it from signals to this job
            )
        except OSError as error:
            return f"{self._text}: {error}"
        with process:
            self._process = process
            if self.was_ended:
                self._kill(process)
            try:
                said, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.was_ended = True
                self._kill(process)
                return f"{self._text} timed out after {timeout_s:g} seconds and was killed"
        if self.was_ended:
            return f"{self._text} was killed, because no time was left for it"
        return None if process.returncode == 0 else f"{self._text} exited with {process.returncode}: {_said(said)}"

    def end(self) -> None:
        """Kill the program and wait briefly until that is logged; no-op in a forked child."""
        if os.getpid() == self._owner and not self.is_logged.is_open():
            self.was_ended = True
            if self._process is not None:
                self._kill(self._process)
            self.is_logged.wait(ENDING_S)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)


def _said(output: bytes) -> str:
    return shown(output[: _SHOWN + 1].decode(errors="replace").strip(), _SHOWN)
