"""Measures a loop from the calls that it makes: how long an update takes, and how much longer beside a save.

What a job that was asked to leave does in the time left: finishes a save, begins one, or keeps the last.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from jaxckpt_train.policies.context import SaveCosts

MARGIN, MARGIN_S = 1.2, 0.1  # a save may take longer than each of the last ones did
ENDING_S = 5.0  # to end a process in which JAX has been at work
UNKNOWN_S = 30.0  # what is set aside of a time limit as long as no save was seen
WINDOW_STEPS, WINDOW_S = 8, 0.5
LEAST_WINDOW_STEPS = 2  # of one that a save cuts short, or that has taken so long:
LONG_WINDOW_S = 30.0
WARM_UP_STEPS = 2  # the first ones compile
WINDOWS, SAVES = 33, 6
HYSTERESIS = 0.1
OUTLIER = 4.0
UNSEEN_SAVES = 2  # in a row, of a loop that is ahead of its device, without updates between them that show its pace
MOST_UNSEEN_SAVES = 8  # of any loop


@dataclasses.dataclass(frozen=True)
class Situation:
    """What is known when a job has been asked to leave.

    Attributes:
        left_s: seconds in which all must be done; None: nobody has said, or no time is left to lose.
        unsaved: the last completed update, if no save of it is committed or under way.
        running: the step of a save under way.
        running_for_s: seconds since it began.
        committed: the step that was committed last.
        save_s: seconds that a save takes until it is committed; None: not known.
        step_s: seconds that an update takes; None: not known.
    """

    left_s: float | None
    unsaved: int | None
    running: int | None = None
    running_for_s: float = 0.0
    committed: int | None = None
    save_s: float | None = None
    step_s: float | None = None


@dataclasses.dataclass(frozen=True)
class ShutdownPlan:
    """What is done, once the save under way has ended if there is one.

    Attributes:
        saves: whether the last completed update is saved.
        why: as text, for the log and the history.
        waits: whether there is a save under way; once it has ended more is known.
        loses: whether there is no time to save updates for which that would be worth it.
    """

    saves: bool
    why: str
    waits: bool = False
    loses: bool = False


def choose(now: Situation) -> ShutdownPlan:
    """What loses the least and can be finished: a save that cannot end in time is not begun.

    A save under way is always waited for. It is enough if the updates since can be done again in the time that another
    save would take; else, and where none is under way, another one follows if that can be committed in time. What is
    not known is tried, and so is whatever can be where nothing is committed yet.
    """
    if now.unsaved is None:
        why = "nothing new to save" if now.running is None else f"finishing the save of step {now.running}"
        return ShutdownPlan(False, why, now.running is not None)
    new, waits = f"saving step {now.unsaved}", now.running is not None
    first = f"finishing the save of step {now.running}, then " if waits else ""
    if now.left_s is None:
        return ShutdownPlan(True, f"{first}{new}: no time limit is known, or it is over already", waits)
    if now.save_s is None:
        return ShutdownPlan(True, f"{first}{new}: how long a save takes is not known yet", waits)
    if now.running is not None and now.step_s is not None:
        behind = now.unsaved - now.running
        if behind * now.step_s <= now.save_s:
            return ShutdownPlan(
                False,
                f"finishing the save of step {now.running}, which is fresh enough: doing {_updates(behind)} again "
                f"takes {behind * now.step_s:.3g} s, saving step {now.unsaved} {now.save_s:.3g} s",
                waits,
            )
    rest_s = 0.0 if now.running is None else max(0.0, now.save_s - now.running_for_s)
    needed_s = MARGIN * (rest_s + now.save_s) + MARGIN_S
    time = f"{needed_s:.3g} s of {now.left_s:.3g} s are needed"
    if needed_s <= now.left_s or (now.committed is None and now.running is None):
        return ShutdownPlan(True, f"{first}{new}: {time}", waits)
    kept = f"finishing the save of step {now.running}" if waits else f"step {now.committed} stays the last one"
    return ShutdownPlan(False, f"{kept}: no time to save step {now.unsaved}, {time}", waits, loses=True)


def _updates(number: int) -> str:
    return "1 update" if number == 1 else f"{number} updates"


def leave_early_s(save_s: float | None, step_s: float | None, limit_s: float) -> float:
    """How many seconds before a time limit a job has to be asked to leave, for its last save to end within it.

    Args:
        save_s: that a save takes until it is committed; None: not known.
        step_s: that an update takes; None: not known.
        limit_s: the time limit, of which half is left to train in, or no job would ever get further.
    """
    # One save may be under way, and one is begun after an update.
    early_s = UNKNOWN_S if save_s is None else ENDING_S + MARGIN * 2 * save_s + 2 * (step_s or 0.0)
    return min(early_s, limit_s / 2)


class LoopTimer:
    """Told of each call for an update, when it begins and when it ends; between them runs the loop.

    The time of an update is that of windows of several, since a loop that reads a value of the device now and then has
    short updates and long ones; the median of the windows, since evaluations fall into some. What a save costs is all
    the time from its call to the end of the update in which it ends, less what as many updates take else.

    A loop that does not wait for its device calls for updates that JAX has only queued. Most saves wait until the queue
    is empty; then the calls come fast until it is full again. So times are taken where the queue is as long as at the
    start: once it is full again, or at the end of that wait.

    Args:
        monotonic: the time in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.perf_counter) -> None:
        self._monotonic = monotonic
        self._windows: collections.deque[float] = collections.deque(maxlen=WINDOWS)
        self._costs: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._blocked: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._durations: collections.deque[float] = collections.deque(maxlen=SAVES)
        self._own_durations: collections.deque[float] = collections.deque(maxlen=SAVES)  # without waits for devices
        self._step = -1  # of the last call
        self._calls = 0
        self._entered_at = self._left_at = 0.0
        self._free_from: tuple[float, int] | None = None  # where the window of free updates began
        self._save: _Save | None = None  # that is under way, or not measured yet
        self._began_step = self._saves = self._free_windows = self._unseen_saves = 0
        self._began_at: float | None = None
        self._spent_s = self._ahead_s = 0.0
        self._held_s: float | None = None

    def recall(self, cost_s: float | None, duration_s: float | None) -> None:
        """Begin with what an earlier process of the run has measured."""
        self._held_s = self._held_s if cost_s is None else cost_s
        if duration_s is not None:
            self._durations.append(duration_s)
            self._own_durations.append(duration_s)

    def entered(self, step: int, is_saving: bool) -> None:
        """A call begins, with so many updates complete; `is_saving`: a save is under way."""
        if step == self._step:  # what the loop did between its calls for one update is none of a save's cost
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
        """A call ends; the loop goes on."""
        self._step = step
        now = self._left_at = self._monotonic()
        if is_saving or self._save is not None:  # the update after a save may pay for it: its memory is shared
            self._free_from = None
        elif self._free_from is None and self._calls > WARM_UP_STEPS:
            self._free_from = now, step
            if self._began_at is None:
                self._began_at, self._began_step = now, step

    def save_began(self, step: int, device_wait_s: float = 0.0) -> None:
        """Note that the call under way took the state and started a save; the loop continues after it.

        Args:
            step: number of updates that the loop has called for.
            device_wait_s: seconds that the call waited until the devices had computed them.
        """
        blocked_s = self._monotonic() - self._entered_at - device_wait_s
        now = _Save(self._entered_at, step, blocked_s, device_wait_s, queued_s=device_wait_s)
        before, self._save = self._save, now
        if before is not None:
            self._end_save(before, before.computed_at, now.computed_at, step)
        elif self._free_from is not None and step - self._free_from[1] >= LEAST_WINDOW_STEPS:
            self._end_window(self._entered_at, step)
        self._unseen_saves = 0 if self._has_window() else self._unseen_saves + 1
        self._free_from, self._free_windows = None, 0
        self._saves += 1
        self._count_queue(now, device_wait_s)

    def committed(self, duration_s: float, device_wait_s: float = 0.0) -> None:
        """A save was committed. Called on any thread.

        Args:
            duration_s: seconds since it began.
            device_wait_s: of these, those in which the devices were computing the state.
        """
        self._durations.append(duration_s)
        self._own_durations.append(duration_s - device_wait_s)
        save = self._save
        if save is not None:
            save.queued_s, save.took_s = max(save.queued_s, device_wait_s), duration_s - device_wait_s

    def costs(self) -> SaveCosts:
        """What is known now."""
        trained_s = 0.0 if self._began_at is None else self._monotonic() - self._began_at - self._spent_s
        durations, own = [*self._durations], [*self._own_durations]
        return SaveCosts(
            step_s=self.step_s(),
            cost_s=self._held_s,
            blocked_s=_trimmed_mean([*self._blocked]) if self._blocked else None,
            duration_s=max(durations, default=None),
            usual_s=statistics.median(own) if own else None,
            is_measuring=self._save is not None or self._has_to_see_updates(),
            is_unseen=self._unseen_saves >= MOST_UNSEEN_SAVES and self._free_windows == 0,
            spent_s=self._spent_s,
            trained_s=max(0.0, trained_s),
            ahead_s=self._ahead_s,
        )

    def step_s(self) -> float | None:
        """Seconds for one update while nothing is being saved; None: not known yet."""
        return statistics.median(self._windows) if self._windows else None

    def _window_is_full(self, now: float, step: int) -> bool:
        assert self._free_from is not None
        steps, lasted_s = step - self._free_from[1], now - self._free_from[0]
        is_long = steps >= LEAST_WINDOW_STEPS and lasted_s >= LONG_WINDOW_S
        return is_long or (steps >= WINDOW_STEPS and lasted_s >= WINDOW_S)

    def _has_window(self) -> bool:
        """Whether updates without a save were seen since the last one; a save that comes now ends their window."""
        steps = 0 if self._free_from is None else self._step - self._free_from[1]
        return self._free_windows > 0 or steps >= LEAST_WINDOW_STEPS

    def _has_to_see_updates(self) -> bool:
        """Whether the pace of a loop that is ahead of its device was not seen lately: only a full queue shows it."""
        return self._ahead_s > 0 and self._unseen_saves >= UNSEEN_SAVES and not self._has_window()

    def _end_window(self, now: float, step: int) -> None:
        assert self._free_from is not None
        self._free_windows += 1
        began, first = self._free_from
        self._windows.append((now - began) / (step - first))
        self._free_from = None

    def _count_queue(self, save: _Save, queued_s: float) -> None:
        """At the first save: that the devices had so much to do was not known to the windows before it.

        The queue was empty when the loop began, so all of them together have counted calls that were only queued.
        """
        if self._saves > 1 or self._began_at is None or queued_s <= (self.step_s() or 0.0):
            return
        steps = save.step - self._began_step + WARM_UP_STEPS  # that were queued by then
        if steps >= LEAST_WINDOW_STEPS:
            self._windows.clear()
            self._windows.append((save.entered_at + queued_s - self._began_at) / steps)

    def _is_queue_full(self, save: _Save, step: int) -> bool:
        """Whether the loop has called for as many updates since a save as it had waited for there.

        True where that is not known, as no update was timed yet.
        """
        step_s = self.step_s()
        return step_s is None or (step - save.step) * step_s >= save.device_wait_s

    def _end_save(self, save: _Save, began: float, now: float, step: int) -> None:
        """All updates since its call are complete: what they took longer is what it cost."""
        if self._save is save:
            self._save = None
        self._count_queue(save, save.queued_s)
        free_s, blocked_s = self.step_s(), save.blocked_s
        self._ahead_s = save.queued_s
        if free_s is None or step <= save.step:
            return
        cost_s = now - began - (step - save.step) * free_s
        if save.queued_s and save.took_s is not None:  # of a long queue even a small error of `free_s` is much
            most_s = blocked_s + save.took_s + free_s
            cost_s = max(-most_s, min(cost_s, most_s))
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


@dataclasses.dataclass
class _Save:
    """A save that the clock measures.

    Attributes:
        entered_at: when its call began.
        step: updates that the loop had called for.
        blocked_s: seconds that the call blocked the loop.
        device_wait_s: seconds that the call waited for the devices.
        queued_s: seconds for which the devices had work at its call; where it does not wait for them, known at its end.
        took_s: seconds that it took without these; None: it was not committed.
    """

    entered_at: float
    step: int
    blocked_s: float
    device_wait_s: float
    queued_s: float
    took_s: float | None = None

    @property
    def computed_at(self) -> float:
        """When the devices had computed all updates before it, if the call waited for them."""
        return self.entered_at + self.device_wait_s


def _trimmed_mean(values: Sequence[float]) -> float:
    """The mean, without the smallest and the largest of four or more."""
    kept = sorted(values)[1:-1] if len(values) >= 4 else values
    return statistics.fmean(kept)
