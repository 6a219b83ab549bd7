"""Processes that are killed at random moments lose nothing; one that acknowledges before it has published is found out.

The whole campaign is `make random-kills`; that of a real training is `make kill-campaign`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.nightly.faults.flaws import FLAWS
from tests.nightly.faults.random_kills import campaign

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*fork")]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)


def test_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    found = campaign(30, seed=0, folder=tmp_path)
    assert found.problems == []
    assert found.acknowledged > 8
    assert found.during["saving"] > 8


def test_a_writer_that_publishes_late_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FLAWS["publishes late"](monkeypatch)
    assert any("was acknowledged" in problem for problem in campaign(30, seed=0, folder=tmp_path).problems)
