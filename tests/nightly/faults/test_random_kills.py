"""Processes killed at random moments lose nothing; a writer that acknowledges before it publishes is detected.

`make random-kills` runs the whole campaign, and `make kill-campaign` that of a real training.
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


def test_acknowledged_saves_survive_random_kills(tmp_path: Path) -> None:
    found = campaign(30, seed=0, folder=tmp_path)
    assert found.problems == []
    assert found.acknowledged > 8
    assert found.during["saving"] > 8


def test_writer_that_publishes_late_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FLAWS["publishes late"](monkeypatch)
    assert any("was acknowledged" in problem for problem in campaign(30, seed=0, folder=tmp_path).problems)
