"""The arguments of CheckpointCallback: checked like a configuration, with a directory for each job of a multirun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import config


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_run_time_s": 30, "grace_period_s": 30}, "more than checkpoint.grace_period_s"),
        ({"max_run_time_s": 20, "grace_period_s": 25}, "checkpoint.grace_period_s, which is 25 seconds"),
        ({"on_preemption": "Raise"}, "checkpoint.on_preemption: expected one of"),
        ({"exit_code": 300}, "from 0 to 255"),
        ({"grace_period_s": -1.0}, "checkpoint.grace_period_s"),
        ({"signals": ("SIGKILL",)}, "that a process can catch"),
        ({"signals": [["SIGTERM"]]}, "that a process can catch"),
        ({"keep_latest": 0}, "checkpoint.keep_latest"),
        ({"best_metric": "loss"}, r"checkpoint.best_metric: .*checkpoint.keep_best"),
        ({"signals": {}}, "checkpoint.signals: expected a list of signal names"),
        ({"save_policy": 5}, r"checkpoint.save_policy: .* should_save\(...\), found 5"),
        ({"keep_policy": 5}, r"checkpoint.keep_policy: .* should_preserve\(...\), found 5"),
        ({"sinks": [5]}, r"checkpoint.sinks\[0\]: expected .* an object, .*, found 5"),
        ({"fingerprint": "v\udcff"}, "checkpoint.fingerprint: expected valid Unicode"),
    ],
)
def test_the_constructor_checks_what_a_configuration_does(tmp_path: Path, wrong: Any, message: str) -> None:
    with pytest.raises(jct.SettingsError, match=message):
        jct.CheckpointCallback(str(tmp_path), save_interval_steps=5, **wrong)


def test_constructor_gives_multirun_jobs_own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "job_name", lambda: "lr=0.1")
    assert jct.CheckpointCallback(str(tmp_path / "a")).manager.directory == str(tmp_path / "a" / "lr=0.1")
    from_config = jct.CheckpointCallback.from_config({"directory": str(tmp_path / "a")})
    assert from_config.manager.directory == str(tmp_path / "a" / "lr=0.1")


def test_constructor_takes_python_types_that_yaml_lacks(tmp_path: Path) -> None:
    ckpt = jct.CheckpointCallback(
        tmp_path / "run",
        save_interval_steps=np.int64(5),  # type: ignore[arg-type]
        save_interval_secs=np.float32(60),  # type: ignore[arg-type]
        notice_file=tmp_path / "leave",
        init_from=tmp_path / "other",
        grace_period_s=np.float32(2),
        signals=("SIGCLD",),
        store=jct.StoreSettings(durability="none"),
    )
    assert ckpt.manager.directory == str(tmp_path / "run")
    with pytest.raises(jct.SettingsError, match=r"checkpoint\.store: expected a StoreSettings"):
        jct.CheckpointCallback(str(tmp_path), store=3)  # type: ignore[arg-type]
