"""Ranks checkpoints by a metric.

What a policy is told and how it is asked: pure functions of a context, in which the time is passed in.

Checks of the arguments that save policies and preservation policies are built with.

What saves cost a loop, and how often its run fails: what policies that tune themselves go by.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import numpy as np

from jaxckpt_train._validation import Mode, refuse, whole
from jaxckpt_train.errors import SettingsError

PRIOR_FAILURES, PRIOR_OBSERVED_S = 0.5, 60.0


@dataclasses.dataclass(frozen=True)
class SaveCosts:
    """What was measured so far, in seconds. None: not known yet.

    Attributes:
        step_s: for one update while nothing is being saved.
        cost_s: that the loop loses by one save: the time in which it is held up, and what the updates beside the save
            take longer. It stays as it is until what is measured differs by a tenth.
        blocked_s: of these, the time in which the loop is held up.
        duration_s: from the begin of a save until it is committed; the longest of the last few.
        usual_s: the same, the median of the last few.
        is_measuring: whether a save is under way, or the update after it, of which it is not known yet what it costs.
        is_unseen: whether updates have to be seen without a save before the next one: there were none between the last
            saves, so what these cost is not known well.
        spent_s: that all saves of this process have cost so far.
        trained_s: since this process began to train, without what saves have cost.
        ahead_s: for which the devices had work at the last save, as the loop does not wait for them; 0.0: it does.
    """

    step_s: float | None = None
    cost_s: float | None = None
    blocked_s: float | None = None
    duration_s: float | None = None
    usual_s: float | None = None
    is_measuring: bool = False
    is_unseen: bool = False
    spent_s: float = 0.0
    trained_s: float = 0.0
    ahead_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Failures:
    """How often a run has failed without having saved, and in which time.

    Attributes:
        count: processes of the run that ended so: killed, or asked to leave with too little time for a save.
        observed_s: seconds that all processes of the run have lived for.
    """

    count: int = 0
    observed_s: float = 0.0

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures that this suggests, in seconds.

        A run that has not failed yet may fail all the same: half a failure in one minute is what is taken for known
        before anything is (the mean of a Gamma prior of the rate). So a run that has not failed expects to do so in
        twice the time that it has lived, whatever that is, and one that has failed soon expects what it has seen.
        """
        return (PRIOR_OBSERVED_S + self.observed_s) / (PRIOR_FAILURES + self.count)


def whole_number(subject: str, value: object, least: int) -> int:
    """`value` as an int of at least `least`; those of numpy and JAX are taken, bool and 500.0 are not."""
    found: int = whole(least)(subject, value)
    return found


def positive_seconds(subject: str, value: object) -> float:
    """`value` as a finite number of seconds above 0; an int stays an int."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise SettingsError(f"{subject}: expected a finite number of seconds above 0, found {value!r}")


def metric_name(subject: str, value: object) -> str:
    """`value` as the name of a metric: text that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise SettingsError(f'{subject}: expected the name of a metric, such as "loss", found {value!r}')


def step_collection(subject: str, value: object) -> Collection[int]:
    """`value` as steps that can be asked `in` fast: a range as it is, anything else as a frozenset."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingsError(f"{subject}: expected a collection of steps, such as [100, 1000], found {value!r}")
    if isinstance(value, range):
        if value and min(value[0], value[-1]) < 0:
            raise SettingsError(f"{subject}: expected steps of at least 0, found {value!r}")
        return value
    return frozenset(whole_number(f"{subject}: a step", step, 0) for step in value)


def require_policy(subject: str, policy: Any, method: str) -> None:
    """Raise SettingsError unless `policy` is an object (not a class) with the method `method`.

    Args:
        subject: names the argument in the message: "StepManager.save_decision_policy".
        policy: what was given.
        method: "should_save" or "should_preserve".
    """
    if isinstance(policy, type):
        raise SettingsError(
            f"{subject}: expected an object with {method}(...), found the class {policy.__name__}; "
            f"write {policy.__name__}(...)"
        )
    if callable(getattr(policy, method, None)):
        return
    found = repr(policy)
    if callable(getattr(policy, "should_save", None)):
        found += ", which is a save policy"
    elif callable(getattr(policy, "should_preserve", None)):
        found += ", which is a preservation policy"
    raise SettingsError(f"{subject}: expected an object with {method}(...), found {found}")


def child_policies(subject: str, value: object, method: str) -> tuple[Any, ...]:
    """`value` as a tuple of at least one policy, each with the method `method`."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        refuse(subject, f"a sequence of policies with {method}(...)", value)
    children = tuple(value)
    if not children:
        raise SettingsError(f"{subject}: expected at least one policy, found none")
    for position, child in enumerate(children):
        require_policy(f"{subject}[{position}]", child, method)
    return children


def steps_text(steps: Collection[int]) -> str:
    """Steps as they appear in a repr: in order, so that equal policies read the same."""
    return repr(steps) if isinstance(steps, range) else repr(sorted(steps))


def _utc(subject: str, time: datetime) -> datetime:
    """`time` in UTC: differences of times in a zone with summer time would be an hour off twice a year."""
    if isinstance(time, datetime) and time.tzinfo is not None:
        return time.astimezone(UTC)
    raise SettingsError(f"{subject}: expected a datetime with a time zone (datetime.now(UTC)), found {time!r}")


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What a policy knows of one checkpoint, or of the step about which it is asked.

    It has the attributes of Orbax's `PolicyCheckpointInfo`, so policies written for Orbax can read it.

    Attributes:
        step: number of completed updates.
        time: when the checkpoint was committed, or the time of the decision; with a time zone, kept in UTC.
        metrics: the metrics recorded with the step; None: none so far (an evaluation may attach them later).
        pinned: the user asked to keep this step whatever the policy says.
        temporary: gone after the next commit.

    Raises:
        SettingsError: the step is no whole number of at least 0, or the time has no time zone.
    """

    step: int
    time: datetime
    metrics: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    pinned: bool = False
    temporary: bool = False

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            object.__setattr__(self, "step", whole_number("CheckpointInfo.step", self.step, 0))
        if getattr(self.time, "tzinfo", None) is not UTC:
            object.__setattr__(self, "time", _utc("CheckpointInfo.time", self.time))


@dataclasses.dataclass(frozen=True)
class MultiprocessingOptions:
    """Who takes part, in the words of Orbax. Our own policies never read it.

    Attributes:
        primary_host: index of the process that decides; None: each decides for itself.
        active_processes: indices of the processes that take part; None: all.
        barrier_sync_key_prefix: set before the names of barriers; None: nothing.
    """

    primary_host: int | None = 0
    active_processes: frozenset[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass(frozen=True)
class DecisionContext:
    """What a policy knows beside the checkpoints. It has the attributes of Orbax's `DecisionContext`.

    Attributes:
        now: the time of the decision; with a time zone, kept in UTC.
        is_saving_in_progress: an earlier save has not been committed yet.
        reached_preemption: the process was asked to leave.
        read_metrics: returns the metrics of the step being decided. Calling it may wait for a device, so only a
            policy that decides by metrics calls it. None: this step has no metrics.
        run_started: when this process began to train; with a time zone, kept in UTC. None: unknown.
        read_costs: returns what saves were seen to cost. None: nobody measures it.
        read_failures: returns how often the run has failed so far. None: nobody knows.
        multiprocessing_options: who takes part; anything with the attributes of `MultiprocessingOptions`.

    Raises:
        SettingsError: a time has no time zone.
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
    """Decides at which steps a checkpoint is saved. Any object with this method is one; Orbax's are."""

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """Whether to save now.

        Args:
            step: the step being decided; its `time` is the time of the decision and its `metrics` are None.
            previous_steps: the checkpoints there are, in the order in which they were saved, the latest last,
                one that is still being written included.
            context: everything else.
        """


class PreservationPolicy(Protocol):
    """Decides which checkpoints are kept. Any object with this method is one; Orbax's are.

    It is asked on a thread of the manager, while others that use the same manager wait: it must not wait for them.
    """

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> Sequence[bool]:
        """Which checkpoints to keep.

        Args:
            checkpoints: the committed ones that are not temporary, lowest step first.
            context: everything else.

        Returns:
            One bool for each checkpoint: True to keep it.
        """


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a step is saved, and why.

    Attributes:
        save: whether to save.
        reason: the policies that asked for it, such as "FixedIntervalPolicy(interval=500)", or why not. A policy with a
            method `reason`, with the arguments of `should_save`, says it itself.
        temporary: whether it goes after the next commit.
    """

    save: bool
    reason: str
    temporary: bool = False


NOT_DUE: Final = Decision(False, "not due: no save policy asked for this step")


def policy_name(policy: object) -> str:
    """A policy as text: its repr, or its class where it has none of its own."""
    return f"{type(policy).__name__}()" if type(policy).__repr__ is object.__repr__ else repr(policy)


def deciding_policies(
    policy: SavePolicy, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
) -> tuple[SavePolicy, ...]:
    """The policies that ask for a save of this step: the policy itself, or some inside it; empty: no save.

    A policy made of others may name them itself, by a method `deciding_policies` with the arguments of `should_save`.

    Raises:
        SettingsError: `should_save` returned something other than True or False.
    """
    inside = getattr(policy, "deciding_policies", None)
    if inside is not None:
        found: tuple[SavePolicy, ...] = inside(step, previous_steps, context=context)
        return found
    while previous_steps and previous_steps[-1].temporary:  # it asks for one that stays: it looks at such
        previous_steps = previous_steps[:-1]
    due: Any = policy.should_save(step, previous_steps, context=context)
    if due is False:
        return ()
    if due is True:
        return (policy,)
    if isinstance(due, np.bool_):
        return (policy,) if due else ()
    raise SettingsError(f"{policy_name(policy)}.should_save: expected True or False, found {due!r}")


def decide(
    policy: SavePolicy, info: CheckpointInfo, previous: Sequence[CheckpointInfo], context: DecisionContext
) -> Decision:
    """Whether to save the step `info`, with the reason. Cheap when nothing is due: no text is built.

    Args:
        policy: a save policy.
        info: the step being decided.
        previous: the checkpoints there are, in the order in which they were saved.
        context: everything else.

    Returns:
        The decision; its reason names the policy that asked for the save, inside Any and All the children that did.

    Raises:
        SettingsError: the policy returned something other than True or False.
    """
    found = deciding_policies(policy, info, previous, context=context)
    if not found:
        return NOT_DUE
    reason = policy_reasons(found, info, previous, context=context)
    return Decision(True, reason, any(map(saves_temporarily, found)))


def saves_temporarily(policy: object) -> bool:
    """Whether what this policy asks for goes after the next commit."""
    return getattr(policy, "saves_temporarily", False) is True


def policy_reasons(
    policies: Sequence[SavePolicy],
    step: CheckpointInfo,
    previous_steps: Sequence[CheckpointInfo],
    *,
    context: DecisionContext,
) -> str:
    """Why these policies ask for a save, by their own method `reason`, or as their names."""
    told = (getattr(policy, "reason", None) or functools.partial(_name_of, policy) for policy in policies)
    return " and ".join(str(tell(step, previous_steps, context=context)) for tell in told)


def _name_of(policy: object, *_: object, **__: object) -> str:
    return policy_name(policy)


def as_lasting(checkpoints: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
    """The checkpoints, the last of which are looked at also if they are temporary."""
    count = len(checkpoints)
    while count and checkpoints[count - 1].temporary:
        count -= 1
    if count == len(checkpoints):
        return checkpoints
    return (*checkpoints[:count], *(dataclasses.replace(each, temporary=False) for each in checkpoints[count:]))


def ask_to_preserve(
    policy: PreservationPolicy, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext
) -> list[bool]:
    """The policy's answer, checked: one bool for each checkpoint.

    Raises:
        SettingsError: the answer has another length, or something in it is neither True nor False.
    """
    answer = policy.should_preserve(checkpoints, context=context)
    subject = f"{policy_name(policy)}.should_preserve"
    try:
        flags = list(answer)
    except TypeError as error:
        raise SettingsError(f"{subject}: expected a sequence of {len(checkpoints)} bools, found {answer!r}") from error
    if len(flags) != len(checkpoints):
        raise SettingsError(
            f"{subject}: expected one bool for each of {len(checkpoints)} checkpoints, found {len(flags)} values"
        )
    for info, flag in zip(checkpoints, flags, strict=True):
        if not isinstance(flag, (bool, np.bool_)):
            raise SettingsError(f"{subject}: expected True or False for step {info.step}, found {flag!r}")
    return [bool(flag) for flag in flags]


def steps_to_delete(
    checkpoints: Sequence[CheckpointInfo], policy: PreservationPolicy, *, context: DecisionContext
) -> set[int]:
    """The committed steps that may be deleted now.

    In this order: never the highest step, nor the one committed last (another one after a roll-back): only what is
    older than both, by the order of the saves and not by clocks. Never a pinned step. Then every temporary step,
    whatever the policy says. Then whatever the policy does not preserve. Temporary steps are not shown to the policy:
    one that is about to go must not push a lasting one out of `LatestN`, nor start an interval of `EveryNSeconds`.

    Args:
        checkpoints: all committed checkpoints, in the order in which they were committed.
        policy: a preservation policy.
        context: the time, for policies that look at it.

    Returns:
        Steps to delete; never all of them.

    Raises:
        SettingsError: the policy's answer has the wrong length or holds something other than True and False.
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


def _number(value: Any) -> float:
    """`value` as a float; text is refused even where it reads as a number."""
    if isinstance(value, (str, bytes)):
        raise TypeError("text is no number")
    return float(value)


def metric_value(metrics: Mapping[str, Any] | None, metric: str) -> float | None:
    """The value of one metric as a float.

    Args:
        metrics: the metrics of one step, or None.
        metric: the name to look up.

    Returns:
        None where there are no metrics, or no such one, or it is None. NaN is returned as NaN.

    Raises:
        SettingsError: the value is no number.
    """
    value = None if metrics is None else metrics.get(metric)
    if value is None:
        return None
    try:
        return _number(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(f'metric "{metric}": expected a number, found {value!r}') from error


def is_better(value: float, than: float, mode: Mode) -> bool:
    """Whether `value` is strictly better. NaN is better than nothing, and nothing is better than NaN."""
    return value < than if mode == "min" else value > than


def rank_checkpoints(checkpoints: Sequence[CheckpointInfo], metric: str, mode: Mode) -> list[CheckpointInfo]:
    """The checkpoints that have the metric, best first; of equal ones the higher step first.

    Args:
        checkpoints: in any order.
        metric: the name of the metric.
        mode: "min": lower is better; "max": higher is better.

    Returns:
        Those with a value other than NaN; possibly none.

    Raises:
        SettingsError: a value of the metric is no number.
    """
    ranked: list[tuple[float, int, CheckpointInfo]] = []
    for info in checkpoints:
        value = metric_value(info.metrics, metric)
        if value is not None and not math.isnan(value):
            ranked.append((value if mode == "min" else -value, -info.step, info))
    ranked.sort(key=lambda entry: entry[:2])
    return [info for _, _, info in ranked]
