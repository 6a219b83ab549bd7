"""What saves have slowed a training down: blocks with saves against the blocks without before and after."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.overhead_training import Block
from benchmarks.spread import Spread


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Of one disk. Fractions of the training without saves.

    Attributes:
        measured: of each block with saves.
        total: of all of them together.
        noise: how much longer an update takes in a block without saves than in the one before.
        policy: what the policy thinks.
        interval_s: between the begins of two saves in a row.
        lasted_s: a save.
        saves: how many.
        update_s: of an update without saves.
    """

    measured: Spread
    total: float
    noise: Spread
    policy: float
    interval_s: Spread | None
    lasted_s: Spread | None
    saves: int
    update_s: Spread


def overhead_of(bare: Sequence[Block], saving: Sequence[Block], stored: Mapping[str, Any]) -> Overhead:
    """The overhead.

    Args:
        bare: blocks without saves, one more than with.
        saving: the blocks between them.
        stored: `saves` and `costs` of the loop, as `pairs_in_child` returns them.
    """
    free = [_update_s(block) for block in bare]
    neighbours = [(one + other) / 2 for one, other in itertools.pairwise(free)]
    expected_s = sum(block.updates * update_s for block, update_s in zip(saving, neighbours, strict=True))
    costs, saves = stored["costs"], stored["saves"]
    lasted = [save["lasted_s"] for save in saves if save["lasted_s"] is not None]
    intervals = intervals_of(saves)
    return Overhead(
        measured=Spread.of(
            [_update_s(block) / update_s - 1 for block, update_s in zip(saving, neighbours, strict=True)]
        ),
        total=sum(block.wall_s for block in saving) / expected_s - 1,
        noise=Spread.of([other / one - 1 for one, other in itertools.pairwise(free)]),
        policy=costs["spent_s"] / costs["trained_s"] if costs["trained_s"] else 0.0,
        interval_s=Spread.of(intervals) if intervals else None,
        lasted_s=Spread.of(lasted) if lasted else None,
        saves=len(saves),
        update_s=Spread.of(free),
    )


def intervals_of(saves: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds from the begin of each save to that of the next."""
    return [after["at_s"] - before["at_s"] for before, after in itertools.pairwise(saves)]


def _update_s(block: Block) -> float:
    return block.wall_s / block.updates


def as_overhead(stored: Mapping[str, Any]) -> Overhead:
    """An overhead that JSON has held."""
    spreads = {
        name: None if stored[name] is None else Spread(**stored[name])
        for name in ("measured", "noise", "interval_s", "lasted_s", "update_s")
    }
    return Overhead(**{**stored, **spreads})
