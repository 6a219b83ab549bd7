"""The cost of a save in a loop that is not killed, and the interval from it, for subjects that need one."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from benchmarks.goodput_log import AttemptRecord, Update
from benchmarks.goodput_subjects import Interval
from jaxckpt_train.policies.save import daly_interval_s

LEAST_COST_S = 0.005
QUIET_SHARE = 1 / 3  # of the updates between two saves: the last ones, when the save has long been committed


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """The costs of one subject that saves at a fixed number of updates. Seconds.

    Attributes:
        cost_s: the median of what the updates from one save to the next take longer than as many quiet ones.
        update_s: the median of the quiet ones.
        called_s: the median of the calls that save.
        start_s: from the start of the process until it trains.
        saves: how many were looked at.
    """

    cost_s: float
    update_s: float
    called_s: float
    start_s: float
    saves: int


def cost_of(record: AttemptRecord, every: int, began_at: float) -> SaveCost:
    """The cost of saves each `every` updates, from the record of a process that was started at `began_at`.

    The first save does not count: memory is new, and some things are compiled.

    Raises:
        ValueError: fewer than two others were seen from their begin to the next one.
    """
    between = [cycle for cycle in _cycles(record.updates, every)[1:] if len(cycle) == every + 1]
    if len(between) < 2 or record.restored_at is None:
        raise ValueError(
            f"{len(record.updates)} updates, a save each {every}: expected three saves at least; give it more time"
        )
    quiet = [step for cycle in between for step in _times(cycle)[-max(1, round(every * QUIET_SHARE)) :]]
    update_s = statistics.median(quiet)
    return SaveCost(
        cost_s=statistics.median(cycle[-1].at - cycle[0].at - every * update_s for cycle in between),
        update_s=update_s,
        called_s=statistics.median(cycle[0].called_s or 0.0 for cycle in between),
        start_s=record.updates[0].at - began_at,
        saves=len(between),
    )


def interval_for(cost: SaveCost, mtbf_s: float) -> Interval:
    """The interval of Young and Daly for this cost, from the begin of one save to the begin of the next.

    A save costs what its call takes, at least: what is measured to be less is noise.
    """
    cost_s = max(cost.cost_s, cost.called_s, LEAST_COST_S)
    seconds = daly_interval_s(cost_s, mtbf_s) + cost_s
    return Interval(max(1, round(seconds / cost.update_s)), seconds)


def _cycles(updates: Sequence[Update], every: int) -> list[list[Update]]:
    """The updates from each one after which a save began, to the next such one, both included."""
    marks = [place for place, update in enumerate(updates) if update.number % every == 0]
    return [list(updates[mark : mark + every + 1]) for mark in marks]


def _times(cycle: Sequence[Update]) -> list[float]:
    return [after.at - before.at for before, after in itertools.pairwise(cycle)]
