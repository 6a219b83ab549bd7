"""What a job does that was asked to leave: chosen by what is known, and never a save that cannot end in time."""

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


def plan(**now: object) -> tuple[bool, bool, bool, str]:
    found = choose(dataclasses.replace(KNOWN, **now))
    return found.saves, found.waits, found.loses, found.why


def test_a_save_that_fits_is_begun() -> None:
    assert plan() == (True, False, False, "saving step 120: 2.5 s of 10 s are needed")


def test_one_that_cannot_end_is_not_begun_and_what_is_committed_stays() -> None:
    why = "keeping step 100: no time to save step 120, 2.5 s of 2.4 s are needed"
    assert plan(left_s=2.4) == (False, False, True, why)


def test_where_nothing_is_committed_it_is_tried_anyway() -> None:
    assert plan(left_s=0.1, committed=None) == (True, False, False, "saving step 120: 2.5 s of 0.1 s are needed")


def test_running_save_suffices_if_redo_is_cheaper() -> None:
    saves, waits, loses, why = plan(running=119, running_for_s=0.5)
    assert (saves, waits, loses) == (False, True, False)
    assert why == (
        "finishing the save of step 119, which is recent enough: repeating 1 update takes 0.01 s, saving step 120 2 s"
    )
    assert "repeating 20 updates takes 0.2 s" in plan(running=100)[3]
    assert plan(running=100, step_s=0.1)[0] is False  # as long as another save: no gain
    assert plan(running=100, step_s=0.11, left_s=10.0)[0] is True


def test_stale_save_is_followed_by_another() -> None:
    late = {"running": 100, "running_for_s": 0.5, "step_s": 1.0}
    why = "finishing the save of step 100, then saving step 120: 4.3 s of 10 s are needed"
    assert plan(**late) == (True, True, False, why)
    saves, waits, loses, why = plan(**late, left_s=4.2)
    assert (saves, waits, loses) == (False, True, True)
    assert why == "finishing the save of step 100: no time to save step 120, 4.3 s of 4.2 s are needed"
    assert plan(**{**late, "running_for_s": 60.0}, left_s=4.2)[0] is True  # it must be about to end


def test_what_is_not_known_is_tried() -> None:
    assert plan(save_s=None)[3] == "saving step 120: the duration of a save is unknown"
    assert plan(save_s=None, left_s=0.0)[0] is True
    assert plan(running=119, step_s=None)[0] is True  # by the time alone
    assert plan(running=119, step_s=None, left_s=1.0)[0] is False


def test_without_a_limit_all_is_saved() -> None:
    assert plan(left_s=None)[3] == "saving step 120: no remaining time limit"
    why = "finishing the save of step 119, then saving step 120: no remaining time limit"
    assert plan(left_s=None, running=119) == (True, True, False, why)


def test_with_nothing_new_nothing_is_saved() -> None:
    assert plan(unsaved=None) == (False, False, False, "nothing new to save")
    assert plan(unsaved=None, running=120) == (False, True, False, "finishing the save of step 120")


@given(situations)
def test_whatever_is_known_no_save_is_begun_that_cannot_end(now: Situation) -> None:
    found = choose(now)
    rest_s = 0.0 if now.running is None else max(0.0, (now.save_s or 0.0) - now.running_for_s)
    if found.saves and None not in (now.left_s, now.save_s, now.committed):
        assert MARGIN * (rest_s + (now.save_s or 0.0)) + MARGIN_S <= (now.left_s or 0.0)
    assert found.waits is (now.running is not None)
    assert found.why
    assert not (found.saves and now.unsaved is None)
    assert not (found.saves and found.loses)


@given(situations)
def test_whatever_is_known_an_update_is_left_unsaved_only_for_a_reason(now: Situation) -> None:
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
def test_more_time_never_ends_in_a_save_less(now: Situation, more_s: float) -> None:
    if now.left_s is not None and choose(now).saves:
        assert choose(dataclasses.replace(now, left_s=now.left_s + more_s)).saves


def test_time_limit_leaves_room_for_two_saves() -> None:
    assert leave_early_s(None, None, 1000.0) == leave_early_s(None, 5.0, 1000.0) == UNKNOWN_S
    assert leave_early_s(10.0, 3.0, 1000.0) == pytest.approx(ENDING_S + 2 * MARGIN * 10.0 + 2 * 3.0)
    assert leave_early_s(0.0, None, 1000.0) == ENDING_S  # later than what is taken without knowing


@pytest.mark.parametrize(
    ("save_s", "limit_s"), [(100.0, 200.0), (1e6, 200.0), (0.0, 8.0), (None, 59.0), (None, 31.0), (None, 0.5)]
)
def test_a_time_limit_leaves_half_of_it_to_train_in_whatever_is_known(save_s: float | None, limit_s: float) -> None:
    assert leave_early_s(save_s, 1.0, limit_s) == limit_s / 2
