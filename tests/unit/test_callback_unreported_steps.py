"""A loop that does not report all its updates gets a warning at once, since they are never saved."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.runs import state_of, step_of

UNREPORTED = "ended without a call of ckpt(...)"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if UNREPORTED in record.getMessage()]


def test_missed_update_warns_once_during_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loop decides itself what to save, at 1, 11, 21, ..., of which none is due."""
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=10) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(25):
            assert len(warnings(caplog)) == (step >= 2)
            if step % 10 == 0:
                ckpt(state_of(step + 1))
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].startswith("update 2 ended")


def test_loop_without_reports_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=2) as ckpt:
        ckpt.resume(state_of(0))
        assert list(ckpt.steps(1)) == [0]
    assert len(warnings(caplog)) == 1


def test_complete_or_disabled_loop_does_not_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=2) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(5):
            ckpt(state_of(step + 1))
    with jct.CheckpointCallback(tmp_path / "other", enabled=False) as ckpt:
        assert list(ckpt.steps(3)) == [0, 1, 2]
    assert warnings(caplog) == []


@pytest.mark.parametrize("enabled", [True, False])
def test_custom_loop_counts_updates_even_if_disabled(tmp_path: Path, enabled: bool) -> None:
    counts = []
    with jct.CheckpointCallback(tmp_path, enabled=enabled) as ckpt:
        ckpt.resume(state_of(0))
        while ckpt.completed_steps < 3 and len(counts) < 10:
            ckpt(state_of(1))
            counts.append(ckpt.completed_steps)
        ckpt(state_of(1), step=7)
        assert (counts, ckpt.completed_steps) == ([1, 2, 3], 7)
        with pytest.raises(jct.SettingsError, match=r"step=9\): expected 8"):
            for _ in ckpt.steps(9):
                ckpt(state_of(1), step=9)


def test_calls_after_a_break_continue_the_count(tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(10):
            assert ckpt.completed_steps == step
            if step == 3:
                break
            ckpt(state_of(step + 1))
            assert ckpt.completed_steps == step + 1
        for completed in (4, 5):
            assert ckpt.completed_steps == completed - 1
            ckpt(state_of(completed))
            assert ckpt.completed_steps == completed
    manager = jct.StepManager(tmp_path)
    assert manager.latest == 5
    assert step_of(manager.restore({"state": state_of(0)})) == 5
