"""A training that ends at any file operation continues exactly; one whose store publishes too early does not.

`make boundaries` runs the whole campaign.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly.faults.boundaries import campaign, why_not

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=f"cannot find boundaries: {why_not()}"),
]


def test_training_continues_exactly_after_any_boundary(tmp_path: Path) -> None:
    found = campaign(tmp_path, 2)
    assert found.problems == []
    assert found.points >= 1


def test_store_that_publishes_first_is_detected(tmp_path: Path) -> None:
    problems = campaign(tmp_path, 3, "publishes first", "before").problems
    assert any("LOST_WORK" in problem for problem in problems)


def test_training_that_overwrites_its_file_is_detected(tmp_path: Path) -> None:
    assert campaign(tmp_path, 1, "by_hand", "torn").problems
