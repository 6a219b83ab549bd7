"""Preservation policies: which committed steps are kept.

Where Orbax has a policy, its name, arguments and meaning are the same here. A policy is a frozen value that checks its
arguments when it is created (`SettingsError`), reads no clock and does no I/O. `PreservationPolicy` documents
`should_preserve`. `steps_to_delete` adds the rules that hold under every policy.

Each policy is stable while steps arrive in order: when it is asked again, after the other steps were deleted and newer
ones were committed, it drops a step only for a newer, better or closer one, or for its age.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Annotated, cast

from jaxckpt_train._validation import Mode, whole
from jaxckpt_train.policies.context import (
    POWERS_OF_TEN,
    Checked,
    CheckpointInfo,
    Checkpoints,
    DecisionContext,
    PreservationPolicy,
    ask_to_preserve,
    child_policies,
    metric_name,
    metric_value,
    positive_seconds,
    rank_checkpoints,
    step_collection,
    steps_text,
)

_log = logging.getLogger("jaxckpt_train")


def only_last(flags: list[bool], max_to_keep: int | None) -> list[bool]:
    """Return `flags` with only the last `max_to_keep` true values left; None: all of them."""
    chosen = [position for position, keep in enumerate(flags) if keep]
    if max_to_keep is not None:
        for position in chosen[:-max_to_keep]:
            flags[position] = False
    return flags


@dataclasses.dataclass(frozen=True)
class EveryNSteps(Checked):
    """Keeps a checkpoint every `interval_steps` steps.

    With `exact_interval`, it keeps the steps that are multiples of the interval. Without it, it keeps the first
    checkpoint and each one that is at least the interval after the previously kept one.

    Args:
        interval_steps: at least 1.
        exact_interval: whether to keep only multiples of the interval.
        max_to_keep: how many of those to keep, the latest ones, at least 1; None: all.
    """

    interval_steps: Annotated[int, whole(1)]
    exact_interval: bool = True
    max_to_keep: Annotated[int, whole(1)] | None = None

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        if self.exact_interval:
            return only_last([info.step % self.interval_steps == 0 for info in checkpoints], self.max_to_keep)
        flags: list[bool] = []
        kept: int | None = None
        for info in checkpoints:
            flags.append(kept is None or info.step - kept >= self.interval_steps)
            kept = info.step if flags[-1] else kept
        return only_last(flags, self.max_to_keep)


@dataclasses.dataclass(frozen=True)
class EveryNStepsClosest(Checked):
    """Keeps, for each multiple of `interval_steps`, the checkpoint closest to it, and the newest checkpoint.

    It suits saves at irregular steps (by time, on preemption). Each checkpoint belongs to the multiple nearest to its
    step; in the middle, to the even multiple. Of two equally close checkpoints, the later is kept.

    Args:
        interval_steps: at least 1.
        max_to_keep: how many of those to keep, the latest ones, including the newest checkpoint, at least 1; None: all.
    """

    interval_steps: Annotated[int, whole(1)]
    max_to_keep: Annotated[int, whole(1)] | None = None

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        closest: dict[int, tuple[int, int]] = {}  # multiple -> (distance, position)
        for position, info in enumerate(checkpoints):
            below, beyond = divmod(info.step, self.interval_steps)  # exact for every step
            multiple = below + (2 * beyond + below % 2 > self.interval_steps)
            distance = abs(info.step - multiple * self.interval_steps)
            if multiple not in closest or distance <= closest[multiple][0]:
                closest[multiple] = (distance, position)
        chosen = {position for _, position in closest.values()} | {len(checkpoints) - 1}
        return only_last([position in chosen for position in range(len(checkpoints))], self.max_to_keep)


@dataclasses.dataclass(frozen=True)
class EveryNSeconds(Checked):
    """Keeps the first checkpoint, and each one that is at least `interval_secs` after the previously kept one.

    A checkpoint whose time is that much *before* the previously kept one is kept, too: the clock was set back, and it
    could take very long to catch up.

    Args:
        interval_secs: in seconds, above 0.
    """

    interval_secs: Annotated[float, positive_seconds]

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        flags: list[bool] = []
        kept: CheckpointInfo | None = None
        for info in checkpoints:
            flags.append(kept is None or abs((info.time - kept.time).total_seconds()) >= self.interval_secs)
            kept = info if flags[-1] else kept
        return flags


@dataclasses.dataclass(frozen=True)
class LatestDuration:
    """Keeps the checkpoints of the last `duration`: the first one that is not older, and all after it.

    Ages are relative to `context.now`. A checkpoint with a later time was saved while the clock was ahead; it counts as
    old as the next checkpoint with a valid time.

    Args:
        duration: a `timedelta`, or seconds; above 0.
    """

    duration: timedelta | float

    def __post_init__(self) -> None:
        given = self.duration
        seconds = given.total_seconds() if isinstance(given, timedelta) else given
        checked = min(positive_seconds("LatestDuration.duration", seconds), timedelta.max.total_seconds())
        object.__setattr__(self, "duration", timedelta(seconds=checked))

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        duration = cast("timedelta", self.duration)
        ages, age = list[timedelta](), timedelta()
        for info in reversed(checkpoints):
            age = context.now - info.time if info.time <= context.now else age
            ages.append(age)
        flags: list[bool] = []
        for age in reversed(ages):
            flags.append(bool(flags and flags[-1]) or age <= duration)
        return flags


@dataclasses.dataclass(frozen=True)
class PreserveAll:
    """Keeps every checkpoint."""

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        return [True] * len(checkpoints)


@dataclasses.dataclass(frozen=True)
class LatestN(Checked):
    """Keeps the `n` highest steps.

    Args:
        n: how many, at least 1; None: all of them.
    """

    n: Annotated[int, whole(1)] | None = None

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        return only_last([True] * len(checkpoints), self.n)


@dataclasses.dataclass(frozen=True)
class BestN(Checked):
    """Keeps the `n` checkpoints with the best values of a metric.

    NaN is never among the best; of equal values, the later step is better. Orbax ranks by a function instead of a name,
    and treats NaN like any other number.

    Args:
        metric: the name of the metric.
        n: how many, at least 1; None: every checkpoint is kept.
        mode: "min": lower is better; "max": higher is better.
        keep_checkpoints_without_metrics: whether to keep checkpoints without the metric (a checkpoint with NaN has it).
            None: keep them until a later checkpoint has the metric, so that a later evaluation can attach it; if no
            checkpoint ever has it, nothing is deleted. True: always keep them, like Orbax, for evaluations that finish
            out of order. False: do not keep them.
    """

    metric: Annotated[str, metric_name]
    n: Annotated[int, whole(1)] | None
    mode: Mode
    keep_checkpoints_without_metrics: bool | None = None

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        if self.n is None:
            return [True] * len(checkpoints)
        best = {info.step for info in rank_checkpoints(checkpoints, self.metric, self.mode)[: self.n]}
        known = [metric_value(info.metrics, self.metric) is not None for info in checkpoints]
        last_known = max((position for position, has in enumerate(known) if has), default=-1)
        keep = self.keep_checkpoints_without_metrics
        if keep is None and last_known < 0 and len(checkpoints) in POWERS_OF_TEN:  # misspelt? The disk fills up
            names = ", ".join(sorted({name for info in checkpoints for name in info.metrics or ()})) or "none"
            text = "BestN: none of %d checkpoints has the metric %r, so all of them are kept; their metrics are: %s"
            _log.warning(text, len(checkpoints), self.metric, names)
        return [
            info.step in best if known[position] else (position > last_known if keep is None else keep)
            for position, info in enumerate(checkpoints)
        ]


@dataclasses.dataclass(frozen=True, repr=False)
class CustomSteps(Checked):
    """Keeps exactly the given steps.

    Args:
        steps: a collection of steps; a `range` is kept, anything else becomes a frozenset.
    """

    steps: Annotated[Collection[int], step_collection]

    def __repr__(self) -> str:
        return f"CustomSteps(steps={steps_text(self.steps)})"

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        return [info.step in self.steps for info in checkpoints]


@dataclasses.dataclass(frozen=True)
class AnyPreservationPolicy(Checked):
    """Keeps what at least one of its policies keeps.

    Args:
        policies: at least one object with `should_preserve`, such as the policies of this module or of Orbax.
    """

    policies: Annotated[Sequence[PreservationPolicy], functools.partial(child_policies, method="should_preserve")]

    def should_preserve(self, checkpoints: Checkpoints, *, context: DecisionContext) -> list[bool]:
        answers = [ask_to_preserve(policy, checkpoints, context=context) for policy in self.policies]
        return [any(flags) for flags in zip(*answers, strict=True)]
