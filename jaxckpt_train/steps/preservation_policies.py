"""Preservation policies: which committed steps are kept.

Names, arguments and meanings are those of Orbax where Orbax has the policy. Each is a frozen value that checks its
arguments when built, reads no clock and does no I/O. Every `should_preserve` is that of
`policy_context.PreservationPolicy`; `policy_context.steps_to_delete` adds what holds under every policy: the newest
step, the one committed last and pinned steps stay, temporary ones go.

Each is stable while steps arrive in order: asked again after the others were deleted and newer ones were committed,
it gives up a step only because a newer, better or closer one took its place, or for its age.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.steps.interval_preservation import (
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    only_last,
)
from jaxckpt_train.steps.policy_arguments import child_policies, metric_name, step_collection, steps_text, whole_number
from jaxckpt_train.steps.policy_context import CheckpointInfo, DecisionContext, PreservationPolicy, ask_to_preserve
from jaxckpt_train.steps.ranking import metric_value, rank_checkpoints
from jaxckpt_train.value_checks import Mode, metric_mode

__all__ = [
    "AnyPreservationPolicy",
    "BestN",
    "CustomSteps",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "LatestDuration",
    "LatestN",
    "PreserveAll",
]
_log = logging.getLogger("jaxckpt_train")
_TELL_AT = frozenset(10**power for power in range(1, 10))  # checkpoints, which come one by one


@dataclasses.dataclass(frozen=True)
class PreserveAll:
    """Keeps every checkpoint.

    Source: Orbax, `PreserveAll`.
    """

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for each."""
        return [True] * len(checkpoints)


@dataclasses.dataclass(frozen=True)
class LatestN:
    """Keeps the `n` highest steps.

    Args:
        n: how many, at least 1; None: all of them.

    Raises:
        SettingsError: `n` is neither None nor a whole number of at least 1.

    Source: Orbax, `LatestN`.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            object.__setattr__(self, "n", whole_number("LatestN.n", self.n, 1))

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the last `n`."""
        return only_last([True] * len(checkpoints), self.n)


@dataclasses.dataclass(frozen=True)
class BestN:
    """Keeps the `n` checkpoints with the best values of a metric.

    NaN is never best, however few there are; of equal values the later step is better. Orbax ranks by a function
    instead of a name, and takes NaN for any other number.

    Args:
        metric: the name of the metric.
        n: how many, at least 1; None: every checkpoint is kept.
        mode: "min": lower is better; "max": higher is better.
        keep_checkpoints_without_metrics: what happens to checkpoints that have no such metric (NaN is one that has).
            None: they are kept as long as no later checkpoint has it, so that an evaluation still to come can attach
            it; if nothing ever has it, nothing is deleted. True: they are always kept, as by Orbax, for evaluations
            that finish out of order. False: they are not kept.

    Raises:
        SettingsError: an argument is of another type or out of range.

    Source: Orbax, `BestN`.
    """

    metric: str
    n: int | None
    mode: Mode
    keep_checkpoints_without_metrics: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", metric_name("BestN.metric", self.metric))
        object.__setattr__(self, "mode", metric_mode("BestN.mode", self.mode))
        if self.n is not None:
            object.__setattr__(self, "n", whole_number("BestN.n", self.n, 1))
        keep = self.keep_checkpoints_without_metrics
        if keep is not None and not isinstance(keep, bool):
            raise SettingsError(f"BestN.keep_checkpoints_without_metrics: expected true, false or none, found {keep!r}")

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the best `n`, and for those whose metric may still come."""
        if self.n is None:
            return [True] * len(checkpoints)
        best = {info.step for info in rank_checkpoints(checkpoints, self.metric, self.mode)[: self.n]}
        known = [metric_value(info.metrics, self.metric) is not None for info in checkpoints]
        last_known = max((position for position, has in enumerate(known) if has), default=-1)
        keep = self.keep_checkpoints_without_metrics
        if keep is None and last_known < 0 and len(checkpoints) in _TELL_AT:
            self._tell(checkpoints)
        flags: list[bool] = []
        for position, info in enumerate(checkpoints):
            waiting = position > last_known if keep is None else keep
            flags.append(info.step in best if known[position] else waiting)
        return flags

    def _tell(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        """A name that is misspelt fills the disk; an evaluation that comes late does not have to be told."""
        there = sorted({name for info in checkpoints for name in info.metrics or ()})
        _log.warning(
            "BestN: none of %d checkpoints has the metric %r, so all of them are kept; the metrics that they have: %s",
            len(checkpoints),
            self.metric,
            ", ".join(there) or "none",
        )


@dataclasses.dataclass(frozen=True, repr=False)
class CustomSteps:
    """Keeps exactly the steps that are named.

    Args:
        steps: a collection of steps; a `range` stays one, anything else becomes a frozenset.

    Raises:
        SettingsError: `steps` is no collection, or something in it is no whole number of at least 0.

    Source: Orbax, `CustomSteps`.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", step_collection("CustomSteps.steps", self.steps))

    def __repr__(self) -> str:
        return f"CustomSteps(steps={steps_text(self.steps)})"

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the steps that are named."""
        return [info.step in self.steps for info in checkpoints]


@dataclasses.dataclass(frozen=True)
class AnyPreservationPolicy:
    """Keeps what at least one of its policies keeps.

    Args:
        policies: at least one object with `should_preserve`; Orbax's are such objects.

    Raises:
        SettingsError: there is no policy, or one of them has no `should_preserve`.

    Source: Orbax, `AnyPreservationPolicy`.
    """

    policies: Sequence[PreservationPolicy]

    def __post_init__(self) -> None:
        children = child_policies("AnyPreservationPolicy.policies", self.policies, "should_preserve")
        object.__setattr__(self, "policies", children)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True where one of the policies says so."""
        answers = [ask_to_preserve(policy, checkpoints, context=context) for policy in self.policies]
        return [any(flags) for flags in zip(*answers, strict=True)]
