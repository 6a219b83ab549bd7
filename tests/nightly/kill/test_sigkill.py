"""SIGKILL at random moments costs no acknowledged step; the whole campaign is `make kill-campaign`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly.kill.campaign import Life, campaign, check


def test_after_sigkill_at_random_moments_a_fresh_process_goes_on_exactly(tmp_path: Path) -> None:
    lives = campaign(kills=2, seed=7, directory=tmp_path / "run")
    assert [life.resumed for life in lives] == sorted({life.resumed for life in lives})


def test_campaign_would_see_lost_step_and_wrong_loss() -> None:
    expected = {step: f"loss {step}" for step in range(1, 20)}
    right = {step: expected[step] for step in range(4, 9)}
    check(Life(3, right), expected, acknowledged=3)
    with pytest.raises(AssertionError, match="resumed from 3, but 4 was acknowledged"):
        check(Life(3, right), expected, acknowledged=4)
    with pytest.raises(AssertionError, match="update 6: loss other"):
        check(Life(3, {**right, 6: "other"}), expected, acknowledged=3)
