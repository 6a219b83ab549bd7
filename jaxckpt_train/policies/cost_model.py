"""The time that a training loop spends on updates and on saves.

`LoopTimer` measures how long an update takes and what a save costs, from the calls of the loop. `plan_last_save`
decides whether a job that was asked to shut down has the time for another save.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxckpt_train.policies.context import SaveCosts

MARGIN, MARGIN_S = 1.2, 0.1  # a save may take longer than each of the last ones
ENDING_S = 5.0  # to end a process that has used JAX
UNKNOWN_S = 30.0  # reserved for the last save while the duration of a save is unknown
WINDOW_STEPS, WINDOW_S = 8, 0.5
LEAST_WINDOW_STEPS = 2  # of a window that is ended by a save, or that has lasted this long:
LONG_WINDOW_S = 30.0
WARM_UP_STEPS = 2  # the first updates compile
WINDOWS, SAVES = 33, 6
HYSTERESIS = 0.1
OUTLIER = 4.0
UNSEEN_SAVES = 2  # consecutive saves of a loop ahead of its devices without timed updates in between
MOST_UNSEEN_SAVES = 8  # the same, of any loop


class ShutdownPlan(NamedTuple):
    """Whether a job that was asked to shut down saves its last completed update."""

    saves: bool
    why: str  # the decision and the reason, for the log and the history


def plan_last_save(unsaved: int, committed: int | None, save_s: float | None, left_s: float | None) -> ShutdownPlan:
    """Decide whether to save the update `unsaved`: a save that cannot end in time is not started.

    The save is tried in any case if there is no limit, if its duration is unknown, or if nothing is committed yet.

    Args:
        unsaved: the last completed update.
        committed: the step that was committed last. None: there is none.
        save_s: the seconds from the start of a save to its commit. None: unknown.
        left_s: the seconds left. None: no limit is known.
    """
    new = f"saving step {unsaved}"
    if left_s is None:
        return ShutdownPlan(True, f"{new}: no remaining time limit")
    if save_s is None:
        return ShutdownPlan(True, f"{new}: the duration of a save is unknown")
    needed_s = MARGIN * save_s + MARGIN_S
    needs = f"{needed_s:.3g} s of {left_s:.3g} s are needed"
    if committed is None or needed_s <= left_s:
        return ShutdownPlan(True, f"{new}: {needs}")
    return ShutdownPlan(False, f"keeping step {committed}: no time to save step {unsaved}, {needs}")


def leave_early_s(save_s: float | None, step_s: float | None, limit_s: float) -> float:
    """The number of seconds before a time limit at which to ask a job to shut down, so that its last save ends in time.

    `save_s` is the duration of a save and `step_s` that of an update; None: unknown. At least half of the limit
    remains, so that every job makes progress.
    """
    # A save may be running, and another one starts after an update.
    early_s = UNKNOWN_S if save_s is None else ENDING_S + MARGIN * 2 * save_s + 2 * (step_s or 0.0)
    return min(early_s, limit_s / 2)


class LoopTimer:
    """Measures a training loop. It is called at the start and the end of each call of the callback.

    The time of an update is the median over windows of several updates. Windows average over updates that read a value
    of a device and updates that do not; the median excludes evaluations. The cost of a save is the time from its call
    to the end of the update in which it ends, minus the usual time of these updates.

    A loop that does not wait for its devices runs ahead of them: JAX queues its updates. Most saves wait until the
    queue is empty, and the next calls are fast until it is full again. Therefore a measurement starts and ends at the
    same length of the queue: when it is full again, or at the end of that wait.
    """

    def __init__(self, monotonic: Callable[[], float] = time.perf_counter) -> None:
        self._monotonic = monotonic
        self._windows: collections.deque[float] = collections.deque(maxlen=WINDOWS)
        self._costs: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._blocked: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._durations: collections.deque[tuple[float, float]] = collections.deque(maxlen=SAVES)  # and the device wait
        self._step = -1  # of the last call
        self._calls = 0
        self._entered_at = self._left_at = 0.0
        self._free_from: tuple[float, int] | None = None  # the start of the window without a save
        self._save: _Save | None = None  # that is running, or not measured yet
        self._began_step = self._saves = self._free_windows = self._unseen_saves = 0
        self._began_at: float | None = None
        self._spent_s = self._ahead_s = 0.0
        self._held_s: float | None = None

    def recall(self, cost_s: float | None, duration_s: float | None) -> None:
        """Start with the measurements of an earlier process of the run."""
        self._held_s = self._held_s if cost_s is None else cost_s
        if duration_s is not None:
            self._durations.append((duration_s, 0.0))

    def entered(self, step: int, is_saving: bool) -> None:
        """A call starts after `step` completed updates, while a save is running or not."""
        if step == self._step:  # a save does not cost what the loop does between calls for one update
            self._entered_at += self._monotonic() - self._left_at
            return
        now = self._entered_at = self._monotonic()
        if step < self._step:  # it went back
            self._free_from = self._save = None
        self._calls += 1
        if self._save is not None:
            if is_saving or not self._is_queue_full(self._save, step):
                return
            self._end_save(self._save, self._save.entered_at, now, step)
        if self._free_from is not None and self._window_is_full(now, step):
            self._end_window(now, step)

    def left(self, step: int, is_saving: bool) -> None:
        """A call ends, and the loop continues."""
        self._step = step
        now = self._left_at = self._monotonic()
        if is_saving or self._save is not None:  # the update after a save may be slow, too: its memory is shared
            self._free_from = None
        elif self._free_from is None and self._calls > WARM_UP_STEPS:
            self._free_from = now, step
            if self._began_at is None:
                self._began_at, self._began_step = now, step

    def save_began(self, step: int, device_wait_s: float = 0.0) -> None:
        """The current call took the state after `step` updates, for which it waited, and started a save."""
        blocked_s = self._monotonic() - self._entered_at - device_wait_s
        now = _Save(self._entered_at, step, blocked_s, device_wait_s, queued_s=device_wait_s)
        before, self._save = self._save, now
        if before is not None:
            computed_at = before.entered_at + before.device_wait_s, now.entered_at + now.device_wait_s
            self._end_save(before, *computed_at, step)
        elif self._free_from is not None and step - self._free_from[1] >= LEAST_WINDOW_STEPS:
            self._end_window(self._entered_at, step)
        self._unseen_saves = 0 if self._has_window() else self._unseen_saves + 1
        self._free_from, self._free_windows = None, 0
        self._saves += 1
        self._count_queue(now, device_wait_s)

    def committed(self, duration_s: float, device_wait_s: float = 0.0) -> None:
        """A save was committed, in part of whose duration the devices were computing the state. From any thread."""
        self._durations.append((duration_s, device_wait_s))
        save = self._save
        if save is not None:
            save.queued_s, save.took_s = max(save.queued_s, device_wait_s), duration_s - device_wait_s

    def costs(self) -> SaveCosts:
        """The current measurements."""
        trained_s = 0.0 if self._began_at is None else self._monotonic() - self._began_at - self._spent_s
        durations = [*self._durations]
        return SaveCosts(
            step_s=self.step_s(),
            cost_s=self._held_s,
            blocked_s=_trimmed_mean([*self._blocked]) if self._blocked else None,
            duration_s=max((duration_s for duration_s, _ in durations), default=None),
            usual_s=statistics.median(duration_s - wait_s for duration_s, wait_s in durations) if durations else None,
            is_measuring=self._save is not None or self._has_to_see_updates(),
            is_unseen=self._unseen_saves >= MOST_UNSEEN_SAVES and self._free_windows == 0,
            spent_s=self._spent_s,
            trained_s=max(0.0, trained_s),
            ahead_s=self._ahead_s,
        )

    def step_s(self) -> float | None:
        """The seconds of an update while no save is running; None: unknown so far."""
        return statistics.median(self._windows) if self._windows else None

    def _window_is_full(self, now: float, step: int) -> bool:
        assert self._free_from is not None
        steps, lasted_s = step - self._free_from[1], now - self._free_from[0]
        is_long = steps >= LEAST_WINDOW_STEPS and lasted_s >= LONG_WINDOW_S
        return is_long or (steps >= WINDOW_STEPS and lasted_s >= WINDOW_S)

    def _has_window(self) -> bool:
        """Whether updates without a save were timed since the last save; a save now ends their window."""
        steps = 0 if self._free_from is None else self._step - self._free_from[1]
        return self._free_windows > 0 or steps >= LEAST_WINDOW_STEPS

    def _has_to_see_updates(self) -> bool:
        """Whether a loop that runs ahead was not timed recently: only a full queue shows its pace."""
        return self._ahead_s > 0 and self._unseen_saves >= UNSEEN_SAVES and not self._has_window()

    def _end_window(self, now: float, step: int) -> None:
        assert self._free_from is not None
        self._free_windows += 1
        began, first = self._free_from
        self._windows.append((now - began) / (step - first))
        self._free_from = None

    def _count_queue(self, save: _Save, queued_s: float) -> None:
        """At the first save, correct the windows before it: they did not know the length of the queue.

        The queue was empty when the loop started, so the windows together also counted calls that only queued updates.
        """
        if self._saves > 1 or self._began_at is None or queued_s <= (self.step_s() or 0.0):
            return
        steps = save.step - self._began_step + WARM_UP_STEPS  # queued until then
        if steps >= LEAST_WINDOW_STEPS:
            self._windows.clear()
            self._windows.append((save.entered_at + queued_s - self._began_at) / steps)

    def _is_queue_full(self, save: _Save, step: int) -> bool:
        """Whether the queue is as long as at the save, after which the loop has called for enough updates.

        True if that is unknown, because no update was timed yet.
        """
        step_s = self.step_s()
        return step_s is None or (step - save.step) * step_s >= save.device_wait_s

    def _end_save(self, save: _Save, began: float, now: float, step: int) -> None:
        """Record the cost of a save: the additional time of the updates since its call, which are complete now."""
        if self._save is save:
            self._save = None
        self._count_queue(save, save.queued_s)
        free_s, blocked_s = self.step_s(), save.blocked_s
        self._ahead_s = save.queued_s
        if free_s is None or step <= save.step:
            return
        cost_s = now - began - (step - save.step) * free_s
        if save.queued_s and save.took_s is not None:  # with a long queue, a small error of `free_s` adds up
            most_s = blocked_s + save.took_s + free_s
            cost_s = max(-most_s, min(cost_s, most_s))
        if len(self._costs) >= SAVES // 2 and self._held_s is not None:  # limit the effect of an evaluation in between
            cost_s = min(cost_s, OUTLIER * max(self._held_s, blocked_s))
        self._costs.append(cost_s)
        self._blocked.append(blocked_s)
        self._spent_s += cost_s
        # At least half of the blocked time: part of it may be a wait for the devices that the loop needs anyway.
        measured_s = max(_trimmed_mean([*self._costs]), _trimmed_mean([*self._blocked]) / 2)
        if self._held_s is None or abs(measured_s - self._held_s) > HYSTERESIS * self._held_s:
            self._held_s = measured_s


@dataclasses.dataclass
class _Save:
    """A save that is measured."""

    entered_at: float  # the start of its call
    step: int  # the number of updates that the loop had called for
    blocked_s: float  # the seconds that the call blocked the loop
    device_wait_s: float  # the seconds that the call waited for the devices
    queued_s: float  # the seconds of work that the devices had queued; if the call does not wait, known at the end
    took_s: float | None = None  # the duration without these waits; None: it was not committed


def _trimmed_mean(values: Sequence[float]) -> float:
    """The mean; of four or more values without the smallest and the largest."""
    kept = sorted(values)[1:-1] if len(values) >= 4 else values
    return statistics.fmean(kept)
