"""The policies that Orbax's manager options stand for, among them those that call functions of the user."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxckpt_train.steps.policy_context import CheckpointInfo, DecisionContext, PreservationPolicy, ask_to_preserve


def _named(function: object) -> str:
    """A function as text that is the same in all processes of a job."""
    return getattr(function, "__qualname__", type(function).__name__)


@dataclasses.dataclass(frozen=True, repr=False)
class ShouldSaveFunction:
    """Saves when a function of the step and of the newest step there is (None: none) says so.

    Source: Orbax, `CheckpointManagerOptions.should_save_fn`.
    """

    function: Callable[[int, int | None], bool]

    def __repr__(self) -> str:
        return f"should_save_fn={_named(self.function)}"

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """What the function says."""
        return bool(self.function(step.step, previous_steps[-1].step if previous_steps else None))


@dataclasses.dataclass(frozen=True, repr=False)
class BestByFunction:
    """Keeps the `n` steps whose metrics a function gives the best value; of equal ones the later. nan is the worst.

    Source: Orbax, `CheckpointManagerOptions.best_fn`.

    Attributes:
        function: of the metrics of a step.
        mode: "min": lower is better; "max": higher is better.
        n: how many; None: all.
        keeps_others: whether steps without metrics are kept.
    """

    function: Callable[[Mapping[str, Any]], float]
    mode: str
    n: int | None = None
    keeps_others: bool = True

    def __repr__(self) -> str:
        return f"best_fn={_named(self.function)} ({self.mode}, {self.n})"

    def ranked(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those that have metrics, the best last."""
        sign = -1 if self.mode == "min" else 1

        def quality(info: CheckpointInfo) -> float:
            value = sign * float(self.function(dict(info.metrics or {})))
            return -math.inf if math.isnan(value) else value

        return sorted((info for info in checkpoints if info.metrics is not None), key=quality)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the best."""
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        ranked = self.ranked(checkpoints)
        kept = {info.step for info in ranked[max(0, len(ranked) - self.n) :]}
        return [info.step in kept or (info.metrics is None and self.keeps_others) for info in checkpoints]


class ButDeleted:
    """Keeps what another policy keeps, but for steps that the user has deleted.

    Args:
        policy: the other one; None: it keeps all.

    Attributes:
        deleted: the steps.
    """

    def __init__(self, policy: PreservationPolicy | None) -> None:
        self._policy = policy
        self.deleted: set[int] = set()

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for what is kept."""
        left = [info for info in checkpoints if info.step not in self.deleted]
        answers = [True] * len(left) if self._policy is None else ask_to_preserve(self._policy, left, context=context)
        kept = {info.step for info, is_kept in zip(left, answers, strict=True) if is_kept}
        return [info.step in kept for info in checkpoints]
