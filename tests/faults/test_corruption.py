"""Damaged checkpoints: nothing wrong is ever loaded, nothing clean is complained about, and the campaign can tell.

The whole campaign is `make corruption`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxckpt_train.settings import DigestName, StoreSettings
from tests.crash.explorer import small_sizes
from tests.faults.corruption import DIGESTS, KINDS, campaign

pytestmark = pytest.mark.timeout(300)

TRIALS = 1200


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


def test_whatever_is_damaged_nothing_wrong_is_loaded_and_the_step_before_is_restored() -> None:
    found = campaign(TRIALS, seed=0)
    assert found.problems == []
    assert set(found.trials) == {*KINDS, "clean"}
    assert min(found.trials.values()) > TRIALS // 20
    layers = {layer for kind in found.layers.values() for layer in kind}
    assert {"COMMIT", "manifest.json", "are not what was saved", "bytes, but the manifest says", "but: "} <= layers


@pytest.mark.parametrize("digest", DIGESTS)
def test_a_load_without_digests_is_found_out(digest: DigestName) -> None:
    found = campaign(600, seed=1, digests=(digest,), settings=StoreSettings(verify_on_load=False, io_threads=1))
    assert any("loaded in silence, and wrong" in problem for problem in found.problems)
