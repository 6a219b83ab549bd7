"""A job with a short grace period on a slow disk leaves in time and loses nothing; without a known one it is late.

`make deadlines` runs the whole campaign.
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


def test_job_leaves_within_its_grace_period() -> None:
    found = campaign(2, seed=1, graces_s=(2,))
    assert found.problems == []
    assert found.given_up > 0


def test_job_without_known_grace_period_is_late() -> None:
    problems = campaign(1, seed=1, graces_s=(1.5,), knows_grace=False).problems
    assert any("left after" in problem for problem in problems)
