"""The processes of a run, read from its events: whole ones, and those of which some are missing, late or damaged."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.run.goodput import RunStatistics, attempts_of, goodput
from jaxckpt_train.run.history import run_events
from tests.support.history_events import at, attempts, stretches
from tests.support.runs import START

LIFE = (
    at(10, "start", host="a", pid=7),
    at(12, "restore", step=100, restore_s=1.5),
    at(13, "resumed", step=100, resume_s=3.0, process_age_s=9.0),
    at(30, "save", step=120, ok=True, blocked_s=0.25),
    at(35, "save", step=140, ok=False, blocked_s=0.5),
    at(50, "progress", step=155),
    at(60, "save", step=160, ok=True, blocked_s=0.25),
    at(61, "delete", name="step-0000000120"),
    at(65, "end", how="finished", step=163),
)


def test_a_process_is_read_from_its_events() -> None:
    (found,) = attempts(*LIFE)
    assert (found.began, found.ended) == (START + datetime.timedelta(seconds=4), START + datetime.timedelta(seconds=65))
    assert (found.how, stretches(found), found.wall_s) == ("finished", [(100, 163)], 61.0)
    assert (found.saves, found.failed_saves, found.blocked_s, found.to_resume_s) == (2, 1, 1.0, 9.0)
    assert found.safe_step == 160
    assert not found.has_lost_work


@pytest.mark.parametrize(
    ("last", "how", "has_lost"),
    [
        ((), "killed", True),
        ((at(65, "end", how="finished"),), "finished", False),
        ((at(65, "end", how="closed"),), "closed", False),
        ((at(65, "end"),), "closed", False),
        ((at(65, "end", how="KeyError"),), "KeyError", True),
        ((at(64, "preempted", step=160), at(65, "end", how="preempted")), "preempted", False),
        ((at(64, "preempted", step=160), at(65, "end", how="closed")), "preempted", False),  # by its own loop
        ((at(64, "preempted", step=160),), "preempted", False),
        ((at(64, "preempted", step=160), at(65, "end", how="late")), "late", True),
        ((at(65, "end", how="late"),), "late", True),
    ],
)
def test_how_it_ended_tells_whether_work_was_lost(last: tuple[Any, ...], how: str, has_lost: bool) -> None:
    (found,) = attempts(*LIFE[:-1], *last)
    assert (found.how, found.has_lost_work) == (how, has_lost)
    assert RunStatistics.of([*LIFE[:-1], *last]).failures.count == has_lost


def test_the_last_one_may_be_at_work() -> None:
    later = START + datetime.timedelta(seconds=100)
    events = (*LIFE, at(70, "start"), at(71, "resumed", step=160, resume_s=1.0))
    assert [each.how for each in attempts(*events)] == ["finished", "killed"]
    assert [each.how for each in attempts(*events, is_live=True)] == ["finished", "running"]
    first, last = attempts(*events, running=(171, later))
    assert (last.how, stretches(last), last.ended) == ("running", [(160, 171)], later)
    _, unready = attempts(*LIFE, at(70, "start"), running=(None, later))
    assert (unready.how, stretches(unready)) == ("running", [])
    assert attempts(*LIFE, running=(171, later))[0].ended == first.ended  # it has noted its end


def test_one_that_ended_before_it_had_its_state_has_done_nothing() -> None:
    events = (*LIFE, at(70, "start"), at(71, "end", how="MismatchError"), at(80, "start"), at(81, "end", how="closed"))
    _, failed, pinned = attempts(*events)
    assert (stretches(failed), failed.how, failed.has_lost_work) == ([], "MismatchError", False)
    assert (stretches(pinned), pinned.safe_step) == ([], 160)


def test_a_process_that_goes_back_tells_how_far_it_had_come() -> None:
    (found,) = attempts(*LIFE[:-1], at(62, "restore", step=120, completed=171), at(63, "resumed", step=120))
    assert stretches(found) == [(100, 171), (120, 120)]


def test_a_process_may_go_back() -> None:
    (found,) = attempts(*LIFE[:-1], at(62, "restore", step=120), at(63, "save", step=130, ok=True), at(65, "end"))
    assert stretches(found) == [(100, 160), (120, 130)]
    assert found.to_resume_s == 9.0
    (twice,) = attempts(*LIFE[:-1], at(62, "resumed", step=120, resume_s=50.0), at(64, "progress", step=125))
    assert (stretches(twice), twice.to_resume_s) == ([(100, 160), (120, 125)], 9.0)


def test_a_step_that_is_overwritten_leaves_those_after_it_behind() -> None:
    (found,) = attempts(*LIFE[:-1], at(62, "save", step=120, ok=True))
    assert stretches(found) == [(100, 160), (120, 120)]
    (below,) = attempts(*LIFE[:3], at(62, "save", step=50, ok=True))
    assert stretches(below) == [(100, 100), (50, 50)]


def test_late_save_does_not_move_time_back() -> None:
    (found,) = attempts(*LIFE[:-2], at(62, "progress", step=170), at(63, "save", step=165, ok=True))
    assert stretches(found) == [(100, 170)]
    assert found.safe_step == 165


def test_a_manager_that_restored_before_it_took_the_directory_goes_on_from_there() -> None:
    *_, found = attempts(*LIFE, at(70, "start", step=120), at(75, "save", step=130, ok=True))
    assert stretches(found) == [(120, 130)]


def test_unknown_resume_point_is_last_commit() -> None:
    *_, found = attempts(*LIFE, at(70, "start"), at(75, "save", step=170, ok=True))
    assert stretches(found) == [(160, 170)]
    *_, back = attempts(*LIFE, at(70, "start"), at(75, "save", step=130, ok=True))
    assert stretches(back) == [(130, 130)]
    (fresh,) = attempts(at(70, "start"), at(75, "save", step=170, ok=True))
    assert stretches(fresh) == [(0, 170)]


def test_a_clock_that_was_set_back_makes_no_time_negative() -> None:
    (found,) = attempts(at(100, "start"), at(50, "resumed", step=5, resume_s=2.0), at(60, "end", how="finished"))
    assert (found.wall_s, found.to_resume_s) == (52.0, 2.0)  # the latest time in the events, and the earliest
    assert found.ended == START + datetime.timedelta(seconds=100)


def test_events_without_start_count_saves_only() -> None:
    old = (
        at(1, "save", step=5, ok=True, save_s=3.0, decide_s=0.25, wait_s=0.75),
        at(2, "preempted", step=5, reason="signal SIGTERM"),
        at(3, "restore", step=5),
        at(4, "save", step=9, ok=False, save_s=90.0),
    )
    assert attempts(*old) == []
    past = RunStatistics.of(old)
    assert (past.failures.count, past.failures.observed_s, past.cost_s, past.duration_s) == (0, 0.0, None, 2.0)
    assert [stretches(each) for each in attempts(*old, *LIFE)] == [[(100, 163)]]


def test_the_past_tells_how_often_it_failed_and_what_the_last_saves_took() -> None:
    events = [*LIFE[:-1], at(100, "start"), at(101, "resumed", step=160)]
    events += [at(110 + n, "save", step=170 + n, ok=True, save_s=10.0 - n, cost_s=float(n)) for n in range(8)]
    past = RunStatistics.of([*events, at(130, "end", how="OSError"), at(140, "start"), at(150, "end", how="closed")])
    assert (past.failures.count, past.failures.observed_s) == (
        2,
        (60.0 - 4) + 30.0,
    )  # a process that did nothing is none of it
    assert (past.cost_s, past.duration_s) == (7.0, 8.0)  # of six saves
    assert RunStatistics.of([]) == RunStatistics()


HOSTILE: list[Any] = [
    None, True, -1, 2**70, 1.5, -0.5, 1e308, "", "x", "2026-03-01T00:00:00", "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59+00:00", [], {}, [[[]]], float("inf"), float("nan"),
]  # fmt: skip
FIELDS = ["event", "time", "step", "ok", "how", "blocked_s", "save_s", "wait_s", "resume_s", "process_age_s", "cost_s"]


@pytest.mark.parametrize("field", FIELDS)
def test_field_that_is_anything_spoils_no_other_event(field: str) -> None:
    for number, value in itertools.product(range(len(LIFE)), HOSTILE):
        events = [*LIFE[:number], {**LIFE[number], field: value}, *LIFE[number + 1 :]]
        RunStatistics.of(events)
        found = goodput(attempts_of(run_events(events)))
        if number:  # else there is no start
            assert len(found.attempts) == 1
            assert found.saves in ((1, 2, 3) if field == "ok" else (1, 2))
            assert found.share <= 1.0
            assert found.useful_steps <= 163


ANYTHING = st.dictionaries(
    st.sampled_from(FIELDS),
    st.sampled_from([*HOSTILE, "start", "save", "restore", "resumed", "progress", "end", "preempted"])
    | st.integers(0, 50)
    | st.floats(0, 100)
    | st.datetimes(timezones=st.just(datetime.UTC)).map(datetime.datetime.isoformat),
)


@given(st.lists(ANYTHING | st.sampled_from(LIFE), max_size=30))
def test_whatever_a_history_holds_it_can_be_read(events: list[dict[str, Any]]) -> None:
    RunStatistics.of(events)
    found = goodput(attempts_of(run_events(events)))
    assert 0.0 <= found.share <= 1.0
    assert all(each.useful_steps >= 0 and each.redone_steps >= 0 for each in found.attempts)


def test_resume_time_is_part_of_process_time() -> None:
    """The second loop of a process has waited a minute for the directory, which it took only then."""
    (found,) = attempts(at(62, "start"), at(64, "resumed", step=5, resume_s=64.0), at(164, "end", how="finished"))
    assert (found.wall_s, found.to_resume_s) == (164.0, 64.0)
