"""A few trials of each kind of `lost_hosts`."""

from __future__ import annotations

import pytest

from tests.nightly.tiers.lost_hosts import campaign
from tests.support.jobs import namespaces

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("redundancy", "killed"), [("partner", 1), ("xor", 1), ("p+q", 2)])
def test_acknowledged_steps_survive_lost_hosts(redundancy: str, killed: int) -> None:
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    found = campaign(4, 4, redundancy, killed, 1)
    assert not found.problems
    assert found.found["newest"] + found.found["ahead"] == 4
