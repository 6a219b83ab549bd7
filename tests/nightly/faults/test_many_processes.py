"""Real processes on one directory: one owner at a time, and readers get the newest acknowledged step.

`make many-processes` runs the whole campaign; `tests/unit/run/test_owners_model.py` compares owners with a model.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from tests.nightly.faults.many_processes import campaign, no_lock

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fork"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)


def test_one_owner_at_a_time_and_nothing_lost(tmp_path: Path) -> None:
    found = campaign(10, seed=0, folder=tmp_path)
    assert found.problems == []
    assert min(found.actions[action] for action in ("owned", "refused", "read")) > 10


def test_owners_without_a_lock_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_lock(monkeypatch)
    assert any("own at once" in problem for problem in campaign(3, seed=0, folder=tmp_path).problems)
