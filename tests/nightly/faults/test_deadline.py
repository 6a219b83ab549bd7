"""A job with little time on a slow disk leaves in time, and loses nothing; one that does not know its time is late.

The whole campaign is `make deadlines`.
"""

from __future__ import annotations

import pytest

from tests.nightly.faults.deadline import campaign
from tests.nightly.faults.fuse_disk import why_not

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _can() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no slow disk: {reason}")


def test_it_commits_or_gives_up_before_its_time_is_over() -> None:
    found = campaign(2, seed=1, graces_s=(2,))
    assert found.problems == []
    assert found.given_up > 0


def test_a_job_that_does_not_know_how_long_it_lives_is_late() -> None:
    problems = campaign(1, seed=1, graces_s=(1.5,), told=False).problems
    assert any("left after" in problem for problem in problems)
