"""Proofs with killed processes: an error instead of a kill, and ignored metrics."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.testing import ResumeProof, assert_resume_exact
from tests.support.training_loops import train, train_with_key


def test_loop_with_key_in_its_state_survives_error(tmp_path: Path) -> None:
    proof = assert_resume_exact(train_with_key, kill_at=5, how="raise", directory=tmp_path / "proof")
    assert proof == ResumeProof(9, (5,), (3,), 6, 6)


@pytest.mark.parametrize("ignored", ["*_per_s", ["updates_per_s", "other"]])
def test_ignored_clock_metric_is_left_out(ignored: Any, tmp_path: Path) -> None:
    clocked = functools.partial(train, mistake="clock")
    proof = assert_resume_exact(clocked, kill_at=5, ignore_metrics=ignored, directory=tmp_path / "proof")
    assert proof == ResumeProof(9, (5,), (3,), 6, 6, ("updates_per_s",))
