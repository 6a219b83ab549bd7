"""Measures a loop from the calls that it makes: how long an update takes, and how much longer beside a save."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Sequence

from jaxckpt_train.steps.save_costs import SaveCosts

WINDOW_STEPS, WINDOW_S = 8, 0.5
LEAST_WINDOW_STEPS = 2  # of one that a save cuts short, or that has taken so long:
LONG_WINDOW_S = 30.0
WARM_UP_STEPS = 2  # the first ones compile
WINDOWS, SAVES = 33, 6
HYSTERESIS = 0.1
OUTLIER = 4.0


class StepClock:
    """Told of each call for an update, when it begins and when it ends; between them runs the loop.

    The time of an update is that of windows of several, since a loop that reads a value of the device now and then has
    short updates and long ones; the median of the windows, since evaluations fall into some. What a save costs is all
    the time from its call to the end of the update in which it ends, less what so many updates take else.

    Args:
        monotonic: the time in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.perf_counter) -> None:
        self._monotonic = monotonic
        self._windows: collections.deque[float] = collections.deque(maxlen=WINDOWS)
        self._costs: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._blocked: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._durations: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._step = -1  # of the last call
        self._calls = 0
        self._entered_at = self._left_at = 0.0
        self._free_from: tuple[float, int] | None = None  # where the window of free updates began
        self._save_from: tuple[float, int, float] | None = None  # the call of the save under way, its step, blocked
        self._began_at: float | None = None
        self._spent_s = 0.0
        self._held_s: float | None = None

    def recall(self, cost_s: float | None, duration_s: float | None) -> None:
        """Begin with what an earlier process of the run has measured."""
        self._held_s = self._held_s if cost_s is None else cost_s
        if duration_s is not None:
            self._durations.append(duration_s)

    def entered(self, step: int, is_saving: bool) -> None:
        """A call begins, with so many updates complete; `is_saving`: a save is under way."""
        if step == self._step:  # what the loop did between its calls for one update is none of a save's cost
            self._entered_at += self._monotonic() - self._left_at
            return
        now = self._entered_at = self._monotonic()
        if step < self._step:  # it went back
            self._free_from = self._save_from = None
        self._calls += 1
        if self._save_from is not None:
            if is_saving:
                return
            self._save_is_over(now, step)
        if self._free_from is not None and self._window_is_full(now, step):
            self._end_window(now, step)

    def left(self, step: int, is_saving: bool) -> None:
        """A call ends; the loop goes on."""
        self._step = step
        now = self._left_at = self._monotonic()
        if is_saving or self._save_from is not None:  # the update after a save may pay for it: its memory is shared
            self._free_from = None
        elif self._free_from is None and self._calls > WARM_UP_STEPS:
            self._free_from = now, step
            self._began_at = now if self._began_at is None else self._began_at

    def save_began(self, step: int) -> None:
        """The call under way has begun a save, and taken the state; the loop goes on after it."""
        if self._save_from is not None:
            self._save_is_over(self._entered_at, step)
        elif self._free_from is not None and step - self._free_from[1] >= LEAST_WINDOW_STEPS:
            self._end_window(self._entered_at, step)
        self._free_from = None
        self._save_from = self._entered_at, step, self._monotonic() - self._entered_at

    def committed(self, duration_s: float) -> None:
        """A save was committed so many seconds after it began. Called on any thread."""
        self._durations.append(duration_s)

    def costs(self) -> SaveCosts:
        """What is known now."""
        trained_s = 0.0 if self._began_at is None else self._monotonic() - self._began_at - self._spent_s
        durations = [*self._durations]
        return SaveCosts(
            step_s=self.step_s(),
            cost_s=self._held_s,
            blocked_s=_trimmed_mean([*self._blocked]) if self._blocked else None,
            duration_s=max(durations, default=None),
            usual_s=statistics.median(durations) if durations else None,
            is_measuring=self._save_from is not None,
            spent_s=self._spent_s,
            trained_s=max(0.0, trained_s),
        )

    def step_s(self) -> float | None:
        """Seconds for one update while nothing is being saved; None: not known yet."""
        return statistics.median(self._windows) if self._windows else None

    def _window_is_full(self, now: float, step: int) -> bool:
        assert self._free_from is not None
        steps, lasted_s = step - self._free_from[1], now - self._free_from[0]
        is_long = steps >= LEAST_WINDOW_STEPS and lasted_s >= LONG_WINDOW_S
        return is_long or (steps >= WINDOW_STEPS and lasted_s >= WINDOW_S)

    def _end_window(self, now: float, step: int) -> None:
        assert self._free_from is not None
        began, first = self._free_from
        self._windows.append((now - began) / (step - first))
        self._free_from = None

    def _save_is_over(self, now: float, step: int) -> None:
        """All updates since its call are complete: what they took longer is what it cost."""
        assert self._save_from is not None
        (began, first, blocked_s), self._save_from = self._save_from, None
        free_s = self.step_s()
        if free_s is None or step <= first:
            return
        cost_s = now - began - (step - first) * free_s
        if len(self._costs) >= SAVES // 2 and self._held_s is not None:  # an evaluation came between
            cost_s = min(cost_s, OUTLIER * max(self._held_s, blocked_s))
        self._costs.append(cost_s)
        self._blocked.append(blocked_s)
        self._spent_s += cost_s
        # Half of what it was seen to hold the loop up, at least: it may wait then for what was to be waited for anyway.
        self._hold(max(_trimmed_mean([*self._costs]), _trimmed_mean([*self._blocked]) / 2))

    def _hold(self, measured_s: float) -> None:
        if self._held_s is None or abs(measured_s - self._held_s) > HYSTERESIS * self._held_s:
            self._held_s = measured_s


def _trimmed_mean(values: Sequence[float]) -> float:
    """The mean, without the smallest and the largest of four or more."""
    kept = sorted(values)[1:-1] if len(values) >= 4 else values
    return statistics.fmean(kept)
