"""SIGKILL at random moments loses no acknowledged step; `make kill-campaign` runs the whole campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly.kill.campaign import Life, campaign, check


def test_training_continues_exactly_after_random_sigkills(tmp_path: Path) -> None:
    lives = campaign(kills=2, seed=7, directory=tmp_path / "run")
    assert [life.resumed for life in lives] == sorted({life.resumed for life in lives})


def test_campaign_detects_lost_step_and_wrong_loss() -> None:
    expected = {step: f"loss {step}" for step in range(1, 20)}
    right = {step: expected[step] for step in range(4, 9)}
    check(Life(3, right), expected, acknowledged=3)
    with pytest.raises(AssertionError, match="from 3, but 4 was acknowledged"):
        check(Life(3, right), expected, acknowledged=4)
    with pytest.raises(AssertionError, match="update 6: loss other"):
        check(Life(3, {**right, 6: "other"}), expected, acknowledged=3)
