"""Slurm requeues a job that has left: by a stand-in for `scontrol`, which works, refuses, hangs or is missing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.notices.programs import in_slurm_job, put_on_path

NOTES_ITS_ARGUMENTS = 'echo "$@" >> $LOG'
ARRAY = {"SLURM_JOB_ID": "1200", "SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}


@pytest.mark.parametrize(("variables", "job"), [({}, "1234"), (ARRAY, "1200_7")])
def test_a_job_that_has_left_is_requeued_and_of_an_array_only_this_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: Any, job: str
) -> None:
    log = put_on_path(tmp_path / "bin", "scontrol", NOTES_ITS_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch, **variables)
    source = jct.SlurmNotice()
    source.start()
    assert source.notice() is None
    assert caplog.records == []
    assert not log.exists()
    source.left(40)
    source.stop()
    assert log.read_text() == f"requeue Incomplete {job}\n"
    assert f"Slurm was asked to requeue job {job}, which goes on from step 40" in caplog.text


def test_a_job_without_a_step_is_requeued_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = put_on_path(tmp_path / "bin", "scontrol", NOTES_ITS_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch)
    jct.SlurmNotice().left(None)
    assert log.read_text() == "requeue Incomplete 1234\n"
    assert "which begins anew, as no step is saved" in caplog.text


def test_without_requeue_the_facts_are_told_and_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxckpt_train")
    log = put_on_path(tmp_path / "bin", "scontrol", NOTES_ITS_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch, SLURM_RESTART_COUNT="3")
    source = jct.SlurmNotice(requeue=False)
    source.start()
    source.left(40)
    assert not log.exists()
    assert caplog.messages == ["Slurm job 1234, requeued 3 times"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'Requested operation is presently disabled for job 1234' >&2; exit 1",
            "scontrol requeue Incomplete 1234 left with 1: Requested operation is presently disabled",
        ),
        ("printf '\\377'; exit 3", "left with 3: \ufffd"),
        ("head -c 1000000 /dev/zero | tr '\\0' x; exit 1", "left with 1: xxx"),
        ("exec sleep 600", "timed out after 0.2 seconds"),
        (None, "No such file or directory: 'scontrol'"),
    ],
)
def test_what_hinders_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: Any, said: str
) -> None:
    put_on_path(tmp_path / "bin", "scontrol" if script else "other", script or "", monkeypatch)
    in_slurm_job(monkeypatch)
    jct.SlurmNotice(timeout_s=0.2).left(40)
    assert len(caplog.records) == 1
    assert "Slurm job 1234 is not requeued: scontrol requeue Incomplete 1234" in caplog.text
    assert "submit it again" in caplog.text
    assert said in caplog.text
    assert len(caplog.text) < 1000


def test_outside_of_a_job_it_warns_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = put_on_path(tmp_path / "bin", "scontrol", NOTES_ITS_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID")
    source = jct.SlurmNotice()
    source.start()
    source.left(40)
    assert not log.exists()
    assert len(caplog.records) == 1
    assert "expected a job of Slurm, found no SLURM_JOB_ID: nothing will be requeued" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"requeue": "yes"}, "SlurmNotice: requeue: expected true or false"),
        ({"timeout_s": 0}, "SlurmNotice: timeout_s"),
    ],
)
def test_wrong_options_are_refused(options: Any, said: str) -> None:
    with pytest.raises(jct.SettingsError, match=said):
        jct.SlurmNotice(**options)
