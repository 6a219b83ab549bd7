"""Goodput: of all updates of a run, those that what it has now descends from; against a run that knows them all."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.run.goodput import Goodput, goodput
from tests.support.history_events import at, attempts


def counts(*events: dict[str, Any]) -> list[tuple[int, int]]:
    """Of each process, how many updates are useful, and how many were lost."""
    return [(each.useful_steps, each.redone_steps) for each in goodput(attempts(*events)).attempts]


def life(second: float, first: int, saved: int | None, last: int, how: str | None = "finished") -> list[dict[str, Any]]:
    """A process of ten seconds, half of which it trains; `how` None: it was killed."""
    events = [at(second, "start"), at(second + 4, "resumed", step=first, resume_s=3.0, process_age_s=5.0)]
    if saved is not None:
        events.append(at(second + 6, "save", step=saved, ok=True, blocked_s=1.0))
    return [*events, at(second + 9, "progress" if how is None else "end", step=last, how=how)]


def test_a_run_without_processes_has_none() -> None:
    assert goodput([]) == Goodput()
    assert Goodput().share == 0.0


def test_what_a_kill_cost_is_redone() -> None:
    events = [*life(0, 0, 10, 15, None), *life(20, 10, 30, 30)]
    assert counts(*events) == [(10, 5), (20, 0)]
    found = goodput(attempts(*events))
    assert (found.useful_steps, found.redone_steps, found.saves, found.blocked_s) == (30, 5, 2, 2.0)
    assert (found.to_resume_s, found.wall_s, found.between_s) == (10.0, 30.0, 10.0)
    first, second = found.attempts
    assert (first.useful_s, second.useful_s) == ((10.0 - 5 - 1) * 10 / 15, 4.0)
    assert found.useful_s == first.useful_s + second.useful_s
    assert found.share == found.useful_s / 30.0
    assert (first.how, first.first_step, first.last_step, second.how) == ("killed", 0, 15, "finished")


def test_one_that_was_killed_may_have_come_further_than_was_heard_of_it() -> None:
    assert counts(*life(0, 0, 10, 15, None), *life(20, 17, None, 20)) == [(17, 0), (3, 0)]
    (first, _) = goodput(attempts(*life(0, 0, 10, 15, None), *life(20, 17, None, 20))).attempts
    assert first.last_step == 17


def test_processes_without_a_state_change_nothing() -> None:
    died = [at(15, "start"), at(16, "end", how="MismatchError")]
    pinned = [at(17, "start"), at(18, "end", how="closed")]
    events = [*life(0, 0, 10, 15, None), *died, *pinned, *life(20, 10, 30, 30)]
    assert counts(*events) == [(10, 5), (0, 0), (20, 0)]
    assert counts(*life(0, 0, 10, 10), *pinned) == [(10, 0)]  # also as the last one
    assert goodput(attempts(*life(0, 0, 10, 10), *pinned)).wall_s == goodput(attempts(*life(0, 0, 10, 10))).wall_s
    _, unready, *_ = goodput(attempts(*events)).attempts
    assert (unready.first_step, unready.last_step, unready.useful_s) == (None, None, 0.0)


@pytest.mark.parametrize("ending", [[at(18, "end", how="closed")], []])
def test_a_command_is_no_process_of_the_training_however_it_ends(ending: list[dict[str, Any]]) -> None:
    events = [*life(0, 0, 10, 15, None), at(17, "start", tends=True), at(17, "delete", name="step-0000000010"), *ending]
    assert counts(*events) == [(15, 0)]
    assert counts(*events, *life(20, 10, 30, 30)) == [(10, 5), (20, 0)]
    assert [each.how for each in goodput(attempts(*events, is_live=not ending)).attempts] == ["killed"]


def test_several_that_were_killed_before_they_saved_are_all_redone() -> None:
    events = [*life(0, 0, 10, 15, None), *life(20, 10, None, 14, None), *life(40, 10, None, 12, None)]
    assert counts(*events, *life(60, 10, 20, 20)) == [(10, 5), (0, 4), (0, 2), (10, 0)]


def test_a_fresh_start_over_loses_all_before() -> None:
    assert counts(*life(0, 0, None, 15, None), *life(20, 0, 5, 5)) == [(0, 15), (5, 0)]


def test_roll_back_loses_later_steps() -> None:
    events = [*life(0, 0, 50, 100), *life(20, 100, 200, 200), *life(40, 50, 70, 70)]
    assert counts(*events) == [(50, 50), (0, 100), (20, 0)]
    again = [*events, *life(60, 70, 80, 85, None)]
    assert counts(*again) == [(50, 50), (0, 100), (20, 0), (15, 0)]


def test_to_come_back_to_what_was_left_behind_makes_that_count_again() -> None:
    events = [*life(0, 0, 100, 100), *life(20, 50, 60, 60), *life(40, 100, 120, 120)]
    assert counts(*events) == [(100, 0), (0, 10), (20, 0)]


def test_a_step_that_was_saved_on_two_branches_counts_on_the_later_one() -> None:
    events = [*life(0, 0, 60, 60), *life(20, 50, 60, 60), *life(40, 60, 70, 70)]
    assert counts(*events) == [(50, 10), (10, 0), (10, 0)]


def test_unrecorded_resume_point_counts_where_reached() -> None:
    back = [at(25, "restore", step=6), at(26, "progress", step=8)]
    events = [*life(0, 0, 6, 6, None), at(20, "start"), at(21, "resumed", step=7), *back, *life(40, 7, None, 9)]
    assert counts(*events) == [(7, 0), (0, 2), (2, 0)]


def test_a_roll_back_within_one_process() -> None:
    events = [*life(0, 0, 50, 100, None), at(10, "restore", step=50), at(12, "save", step=60, ok=True)]
    assert counts(*events) == [(60, 50)]
    assert goodput(attempts(*events)).attempts[0].last_step == 60


def test_clocks_that_disagree_make_no_share_above_one() -> None:
    early = [at(0, "start"), at(0, "resumed", step=0, resume_s=0.0), at(100, "end", step=10, how="finished")]
    late = [at(1, "start"), at(1, "resumed", step=10, resume_s=0.0), at(99, "end", step=20, how="finished")]
    found = goodput(attempts(*early, *late))
    assert (found.share, found.between_s, found.wall_s) == (1.0, 0.0, 100.0)


def test_a_history_of_many_crashes_is_read_in_no_time() -> None:
    events = life(0, 0, 10, 10)
    for number in range(20_000):
        events += life(20 + number * 20, 10, None, 11, None)
    found = goodput(attempts(*events))
    assert (found.useful_steps, found.redone_steps) == (11, 19_999)


Update = tuple[int, int]  # which process did it, and a number of its own
Path = tuple[Update, ...]  # the updates that a state has had


class Model:
    """A run that knows of each update who did it, and tells its history as a real one does."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.stands: Path = ()
        self.done: set[Update] = set()  # as far as they were heard of
        self._committed: dict[int, Path] = {}  # of each step what was saved last
        self._latest: Path = ()
        self._processes = self._updates = 0
        self._forget()

    def _forget(self) -> None:
        self._now: Path | None = None
        self._pending: Path | None = None
        self._saved = 0
        self._is_alive = False

    def _tell(self, event: str, **fields: Any) -> None:
        self.events.append(at(len(self.events), event, **fields))

    def _hear(self, path: Path) -> None:
        if len(path) > len(self.stands):
            self._take_up(path)

    def _take_up(self, path: Path) -> None:
        self.stands = path
        self.done |= {*path}

    def start(self) -> None:
        self._forget()
        self._is_alive = True
        self._processes += 1
        self._tell("start")

    def resume(self) -> None:
        if self._is_alive and self._now is None:
            if self._latest:
                self._tell("restore", step=len(self._latest))
            self._go_on_from(self._latest)
            self._tell("resumed", step=len(self._latest), resume_s=0.0)

    def _go_on_from(self, path: Path) -> None:
        self._now, self._saved = path, len(path)
        self._take_up(path)

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
            self._tell("save", step=len(path), ok=ok)
            self._hear(path)
            if ok:
                self._commit(path)

    def _commit(self, path: Path) -> None:
        self._committed[len(path)] = self._latest = path
        self._saved = len(path)

    def fail(self) -> None:
        self.commit(ok=False)

    def progress(self) -> None:
        if self._now is not None:
            self._tell("progress", step=len(self._now))
            self._hear(self._now)

    def roll_back(self) -> None:
        self.commit()
        if self._now is not None and self._committed:
            path = self._committed[sorted(self._committed)[self._updates % len(self._committed)]]
            self._tell("restore", step=len(path))
            self._go_on_from(path)

    def end(self) -> None:
        if self._is_alive:
            self.commit()
            self._tell("end", step=None if self._now is None else len(self._now), how="finished")
            self._hear(self._now or ())
            self._forget()

    def kill(self) -> None:
        """Perhaps when a save was committed, and its note was not written."""
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
    assert found.useful_steps == len(run.stands)  # where it stands now: all began from scratch
    assert found.useful_steps + found.redone_steps == len(run.done)
    useful = collections.Counter(process for process, _ in run.stands)
    all_done = collections.Counter(process for process, _ in run.done)
    for number, each in enumerate(found.attempts, 1):
        assert (each.useful_steps, each.useful_steps + each.redone_steps) == (useful[number], all_done[number])
