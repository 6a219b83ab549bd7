"""Save policies that tune themselves: by what saves cost the loop, and by how often the run fails."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.steps.policy_arguments import positive_seconds
from jaxckpt_train.steps.policy_context import CheckpointInfo, DecisionContext
from jaxckpt_train.steps.save_costs import Failures, SaveCosts
from jaxckpt_train.steps.save_policies import apart

LEAST_INTERVAL_S, MOST_INTERVAL_S = 1.0, 3600.0
AIM = 0.9  # of a budget: what is measured is not known exactly
ROOM = 1.5  # an interval is so much longer than a save lasts as a rule, at least: not to save all the time


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The interval between saves that loses the least time: seconds from the end of one save to the begin of the next.

    Args:
        cost_s: that a save costs.
        mtbf_s: mean time between failures.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, equation 37;
    its first term is J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclasses.dataclass(frozen=True)
class _Interval:
    """How far saves are to lie apart, and why."""

    seconds: float
    why: Callable[[], str]


class _TunedPolicy(abc.ABC):
    """A policy by what was measured: it says which interval it wants, and this bounds it and waits for it."""

    min_interval_secs: float
    max_interval_secs: float | None

    @property
    @abc.abstractmethod
    def _name(self) -> str:
        """Of the policy, in reasons."""

    @abc.abstractmethod
    def _wanted(self, costs: SaveCosts, cost_s: float, context: DecisionContext) -> _Interval:
        """The interval that is right where a save costs so many seconds, and why."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether the interval has passed since the last save, and since this process began; no save is waited for."""
        interval = None if context.is_saving_in_progress else self._interval(context)
        if interval is None:
            return False
        times = (previous_steps[-1].time if previous_steps else None, context.run_started)
        last = max((time for time in times if time), default=None)
        ahead_s = _ahead_s(step, previous_steps, context)
        return last is None or apart(step.time, last, interval.seconds - ahead_s)

    def reason(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> str:
        """Why it asks for a save, with what was measured."""
        found = self._interval(context)
        return f"{self._name}: " + ("" if found is None else found.why())

    def _interval(self, context: DecisionContext) -> _Interval | None:
        costs, most_s = SaveCosts() if context.read_costs is None else context.read_costs(), self.max_interval_secs
        if costs.ahead_s and costs.is_measuring:  # until the queue is full again, calls do not show the time
            return None
        if costs.is_unseen:
            if most_s is None:
                return None
            return _Interval(most_s, lambda: f"updates are to be timed, but max_interval_secs={most_s:g} have passed")
        if costs.cost_s is not None:
            return _bounded(self._wanted(costs, costs.cost_s, context), self, costs)
        if costs.step_s is not None:
            return None if costs.is_measuring else _Interval(0.0, lambda: "the first save, to see what it costs")
        if most_s is None:
            return None
        return _Interval(most_s, lambda: f"nothing is measured yet, and max_interval_secs={most_s:g} have passed")


@dataclasses.dataclass(frozen=True)
class OverheadBudgetPolicy(_TunedPolicy):
    """Saves as often as a budget allows: all saves together slow the training down by no more than this fraction.

    What a save costs is measured while the loop runs: the time in which the loop is held up, and what updates beside a
    save take longer. A save that has cost more than was expected puts off the next one, and one that has cost less
    brings it nearer, so the total keeps to the budget also where a disk gets slower. Until something is measured, which
    takes some updates, nothing is saved; an earlier process of the run has measured it already.

    Args:
        max_fraction: of the time of the training without saves, above 0 and below 1.
        min_interval_secs: seconds between saves, at least.
        max_interval_secs: seconds after which a step is saved even where that is more than the budget; None: never.

    Raises:
        SettingsError: an argument is out of range.

    Source: J. Mohan, A. Phanishayee, V. Chidambaram, CheckFreq: frequent, fine-grained DNN checkpointing, FAST 2021.
    """

    max_fraction: float = 0.035
    min_interval_secs: float = LEAST_INTERVAL_S
    max_interval_secs: float | None = MOST_INTERVAL_S

    def __post_init__(self) -> None:
        fraction = self.max_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise SettingsError(
                "OverheadBudgetPolicy.max_fraction: expected a fraction above 0 and below 1, such as 0.035, "
                f"found {fraction!r}"
            )
        _check_bounds(self)

    @property
    def _name(self) -> str:
        return f"OverheadBudgetPolicy(max_fraction={self.max_fraction:g})"

    def _wanted(self, costs: SaveCosts, cost_s: float, context: DecisionContext) -> _Interval:
        aim = AIM * self.max_fraction
        owed_s = costs.spent_s - aim * costs.trained_s  # what was spent beyond it, or below 0: is left to spend
        return _Interval((cost_s + max(owed_s, -cost_s / 2)) / aim + cost_s, lambda: _spending(costs, cost_s))


@dataclasses.dataclass(frozen=True)
class YoungDalyPolicy(_TunedPolicy):
    """Saves at the interval that loses the least time to saves and failures together, by Young and Daly.

    A failure is the end of a process that has not saved before: a kill, a crash, or a request to leave that left no
    time for it. Requests that were met with a save lose nothing, and do not count.

    Args:
        mtbf_secs: mean time between failures; None: estimated from the run's own history: until it has failed twice the
            time that it has run without, so that saves come often at first and less and less.
        min_interval_secs: seconds between saves, at least.
        max_interval_secs: seconds between saves, at most; None: no limit.

    Raises:
        SettingsError: an argument is out of range.

    Source: `daly_interval_s`.
    """

    mtbf_secs: float | None = None
    min_interval_secs: float = LEAST_INTERVAL_S
    max_interval_secs: float | None = MOST_INTERVAL_S

    def __post_init__(self) -> None:
        if self.mtbf_secs is not None:
            object.__setattr__(self, "mtbf_secs", positive_seconds("YoungDalyPolicy.mtbf_secs", self.mtbf_secs))
        _check_bounds(self)

    @property
    def _name(self) -> str:
        return "YoungDalyPolicy"

    def _wanted(self, costs: SaveCosts, cost_s: float, context: DecisionContext) -> _Interval:
        failures = None if self.mtbf_secs is not None or context.read_failures is None else context.read_failures()
        mtbf_s = self.mtbf_secs or (failures or Failures()).mtbf_s
        return _Interval(daly_interval_s(cost_s, mtbf_s) + cost_s, lambda: _risk(cost_s, mtbf_s, failures))


def _ahead_s(step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], context: DecisionContext) -> float:
    """Seconds until the devices have computed this step, where the loop does not wait for them."""
    costs = SaveCosts() if context.read_costs is None else context.read_costs()
    if not (costs.ahead_s and costs.step_s and previous_steps):
        return 0.0
    return min(costs.ahead_s, max(0, step.step - previous_steps[-1].step) * costs.step_s)


def _check_bounds(policy: _TunedPolicy) -> None:
    name = type(policy).__name__
    least = positive_seconds(f"{name}.min_interval_secs", policy.min_interval_secs)
    if policy.max_interval_secs is not None:
        most = positive_seconds(f"{name}.max_interval_secs", policy.max_interval_secs)
        if most < least:
            raise SettingsError(
                f"{name}.max_interval_secs: expected at least min_interval_secs ({least:g}), found {most:g}"
            )


def _bounded(wanted: _Interval, policy: _TunedPolicy, costs: SaveCosts) -> _Interval:
    wanted_s, why = wanted.seconds, wanted.why
    least_s, most_s = policy.min_interval_secs, policy.max_interval_secs
    usual_s = costs.usual_s or 0.0
    lasting_s = ROOM * usual_s

    def right() -> str:
        return f"{why()}: every {_seconds(wanted_s)}"

    if most_s is not None and max(wanted_s, lasting_s) > most_s:
        lasts = f", and a save lasts {_seconds(usual_s)}" if lasting_s > most_s else ""
        return _Interval(most_s, lambda: f"{right()} is right{lasts}, max_interval_secs={most_s:g} is less")
    if wanted_s < lasting_s and least_s < lasting_s:
        return _Interval(lasting_s, lambda: f"{right()} is right, but a save lasts {_seconds(usual_s)}")
    if wanted_s < least_s:
        return _Interval(least_s, lambda: f"{right()} is right, min_interval_secs={least_s:g} is more")
    return _Interval(wanted_s, right)


def _spending(costs: SaveCosts, cost_s: float) -> str:
    spent = costs.spent_s / costs.trained_s if costs.trained_s else 0.0
    blocked = "" if costs.blocked_s is None else f" ({_seconds(costs.blocked_s)} of it the loop is held up)"
    return f"a save costs {_seconds(cost_s)}{blocked}, all so far {spent:.2%} of the training"


def _risk(cost_s: float, mtbf_s: float, failures: Failures | None) -> str:
    seen = ""
    if failures is not None:
        seen = f" ({failures.count} in {_seconds(failures.observed_s)} so far)"
    return f"a save costs {_seconds(cost_s)}, and a failure is due every {_seconds(mtbf_s)}{seen}"


def _seconds(value: float) -> str:
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"
