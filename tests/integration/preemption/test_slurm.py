"""Slurm requeues a preempted job: with a fake `scontrol` that works, refuses, hangs or is missing."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.cluster_programs import in_slurm_job, put_on_path
from tests.support.metadata_servers import until
from tests.support.runs import state_of

LOG_ARGUMENTS = 'echo "$@" >> $LOG'
HANG = "echo $$ >> $LOG; exec sleep 60"
ARRAY = {"SLURM_JOB_ID": "1200", "SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}


def is_alive(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(("variables", "job"), [({}, "1234"), (ARRAY, "1200_7")])
def test_left_job_or_array_task_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: Any, job: str
) -> None:
    log = put_on_path(tmp_path / "bin", "scontrol", LOG_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch, **variables)
    source = jct.SlurmNotice()
    source.start()
    assert source.notice() is None
    assert caplog.records == []
    assert not log.exists()
    source.left(40)
    source.stop()
    assert log.read_text() == f"requeue Incomplete {job}\n"
    assert f"requeue job {job}, which continues from step 40" in caplog.text


def test_a_job_without_a_step_is_requeued_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = put_on_path(tmp_path / "bin", "scontrol", LOG_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch)
    jct.SlurmNotice().left(None)
    assert log.read_text() == "requeue Incomplete 1234\n"
    assert "as no step is saved" in caplog.text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'Requested operation is presently disabled for job 1234' >&2; exit 1",
            "exited with 1: 'Requested operation is presently disabled for job 1234'",
        ),
        ("printf '\\377'; exit 3", "exited with 3: '\ufffd'"),
        ("printf '\\033[2J\\0'; exit 1", r"exited with 1: '\x1b[2J\x00'"),
        ("head -c 1000000 /dev/zero | tr '\\0' x; exit 1", "exited with 1: 'xxx"),
        (None, "No such file or directory: 'scontrol'"),
    ],
)
def test_failed_requeue_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: Any, said: str
) -> None:
    put_on_path(tmp_path / "bin", "scontrol" if script else "other", script or "", monkeypatch)
    in_slurm_job(monkeypatch)
    jct.SlurmNotice(timeout_s=60).left(40)
    assert len(caplog.records) == 1
    assert "Slurm job 1234 is not requeued" in caplog.text
    assert "submit it again" in caplog.text
    assert said in caplog.text
    assert len(caplog.text) < 1000


@pytest.mark.parametrize(("timeout_s", "grace_period_s"), [(11.0, None), (600.0, 4.0)])
def test_run_leaves_while_scontrol_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    timeout_s: Any,
    grace_period_s: Any,
) -> None:
    """The timeout of the source counts, also above ten seconds, but never more than the grace period."""
    log = put_on_path(tmp_path / "bin", "scontrol", HANG, monkeypatch)
    in_slurm_job(monkeypatch)
    asked = tmp_path / "leave"
    ckpt = jct.CheckpointCallback(
        tmp_path / "run",
        notice_file=asked,
        notices=[jct.SlurmNotice(timeout_s=timeout_s)],
        grace_period_s=grace_period_s,
        signals=[],
    )
    with pytest.raises(SystemExit), ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(10**9):
            asked.touch()
            ckpt(state_of(step + 1))
    scontrol = int(log.read_text())
    if grace_period_s is None:
        (message,) = [message for message in caplog.messages if "scontrol timed out after 11 seconds" in message]
        assert message.startswith("Slurm job 1234 may not be requeued")
        assert "squeue" in message
        assert not is_alive(scontrol)
    else:
        assert "its left() method has not finished" in caplog.text
        os.kill(scontrol, signal.SIGKILL)
        until(lambda: f"scontrol exited with -{signal.SIGKILL:d}" in caplog.text)
        assert "Slurm job 1234 may not be requeued: scontrol exited" in caplog.text
