"""The timer of a loop: how long an update takes and what a save costs, whatever else happens in the loop."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.policies.cost_model import HYSTERESIS, WARM_UP_STEPS, LoopTimer


@dataclasses.dataclass
class Loop:
    """A loop in simulated time, which reports its calls to a timer as a callback does."""

    step_s: float = 1.0
    now: float = 1000.0
    step: int = 0

    def __post_init__(self) -> None:
        self.clock = LoopTimer(lambda: self.now)

    def update(self, took_s: float | None = None, *, saving: bool = False, still: bool | None = None) -> None:
        """Run one update and the call after it; `saving`: a save runs during it, `still`: also at its end."""
        self.now += self.step_s if took_s is None else took_s
        self.step += 1
        is_saving = saving if still is None else still
        self.clock.entered(self.step, is_saving)
        self.clock.left(self.step, is_saving)

    def updates(self, count: int) -> None:
        """Run `count` updates without a save."""
        for _ in range(count):
            self.update()

    def save(self, blocked_s: float, meanwhile: list[float]) -> None:
        """Run an update whose call saves, and updates during the save, which ends in the last of them."""
        self.now += self.step_s
        self.step += 1
        self.clock.entered(self.step, False)
        self.clock.left(self.step, False)  # the policy was asked
        self.clock.entered(self.step, False)
        self.now += blocked_s
        self.clock.save_began(self.step)
        self.clock.left(self.step, True)
        for number, took_s in enumerate(meanwhile, 1):
            self.update(took_s, saving=True, still=number < len(meanwhile))


def test_nothing_is_known_before_some_updates() -> None:
    loop = Loop()
    assert (loop.clock.costs().step_s, loop.clock.costs().cost_s) == (None, None)
    loop.updates(WARM_UP_STEPS)
    assert loop.clock.costs().step_s is None


def test_slow_first_updates_do_not_count() -> None:
    loop = Loop()
    loop.update(60.0)  # it compiles
    loop.update(3.0)
    loop.updates(50)
    assert loop.clock.costs().step_s == pytest.approx(1.0)


def test_update_time_is_mean_between_waits() -> None:
    loop = Loop()
    for number in range(200):
        loop.update(8.2 if number % 8 == 7 else 0.1)
    assert loop.clock.costs().step_s == pytest.approx((7 * 0.1 + 8.2) / 8, rel=0.05)


def test_evaluation_is_no_update_time() -> None:
    loop = Loop()
    for number in range(200):
        loop.update(90.0 if number % 50 == 49 else 1.0)
    assert loop.clock.costs().step_s == pytest.approx(1.0)


def test_save_costs_blocking_and_slower_updates() -> None:
    loop = Loop()
    loop.updates(20)
    loop.save(0.5, [1.3, 1.3, 1.3, 1.1])
    costs = loop.clock.costs()
    assert costs.cost_s == pytest.approx(0.5 + 0.3 * 3 + 0.1)
    assert costs.blocked_s == pytest.approx(0.5)
    assert costs.spent_s == pytest.approx(1.5)
    assert costs.trained_s == pytest.approx(loop.now - 1000.0 - WARM_UP_STEPS - 1.0 - 1.5)


def test_update_after_short_save_counts_as_cost() -> None:
    """With views on CPU, an update copies memory that the snapshot shares, even if the save has ended by then."""
    loop = Loop()
    loop.updates(20)
    loop.save(0.1, [1.4])
    assert loop.clock.costs().cost_s == pytest.approx(0.5)
    loop.updates(100)
    assert loop.clock.costs().step_s == pytest.approx(1.0)


def test_cost_is_unknown_until_updates_complete() -> None:
    loop = Loop()
    loop.updates(20)
    loop.clock.entered(21, False)
    loop.clock.save_began(21)
    loop.clock.left(21, True)
    assert loop.clock.costs().is_measuring
    loop.step = 21
    loop.update(saving=True, still=True)
    assert (loop.clock.costs().is_measuring, loop.clock.costs().cost_s) == (True, None)
    loop.update(saving=False)
    assert not loop.clock.costs().is_measuring
    assert loop.clock.costs().cost_s is not None


def test_reported_estimate_changes_by_a_tenth() -> None:
    loop = Loop()
    loop.updates(20)
    loop.save(1.0, [1.0])
    first = loop.clock.costs().cost_s
    assert first == pytest.approx(1.0)
    for _ in range(8):
        loop.updates(20)
        loop.save(1.0 + HYSTERESIS * 0.9, [1.0])
    assert loop.clock.costs().cost_s == first
    for _ in range(8):
        loop.updates(20)
        loop.save(1.5, [1.0])
    assert loop.clock.costs().cost_s == pytest.approx(1.5, rel=HYSTERESIS)


def test_evaluation_during_save_is_no_cost() -> None:
    loop = Loop()
    for number in range(12):
        loop.updates(20)
        loop.save(1.0, [600.0 if number == 8 else 1.0])
    costs = loop.clock.costs()
    assert costs.cost_s == pytest.approx(1.0, rel=0.2)
    assert costs.spent_s < 12 + 4


def test_work_between_calls_is_no_save_cost() -> None:
    loop = Loop()
    loop.updates(20)
    loop.update()  # the policy was asked
    loop.now += 300.0  # an evaluation, after which it saves
    loop.clock.entered(loop.step, False)
    loop.now += 1.0
    loop.clock.save_began(loop.step)
    loop.clock.left(loop.step, True)
    loop.update(1.25, saving=True, still=False)
    costs = loop.clock.costs()
    assert (costs.cost_s, costs.blocked_s) == (pytest.approx(1.25), pytest.approx(1.0))


def test_long_updates_are_known_after_two() -> None:
    loop = Loop(step_s=360.0)
    loop.updates(WARM_UP_STEPS + 3)
    assert loop.clock.costs().step_s == pytest.approx(360.0)


def test_next_save_ends_cost_of_previous_one() -> None:
    loop = Loop()
    loop.updates(20)
    loop.save(0.5, [1.2])
    loop.step += 1
    loop.now += 1.2
    loop.clock.entered(loop.step, True)
    loop.now += 2.0  # it waits for the previous save
    loop.clock.save_began(loop.step)
    loop.clock.left(loop.step, True)
    loop.update(1.2, saving=True, still=False)
    assert loop.clock.costs().spent_s == pytest.approx(0.5 + 0.2 + 0.0 + 2.0 + 0.2, abs=0.3)


def test_roll_back_keeps_measured_update_time() -> None:
    loop = Loop()
    loop.updates(30)
    loop.step = 3
    loop.updates(30)
    assert loop.clock.costs().step_s == pytest.approx(1.0)


def test_calls_every_tenth_update_are_scaled() -> None:
    loop = Loop()
    for number in range(1, 40):
        loop.now += 10.0
        loop.clock.entered(10 * number, False)
        loop.clock.left(10 * number, False)
    assert loop.clock.costs().step_s == pytest.approx(1.0)


def test_duration_is_longest_of_recent_saves() -> None:
    clock = LoopTimer()
    clock.recall(0.7, 9.0)
    assert (clock.costs().cost_s, clock.costs().duration_s) == (0.7, 9.0)
    clock.committed(2.0)
    assert clock.costs().duration_s == 9.0
    for _ in range(6):
        clock.committed(3.0)
    assert clock.costs().duration_s == 3.0


@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 2), st.integers(1, 6)), min_size=4, max_size=12))
def test_all_saves_together_cost_what_the_loop_lost(saves: list[tuple[float, float, int]]) -> None:
    """The total cost is the time of the loop minus the time of its updates alone, whatever a single save costs."""
    loop = Loop()
    loop.updates(20)
    began, first = loop.now, loop.step
    most = max(blocked_s + slower_s * count for blocked_s, slower_s, count in saves)
    for blocked_s, slower_s, count in saves:
        loop.save(blocked_s, [1.0 + slower_s] * count)
        loop.updates(20)
    lost_s = loop.now - began - (loop.step - first)
    # A save that costs many times more than earlier ones is limited, as an evaluation is.
    assert loop.clock.costs().spent_s <= lost_s + 1e-6
    if most <= 4 * min(blocked_s + slower_s * count for blocked_s, slower_s, count in saves):
        assert loop.clock.costs().spent_s == pytest.approx(lost_s, abs=1e-6)


@dataclasses.dataclass
class QueuedLoop:
    """A loop that runs ahead of its device, which takes `step_s` per update; at most `most` updates are queued."""

    step_s: float
    most: int = 32
    reads_every: int = 0  # after how many updates the loop reads a value and so waits for the device
    now: float = 1000.0
    step: int = 0

    def __post_init__(self) -> None:
        self.clock = LoopTimer(lambda: self.now)
        self._ends: list[float] = []
        self._saves_until = self._began = self._queued_s = 0.0
        self._slower = 1.0

    def update(self, saves: tuple[float, float, float, bool] | None = None) -> None:
        """Run one update and its call; `saves`: seconds blocked, in the background, slowdown, drains the queue."""
        self.now += 1e-4
        if len(self._ends) >= self.most:
            self.now = max(self.now, self._ends[-self.most])
        begins = max(self.now, self._ends[-1] if self._ends else 0.0)
        self._ends.append(begins + self.step_s * (self._slower if begins < self._saves_until else 1.0))
        self.step += 1
        if self.reads_every and self.step % self.reads_every == 0:
            self.now = max(self.now, self._ends[-1])
        is_saving = self.now < self._saves_until
        if self._saves_until and not is_saving:
            self.clock.committed(self._saves_until - self._began, self._queued_s)
            self._saves_until = 0.0
        self.clock.entered(self.step, is_saving)
        if saves is not None:
            blocked_s, lasts_s, self._slower, drains = saves
            self._began, self._queued_s = self.now, max(0.0, self._ends[-1] - self.now)
            self.now += blocked_s + (self._queued_s if drains else 0.0)
            self._saves_until = self.now + lasts_s + (0.0 if drains else self._queued_s)
            self.clock.save_began(self.step, self._queued_s if drains else 0.0)
        self.clock.left(self.step, saves is not None or is_saving)


@pytest.mark.parametrize("step_s", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("reads_every", [0, 10])
def test_drained_queue_counts_as_save_cost(step_s: float, reads_every: int) -> None:
    loop = QueuedLoop(step_s, reads_every=reads_every)
    blocked_s, lasts_s, slower = 0.5 * step_s, 10 * step_s, 1.1
    for number in range(1, 2101):  # saves by time come after a read, where the time passes
        loop.update((blocked_s, lasts_s, slower, True) if number % 200 == 0 else None)
    costs = loop.clock.costs()
    lost_s = blocked_s + lasts_s * (slower - 1) / slower
    assert costs.step_s == pytest.approx(step_s, rel=0.05)
    assert costs.cost_s == pytest.approx(lost_s, abs=0.5 * step_s)
    assert costs.blocked_s == pytest.approx(blocked_s, abs=1e-3)
    assert costs.duration_s is not None
    assert costs.usual_s == pytest.approx(lasts_s + blocked_s, rel=0.01)


@pytest.mark.parametrize("drains", [True, False])
def test_first_save_corrects_time_of_queued_updates(drains: bool) -> None:
    loop = QueuedLoop(1.0)
    for _ in range(34):
        loop.update()
    early_s = loop.clock.costs().step_s
    assert early_s is not None
    assert early_s < 0.1
    loop.update((0.1, 5.0, 1.0, drains))
    while loop.clock.costs().is_measuring:
        loop.update()
    costs = loop.clock.costs()
    assert costs.step_s == pytest.approx(1.0, rel=0.1)
    assert costs.cost_s == pytest.approx(0.1, abs=1.5)


def test_queue_draining_saves_measure_time_between_them() -> None:
    loop = QueuedLoop(0.1)
    for number in range(1, 1001):  # the queue does not fill up between these saves
        loop.update((0.05, 0.2, 1.0, True) if number % 20 == 0 else None)
    costs = loop.clock.costs()
    assert costs.step_s == pytest.approx(0.1, rel=0.15)
    assert costs.ahead_s == pytest.approx(2.0, rel=0.1)
    assert costs.is_measuring


@pytest.mark.parametrize("first", [1, 2, 3, 10, 33])
@pytest.mark.parametrize("drains", [True, False])
def test_first_save_at_any_time_is_measured(first: int, drains: bool) -> None:
    loop = QueuedLoop(0.1)
    for number in range(1, 401):
        loop.update((0.05, 0.2, 1.0, drains) if number in (first, 200) else None)
    costs = loop.clock.costs()
    assert costs.step_s == pytest.approx(0.1, rel=0.1)
    assert costs.cost_s is not None
    assert not costs.is_measuring


@pytest.mark.parametrize("drains", [True, False])
def test_loop_saving_at_reads_is_measured(drains: bool) -> None:
    loop, saves = QueuedLoop(1.0, reads_every=10), list[int]()
    for number in range(1, 1501):
        is_due = number % 10 == 0 and not loop.clock.costs().is_unseen
        if is_due:
            saves.append(number)
        loop.update((0.5, 5.0, 1.1, drains) if is_due else None)
    costs = loop.clock.costs()
    assert costs.step_s == pytest.approx(1.0, rel=0.02)
    assert costs.cost_s == pytest.approx(0.95, rel=0.2)
    assert max(second - first for first, second in itertools.pairwise(saves)) <= 30
    assert len(saves) >= 0.7 * 150


def test_loop_ahead_of_device_saves_at_full_queue() -> None:
    loop, saves = QueuedLoop(0.1), list[int]()
    for number in range(1, 601):
        costs = loop.clock.costs()
        is_due = costs.step_s is not None and not costs.is_measuring
        if is_due:
            saves.append(number)
        loop.update((0.05, 0.2, 1.0, True) if is_due else None)
    apart = [second - first for first, second in itertools.pairwise(saves)][1:]
    assert min(apart) >= 32
    assert max(apart) <= 37
    assert loop.clock.costs().step_s == pytest.approx(0.1, rel=0.1)
    assert loop.clock.costs().cost_s == pytest.approx(0.05, abs=0.05)
