"""Save policies: at which steps a checkpoint is saved.

Names, arguments and meanings are those of Orbax where Orbax has the policy. Each is a frozen value that checks its
arguments when built, reads no clock and does no I/O. Every `should_save` is that of `policy_context.SavePolicy`.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import math
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import ClassVar

from jaxckpt_train.steps.policy_arguments import (
    child_policies,
    metric_name,
    positive_seconds,
    require_policy,
    step_collection,
    steps_text,
    whole_number,
)
from jaxckpt_train.steps.policy_context import (
    CheckpointInfo,
    DecisionContext,
    SavePolicy,
    as_lasting,
    deciding_policies,
    policy_reasons,
    saves_temporarily,
)
from jaxckpt_train.steps.ranking import is_better, metric_value
from jaxckpt_train.value_checks import Mode, metric_mode

__all__ = [
    "AllSavePolicy",
    "AnySavePolicy",
    "ContinuousCheckpointingPolicy",
    "EverySecondsPolicy",
    "FixedIntervalPolicy",
    "ImprovementPolicy",
    "InitialSavePolicy",
    "PreemptionCheckpointingPolicy",
    "SpecificStepsPolicy",
    "TemporarySavePolicy",
]


_TELL_AT = frozenset(10**power for power in range(1, 10))
_log = logging.getLogger("jaxckpt_train")


def apart(one: datetime, other: datetime, seconds: float) -> bool:
    """Whether two times lie at least `seconds` apart, in either order.

    Either order, because a clock that was set back must not hold up saves until it has caught up.
    """
    return abs((one - other).total_seconds()) >= seconds


@dataclasses.dataclass(frozen=True)
class FixedIntervalPolicy:
    """Saves each step that is a multiple of `interval`; step 0, the state before training, is one.

    Args:
        interval: in steps, at least 1.

    Raises:
        SettingsError: the interval is no whole number of at least 1.

    Source: Orbax, `FixedIntervalPolicy`.
    """

    interval: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", whole_number("FixedIntervalPolicy.interval", self.interval, 1))

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether the step is a multiple of the interval."""
        return step.step % self.interval == 0


@dataclasses.dataclass(frozen=True)
class EverySecondsPolicy:
    """Saves when `seconds` have passed since the last save, and since this process began to train.

    The second condition keeps a job that waited in a queue from saving right after it resumed. If the clock was set
    back, a save is due at the latest when twice the time has passed. Without a previous checkpoint and without
    `context.run_started`, a save is due at once.

    Args:
        seconds: between saves, above 0.

    Raises:
        SettingsError: the seconds are no finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", positive_seconds("EverySecondsPolicy.seconds", self.seconds))

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether the time has passed since the last save and since the start."""
        if previous_steps and not apart(step.time, previous_steps[-1].time, self.seconds):
            return False
        return context.run_started is None or apart(step.time, context.run_started, self.seconds)


@dataclasses.dataclass(frozen=True, repr=False)
class SpecificStepsPolicy:
    """Saves exactly the steps that are named.

    Args:
        steps: a collection of steps; a `range` stays one, anything else becomes a frozenset.

    Raises:
        SettingsError: `steps` is no collection, or something in it is no whole number of at least 0.

    Source: Orbax, `SpecificStepsPolicy`.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", step_collection("SpecificStepsPolicy.steps", self.steps))

    def __repr__(self) -> str:
        return f"SpecificStepsPolicy(steps={steps_text(self.steps)})"

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether the step is one of those named."""
        return step.step in self.steps


@dataclasses.dataclass(frozen=True)
class InitialSavePolicy:
    """Saves at once if there is no checkpoint yet.

    Source: Orbax, `InitialSavePolicy`.
    """

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether there is no previous checkpoint."""
        return not previous_steps


@dataclasses.dataclass(frozen=True)
class ContinuousCheckpointingPolicy:
    """Saves as often as it can without waiting: whenever no earlier save is still in progress.

    Args:
        minimum_interval_secs: seconds that must have passed since the last save, above 0; None: any time.

    Raises:
        SettingsError: the seconds are neither None nor a finite number above 0.

    Source: Orbax, `ContinuousCheckpointingPolicy`.
    """

    minimum_interval_secs: float | None = None

    def __post_init__(self) -> None:
        if self.minimum_interval_secs is not None:
            subject = "ContinuousCheckpointingPolicy.minimum_interval_secs"
            object.__setattr__(self, "minimum_interval_secs", positive_seconds(subject, self.minimum_interval_secs))

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether no save is in progress and the last one is long enough ago."""
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return apart(step.time, previous_steps[-1].time, self.minimum_interval_secs)


@dataclasses.dataclass(frozen=True)
class PreemptionCheckpointingPolicy:
    """Saves when the process was asked to leave.

    Source: Orbax, `PreemptionCheckpointingPolicy`.
    """

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether `context.reached_preemption` is set."""
        return context.reached_preemption


@dataclasses.dataclass(frozen=True)
class ImprovementPolicy:
    """Saves when a metric is strictly better than in each previous checkpoint that has it.

    A step without the metric, or with NaN, is not saved; the first one with a value is. The comparison is with the
    checkpoints that still exist: keep the best of them, by `BestN` of the same metric. Reading the metrics may wait
    for the device: inside `AllSavePolicy` put cheaper policies before this one.

    Args:
        metric: the name of the metric.
        mode: "min": lower is better; "max": higher is better.

    Raises:
        SettingsError: the name is empty or no text, or the mode is another one.
    """

    metric: str
    mode: Mode

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", metric_name("ImprovementPolicy.metric", self.metric))
        object.__setattr__(self, "mode", metric_mode("ImprovementPolicy.mode", self.mode))

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether the metric of this step beats that of every previous checkpoint."""
        metrics = step.metrics
        if metrics is None and context.read_metrics is not None:
            metrics = context.read_metrics()
        value = metric_value(metrics, self.metric)
        if value is None and not previous_steps and step.step in _TELL_AT:
            names = ", ".join(sorted(metrics or ())) or "none"
            told = "ImprovementPolicy: nothing is saved yet, and step %d has no metric %r; the metrics that it has: %s"
            _log.warning(told, step.step, self.metric, names)
        if value is None or math.isnan(value):
            return False
        earlier = (metric_value(info.metrics, self.metric) for info in previous_steps)
        return all(is_better(value, old, self.mode) for old in earlier if old is not None and not math.isnan(old))


class _ComposedPolicy(abc.ABC):
    """A policy that asks others, and names those that decide."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether one of those that decide asks for a save."""
        return bool(self.deciding_policies(step, previous_steps, context=context))

    @abc.abstractmethod
    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        """The policies that ask for the save; empty: it is not saved."""


@dataclasses.dataclass(frozen=True)
class AnySavePolicy(_ComposedPolicy):
    """Saves when at least one of its policies asks for it. They are asked in order, up to the first that does.

    After one whose steps are temporary, the others are asked whether this step is to stay.

    Args:
        policies: at least one object with `should_save`; Orbax's are such objects.

    Raises:
        SettingsError: there is no policy, or one of them has no `should_save`.

    Source: Orbax, `AnySavePolicy`.
    """

    policies: Sequence[SavePolicy]

    def __post_init__(self) -> None:
        children = child_policies("AnySavePolicy.policies", self.policies, "should_save")
        object.__setattr__(self, "policies", children)

    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        """The first policy that asks for a save, or what decides inside it; empty: none does."""
        temporary: tuple[SavePolicy, ...] = ()
        for policy in self.policies:
            found = deciding_policies(policy, step, previous_steps, context=context)
            if found and not any(map(saves_temporarily, found)):
                return found
            temporary = temporary or found
        return temporary


@dataclasses.dataclass(frozen=True)
class TemporarySavePolicy(_ComposedPolicy):
    """Saves when its policy asks for it, a step that goes once a later one is committed, also by a later process.

    Beside it, in an `AnySavePolicy`, other policies ask for steps that stay: these look at the last such step, and it
    at the last of any kind. Preservation policies are not shown temporary steps.

    Args:
        policy: an object with `should_save`, such as `EverySecondsPolicy(600)`.

    Raises:
        SettingsError: it has no `should_save`, or is made of temporary ones itself.

    Source: Levanter, whose saves by time are temporary, and those by step permanent.
    """

    policy: SavePolicy
    saves_temporarily: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_policy("TemporarySavePolicy.policy", self.policy, "should_save")

    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        """Itself, if the policy asks for a save."""
        return (self,) if deciding_policies(self.policy, step, as_lasting(previous_steps), context=context) else ()

    def reason(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> str:
        """Why the policy asks for a save."""
        found = deciding_policies(self.policy, step, as_lasting(previous_steps), context=context)
        return "temporary: " + policy_reasons(found, step, as_lasting(previous_steps), context=context)


def has_temporary(policy: SavePolicy | None) -> bool:
    """Whether some of what a policy asks for is temporary."""
    if isinstance(policy, AnySavePolicy | AllSavePolicy):
        return any(map(has_temporary, policy.policies))
    return saves_temporarily(policy)


@dataclasses.dataclass(frozen=True)
class AllSavePolicy(_ComposedPolicy):
    """Saves when all of its policies ask for it. They are asked in order, up to the first that does not.

    Args:
        policies: at least one object with `should_save`; Orbax's are such objects.

    Raises:
        SettingsError: there is no policy, or one of them has no `should_save`.
    """

    policies: Sequence[SavePolicy]

    def __post_init__(self) -> None:
        children = child_policies("AllSavePolicy.policies", self.policies, "should_save")
        object.__setattr__(self, "policies", children)

    def deciding_policies(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> tuple[SavePolicy, ...]:
        """What decides inside each of the policies; empty: one of them asks for no save."""
        found: list[SavePolicy] = []
        for policy in self.policies:
            some = deciding_policies(policy, step, previous_steps, context=context)
            if not some:
                return ()
            found.extend(some)
        return tuple(found)
