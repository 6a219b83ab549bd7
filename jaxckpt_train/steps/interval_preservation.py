"""Preservation policies by distance: every so many steps, every so many seconds, the last so many seconds.

Import them from `preservation_policies`, which tells what they have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.steps.policy_arguments import positive_seconds, whole_number
from jaxckpt_train.steps.policy_context import CheckpointInfo, DecisionContext


def only_last(flags: list[bool], max_to_keep: int | None) -> list[bool]:
    """`flags` with only the last `max_to_keep` of those that are True; None: all of them."""
    chosen = [position for position, keep in enumerate(flags) if keep]
    if max_to_keep is not None:
        for position in chosen[:-max_to_keep]:
            flags[position] = False
    return flags


@dataclasses.dataclass(frozen=True)
class EveryNSteps:
    """Keeps a checkpoint every `interval_steps` steps.

    With `exact_interval` those whose step is a multiple of the interval. Without it the first checkpoint, and then
    each that is at least the interval after the one kept before it.

    Args:
        interval_steps: at least 1.
        exact_interval: only multiples of the interval.
        max_to_keep: only the last so many of those, at least 1; None: for ever.

    Raises:
        SettingsError: an argument is of another type or out of range.

    Source: Orbax, `EveryNSteps`.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval_steps", whole_number("EveryNSteps.interval_steps", self.interval_steps, 1))
        if not isinstance(self.exact_interval, bool):
            raise SettingsError(f"EveryNSteps.exact_interval: expected true or false, found {self.exact_interval!r}")
        if self.max_to_keep is not None:
            object.__setattr__(self, "max_to_keep", whole_number("EveryNSteps.max_to_keep", self.max_to_keep, 1))

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the multiples, or for the chain that starts at the first checkpoint."""
        if self.exact_interval:
            return only_last([info.step % self.interval_steps == 0 for info in checkpoints], self.max_to_keep)
        flags: list[bool] = []
        kept: int | None = None
        for info in checkpoints:
            flags.append(kept is None or info.step - kept >= self.interval_steps)
            kept = info.step if flags[-1] else kept
        return only_last(flags, self.max_to_keep)


@dataclasses.dataclass(frozen=True)
class EveryNStepsClosest:
    """Keeps, for each multiple of `interval_steps`, the checkpoint closest to it, and the newest checkpoint.

    For saves at odd steps (by time, on preemption). Each checkpoint belongs to the multiple nearest to its step, one
    half way to the nearest even multiple; of two equally close ones the later is kept.

    Args:
        interval_steps: at least 1.
        max_to_keep: only the last so many of those, the newest checkpoint counted, at least 1; None: for ever.

    Raises:
        SettingsError: an argument is no whole number of at least 1.

    Source: Orbax, `EveryNStepsClosest`.
    """

    interval_steps: int
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        subject = "EveryNStepsClosest"
        object.__setattr__(self, "interval_steps", whole_number(f"{subject}.interval_steps", self.interval_steps, 1))
        if self.max_to_keep is not None:
            object.__setattr__(self, "max_to_keep", whole_number(f"{subject}.max_to_keep", self.max_to_keep, 1))

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the closest to each multiple, and for the last."""
        closest: dict[int, tuple[int, int]] = {}  # multiple -> (distance, position)
        for position, info in enumerate(checkpoints):
            multiple, distance = self._nearest(info.step)
            if multiple not in closest or distance <= closest[multiple][0]:
                closest[multiple] = (distance, position)
        chosen = {position for _, position in closest.values()} | {len(checkpoints) - 1}
        return only_last([position in chosen for position in range(len(checkpoints))], self.max_to_keep)

    def _nearest(self, step: int) -> tuple[int, int]:
        """The nearest multiple, counted in intervals, and how far it is; in integers, exact for every step."""
        below, beyond = divmod(step, self.interval_steps)
        left = self.interval_steps - beyond
        if beyond > left or (beyond == left and below % 2 == 1):
            return below + 1, left
        return below, beyond


@dataclasses.dataclass(frozen=True)
class EveryNSeconds:
    """Keeps the first checkpoint, and then each that is at least `interval_secs` after the one kept before it.

    A checkpoint whose time lies that much *before* the one kept before it is kept too: the clock was set back, and
    waiting until it has caught up could take for ever.

    Args:
        interval_secs: seconds, above 0.

    Raises:
        SettingsError: the seconds are no finite number above 0.

    Source: Orbax, `EveryNSeconds`.
    """

    interval_secs: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval_secs", positive_seconds("EveryNSeconds.interval_secs", self.interval_secs))

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the chain that starts at the first checkpoint."""
        flags: list[bool] = []
        kept: CheckpointInfo | None = None
        for info in checkpoints:
            flags.append(kept is None or abs((info.time - kept.time).total_seconds()) >= self.interval_secs)
            kept = info if flags[-1] else kept
        return flags


@dataclasses.dataclass(frozen=True)
class LatestDuration:
    """Keeps the checkpoints of the last `duration`: the first that is no older, and all after it.

    Ages are taken at `context.now`. A checkpoint whose time is after that was saved while the clock was ahead: it is
    as old as the next one whose time is not.

    Args:
        duration: a `timedelta`, or seconds; above 0.

    Raises:
        SettingsError: the duration is neither, or not above 0.

    Source: Orbax, `LatestDuration`.
    """

    duration: timedelta | float

    def __post_init__(self) -> None:
        given = self.duration
        seconds = given.total_seconds() if isinstance(given, timedelta) else given
        checked = positive_seconds("LatestDuration.duration", seconds)
        if isinstance(given, timedelta):
            return
        try:
            object.__setattr__(self, "duration", timedelta(seconds=checked))
        except OverflowError as error:
            raise SettingsError(f"LatestDuration.duration: expected a duration, found {given!r} seconds") from error

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True from the first checkpoint on that is young enough."""
        duration = cast("timedelta", self.duration)
        ages, age = list[timedelta](), timedelta()
        for info in reversed(checkpoints):
            age = context.now - info.time if info.time <= context.now else age
            ages.append(age)
        flags: list[bool] = []
        for age in reversed(ages):
            flags.append(bool(flags and flags[-1]) or age <= duration)
        return flags
