"""Slurm: a job that has left on request is put into the queue again.

Kubernetes: what would keep its request to leave, a SIGTERM, from this process is told when the job begins.
"""

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
ENDING_S = 1.0  # what it may take until a `scontrol` that was ended is gone, and that was told


class KubernetesNotice:
    """Looks whether the SIGTERM of Kubernetes can reach this process. The signal itself is noticed as any other.

    It is sent to process 1 of the container alone. A shell there hands nothing on: the pod would be killed at the end
    of its grace period with nothing saved.
    """

    def start(self) -> None:
        """Warn of what is wrong."""
        if not is_in_pod():
            _log.warning(
                "KubernetesNotice: expected a pod of Kubernetes, found no KUBERNETES_SERVICE_HOST: leave this source "
                "out of `notices` elsewhere"
            )
        first = command_name(1)
        if first in SHELLS:
            _log.warning(
                "KubernetesNotice: process 1 of this container is a shell (%s), which hands no SIGTERM on to this "
                "process unless a trap of its does: start Python by `exec python ...`, or without a shell",
                first,
            )

    def stop(self) -> None:
        """Nothing to end."""

    def notice(self) -> Notice | None:
        """None: signals are noticed as such."""
        return None


class SlurmNotice:
    """Requeues the Slurm job once it has left on request. The request itself is the signal of `sbatch --signal`.

    `scontrol requeue Incomplete <job>` is called by process 0 when the last step is committed and the run directory is
    let go of. "Incomplete": what Slurm is ending already it does not bring back, as after `scancel`; a job that Slurm
    preempts with PreemptMode=REQUEUE it requeues by itself. The job must be one of `sbatch` that may be requeued
    (`--requeue`). Slurm ends what is left of the job then.

    Args:
        requeue: False: only the facts are told.
        timeout_s: seconds that `scontrol` may take; less if less is left of the grace period. It is ended then.

    Attributes:
        left_timeout_s: seconds that `left` may take.

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
        """End what is under way of a requeue, which is told."""
        if self._command is not None:
            self._command.end()

    def notice(self) -> Notice | None:
        """None: signals are noticed as such."""
        return None

    def left(self, step: int | None) -> None:
        """Requeue the job; what hinders that is told."""
        job = slurm_job()
        if job is None or not self._requeue:
            return
        self._command = command = _Command("scontrol", "requeue", "Incomplete", job.id)
        try:
            problem = command.problem(self._timeout_s)
            if problem is None:
                begins = "begins anew, as no step is saved" if step is None else f"goes on from step {step}"
                _log.warning("Slurm was asked to requeue job %s, which %s", job.id, begins)
            elif command.was_ended:  # it may have been heard all the same
                advice = "look for it with squeue, and submit it again if it is not there"
                _log.warning("Slurm job %s may not be requeued: %s; %s", job.id, problem, advice)
            else:
                _log.warning("Slurm job %s is not requeued: %s; submit it again", job.id, problem)
        finally:
            command.is_told.open()


class _Command:
    """A program that is run once, and ended with all that it has started if that takes too long.

    Attributes:
        was_ended: whether it was.
        is_told: opened by who has told what became of it.
    """

    def __init__(self, *command: str) -> None:
        self._command, self._text = command, " ".join(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self.was_ended, self.is_told = os.getpid(), False, Latch()

    def problem(self, timeout_s: float) -> str | None:
        """Run it; why it did not work."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all that it starts can be ended, and no signal of this job ends it
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
                return f"{self._text} timed out after {timeout_s:g} seconds and was ended"
        if self.was_ended:
            return f"{self._text} was ended, as there was no time left for it"
        return None if process.returncode == 0 else f"{self._text} left with {process.returncode}: {_said(said)}"

    def end(self) -> None:
        """End it, and wait a moment until that is told; a fork of the process that runs it does not."""
        if os.getpid() == self._owner and not self.is_told.is_open():
            self.was_ended = True
            if self._process is not None:
                self._kill(self._process)
            self.is_told.wait(ENDING_S)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            with contextlib.suppress(OSError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)


def _said(output: bytes) -> str:
    return shown(output[: _SHOWN + 1].decode(errors="replace").strip(), _SHOWN)
