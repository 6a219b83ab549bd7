"""Damaged data is never loaded, clean data raises no alarm, and damaged steps are set aside.

`make corruption` runs the whole campaign; `test_corruption_controls.py` has its controls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults import corruption, damaged_background, damaged_owners
from tests.nightly.faults.corruption import campaign
from tests.nightly.faults.damage_report import BY, CLEAN, UNCHANGED
from tests.nightly.faults.damages import KINDS
from tests.nightly.faults.sample_runs import DIGESTS

pytestmark = pytest.mark.timeout(300)

TRIALS = 480
REACHED = {
    "COMMIT: missing",
    "COMMIT: size",
    "COMMIT: content",
    "manifest: missing",
    "manifest: size",
    "manifest: SHA-256",
    "segment: missing",
    "segment: size",
    "segment: digest of the header",
    "segment: digest of a block",
    "value: missing",
    "value: size",
    "value: digest",
}


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_sizes():
        yield


def test_damage_never_loads_and_restore_falls_back() -> None:
    found = campaign(TRIALS, seed=0)
    assert found.problems == []
    for kind in KINDS:
        for by in BY:
            for digest in DIGESTS:
                assert found.count(kind=kind, by=by, digest=digest) > 2
    assert found.count(kind=CLEAN) == TRIALS // 10
    assert found.damaged(layer=UNCHANGED) < TRIALS // 100
    assert found.damaged(noticed=None) == found.damaged(layer=UNCHANGED)
    assert {trial.layer for trial in found.trials if trial.noticed} == REACHED
    same_size = found.count(kind="swap", layer="segment: digest of a block")
    assert same_size > 0, "two segments of one size were swapped, which no size reveals"


def test_next_owner_survives_any_damaged_file() -> None:
    found = damaged_owners.campaign(150, seed=0)
    assert found.problems == []
    sorts = {(sort, kind) for sort, kind, _ in found.trials}
    assert {sort for sort, _ in sorts} == {CLEAN, "record", "history", "lock", "newest step", "older steps"}
    assert {kind for sort, kind in sorts if sort == "record"} == set(damaged_owners.RECORD_KINDS)
    older = sum(count for (*_, outcome), count in found.trials.items() if "an older step" in outcome)
    assert older > 20


def test_background_finds_damage_and_verifies_neighbours_next() -> None:
    found = damaged_background.campaign(60, seed=0)
    assert found.problems == []
    assert found.aside > 50


def test_command_prints_tables_and_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["corruption", "--trials", "40", "--seed", "4"])
    with pytest.raises(SystemExit) as left:
        corruption.main()
    assert not left.value.code
    printed = capsys.readouterr().out
    assert "\n0 problems; " in printed
    assert printed.count("\n| --- |") == 4
    assert "| all | 40 | " in printed
