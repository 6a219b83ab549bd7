"""The attempts of a run, read from its events, some of which may be missing, late or damaged."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.run.goodput import RunStatistics, attempts_of, goodput
from tests.support.history_events import at, attempts, run_events, stretches
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
        (
            (at(64, "preempted", step=160), at(65, "end", how="closed")),
            "preempted",
            False,
        ),  # the loop of the user ended the process
        ((at(64, "preempted", step=160),), "preempted", False),
        ((at(64, "preempted", step=160), at(65, "end", how="late")), "late", True),
        ((at(65, "end", how="late"),), "late", True),
    ],
)
def test_kind_of_end_shows_lost_work(last: tuple[Any, ...], how: str, has_lost: bool) -> None:
    (found,) = attempts(*LIFE[:-1], *last)
    assert (found.how, found.has_lost_work) == (how, has_lost)
    assert RunStatistics.of(run_events([*LIFE[:-1], *last])).failures.count == has_lost


def test_last_attempt_may_be_running() -> None:
    later = START + datetime.timedelta(seconds=100)
    events = (*LIFE, at(70, "start"), at(71, "resumed", step=160, resume_s=1.0))
    assert [each.how for each in attempts(*events)] == ["finished", "killed"]
    assert [each.how for each in attempts(*events, is_live=True)] == ["finished", "running"]
    first, last = attempts(*events, running=(171, later))
    assert (last.how, stretches(last), last.ended) == ("running", [(160, 171)], later)
    _, unready = attempts(*LIFE, at(70, "start"), running=(None, later))
    assert (unready.how, stretches(unready)) == ("running", [])
    assert attempts(*LIFE, running=(171, later))[0].ended == first.ended  # its end is recorded


def test_attempt_without_state_has_no_stretches() -> None:
    events = (*LIFE, at(70, "start"), at(71, "end", how="MismatchError"), at(80, "start"), at(81, "end", how="closed"))
    _, failed, pinned = attempts(*events)
    assert (stretches(failed), failed.how, failed.has_lost_work) == ([], "MismatchError", False)
    assert (stretches(pinned), pinned.safe_step) == ([], 160)


def test_roll_back_records_step_reached_before() -> None:
    (found,) = attempts(*LIFE[:-1], at(62, "restore", step=120, completed=171), at(63, "resumed", step=120))
    assert stretches(found) == [(100, 171), (120, 120)]


def test_roll_back_starts_new_stretch() -> None:
    (found,) = attempts(*LIFE[:-1], at(62, "restore", step=120), at(63, "save", step=130, ok=True), at(65, "end"))
    assert stretches(found) == [(100, 160), (120, 130)]
    assert found.to_resume_s == 9.0
    (twice,) = attempts(*LIFE[:-1], at(62, "resumed", step=120, resume_s=50.0), at(64, "progress", step=125))
    assert (stretches(twice), twice.to_resume_s) == ([(100, 160), (120, 125)], 9.0)


def test_overwritten_step_starts_new_stretch() -> None:
    (found,) = attempts(*LIFE[:-1], at(62, "save", step=120, ok=True))
    assert stretches(found) == [(100, 160), (120, 120)]
    (below,) = attempts(*LIFE[:3], at(62, "save", step=50, ok=True))
    assert stretches(below) == [(100, 100), (50, 50)]


def test_late_save_does_not_move_time_back() -> None:
    (found,) = attempts(*LIFE[:-2], at(62, "progress", step=170), at(63, "save", step=165, ok=True))
    assert stretches(found) == [(100, 170)]
    assert found.safe_step == 165


def test_start_event_step_begins_the_stretch() -> None:
    *_, found = attempts(*LIFE, at(70, "start", step=120), at(75, "save", step=130, ok=True))
    assert stretches(found) == [(120, 130)]


def test_unknown_resume_point_is_last_commit() -> None:
    *_, found = attempts(*LIFE, at(70, "start"), at(75, "save", step=170, ok=True))
    assert stretches(found) == [(160, 170)]
    *_, back = attempts(*LIFE, at(70, "start"), at(75, "save", step=130, ok=True))
    assert stretches(back) == [(130, 130)]
    (fresh,) = attempts(at(70, "start"), at(75, "save", step=170, ok=True))
    assert stretches(fresh) == [(0, 170)]


def test_clock_set_back_makes_no_time_negative() -> None:
    (found,) = attempts(at(100, "start"), at(50, "resumed", step=5, resume_s=2.0), at(60, "end", how="finished"))
    assert (found.wall_s, found.to_resume_s) == (52.0, 2.0)  # from the earliest to the latest time of the events
    assert found.ended == START + datetime.timedelta(seconds=100)


def test_events_without_start_count_saves_only() -> None:
    old = (
        at(1, "save", step=5, ok=True, save_s=3.0, decide_s=0.25, wait_s=0.75),
        at(2, "preempted", step=5, reason="signal SIGTERM"),
        at(3, "restore", step=5),
        at(4, "save", step=9, ok=False, save_s=90.0),
    )
    assert attempts(*old) == []
    found = RunStatistics.of(run_events(old))
    assert (found.failures.count, found.failures.observed_s, found.cost_s, found.duration_s) == (0, 0.0, None, 2.0)
    assert [stretches(each) for each in attempts(*old, *LIFE)] == [[(100, 163)]]


def test_statistics_count_failures_and_recent_saves() -> None:
    events = [*LIFE[:-1], at(100, "start"), at(101, "resumed", step=160)]
    events += [at(110 + n, "save", step=170 + n, ok=True, save_s=10.0 - n, cost_s=float(n)) for n in range(8)]
    events += [at(130, "end", how="OSError"), at(140, "start"), at(150, "end", how="closed")]
    found = RunStatistics.of(run_events(events))
    observed_s = (60.0 - 4) + 30.0  # an attempt without a state does not count
    assert (found.failures.count, found.failures.observed_s) == (2, observed_s)
    assert (found.cost_s, found.duration_s) == (7.0, 8.0)  # of the last six saves
    assert RunStatistics.of([]) == RunStatistics()


HOSTILE: list[Any] = [
    None, True, -1, 2**70, 1.5, -0.5, 1e308, "", "x", "2026-03-01T00:00:00", "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59+00:00", [], {}, [[[]]], float("inf"), float("nan"),
]  # fmt: skip
FIELDS = ["event", "time", "step", "ok", "how", "blocked_s", "save_s", "wait_s", "resume_s", "process_age_s", "cost_s"]


@pytest.mark.parametrize("field", FIELDS)
def test_invalid_field_spoils_no_other_event(field: str) -> None:
    for number, value in itertools.product(range(len(LIFE)), HOSTILE):
        events = [*LIFE[:number], {**LIFE[number], field: value}, *LIFE[number + 1 :]]
        RunStatistics.of(run_events(events))
        found = goodput(attempts_of(run_events(events)))
        if number:  # otherwise the start event may be invalid
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
def test_arbitrary_events_can_be_read(events: list[dict[str, Any]]) -> None:
    RunStatistics.of(run_events(events))
    found = goodput(attempts_of(run_events(events)))
    assert 0.0 <= found.share <= 1.0
    assert all(each.useful_steps >= 0 and each.redone_steps >= 0 for each in found.attempts)


def test_resume_time_is_part_of_process_time() -> None:
    """The second loop of a process waits a minute for the directory before its start is recorded."""
    (found,) = attempts(at(62, "start"), at(64, "resumed", step=5, resume_s=64.0), at(164, "end", how="finished"))
    assert (found.wall_s, found.to_resume_s) == (164.0, 64.0)
