"""What a job does after a shutdown request: it never begins a save that cannot end in time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.policies.cost_model import ENDING_S, MARGIN, MARGIN_S, UNKNOWN_S, Situation, choose, leave_early_s

KNOWN = Situation(left_s=10.0, unsaved=120, committed=100, save_s=2.0, step_s=0.01)
seconds = st.floats(0, 1e6)
maybe = st.none() | seconds
steps = st.integers(0, 10**6)
situations = st.builds(
    Situation,
    left_s=maybe,
    unsaved=st.none() | steps,
    running=st.none() | steps,
    running_for_s=seconds,
    committed=st.none() | steps,
    save_s=maybe,
    step_s=maybe,
)


def plan(**now: object) -> tuple[tuple[bool, bool, bool], str]:
    """Whether the plan saves, waits and loses updates; and its reason."""
    found = choose(dataclasses.replace(KNOWN, **now))
    return (found.saves, found.waits, found.loses), found.why


def test_a_save_that_fits_is_begun() -> None:
    assert plan() == ((True, False, False), "saving step 120: 2.5 s of 10 s are needed")


def test_save_without_enough_time_is_not_begun() -> None:
    flags, why = plan(left_s=2.4)
    assert flags == (False, False, True)
    assert why.startswith("keeping step 100")
    assert "2.5 s of 2.4 s" in why


def test_save_is_tried_if_nothing_is_committed() -> None:
    flags, why = plan(left_s=0.1, committed=None)
    assert flags == (True, False, False)
    assert "2.5 s of 0.1 s" in why


def test_running_save_suffices_if_redo_is_cheaper() -> None:
    flags, why = plan(running=119, running_for_s=0.5)
    assert flags == (False, True, False)
    assert why.startswith("finishing the save of step 119")
    assert "repeating 1 update takes 0.01 s" in why
    assert "repeating 20 updates takes 0.2 s" in plan(running=100)[1]
    assert plan(running=100, step_s=0.1)[0] == (False, True, False)  # as long as another save: no gain
    assert plan(running=100, step_s=0.11, left_s=10.0)[0] == (True, True, False)


def test_stale_save_is_followed_by_another() -> None:
    late = {"running": 100, "running_for_s": 0.5, "step_s": 1.0}
    flags, why = plan(**late)
    assert flags == (True, True, False)
    assert why.startswith("finishing the save of step 100, then saving step 120")
    assert "4.3 s of 10 s" in why
    flags, why = plan(**late, left_s=4.2)
    assert flags == (False, True, True)
    assert "4.3 s of 4.2 s" in why
    assert plan(**{**late, "running_for_s": 60.0}, left_s=4.2)[0] == (True, True, False)  # it must be about to end


def test_save_of_unknown_duration_is_tried() -> None:
    assert "duration of a save is unknown" in plan(save_s=None)[1]
    assert plan(save_s=None, left_s=0.0)[0] == (True, False, False)
    assert plan(running=119, step_s=None)[0] == (True, True, False)  # by the remaining time alone
    assert plan(running=119, step_s=None, left_s=1.0)[0] == (False, True, True)


def test_without_a_limit_all_is_saved() -> None:
    assert plan(left_s=None) == ((True, False, False), "saving step 120: no remaining time limit")
    assert plan(left_s=None, running=119)[0] == (True, True, False)


def test_with_nothing_new_nothing_is_saved() -> None:
    assert plan(unsaved=None) == ((False, False, False), "nothing new to save")
    assert plan(unsaved=None, running=120) == ((False, True, False), "finishing the save of step 120")


@given(situations)
def test_no_begun_save_exceeds_remaining_time(now: Situation) -> None:
    found = choose(now)
    rest_s = 0.0 if now.running is None else max(0.0, (now.save_s or 0.0) - now.running_for_s)
    if found.saves and None not in (now.left_s, now.save_s, now.committed):
        assert MARGIN * (rest_s + (now.save_s or 0.0)) + MARGIN_S <= (now.left_s or 0.0)
    assert found.waits is (now.running is not None)
    assert found.why
    assert not (found.saves and now.unsaved is None)
    assert not (found.saves and found.loses)


@given(situations)
def test_updates_are_lost_only_for_a_reason(now: Situation) -> None:
    found = choose(now)
    if now.unsaved is None or found.saves:
        assert not found.loses
        return
    assert now.left_s is not None
    assert now.save_s is not None
    is_fresh = now.running is not None and now.step_s is not None
    is_fresh = is_fresh and (now.unsaved - (now.running or 0)) * (now.step_s or 0.0) <= now.save_s
    assert found.loses is not is_fresh


@given(situations, seconds)
def test_more_time_never_prevents_a_save(now: Situation, more_s: float) -> None:
    if now.left_s is not None and choose(now).saves:
        assert choose(dataclasses.replace(now, left_s=now.left_s + more_s)).saves


def test_time_limit_leaves_room_for_two_saves() -> None:
    assert leave_early_s(None, None, 1000.0) == leave_early_s(None, 5.0, 1000.0) == UNKNOWN_S
    assert leave_early_s(10.0, 3.0, 1000.0) == pytest.approx(ENDING_S + 2 * MARGIN * 10.0 + 2 * 3.0)
    assert leave_early_s(0.0, None, 1000.0) == ENDING_S  # less than for an unknown duration


@pytest.mark.parametrize(
    ("save_s", "limit_s"), [(100.0, 200.0), (1e6, 200.0), (0.0, 8.0), (None, 59.0), (None, 31.0), (None, 0.5)]
)
def test_half_of_time_limit_remains_for_training(save_s: float | None, limit_s: float) -> None:
    assert leave_early_s(save_s, 1.0, limit_s) == limit_s / 2
