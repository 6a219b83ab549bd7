"""What the turns of one subject say: ratios of steps during a save to quiet steps, and what a save costs the loop."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.cost_fit import quantile
from benchmarks.spread import Spread
from benchmarks.step_time_turn import Cycle

TAIL = 0.9
TARGET_RATIO = 1.10

Turn = Sequence[Cycle]


@dataclasses.dataclass(frozen=True)
class Summary:
    """One subject over all rounds. Seconds; ratios are to the quiet steps of the same process.

    Attributes:
        quiet_s, during_s: median steps of the rounds.
        ratio: median step during a save / median quiet step, of the same round.
        tail_ratio: the 90th percentile of the steps during saves / that of the quiet ones, all rounds together.
        during_tail_s, quiet_tail_s: these percentiles.
        first_ratio: median of the first steps of the saves / median quiet step, of the same round.
        slowdown: wall time of a step in the blocks with a save, its call included / in the quiet blocks.
        lost_s: what one save costs the loop: wall time of its block less that of as many quiet steps.
        blocking_s, save_s: of the call; until the save was finished.
        during_steps: steps during saves, all rounds together.
    """

    quiet_s: Spread
    during_s: Spread
    ratio: Spread
    tail_ratio: float
    during_tail_s: float
    quiet_tail_s: float
    first_ratio: Spread
    slowdown: Spread
    lost_s: Spread
    blocking_s: Spread
    save_s: Spread
    during_steps: int

    @property
    def within_target(self) -> bool:
        """Whether the median step during a save is at most a tenth slower."""
        return self.ratio.median <= TARGET_RATIO


def summarise(turns: Sequence[Turn]) -> Summary:
    """The summary of one subject's turns, one for each round."""
    quiets = [_all(turn, "quiet_s") for turn in turns]
    durings = [_all(turn, "during_s") for turn in turns]
    quiet = [statistics.median(each) for each in quiets]
    during = [statistics.median(each) for each in durings]
    firsts = [statistics.median(cycle.during_s[0] for cycle in turn) for turn in turns]
    quiet_tail = quantile([step for each in quiets for step in each], TAIL)
    during_tail = quantile([step for each in durings for step in each], TAIL)
    cycles = [cycle for turn in turns for cycle in turn]
    return Summary(
        quiet_s=Spread.of(quiet),
        during_s=Spread.of(during),
        ratio=Spread.of([d / q for d, q in zip(during, quiet, strict=True)]),
        tail_ratio=during_tail / quiet_tail,
        during_tail_s=during_tail,
        quiet_tail_s=quiet_tail,
        first_ratio=Spread.of([f / q for f, q in zip(firsts, quiet, strict=True)]),
        slowdown=Spread.of([_slowdown(turn) for turn in turns]),
        lost_s=Spread.of([_lost_s(cycle) for cycle in cycles]),
        blocking_s=Spread.of([cycle.blocking_s for cycle in cycles]),
        save_s=Spread.of([cycle.save_s for cycle in cycles]),
        during_steps=sum(map(len, durings)),
    )


def _all(turn: Turn, field: str) -> list[float]:
    return [step for cycle in turn for step in getattr(cycle, field)]


def _steps(cycle: Cycle) -> int:
    return len(cycle.during_s) + len(cycle.after_s)


def _slowdown(turn: Turn) -> float:
    quiet = sum(cycle.quiet_wall_s for cycle in turn) / sum(len(cycle.quiet_s) for cycle in turn)
    return sum(cycle.block_wall_s for cycle in turn) / sum(map(_steps, turn)) / quiet


def _lost_s(cycle: Cycle) -> float:
    return cycle.block_wall_s - _steps(cycle) * statistics.median(cycle.quiet_s)
