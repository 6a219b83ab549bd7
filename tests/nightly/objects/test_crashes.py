"""A sample of crashes at requests to an object store, and the flaws that a campaign must find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nightly.objects.crash_flaws import FLAWS
from tests.nightly.objects.crash_programs import PROGRAMS, Recorder
from tests.nightly.objects.crashes import Campaign, found_flaw, quiet


@pytest.fixture
def server() -> Iterator[Recorder]:
    with quiet(), Recorder() as it:
        yield it


@pytest.mark.parametrize("program", PROGRAMS)
def test_crash_at_requests_breaks_no_promise(server: Recorder, program: str) -> None:
    campaign = Campaign(server, every=9, seed=1, deeper=5)
    campaign.run(program)
    assert not campaign.found.violations
    assert sum(campaign.found.states.values()) > 20


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_is_found(server: Recorder, flaw: str) -> None:
    assert found_flaw(server, flaw).violations
