"""A training that ends at a call on a file goes on exactly; one whose store publishes before it has written does not.

The whole campaign is `make boundaries`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly.faults.boundaries import campaign, why_not

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=f"no boundaries: {why_not()}"),
]


def test_training_that_ends_at_boundary_goes_on_exactly(tmp_path: Path) -> None:
    found = campaign(tmp_path, 2)
    assert found.problems == []
    assert found.points >= 1


def test_store_that_publishes_first_is_caught(tmp_path: Path) -> None:
    problems = campaign(tmp_path, 3, "publishes first", "before").problems
    assert any("LOST_WORK" in problem for problem in problems)


def test_a_training_that_writes_over_its_only_file_is_found_out(tmp_path: Path) -> None:
    assert campaign(tmp_path, 1, "by_hand", "torn").problems
