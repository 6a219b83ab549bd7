"""What earlier processes of a run tell a new one: how often it has failed, and what its saves took."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxckpt_train.steps.attempts import attempts_of
from jaxckpt_train.steps.run_events import run_events
from jaxckpt_train.steps.save_costs import Failures


@dataclasses.dataclass(frozen=True)
class Past:
    """What earlier processes of a run tell a new one.

    Attributes:
        failures: how often, and in which time, it has failed.
        cost_s: what a save cost the loop; None: not known.
        duration_s: the longest of the last saves, from its begin until it was committed; None: not known.
        has_begun: whether a loop has had its state.
    """

    failures: Failures = dataclasses.field(default_factory=Failures)
    cost_s: float | None = None
    duration_s: float | None = None
    has_begun: bool = False

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]], last: int = 6) -> Past:
        """Read it from the events of a run, of which none is of a process that is at work."""
        listed = [*run_events(events)]
        attempts = [each for each in attempts_of(listed) if each.is_of_the_training]
        failures = Failures(sum(each.has_lost_work for each in attempts), sum(each.wall_s for each in attempts))
        saves = [event for event in listed if event.event == "save" and event.ok][-last:]
        costs = [event.cost_s for event in saves if event.cost_s is not None]
        took = [max(0.0, event.save_s - event.decide_s - event.wait_s) for event in saves if event.save_s]
        has_begun = any(event.event == "resumed" for event in listed)
        return cls(failures, costs[-1] if costs else None, max(took, default=None), has_begun)
