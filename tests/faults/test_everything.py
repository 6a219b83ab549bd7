"""The table of campaigns says what they said: problems, skips, and what fell over."""

from __future__ import annotations

import datetime
import importlib

import pytest

from tests.faults.everything import CAMPAIGNS, Campaign, Result, run, table


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda each: each.name)
def test_every_campaign_is_there(campaign: Campaign) -> None:
    assert callable(importlib.import_module(campaign.module).main)


@pytest.mark.parametrize(
    ("lines", "code", "verdict", "right"),
    [
        (("30 cuts, 0 problems, 4 found a newer step",), 0, "0 problems", True),
        (("ext4: 30 cuts, 2 problems", "  seed 3"), 1, "2 problems", False),
        (("SKIP: needs root, to mount",), 0, "SKIP: needs root, to mount", True),
        (("ext4: 0 problems", "xfs: SKIP: needs mkfs.xfs"), 0, "0 problems; xfs: SKIP: needs mkfs.xfs", True),
        ((), 0, "said nothing", False),
        (("on its way",), -9, "fell over (-9)", False),
    ],
)
def test_the_verdict(lines: tuple[str, ...], code: int, verdict: str, right: bool) -> None:
    result = Result(CAMPAIGNS[0], lines, code, 1.0)
    assert (result.verdict, result.is_right) == (verdict, right)
    assert f"| {verdict} | 1 s |" in table([result], 1.0, 7, datetime.date(2026, 1, 2))


def test_a_campaign_is_run_with_its_share_of_trials(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(Campaign("owners", "tests.faults.owners", "--sequences", 400), 0.01, seed=3)
    assert result.verdict == "0 problems"
    assert "4 sequences" in capsys.readouterr().out
