"""Save policies: at which steps a checkpoint is saved.

Where Orbax has a policy, its name, arguments and meaning are the same here. A policy is a frozen value that checks its
arguments when it is created (`SettingsError`), reads no clock and does no I/O. `SavePolicy` documents `should_save`.

`OverheadBudgetPolicy` and `YoungDalyPolicy` adapt their interval to the measured costs of saves and to failures.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Annotated, ClassVar, NamedTuple

from jaxckpt_train._validation import Mode, refuse, whole
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.policies.context import (
    POWERS_OF_TEN,
    Checked,
    CheckpointInfo,
    Checkpoints,
    DecisionContext,
    Failures,
    SaveCosts,
    SavePolicy,
    as_lasting,
    child_policies,
    deciding_policies,
    is_better,
    metric_name,
    metric_value,
    policy_reasons,
    positive_seconds,
    require_policy,
    saves_temporarily,
    step_collection,
    steps_text,
)

_log = logging.getLogger("jaxckpt_train")
LEAST_INTERVAL_S, MOST_INTERVAL_S = 1.0, 3600.0
AIM = 0.9  # the part of a budget that is used: the measurements are not exact
ROOM = 1.5  # an interval is at least this multiple of the usual duration of a save, to avoid saving all the time


def apart(one: datetime, other: datetime, seconds: float) -> bool:
    """Whether two times differ by at least `seconds`, in either order.

    Either order counts, because after a clock was set back, saves must not wait until it has caught up.
    """
    return abs((one - other).total_seconds()) >= seconds


@dataclasses.dataclass(frozen=True)
class FixedIntervalPolicy(Checked):
    """Saves each step that is a multiple of `interval`, including step 0, the state before training.

    Args:
        interval: in steps, at least 1.
    """

    interval: Annotated[int, whole(1)]

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        return step.step % self.interval == 0


@dataclasses.dataclass(frozen=True)
class EverySecondsPolicy(Checked):
    """Saves when `seconds` have passed since the last save, and since this process started to train.

    The second condition keeps a job that waited in a queue from saving right after it resumed. After the clock was set
    back, a save is due when at most twice the time has passed. Without a previous checkpoint and without
    `context.run_started`, a save is due at once.

    Args:
        seconds: between saves, above 0.
    """

    seconds: Annotated[float, positive_seconds]

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        if previous_steps and not apart(step.time, previous_steps[-1].time, self.seconds):
            return False
        return context.run_started is None or apart(step.time, context.run_started, self.seconds)


@dataclasses.dataclass(frozen=True, repr=False)
class SpecificStepsPolicy(Checked):
    """Saves exactly the given steps.

    Args:
        steps: a collection of steps; a `range` is kept, anything else becomes a frozenset.
    """

    steps: Annotated[Collection[int], step_collection]

    def __repr__(self) -> str:
        return f"SpecificStepsPolicy(steps={steps_text(self.steps)})"

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        return step.step in self.steps


@dataclasses.dataclass(frozen=True)
class InitialSavePolicy:
    """Saves at once if there is no checkpoint yet."""

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        return not previous_steps


@dataclasses.dataclass(frozen=True)
class ContinuousCheckpointingPolicy(Checked):
    """Saves as often as possible without waiting: whenever no earlier save is in progress.

    Args:
        minimum_interval_secs: the minimum number of seconds since the last save, above 0; None: no minimum.
    """

    minimum_interval_secs: Annotated[float, positive_seconds] | None = None

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return apart(step.time, previous_steps[-1].time, self.minimum_interval_secs)


@dataclasses.dataclass(frozen=True)
class PreemptionCheckpointingPolicy:
    """Saves when the process was asked to shut down."""

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        return context.reached_preemption


@dataclasses.dataclass(frozen=True)
class ImprovementPolicy(Checked):
    """Saves when a metric is strictly better than in every previous checkpoint that has it.

    A step without the metric, or with NaN, is not saved; the first step with a value is. Only checkpoints that still
    exist are compared: keep the best of them by `BestN` with the same metric. Reading the metrics may wait for the
    device: inside `AllSavePolicy`, put cheaper policies first.

    Args:
        metric: the name of the metric.
        mode: "min": lower is better; "max": higher is better.
    """

    metric: Annotated[str, metric_name]
    mode: Mode

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        metrics = step.metrics
        if metrics is None and context.read_metrics is not None:
            metrics = context.read_metrics()
        value = metric_value(metrics, self.metric)
        if value is None and not previous_steps and step.step in POWERS_OF_TEN:
            names = ", ".join(sorted(metrics or ())) or "none"
            text = "ImprovementPolicy: nothing is saved yet, and step %d has no metric %r; its metrics are: %s"
            _log.warning(text, step.step, self.metric, names)
        if value is None or math.isnan(value):
            return False
        earlier = (metric_value(info.metrics, self.metric) for info in previous_steps)
        return all(is_better(value, old, self.mode) for old in earlier if old is not None and not math.isnan(old))


class _ComposedPolicy(Checked, abc.ABC):
    """A policy that asks other policies, and returns those that decide."""

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        return bool(self.deciding_policies(step, previous_steps, context=context))

    @abc.abstractmethod
    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        """The policies that ask for the save; empty: no save."""


@dataclasses.dataclass(frozen=True)
class AnySavePolicy(_ComposedPolicy):
    """Saves when at least one of its policies asks for it. They are asked in order, up to the first one that does.

    After a policy with temporary steps, the others are asked, too: the step is kept if one of them asks for it.

    Args:
        policies: at least one object with `should_save`, such as the policies of this module or of Orbax.
    """

    policies: Annotated[Sequence[SavePolicy], functools.partial(child_policies, method="should_save")]

    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        temporary: tuple[SavePolicy, ...] = ()
        for policy in self.policies:
            found = deciding_policies(policy, step, previous_steps, context=context)
            if found and not any(map(saves_temporarily, found)):
                return found
            temporary = temporary or found
        return temporary


@dataclasses.dataclass(frozen=True)
class TemporarySavePolicy(_ComposedPolicy):
    """Saves temporary steps when its policy asks for it: each is deleted once a later step is committed.

    The deletion also happens in a later process. In an `AnySavePolicy`, this policy sees all previous steps, while
    policies for lasting steps see only the previous lasting ones. Preservation policies do not see temporary steps.

    Args:
        policy: an object with `should_save`, such as `EverySecondsPolicy(600)`.

    Source: Levanter, whose saves by time are temporary, and whose saves by step are permanent.
    """

    policy: Annotated[SavePolicy, functools.partial(require_policy, method="should_save")]
    saves_temporarily: ClassVar[bool] = True

    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        return (self,) if deciding_policies(self.policy, step, as_lasting(previous_steps), context=context) else ()

    def reason(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> str:
        """Why the inner policy asks for a save."""
        found = deciding_policies(self.policy, step, as_lasting(previous_steps), context=context)
        return "temporary: " + policy_reasons(found, step, as_lasting(previous_steps), context=context)


def has_temporary(policy: SavePolicy | None) -> bool:
    """Whether a policy may ask for temporary steps."""
    if isinstance(policy, AnySavePolicy | AllSavePolicy):
        return any(map(has_temporary, policy.policies))
    return saves_temporarily(policy)


@dataclasses.dataclass(frozen=True)
class AllSavePolicy(_ComposedPolicy):
    """Saves when all of its policies ask for it. They are asked in order, up to the first one that does not.

    Args:
        policies: at least one object with `should_save`, such as the policies of this module or of Orbax.
    """

    policies: Annotated[Sequence[SavePolicy], functools.partial(child_policies, method="should_save")]

    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        found: list[SavePolicy] = []
        for policy in self.policies:
            some = deciding_policies(policy, step, previous_steps, context=context)
            if not some:
                return ()
            found.extend(some)
        return tuple(found)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The interval between saves that loses the least time, in seconds from the end of a save to the start of the next.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, equation 37;
    its first term is J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class _Interval(NamedTuple):
    seconds: float  # between saves
    why: Callable[[], str]  # the reason


class _TunedPolicy(Checked, abc.ABC):
    """A policy that computes its interval from measurements. This class limits the interval and compares it."""

    min_interval_secs: float
    max_interval_secs: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = self.min_interval_secs, self.max_interval_secs
        if most is not None and most < least:
            subject = f"{type(self).__name__}.max_interval_secs"
            raise SettingsError(f"{subject}: expected at least min_interval_secs ({least:g}), found {most:g}")

    def _name(self) -> str:
        """The policy, as reasons name it."""
        return type(self).__name__

    @abc.abstractmethod
    def _wanted(self, costs: SaveCosts, cost_s: float, context: DecisionContext) -> _Interval:
        """The best interval, and why, if a save costs `cost_s` seconds."""

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        costs = _costs(context)
        interval = None if context.is_saving_in_progress else self._interval(costs, context)
        if interval is None:
            return False
        times = (previous_steps[-1].time if previous_steps else None, context.run_started)
        last = max((time for time in times if time), default=None)
        ahead_s = 0.0  # until the devices have computed this step, if the loop does not wait for them
        if costs.ahead_s and costs.step_s and previous_steps:
            ahead_s = min(costs.ahead_s, max(0, step.step - previous_steps[-1].step) * costs.step_s)
        return last is None or apart(step.time, last, interval.seconds - ahead_s)

    def reason(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> str:
        """Why it asks for a save, with the measurements."""
        found = self._interval(_costs(context), context)
        return f"{self._name()}: " + ("" if found is None else found.why())

    def _interval(self, costs: SaveCosts, context: DecisionContext) -> _Interval | None:
        if costs.ahead_s and costs.is_measuring:  # until the queue is full again, the calls do not show the pace
            return None
        if costs.cost_s is not None and not costs.is_unseen:
            return _bounded(self._wanted(costs, costs.cost_s, context), self, costs)
        if costs.step_s is not None and not costs.is_unseen:
            return None if costs.is_measuring else _Interval(0.0, lambda: "the first save, to measure its cost")
        most_s, what = self.max_interval_secs, "updates have to be timed" if costs.is_unseen else "nothing is measured"
        if most_s is None:
            return None
        return _Interval(most_s, lambda: f"{what}, but max_interval_secs={most_s:g} have passed")


def _costs(context: DecisionContext) -> SaveCosts:
    return SaveCosts() if context.read_costs is None else context.read_costs()


@dataclasses.dataclass(frozen=True)
class OverheadBudgetPolicy(_TunedPolicy):
    """Saves as often as a budget allows: all saves together slow the training down by at most this fraction.

    The cost of a save is measured while the loop runs: the time that the loop is blocked, and the slowdown of the
    updates during the save. A save that costs more than expected delays the next one, and a cheaper one advances it,
    so the total keeps to the budget even if a disk gets slower. Nothing is saved until a measurement exists, which
    takes a few updates, unless an earlier process of the run has measured.

    Args:
        max_fraction: the fraction of the training time without saves, above 0 and below 1.
        min_interval_secs: the minimum number of seconds between saves.
        max_interval_secs: the number of seconds after which a step is saved even if that exceeds the budget; None: no
            limit.

    Source: J. Mohan, A. Phanishayee, V. Chidambaram, CheckFreq: frequent, fine-grained DNN checkpointing, FAST 2021.
    """

    max_fraction: float = 0.035
    min_interval_secs: Annotated[float, positive_seconds] = LEAST_INTERVAL_S
    max_interval_secs: Annotated[float, positive_seconds] | None = MOST_INTERVAL_S

    def __post_init__(self) -> None:
        fraction = self.max_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            refuse("OverheadBudgetPolicy.max_fraction", "a fraction above 0 and below 1, such as 0.035", fraction)
        super().__post_init__()

    def _name(self) -> str:
        return f"OverheadBudgetPolicy(max_fraction={self.max_fraction:g})"

    def _wanted(self, costs: SaveCosts, cost_s: float, context: DecisionContext) -> _Interval:
        aim = AIM * self.max_fraction
        owed_s = costs.spent_s - aim * costs.trained_s  # overspent time; negative: time left to spend
        return _Interval((cost_s + max(owed_s, -cost_s / 2)) / aim + cost_s, lambda: _spending(costs, cost_s))


@dataclasses.dataclass(frozen=True)
class YoungDalyPolicy(_TunedPolicy):
    """Saves at the interval that loses the least time to saves and failures together, after Young and Daly.

    A failure is the end of a process that could not save before: a kill, a crash, or a request to shut down with too
    little time for a save. A request that was answered with a save loses nothing, and does not count.

    Args:
        mtbf_secs: the mean time between failures; None: estimate it from the history of the run. Before the first
            failure, the estimate is twice the time that the run has lived, so saves are frequent at first.
        min_interval_secs: the minimum number of seconds between saves.
        max_interval_secs: the maximum number of seconds between saves; None: no limit.

    Source: `daly_interval_s`.
    """

    mtbf_secs: Annotated[float, positive_seconds] | None = None
    min_interval_secs: Annotated[float, positive_seconds] = LEAST_INTERVAL_S
    max_interval_secs: Annotated[float, positive_seconds] | None = MOST_INTERVAL_S

    def _wanted(self, costs: SaveCosts, cost_s: float, context: DecisionContext) -> _Interval:
        failures = None if self.mtbf_secs is not None or context.read_failures is None else context.read_failures()
        mtbf_s = self.mtbf_secs or (failures or Failures()).mtbf_s
        return _Interval(daly_interval_s(cost_s, mtbf_s) + cost_s, lambda: _risk(cost_s, mtbf_s, failures))


def _bounded(wanted: _Interval, policy: _TunedPolicy, costs: SaveCosts) -> _Interval:
    wanted_s, why = wanted.seconds, wanted.why
    least_s, most_s = policy.min_interval_secs, policy.max_interval_secs
    usual_s = costs.usual_s or 0.0
    lasting_s = ROOM * usual_s

    def right() -> str:
        return f"{why()}: every {_seconds(wanted_s)}"

    if most_s is not None and max(wanted_s, lasting_s) > most_s:
        lasts = f", and a save lasts {_seconds(usual_s)}" if lasting_s > most_s else ""
        return _Interval(most_s, lambda: f"{right()} is best{lasts}, but max_interval_secs={most_s:g} is less")
    if wanted_s < lasting_s and least_s < lasting_s:
        return _Interval(lasting_s, lambda: f"{right()} is best, but a save lasts {_seconds(usual_s)}")
    if wanted_s < least_s:
        return _Interval(least_s, lambda: f"{right()} is best, but min_interval_secs={least_s:g} is more")
    return _Interval(wanted_s, right)


def _spending(costs: SaveCosts, cost_s: float) -> str:
    spent = costs.spent_s / costs.trained_s if costs.trained_s else 0.0
    blocked = "" if costs.blocked_s is None else f" (and blocks the loop for {_seconds(costs.blocked_s)} of it)"
    return f"a save costs {_seconds(cost_s)}{blocked}, all so far {spent:.2%} of the training"


def _risk(cost_s: float, mtbf_s: float, failures: Failures | None) -> str:
    seen = "" if failures is None else f" ({failures.count} in {_seconds(failures.observed_s)} so far)"
    return f"a save costs {_seconds(cost_s)}, and a failure is expected every {_seconds(mtbf_s)}{seen}"


def _seconds(value: float) -> str:
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"
