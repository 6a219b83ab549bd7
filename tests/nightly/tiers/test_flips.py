"""A short campaign of flipped bytes, and its control."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jaxckpt_train as jct
from tests.nightly.tiers.flips import REDUNDANCIES, Run, campaign, saved_runs

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
TRIALS = 30 * len(REDUNDANCIES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    with saved_runs(tmp_path_factory.mktemp("flips")) as found:
        yield found


def test_flipped_bytes_are_not_restored(runs: list[Run]) -> None:
    found = campaign(runs, TRIALS, 7)
    assert not found.problems
    assert found.outcomes().total() == TRIALS


def test_flips_are_found_if_digests_are_not_compared(runs: list[Run]) -> None:
    found = campaign(runs, TRIALS, 7, settings=jct.StoreSettings(verify_on_load=False))
    assert found.outcomes()["wrong"] > 0
