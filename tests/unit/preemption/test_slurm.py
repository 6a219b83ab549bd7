"""SlurmNotice: its settings, and when it does not call `scontrol`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.cluster_programs import in_slurm_job, put_on_path

LOG_ARGUMENTS = 'echo "$@" >> $LOG'


def test_job_is_only_logged_without_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxckpt_train")
    log = put_on_path(tmp_path / "bin", "scontrol", LOG_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch, SLURM_RESTART_COUNT="3")
    source = jct.SlurmNotice(requeue=False)
    source.start()
    source.left(40)
    assert not log.exists()
    assert caplog.messages == ["Slurm job 1234, requeued 3 times"]


def test_missing_slurm_job_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = put_on_path(tmp_path / "bin", "scontrol", LOG_ARGUMENTS, monkeypatch)
    in_slurm_job(monkeypatch)
    monkeypatch.delenv("SLURM_JOB_ID")
    source = jct.SlurmNotice()
    source.start()
    source.left(40)
    assert not log.exists()
    assert len(caplog.records) == 1
    assert "expected a Slurm job, found no SLURM_JOB_ID" in caplog.text


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
