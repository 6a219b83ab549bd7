"""Medians, ratios and shares."""

from __future__ import annotations

import pytest

from benchmarks.record import Turn
from benchmarks.spread import Spread
from benchmarks.summary import summarise
from tests.support.recorded_benchmark import load_sample, save_sample, turns


def test_the_warm_up_does_not_count() -> None:
    assert summarise(turns()).saves["ours"]["durable_s"] == Spread(2.0, 1.0, 3.0)


def test_ratios_are_taken_round_by_round() -> None:
    peer = summarise(turns()).saves["peer"]
    assert peer["durable_by_ours"] == Spread(3.0, 2.0, 4.0)
    assert peer["plain_by_ours"] == Spread(0.5, 0.5, 0.5)
    assert peer["durable_s"] == Spread(8.0, 2.0, 9.0)


def test_loads_have_ratio_and_two_shares_of_limit() -> None:
    rows = summarise(turns()).loads["whole"]
    assert rows["peer"]["load_by_ours"] == Spread(30.0, 20.0, 40.0)
    assert rows["ours"]["load_by_ours"] is None
    assert rows["ours"]["share_of_raw"] == Spread(0.5, 0.5, 0.5)
    assert rows["ours"]["share_of_raw_fresh"] == Spread(0.75, 0.75, 0.75)
    assert rows["ours"]["extra_peak_bytes"] == Spread(250, 250, 250)


def test_synchronous_save_has_no_blocking_time() -> None:
    summary = summarise(turns())
    assert summary.saves["peer"]["blocking_s"] is None
    assert summary.saves["peer"]["blocking_by_ours"] is None


def test_ratios_to_ours_need_ours() -> None:
    others = [turn for turn in turns() if turn.subject != "ours"]
    assert summarise(others).saves["peer"]["durable_by_ours"] is None
    assert summarise(others).saves["peer"]["share_of_raw"] is not None


@pytest.mark.parametrize(
    ("load", "warning"),
    [
        (load_sample("peer", 1.0, lazy_s=0.5), "peer: reads lazily"),
        (load_sample("peer", 1.0, was_mapped=True), "peer: its files were still"),
        (load_sample("peer", 1.0, direct_io=False), "peer: the file system refused"),
    ],
)
def test_each_warning_is_shown_once(load: object, warning: str) -> None:
    made = [Turn(number, "peer", save_sample(1.0), [load]) for number in (1, 2)]
    (found,) = summarise(made).warnings
    assert found.startswith(warning)


def test_stolen_time_is_reported_with_affected_rounds() -> None:
    quiet, loud = load_sample("peer", 1.0, stolen_s=0.01), load_sample("peer", 1.0, stolen_s=0.06)
    made = [Turn(number, "peer", save_sample(1.0), [load]) for number, load in enumerate((quiet, loud, loud), start=1)]
    (warning,) = summarise(made).warnings
    assert warning.startswith("peer: ")
    assert "2 of 3 loads" in warning
    assert summarise(made[:1]).warnings == []


def test_first_round_reports_memory() -> None:
    assert summarise(turns()).saves["ours"]["first_bytes"] == Spread(225, 200, 250)
    assert summarise(turns()).loads["whole"]["ours"]["first_bytes"] == Spread(225, 200, 250)
    assert summarise(turns()).saves["peer"]["first_bytes"] is None
