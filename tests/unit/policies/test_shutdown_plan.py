"""What a job does after a shutdown request: it never begins a save that cannot end in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.policies.cost_model import ENDING_S, MARGIN, MARGIN_S, UNKNOWN_S, leave_early_s, plan_last_save

seconds = st.floats(0, 1e6)
steps = st.integers(0, 10**6)


def test_a_save_that_fits_is_begun() -> None:
    assert plan_last_save(120, 100, 2.0, 10.0) == (True, "saving step 120: 2.5 s of 10 s are needed")


def test_save_without_enough_time_is_not_begun() -> None:
    saves, why = plan_last_save(120, 100, 2.0, 2.4)
    assert not saves
    assert why == "keeping step 100: no time to save step 120, 2.5 s of 2.4 s are needed"


def test_save_is_tried_if_nothing_is_committed() -> None:
    saves, why = plan_last_save(120, None, 2.0, 0.1)
    assert saves
    assert "2.5 s of 0.1 s" in why


def test_save_of_unknown_duration_is_tried() -> None:
    saves, why = plan_last_save(120, 100, None, 0.0)
    assert saves
    assert "duration of a save is unknown" in why


def test_without_a_limit_all_is_saved() -> None:
    assert plan_last_save(120, 100, 2.0, None) == (True, "saving step 120: no remaining time limit")


@given(steps, st.none() | steps, st.none() | seconds, st.none() | seconds)
def test_updates_are_lost_only_for_lack_of_time(
    unsaved: int, committed: int | None, save_s: float | None, left_s: float | None
) -> None:
    saves, why = plan_last_save(unsaved, committed, save_s, left_s)
    is_known = committed is not None and save_s is not None and left_s is not None
    assert saves is not (is_known and MARGIN * (save_s or 0.0) + MARGIN_S > (left_s or 0.0))
    assert f"step {unsaved}" in why


def test_time_limit_leaves_room_for_two_saves() -> None:
    assert leave_early_s(None, None, 1000.0) == leave_early_s(None, 5.0, 1000.0) == UNKNOWN_S
    assert leave_early_s(10.0, 3.0, 1000.0) == pytest.approx(ENDING_S + 2 * MARGIN * 10.0 + 2 * 3.0)
    assert leave_early_s(0.0, None, 1000.0) == ENDING_S  # less than for an unknown duration


@pytest.mark.parametrize(
    ("save_s", "limit_s"), [(100.0, 200.0), (1e6, 200.0), (0.0, 8.0), (None, 59.0), (None, 31.0), (None, 0.5)]
)
def test_half_of_time_limit_remains_for_training(save_s: float | None, limit_s: float) -> None:
    assert leave_early_s(save_s, 1.0, limit_s) == limit_s / 2
