"""A training in blocks with and without saves, in one process, or with saves on a disk that changes its speed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jaxckpt_train as jct
from benchmarks import page_cache
from benchmarks.lm_training import LmTraining, configure, lm_training
from benchmarks.write_limit import WriteLimit
from jaxckpt_train.policies.context import SaveCosts
from jaxckpt_train.policies.cost_model import LoopTimer

FRACTION = 0.035
KEEP = 2
WARM_UPDATES = 10
START = datetime(2026, 1, 1, tzinfo=UTC)


class OwnTime:
    """The time of one loop. It stands still while another loop runs in between: that is no part of its training."""

    def __init__(self) -> None:
        self._away_s, self._stopped_at = 0.0, math.inf

    def stop(self) -> None:
        """The other loop runs."""
        self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        """This one does, as at the beginning."""
        self._away_s += max(0.0, time.monotonic() - self._stopped_at)
        self._stopped_at = math.inf

    def seconds(self) -> float:
        """The time of this loop."""
        return min(time.monotonic(), self._stopped_at) - self._away_s

    def utc(self) -> datetime:
        """The same as a date."""
        return START + timedelta(seconds=self.seconds())


class TimedManager(jct.StepManager):
    """A manager whose clocks are those of the loop that it belongs to."""

    def __init__(self, directory: Path, own_time: OwnTime, policy: Any) -> None:
        super().__init__(
            directory, save_decision_policy=policy, preservation_policy=jct.LatestN(KEEP), clock=own_time.utc
        )
        self._save_scheduler.clock = LoopTimer(own_time.seconds)

    def costs(self) -> SaveCosts:
        """What its saves were seen to cost so far."""
        return self._save_scheduler.costs()


@dataclasses.dataclass(frozen=True)
class Block:
    """Some updates in a row.

    Attributes:
        updates: how many.
        wall_s: all their time, and that of the calls between them.
        saves: that were begun.
    """

    updates: int
    wall_s: float
    saves: int


@dataclasses.dataclass
class Save:
    """One save.

    Attributes:
        at_s: its start, since the first update of a block with saves.
        reason: of the policy, with what it had measured.
        lasted_s: until it was committed; None: it was not, by the end.
        spent: what all saves so far had cost, as a fraction of the training, when it began: the policy's own measure.
    """

    at_s: float
    reason: str
    lasted_s: float | None
    spent: float


class SavingLoop:
    """The loop with saves. Its blocks follow each other as if nothing were in between.

    Attributes:
        saves: that were begun.
    """

    def __init__(self, training: LmTraining, directory: Path) -> None:
        self._training, self._own_time = training, OwnTime()
        self._began_s = self._own_time.seconds()
        self._manager = TimedManager(directory, self._own_time, jct.OverheadBudgetPolicy(FRACTION))
        self._own_time.stop()
        self._updates = 0
        self.saves: list[Save] = []

    def block(self, seconds: float) -> Block:
        """Train for so long, and until no save is under way, nor the update after it that it may have slowed down."""
        self._own_time.go_on()
        began_s, first, saves = self._own_time.seconds(), self._updates, len(self.saves)
        while self._own_time.seconds() - began_s < seconds or self._is_disturbed():
            self._update()
        wall_s = self._own_time.seconds() - began_s
        self._own_time.stop()
        return Block(self._updates - first, wall_s, len(self.saves) - saves)

    def costs(self) -> SaveCosts:
        """What the policy goes by."""
        return self._manager.costs()

    def close(self) -> None:
        """Wait for what is under way."""
        self._own_time.go_on()
        self._manager.close()

    def _is_disturbed(self) -> bool:
        return self._manager.is_saving_in_progress() or self._manager.costs().is_measuring

    def _update(self) -> None:
        loss = float(self._training.update())
        self._updates += 1
        values = {"state": (self._training.model, self._training.optimizer), "data": self._training.data}
        result = self._manager.save(self._updates, values, metrics={"loss": loss})
        if result.pending is not None:
            at_s, costs = self._own_time.seconds(), self._manager.costs()
            spent = costs.spent_s / costs.trained_s if costs.trained_s else 0.0
            save = Save(at_s - self._began_s, result.reason, None, spent)
            self.saves.append(save)
            result.pending.committed.add_done_callback(lambda _: self._committed(save))

    def _committed(self, save: Save) -> None:
        save.lasted_s = self._own_time.seconds() - self._began_s - save.at_s


def bare_block(training: LmTraining, seconds: float) -> Block:
    """The same loop without saves."""
    began_s, updates = time.monotonic(), 0
    while time.monotonic() - began_s < seconds:
        float(training.update())
        updates += 1
    return Block(updates, time.monotonic() - began_s, 0)


def pairs_in_child(size: dict[str, Any], directory: str, block_s: float, pairs: int) -> dict[str, Any]:
    """Blocks without and with saves in turn, one without at the end.

    The first block with saves has the first save in it, which finds memory that is new.
    """
    with lm_training(configure(size, Path(directory, "cache"))) as training:
        for _ in range(WARM_UPDATES):
            float(training.update())
        loop = SavingLoop(training, Path(directory, "run"))
        bare, saving = [bare_block(training, block_s)], []
        for _ in range(pairs):
            saving.append(loop.block(block_s))
            page_cache.settle()  # of what was deleted
            bare.append(bare_block(training, block_s))
        costs, nbytes = loop.costs(), training.nbytes
        loop.close()
    return {
        "state_bytes": nbytes,
        "bare": [dataclasses.asdict(block) for block in bare],
        "saving": [dataclasses.asdict(block) for block in saving],
        "saves": [dataclasses.asdict(save) for save in loop.saves],
        "costs": dataclasses.asdict(costs),
    }


def phases_in_child(
    size: dict[str, Any], directory: str, limit: dict[str, Any], phases: Sequence[tuple[float, int | None]]
) -> dict[str, Any]:
    """One block with saves for each phase: its seconds, and the bytes per second that its disk accepts.

    A save that is under way when a phase ends goes on at the speed of the next one.
    """
    group, ends_s = WriteLimit(**limit), [0.0]
    with lm_training(configure(size, Path(directory, "cache"))) as training:
        for _ in range(WARM_UPDATES):
            float(training.update())
        loop = SavingLoop(training, Path(directory, "run"))
        for seconds, bytes_per_s in phases:
            group.set(bytes_per_s)
            ends_s.append(ends_s[-1] + loop.block(seconds).wall_s)
        costs = loop.costs()
        group.set(None)
        loop.close()
    return {
        "ends_s": ends_s,
        "rates": [rate for _, rate in phases],
        "saves": [dataclasses.asdict(save) for save in loop.saves],
        "costs": dataclasses.asdict(costs),
    }
