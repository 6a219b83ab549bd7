"""A short soak of the fast tier."""

from __future__ import annotations

import pytest

from tests.nightly.tiers.soak import soak, why_not

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def test_a_minute_of_random_faults() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    found = soak(60.0, "partner", 1)
    assert not found.trials.problems
    assert sum(found.faults.values()) > 3
