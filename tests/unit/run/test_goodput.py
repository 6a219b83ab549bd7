"""Goodput: the updates that the current state descends from, compared with a model that knows every update."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.run.goodput import Goodput, goodput
from tests.support.history_events import at, attempts


def counts(*events: dict[str, Any]) -> list[tuple[int, int]]:
    """For each attempt, the numbers of useful and of redone updates."""
    return [(each.useful_steps, each.redone_steps) for each in goodput(attempts(*events)).attempts]


def attempt(
    second: float, first: int, saved: int | None, last: int, how: str | None = "finished"
) -> list[dict[str, Any]]:
    """The events of an attempt of ten seconds, half of them training; with `how` None it was killed."""
    events = [at(second, "start"), at(second + 4, "resumed", step=first, resume_s=3.0, process_age_s=5.0)]
    if saved is not None:
        events.append(at(second + 6, "save", step=saved, ok=True, blocked_s=1.0))
    return [*events, at(second + 9, "progress" if how is None else "end", step=last, how=how)]


def test_no_attempts_mean_no_goodput() -> None:
    assert goodput([]) == Goodput()
    assert Goodput().share == 0.0


def test_unsaved_updates_of_kill_are_redone() -> None:
    events = [*attempt(0, 0, 10, 15, None), *attempt(20, 10, 30, 30)]
    assert counts(*events) == [(10, 5), (20, 0)]
    found = goodput(attempts(*events))
    assert (found.useful_steps, found.redone_steps, found.saves, found.blocked_s) == (30, 5, 2, 2.0)
    assert (found.to_resume_s, found.wall_s, found.between_s) == (10.0, 30.0, 10.0)
    first, second = found.attempts
    assert (first.useful_s, second.useful_s) == ((10.0 - 5 - 1) * 10 / 15, 4.0)
    assert found.useful_s == first.useful_s + second.useful_s
    assert found.share == found.useful_s / 30.0
    assert (first.how, first.first_step, first.last_step, second.how) == ("killed", 0, 15, "finished")


def test_resume_point_extends_killed_attempt() -> None:
    assert counts(*attempt(0, 0, 10, 15, None), *attempt(20, 17, None, 20)) == [(17, 0), (3, 0)]
    (first, _) = goodput(attempts(*attempt(0, 0, 10, 15, None), *attempt(20, 17, None, 20))).attempts
    assert first.last_step == 17


def test_processes_without_a_state_change_nothing() -> None:
    died = [at(15, "start"), at(16, "end", how="MismatchError")]
    pinned = [at(17, "start"), at(18, "end", how="closed")]
    events = [*attempt(0, 0, 10, 15, None), *died, *pinned, *attempt(20, 10, 30, 30)]
    assert counts(*events) == [(10, 5), (0, 0), (20, 0)]
    assert counts(*attempt(0, 0, 10, 10), *pinned) == [(10, 0)]  # also as the last attempt
    assert goodput(attempts(*attempt(0, 0, 10, 10), *pinned)).wall_s == goodput(attempts(*attempt(0, 0, 10, 10))).wall_s
    _, unready, *_ = goodput(attempts(*events)).attempts
    assert (unready.first_step, unready.last_step, unready.useful_s) == (None, None, 0.0)


@pytest.mark.parametrize("ending", [[at(18, "end", how="closed")], []])
def test_maintenance_command_is_no_attempt(ending: list[dict[str, Any]]) -> None:
    events = [
        *attempt(0, 0, 10, 15, None),
        at(17, "start", tends=True),
        at(17, "delete", name="step-0000000010"),
        *ending,
    ]
    assert counts(*events) == [(15, 0)]
    assert counts(*events, *attempt(20, 10, 30, 30)) == [(10, 5), (20, 0)]
    assert [each.how for each in goodput(attempts(*events, is_live=not ending)).attempts] == ["killed"]


def test_attempts_killed_before_saving_are_redone() -> None:
    events = [*attempt(0, 0, 10, 15, None), *attempt(20, 10, None, 14, None), *attempt(40, 10, None, 12, None)]
    assert counts(*events, *attempt(60, 10, 20, 20)) == [(10, 5), (0, 4), (0, 2), (10, 0)]


def test_a_fresh_start_over_loses_all_before() -> None:
    assert counts(*attempt(0, 0, None, 15, None), *attempt(20, 0, 5, 5)) == [(0, 15), (5, 0)]


def test_roll_back_loses_later_steps() -> None:
    events = [*attempt(0, 0, 50, 100), *attempt(20, 100, 200, 200), *attempt(40, 50, 70, 70)]
    assert counts(*events) == [(50, 50), (0, 100), (20, 0)]
    again = [*events, *attempt(60, 70, 80, 85, None)]
    assert counts(*again) == [(50, 50), (0, 100), (20, 0), (15, 0)]


def test_returning_to_branch_makes_it_useful() -> None:
    events = [*attempt(0, 0, 100, 100), *attempt(20, 50, 60, 60), *attempt(40, 100, 120, 120)]
    assert counts(*events) == [(100, 0), (0, 10), (20, 0)]


def test_step_of_two_branches_counts_on_later() -> None:
    events = [*attempt(0, 0, 60, 60), *attempt(20, 50, 60, 60), *attempt(40, 60, 70, 70)]
    assert counts(*events) == [(50, 10), (10, 0), (10, 0)]


def test_unrecorded_resume_point_counts_where_reached() -> None:
    back = [at(25, "restore", step=6), at(26, "progress", step=8)]
    events = [*attempt(0, 0, 6, 6, None), at(20, "start"), at(21, "resumed", step=7), *back, *attempt(40, 7, None, 9)]
    assert counts(*events) == [(7, 0), (0, 2), (2, 0)]


def test_a_roll_back_within_one_process() -> None:
    events = [*attempt(0, 0, 50, 100, None), at(10, "restore", step=50), at(12, "save", step=60, ok=True)]
    assert counts(*events) == [(60, 50)]
    assert goodput(attempts(*events)).attempts[0].last_step == 60


def test_disagreeing_clocks_keep_share_below_one() -> None:
    early = [at(0, "start"), at(0, "resumed", step=0, resume_s=0.0), at(100, "end", step=10, how="finished")]
    late = [at(1, "start"), at(1, "resumed", step=10, resume_s=0.0), at(99, "end", step=20, how="finished")]
    found = goodput(attempts(*early, *late))
    assert (found.share, found.between_s, found.wall_s) == (1.0, 0.0, 100.0)


def test_history_of_many_crashes_is_read_quickly() -> None:
    events = attempt(0, 0, 10, 10)
    for number in range(20_000):
        events += attempt(20 + number * 20, 10, None, 11, None)
    found = goodput(attempts(*events))
    assert (found.useful_steps, found.redone_steps) == (11, 19_999)


Update = tuple[int, int]  # which process did it, and a number of its own
Path = tuple[Update, ...]  # the updates that led to a state


class Model:
    """A run that knows which process did each update, and records events as a real run does."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.current: Path = ()
        self.done: set[Update] = set()  # as far as the events show
        self._committed: dict[int, Path] = {}  # the last save of each step
        self._latest: Path = ()
        self._processes = self._updates = 0
        self._forget()

    def _forget(self) -> None:
        self._now: Path | None = None
        self._pending: Path | None = None
        self._saved = 0
        self._is_alive = False

    def _record(self, event: str, **fields: Any) -> None:
        self.events.append(at(len(self.events), event, **fields))

    def _observe(self, path: Path) -> None:
        if len(path) > len(self.current):
            self._continue_at(path)

    def _continue_at(self, path: Path) -> None:
        self.current = path
        self.done |= {*path}

    def start(self) -> None:
        self._forget()
        self._is_alive = True
        self._processes += 1
        self._record("start")

    def resume(self) -> None:
        if self._is_alive and self._now is None:
            if self._latest:
                self._record("restore", step=len(self._latest))
            self._restore(self._latest)
            self._record("resumed", step=len(self._latest), resume_s=0.0)

    def _restore(self, path: Path) -> None:
        self._now, self._saved = path, len(path)
        self._continue_at(path)

    def update(self) -> None:
        if self._now is not None:
            self._updates += 1
            self._now += ((self._processes, self._updates),)

    def begin_save(self) -> None:
        if self._now is not None and self._pending is None and len(self._now) > self._saved:
            self._pending = self._now

    def commit(self, ok: bool = True) -> None:
        if self._pending is not None:
            path, self._pending = self._pending, None
            self._record("save", step=len(path), ok=ok)
            self._observe(path)
            if ok:
                self._commit(path)

    def _commit(self, path: Path) -> None:
        self._committed[len(path)] = self._latest = path
        self._saved = len(path)

    def fail(self) -> None:
        self.commit(ok=False)

    def progress(self) -> None:
        if self._now is not None:
            self._record("progress", step=len(self._now))
            self._observe(self._now)

    def roll_back(self) -> None:
        self.commit()
        if self._now is not None and self._committed:
            path = self._committed[sorted(self._committed)[self._updates % len(self._committed)]]
            self._record("restore", step=len(path))
            self._restore(path)

    def end(self) -> None:
        if self._is_alive:
            self.commit()
            self._record("end", step=None if self._now is None else len(self._now), how="finished")
            self._observe(self._now or ())
            self._forget()

    def kill(self) -> None:
        """Kill the process, sometimes between the commit of a save and its event."""
        if self._pending is not None and len(self._pending) not in self._committed and self._updates % 2:
            self._commit(self._pending)
        self._forget()


ACTIONS = ["update"] * 6 + ["progress", "begin_save", "commit", "fail", "roll_back", "end", "kill", "start", "resume"]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(ACTIONS), min_size=20, max_size=120))
def test_goodput_is_exact_for_any_events(actions: list[str]) -> None:
    run = Model()
    for action in ["start", "resume", *actions]:
        if action == "start":
            run.start()
            run.resume()
        else:
            getattr(run, action)()
    found = goodput(attempts(*run.events))
    assert found.useful_steps == len(run.current)  # the run started from scratch
    assert found.useful_steps + found.redone_steps == len(run.done)
    useful = collections.Counter(process for process, _ in run.current)
    all_done = collections.Counter(process for process, _ in run.done)
    for number, each in enumerate(found.attempts, 1):
        assert (each.useful_steps, each.useful_steps + each.redone_steps) == (useful[number], all_done[number])
