"""The input of policies, the functions that ask them, and the checks of their arguments.

All functions are pure: the current time is part of the `DecisionContext`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import numpy as np

from jaxckpt_train._validation import Mode, check_fields, refuse, seconds, whole

PRIOR_FAILURES, PRIOR_OBSERVED_S = 0.5, 60.0
POWERS_OF_TEN = frozenset(10**power for power in range(1, 10))  # steps or counts at which a missing metric is logged


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """The facts about one checkpoint, or about the step being decided, that a policy can use.

    It has the attributes of Orbax's `PolicyCheckpointInfo`, so policies written for Orbax can read it.

    Attributes:
        step: the number of completed updates.
        time: when the save started, or the time of the decision; with a time zone, converted to UTC.
        metrics: the metrics recorded with the step; None: none so far (an evaluation may attach them later).
        pinned: whether the user has asked to keep this step whatever the policy says.
        temporary: whether it is deleted after the next commit.
    """

    step: int
    time: datetime
    metrics: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    pinned: bool = False
    temporary: bool = False

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            object.__setattr__(self, "step", whole(0)("CheckpointInfo.step", self.step))
        if getattr(self.time, "tzinfo", None) is not UTC:
            object.__setattr__(self, "time", _utc("CheckpointInfo.time", self.time))


Checkpoints = Sequence[CheckpointInfo]


@dataclasses.dataclass(frozen=True)
class MultiprocessingOptions:
    """The processes that take part, as policies of Orbax read them; those of this package do not."""

    primary_host: int | None = 0
    active_processes: frozenset[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass(frozen=True)
class DecisionContext:
    """The facts apart from the checkpoints that a policy can use.

    It has the attributes of Orbax's `DecisionContext`.

    Attributes:
        now: the time of the decision; with a time zone, converted to UTC.
        is_saving_in_progress: whether an earlier save is not committed yet.
        reached_preemption: whether the process was asked to shut down.
        read_metrics: returns the metrics of the step being decided. The call may wait for a device, so only a policy
            that decides by metrics should make it. None: the step has no metrics.
        run_started: when this process started to train; with a time zone, converted to UTC. None: unknown.
        read_costs: returns the measured costs of saves. None: they are not measured.
        read_failures: returns how often the run has failed so far. None: unknown.
        multiprocessing_options: the processes that take part; any object with the attributes of
            `MultiprocessingOptions`.
    """

    now: datetime
    is_saving_in_progress: bool = False
    reached_preemption: bool = False
    read_metrics: Callable[[], Mapping[str, Any] | None] | None = None
    run_started: datetime | None = None
    read_costs: Callable[[], SaveCosts] | None = None
    read_failures: Callable[[], Failures] | None = None
    multiprocessing_options: Any = MultiprocessingOptions()

    def __post_init__(self) -> None:
        if getattr(self.now, "tzinfo", None) is not UTC:
            object.__setattr__(self, "now", _utc("DecisionContext.now", self.now))
        if self.run_started is not None and getattr(self.run_started, "tzinfo", None) is not UTC:
            object.__setattr__(self, "run_started", _utc("DecisionContext.run_started", self.run_started))


class SavePolicy(Protocol):
    """Decides at which steps to save a checkpoint. Any object with this method is a save policy, also one of Orbax."""

    def should_save(self, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext) -> bool:
        """Whether to save now.

        Args:
            step: the step being decided; its `time` is the time of the decision and its `metrics` are None.
            previous_steps: the existing checkpoints in the order of their saves, latest last, including one that is
                still being written.
            context: everything else.
        """


class PreservationPolicy(Protocol):
    """Decides which checkpoints to keep. Any object with this method is a preservation policy, also one of Orbax.

    It is called on a thread of the manager while other threads that use the manager wait: it must not wait for them.
    """

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> Sequence[bool]:
        """Which checkpoints to keep.

        Args:
            checkpoints: the committed checkpoints that are not temporary, in ascending order of the step.
            context: everything else.

        Returns:
            One bool for each checkpoint: True to keep it.
        """


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a step is saved, and why.

    Attributes:
        save: whether to save.
        reason: the policies that asked for the save, such as "FixedIntervalPolicy(interval=500)", or why it is not
            saved. A policy may state its own reason by a method `reason` with the arguments of `should_save`.
        temporary: whether the step is deleted after the next commit.
        fast: whether the step is only due on the fast tier.
    """

    save: bool
    reason: str
    temporary: bool = False
    fast: bool = False


NOT_DUE: Final = Decision(False, "not due: no save policy asked for this step")


def policy_name(policy: object) -> str:
    """A policy as text: its repr, or its class name if it has no repr of its own."""
    return f"{type(policy).__name__}()" if type(policy).__repr__ is object.__repr__ else repr(policy)


def deciding_policies(
    policy: SavePolicy, step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext
) -> tuple[SavePolicy, ...]:
    """The policies that ask for a save of this step: the policy itself, or policies inside it; empty: no save.

    A composed policy may return them by a method `deciding_policies` with the arguments of `should_save`.
    """
    inside = getattr(policy, "deciding_policies", None)
    if inside is not None:
        found: tuple[SavePolicy, ...] = inside(step, previous_steps, context=context)
        return found
    while previous_steps and previous_steps[-1].temporary:  # a policy for lasting saves does not see temporary ones
        previous_steps = previous_steps[:-1]
    due: Any = policy.should_save(step, previous_steps, context=context)
    if not isinstance(due, (bool, np.bool_)):
        refuse(f"{policy_name(policy)}.should_save", "True or False", due)
    return (policy,) if due else ()


def decide(policy: SavePolicy, info: CheckpointInfo, previous: Checkpoints, context: DecisionContext) -> Decision:
    """Decide whether to save a step, as `SavePolicy` describes. Cheap if nothing is due: no text is built."""
    found = deciding_policies(policy, info, previous, context=context)
    if not found:
        return NOT_DUE
    reason = policy_reasons(found, info, previous, context=context)
    return Decision(True, reason, any(map(saves_temporarily, found)))


def saves_temporarily(policy: object) -> bool:
    """Whether a step that this policy asks for is deleted after the next commit."""
    return getattr(policy, "saves_temporarily", False) is True


def policy_reasons(
    policies: Sequence[SavePolicy], step: CheckpointInfo, previous_steps: Checkpoints, *, context: DecisionContext
) -> str:
    """Why these policies ask for a save: their own `reason`, or their names."""
    reasons = []
    for policy in policies:
        own = getattr(policy, "reason", None)
        reasons.append(policy_name(policy) if own is None else str(own(step, previous_steps, context=context)))
    return " and ".join(reasons)


def as_lasting(checkpoints: Checkpoints) -> Checkpoints:
    """Return the checkpoints with the temporary ones at the end marked as lasting."""
    count = len(checkpoints)
    while count and checkpoints[count - 1].temporary:
        count -= 1
    if count == len(checkpoints):
        return checkpoints
    return (*checkpoints[:count], *(dataclasses.replace(each, temporary=False) for each in checkpoints[count:]))


def ask_to_preserve(policy: PreservationPolicy, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
    """Ask a policy and check its answer: one bool for each checkpoint."""
    answer: Any = policy.should_preserve(checkpoints, context=context)
    flags = list(answer) if isinstance(answer, Iterable) else [answer]
    if len(flags) != len(checkpoints) or not all(isinstance(flag, (bool, np.bool_)) for flag in flags):
        expected = f"one bool for each of {len(checkpoints)} checkpoints"
        refuse(f"{policy_name(policy)}.should_preserve", expected, answer)
    return [bool(flag) for flag in flags]


def steps_to_delete(checkpoints: Checkpoints, policy: PreservationPolicy, *, context: DecisionContext) -> set[int]:
    """The committed steps that may be deleted now.

    The rules, in this order: The highest step and the step committed last are kept (they differ after a roll-back).
    Pinned steps are kept. All temporary steps are deleted; the policy does not see them. Other steps are deleted if the
    policy does not keep them. The checkpoints come in the order of their commits, not of clocks.
    """
    if not checkpoints:
        return set()
    ordered = sorted(checkpoints, key=lambda info: info.step)
    kept = {ordered[-1].step, checkpoints[-1].step}
    kept.update(info.step for info in ordered if info.pinned)
    lasting = [info for info in ordered if not info.temporary]
    flags = ask_to_preserve(policy, lasting, context=context)
    kept.update(info.step for info, keep in zip(lasting, flags, strict=True) if keep)
    return {info.step for info in ordered} - kept


@dataclasses.dataclass(frozen=True)
class SaveCosts:
    """The measured costs of saves, in seconds. None: unknown so far."""

    step_s: float | None = None  # the duration of an update while no save is running
    # What the loop loses by one save: the time that it is blocked, and the slowdown of the updates during the save.
    cost_s: float | None = None
    blocked_s: float | None = None  # the part of it in which the loop is blocked
    duration_s: float | None = None  # the time from the start of a save to its commit; the longest of the last few
    usual_s: float | None = None  # the same, the median of the last few
    is_measuring: bool = False  # whether a save is running, or the update after it, so that its cost is not known yet
    is_unseen: bool = False  # whether updates have to be timed before the next save: none ran between the last ones
    spent_s: float = 0.0  # the cost of all saves of this process so far
    trained_s: float = 0.0  # the time since this process started to train, without the cost of saves
    # The work that the devices had queued at the last save, if the loop does not wait for them; else 0.0.
    ahead_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Failures:
    """How often a run has failed without a save, and in which time."""

    count: int = 0  # the number of processes that were killed, or asked to shut down with too little time for a save
    observed_s: float = 0.0  # the seconds that all processes of the run have lived

    @property
    def mtbf_s(self) -> float:
        """The estimated mean time between failures, in seconds: the mean of a Gamma prior, updated by the observations.

        The prior is half a failure in one minute. So a run without failures expects one after twice the time that it
        has lived, and a run with failures expects about what it has observed.
        """
        return (PRIOR_OBSERVED_S + self.observed_s) / (PRIOR_FAILURES + self.count)


def metric_value(metrics: Mapping[str, Any] | None, metric: str) -> float | None:
    """The value of one metric as a float; None: the metrics do not have it, or it is None."""
    value = None if metrics is None else metrics.get(metric)
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, (str, bytes)):  # not a number, even if it spells one
            return float(value)
    refuse(f'metric "{metric}"', "a number", value)


def is_better(value: float, than: float, mode: Mode) -> bool:
    """Whether `value` is strictly better than `than`. NaN is neither better nor worse than any value."""
    return value < than if mode == "min" else value > than


def rank_checkpoints(checkpoints: Checkpoints, metric: str, mode: Mode) -> list[CheckpointInfo]:
    """The checkpoints with a value of the metric other than NaN, best first; of equal values, the higher step first."""
    sign = 1 if mode == "min" else -1
    values = ((metric_value(info.metrics, metric), info) for info in checkpoints)
    ranked = [(sign * value, -info.step, info) for value, info in values if value is not None and not math.isnan(value)]
    return [info for _, _, info in sorted(ranked, key=lambda entry: entry[:2])]


class Checked:
    """A frozen dataclass that checks its fields when it is created, by `check_fields`."""

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)


def positive_seconds(subject: str, value: Any) -> float:
    """Return `value` as a finite number of seconds above 0; an int stays an int."""
    checked = seconds(subject, value)
    return value if isinstance(value, int) else checked


def metric_name(subject: str, value: object) -> str:
    """Return `value` as the name of a metric: text that is not empty."""
    if isinstance(value, str) and value:
        return value
    refuse(subject, 'the name of a metric, such as "loss"', value)


def step_collection(subject: str, value: object) -> Collection[int]:
    """Return `value` as steps with a fast `in`: a range unchanged, anything else as a frozenset."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse(subject, "a collection of steps, such as [100, 1000]", value)
    steps = [value[0], value[-1]] if isinstance(value, range) and value else value
    checked = frozenset(whole(0)(f"{subject}: a step", step) for step in steps)
    return value if isinstance(value, range) else checked


def require_policy(subject: str, policy: Any, method: str) -> Any:
    """Return `policy` if it is an object, not a class, with this method."""
    if isinstance(policy, type) or not callable(getattr(policy, method, None)):
        refuse(subject, f"an object with {method}(...)", policy)
    return policy


def child_policies(subject: str, value: object, method: str) -> tuple[Any, ...]:
    """Return `value` as a tuple of at least one policy, each with this method."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        refuse(subject, "a list of policies", value)
    children = tuple(value)
    if not children:
        refuse(subject, "at least one policy", value)
    return tuple(require_policy(f"{subject}[{position}]", child, method) for position, child in enumerate(children))


def steps_text(steps: Collection[int]) -> str:
    """Format steps for a repr, in order, so that equal policies have equal text."""
    return repr(steps) if isinstance(steps, range) else repr(sorted(steps))


def _utc(subject: str, time: datetime) -> datetime:
    """Return `time` in UTC: differences of times in a zone with daylight saving can be wrong by an hour."""
    if isinstance(time, datetime) and time.tzinfo is not None:
        return time.astimezone(UTC)
    refuse(subject, "a datetime with a time zone (datetime.now(UTC))", time)
